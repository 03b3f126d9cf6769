r"""Solving along a Brownian path that is refined where the error asks for it.

The grid, and every interval of it, is bisected until a step and its two halves agree (Gaines and
Lyons 1997): the times of the steps are decided before the noise between them is looked at any
closer, and what is rejected is refined, never thrown away, so that there is no bias. All steps
lie on one tree, hence one path of the noise for every tolerance.

A control without contraction is a drift, and is evaluated at every step. A contraction C acts on
the noise of a whole interval of the grid, and so does the control beside it. With W the Brownian
path of the interval, over [0, 1], and eps = W(0, 1), the noise that drives the prior is

.. math:: \tilde W(a, b) = W(a, b) + (b - a)\,(w + C \varepsilon - \varepsilon)

with w = sqrt(dt) u and C both from the state at the start of the interval: over the whole interval
it is w + C eps, and in between a Brownian bridge. The reason: all observations are at times of the
grid, and given its states at these times the exact posterior is the bridge of the prior, so that
the guide has nothing to say in between. As the grid is refined, C tends to the identity and the
path to that of Girsanov's theorem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._errors import SolutionError
from .base import Draw, Law, Simulator, Task
from .step import contract, displace, is_matrix
from .tolerance import Solve, current_tolerance, tolerance

__all__ = ["Adaptive", "Refined", "adapt", "step_function", "time_at"]

DEEPEST = 2.0**-40
"""A step is never shorter than this part of an interval of the grid: it underflows."""

State = tuple[Tensor, ...]


@dataclass
class Refined:
    """A path that can be solved again, together with something else, on the same noise."""

    task: Task
    value: Tensor
    noise: list[Any]
    """One torchsde.BrownianInterval over [0, 1] for each interval of the grid."""
    displacements: list[Tensor] = field(default_factory=list)
    """What contraction adds to the noise of each interval, w + C eps - eps: that of the first
    solution, so that all others have the same noise. Empty without contraction."""

    def increment(self, i: int, a: float, b: float) -> Tensor:
        """The increment of the noise of interval ``i`` over a part of it."""
        w = self.noise[i](a, b)
        return w + (b - a) * self.displacements[i] if self.displacements else w

    def displace(self, i: int, z: Tensor) -> None:
        """Fix the noise of interval ``i``, whose first state is ``z``."""
        u, contraction = self.task.control_at(i, z)
        eps = self.noise[i](0.0, 1.0)
        assert u is not None
        self.displacements.append(contract(self.task.root[i] * u, contraction, eps) - eps)


class Adaptive(Simulator):
    """Draws paths inside of :class:`~pyro_sde.tolerance`: on their grid, solved to the tolerance
    in between."""

    def __call__(self, task: Task, noise: Tensor | None = None) -> Draw:
        tol = current_tolerance()
        assert tol is not None
        if noise is not None:
            raise ValueError(
                "inside of tolerance() a path draws the noise that it refines; draw a path with "
                "given noise outside"
            )
        return Draw(_refined_path(task, tol), None, self)


def _refined_path(task: Task, tol: tolerance) -> Tensor:
    import torchsde

    z0 = task.z0
    seeds = torch.randint(2**31 - 1, (task.steps,)).tolist()
    noise = [
        torchsde.BrownianInterval(
            0.0,
            1.0,
            size=tuple(z0.shape),
            dtype=z0.dtype,
            device=z0.device,
            entropy=seed,
            halfway_tree=True,
            tol=1e-30,
        )
        for seed in seeds
    ]
    refined = Refined(task, z0, noise)
    states = [z0]
    advance = step_function(refined)
    calls = 0

    def step(a: float, b: float, state: State) -> State:
        nonlocal calls
        calls += 1
        return (advance(a, b, state[0]),)

    def count() -> int:
        return calls + len(refined.displacements)

    for i in range(len(noise)):
        if task.contraction is not None:
            refined.displace(i, states[-1])
        solve = tol.solves[-1] if i else None
        (z,) = adapt(step, (states[-1],), refined, tol, count, (i, i + 1), solve)
        states.append(z)
    refined.value = torch.stack(states, -2)
    tol.remember(refined)
    return refined.value


def time_at(times: Tensor, x: float) -> Tensor:
    """The time at a place of the grid: 2.5 is halfway from times[2] to times[3]."""
    i = min(int(x), times.shape[-1] - 2)
    return torch.lerp(times[..., i], times[..., i + 1], x - i)


def step_function(refined: Refined) -> Callable[[float, float, Tensor], Tensor]:
    """One step of the path, as a function of two places of its grid and of the state at the first.

    Where the scale depends on the state, Milstein's term makes a step of strong order 1 out of
    Euler's, of order 1/2: half of what the scale changes by if the state moves by it, times
    eps^2 - 1, entry by entry.
    """
    task = refined.task
    starts, dts, roots, law = task.t, task.dt, task.root, task.law
    moved = task.target if task.contraction is None else law
    has_milstein = _scale_depends_on_state(law, starts[0], dts[0], task.z0)

    def increment(a: float, b: float) -> Tensor:
        total: Any = 0.0
        while a < b:
            i = int(a)
            end = min(b, i + 1.0)
            total = total + roots[i] * refined.increment(i, a - i, end - i)
            a = end
        return total

    def start(x: float) -> Tensor:
        i = min(int(x), len(starts) - 1)
        return starts[i] + (x - i) * dts[i]

    def step(a: float, b: float, z: Tensor) -> Tensor:
        t = start(a)
        dt = start(b) - t
        mean, scale = moved.transition(t, dt, z)
        eps = increment(a, b) / dt.sqrt()
        after = displace(mean, scale, eps)
        if not has_milstein:
            return after
        change = law.transition(t, dt, z + scale)[1] - scale
        return after + 0.5 * change * (eps.square() - 1)

    return step


@torch.enable_grad()
def _scale_depends_on_state(law: Law, t: Tensor, dt: Tensor, z: Tensor) -> bool:
    """Whether the scale of the law is computed from the state. A matrix is taken as one that is
    not: Milstein's term for it needs more of the noise than its increments."""
    z = z.detach().requires_grad_()
    scale = law.transition(t, dt, z)[1]
    if is_matrix(scale, z) or not scale.requires_grad:
        return False
    (slope,) = torch.autograd.grad(scale.sum(), z, allow_unused=True)
    return slope is not None


def _middle(a: float, b: float) -> float:
    """A time of the grid, where there is one between; else halfway between two of them."""
    return float((int(a) + int(b)) // 2) if b - a > 1 else 0.5 * (a + b)


def adapt(
    step: Callable[[float, float, State], State],
    state: State,
    refined: Refined,
    tol: tolerance,
    count: Callable[[], int],
    span: tuple[int, int],
    solve: Solve | None = None,
) -> State:
    """The state at the end of a span of the grid, by bisection: first at times of the grid, whose
    noise is known, then between them.

    :param step: From one place of the grid to another, a state to the next.
    :param count: How many evaluations there were so far.
    :param solve: Where to go on counting.
    """
    times = refined.task.target.times
    if solve is None:
        solve = Solve("path" if len(state) == 1 else "block")
        tol.solves.append(solve)
    row = times.reshape(-1, times.shape[-1])[0].double()
    whole = float(row[-1] - row[0])
    pieces: list[tuple[float, float, State | None]] = [(float(span[0]), float(span[1]), None)]
    while pieces:
        a, b, known = pieces.pop()
        middle = _middle(a, b)
        start = float(time_at(row, a))
        length = float(time_at(row, b)) - start
        if length > 2.01 * solve.last and known is None:  # it would be rejected
            pieces += [(middle, b, None), (a, middle, None)]
            continue
        solve.evaluations = count()
        if solve.evaluations >= tol.max_evaluations:
            what = f"took {solve.evaluations} evaluations, the bound of {tol},"
            raise _error_at(what, start, length, state)
        if b - a < DEEPEST:
            raise _error_at(f"does not meet {tol}: the step underflows,", start, length, state)
        coarse = step(a, b, state) if known is None else known
        halfway = step(a, middle, state)
        fine = step(middle, b, halfway)
        if _error(coarse, fine, state, tol) <= (length / whole) ** 0.5:
            state, solve.last = fine, length
            solve.steps += 2
            solve.shortest = min(solve.shortest, length / 2)
        else:
            solve.rejected += 1
            pieces += [(middle, b, None), (a, middle, halfway)]
    solve.evaluations = count()
    return state


def _error(coarse: State, fine: State, before: State, tol: tolerance) -> float:
    """The largest of the parts' errors in units of the tolerance; infinite if there is none."""
    worst = 0.0
    for c, f, z in zip(coarse, fine, before, strict=True):
        allowed = tol.atol + tol.rtol * torch.maximum(z.abs(), f.abs())
        rms = float(((c - f) / allowed).detach().square().mean().sqrt())
        worst = max(worst, rms) if rms == rms else float("inf")
    return worst


def _error_at(what: str, t: float, length: float, state: State) -> SolutionError:
    norms = ", ".join(f"{float(s.detach().abs().max()):.3g}" for s in state)
    return SolutionError(
        f"the solution {what} at t={t:g} with a step of {length:.3g}, where the largest entry of "
        f"the state is {norms}: the equation blows up there or is stiff; loosen the tolerance, "
        "raise max_evaluations, or bound the field"
    )
