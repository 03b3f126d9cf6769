"""Solving along a Brownian path that is refined where the error asks for it.

The grid, and every interval of it, is bisected until a step and its two halves agree (Gaines and
Lyons 1997): the times of the steps are decided before the noise between them is looked at any
closer, and what is rejected is refined, never thrown away, so that there is no bias. All steps
lie on one tree, hence one path of the noise for every tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._errors import SolutionError
from .tolerance import Solve, tolerance

if TYPE_CHECKING:
    from .path import PathDistribution

__all__ = ["Refined", "adapt", "refined_sample", "step_of", "time_at"]

DEEPEST = 2.0**-40
"""A step is never shorter than this part of an interval of the grid: it underflows."""

State = tuple[Tensor, ...]


@dataclass
class Refined:
    """A path that can be solved again, together with something else, on the same noise."""

    path: PathDistribution
    value: Tensor
    z0: Tensor
    noise: list[Any]
    """One torchsde.BrownianInterval over [0, 1] for each interval of the grid."""


def refined_sample(path: PathDistribution, z0: Tensor, tol: tolerance) -> Tensor:
    """The path on its grid, solved to ``tol`` between."""
    import torchsde

    if getattr(path, "contraction", None) is not None:
        raise ValueError(
            "a path with contraction shrinks the noise of the steps of its grid, and is the "
            "discretisation of no SDE that could be refined: predict on its grid, without "
            "tolerance(), or train AutoSDE with contraction=False"
        )
    seeds = torch.randint(2**31 - 1, (path.times.shape[-1] - 1,)).tolist()
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
    refined = Refined(path, z0, z0, noise)
    states = [z0]
    advance = step_of(refined)
    calls = 0

    def step(a: float, b: float, state: State) -> State:
        nonlocal calls
        calls += 1
        return (advance(a, b, state[0]),)

    for i in range(len(noise)):
        solve = tol.solves[-1] if i else None
        (z,) = adapt(step, (states[-1],), refined, tol, lambda: calls, (i, i + 1), solve)
        states.append(z)
    refined.value = torch.stack(states, -2)
    tol.remember(refined)
    return refined.value


def time_at(times: Tensor, x: float) -> Tensor:
    """The time at a place of the grid: 2.5 is halfway from times[2] to times[3]."""
    i = min(int(x), times.shape[-1] - 2)
    return torch.lerp(times[..., i], times[..., i + 1], x - i)


def step_of(refined: Refined) -> Callable[[float, float, Tensor], Tensor]:
    """One step of the path from one place of its grid to another, over as many times of it."""
    path, noise = refined.path, refined.noise
    starts, dts = path.step_times(refined.z0.dim() - 1 - len(path.batch_shape))
    roots = dts.sqrt()

    def increment(a: float, b: float) -> Tensor:
        total: Any = 0.0
        while a < b:
            i = int(a)
            end = min(b, i + 1.0)
            total = total + roots[i] * noise[i](a - i, end - i)
            a = end
        return total

    def start(x: float) -> Tensor:
        i = min(int(x), len(starts) - 1)
        return starts[i] + (x - i) * dts[i]

    def step(a: float, b: float, z: Tensor) -> Tensor:
        t = start(a)
        dt = start(b) - t
        mean, scale = path.transition(t, dt, z)
        eps = increment(a, b) / dt.sqrt()
        after = torch.addcmul(mean, scale, eps)
        more = path.milstein(t, dt, z, scale)
        return after if more is None else after + 0.5 * more * (eps.square() - 1)

    return step


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
    times = refined.path.times
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
