"""Solving along a Brownian path that is refined where the error asks for it.

Every interval of the grid is bisected until a step and its two halves agree (Gaines and Lyons
1997): the times of the steps are decided before the noise between them is looked at any closer,
and what is rejected is refined, never thrown away, so that there is no bias. All steps lie on
one dyadic tree, hence one path of the noise for every tolerance.
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

__all__ = ["Refined", "adapt", "refined_sample", "step_of"]

DEEPEST = 40
"""A step is never shorter than 2^-40 of an interval of the grid: it underflows."""

FIRST = 8
"""No interval begins with more than 2^8 pieces: it may be easier than the one before."""

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

    def step(i: int, a: float, b: float, state: State) -> State:
        nonlocal calls
        calls += 1
        return (advance(i, a, b, state[0]),)

    adapt(step, (z0,), refined, tol, lambda: calls, lambda s: states.append(s[0]))
    refined.value = torch.stack(states, -2)
    tol.remember(refined)
    return refined.value


def step_of(refined: Refined) -> Callable[[int, float, float, Tensor], Tensor]:
    """One step of the path from fraction a to fraction b of the i-th interval of its grid."""
    path, noise = refined.path, refined.noise
    t, dt = path.step_times(refined.z0.dim() - 1 - len(path.batch_shape))

    def step(i: int, a: float, b: float, z: Tensor) -> Tensor:
        share = b - a
        mean, scale = path.transition(t[i] + a * dt[i], share * dt[i], z)
        eps = noise[i](a, b) / share**0.5
        after = torch.addcmul(mean, scale, eps)
        more = path.milstein(t[i] + a * dt[i], share * dt[i], z, scale)
        return after if more is None else after + 0.5 * more * (eps.square() - 1)

    return step


def adapt(
    step: Callable[[int, float, float, State], State],
    state: State,
    refined: Refined,
    tol: tolerance,
    count: Callable[[], int],
    at_grid: Callable[[State], None] = lambda state: None,
) -> State:
    """The state at the end of the grid, by bisection of its intervals.

    :param step: From fraction a to fraction b of interval i, a state to the next.
    :param count: How many evaluations there were so far.
    :param at_grid: Called with the state at the end of every interval.
    """
    times = refined.path.times
    lengths = times.diff(dim=-1) / (times[..., -1:] - times[..., :1])
    shares = lengths.reshape(-1, lengths.shape[-1]).mean(0).tolist()
    solve, level = Solve("path" if len(state) == 1 else "block"), 0
    tol.solves.append(solve)
    for i, share in enumerate(shares):
        # Begin a level above where the last interval ended: not all over, nor too coarse for long.
        level = min(max(0, level - 1), FIRST)
        pieces: list[tuple[int, int, State | None]]
        pieces = [(level, k, None) for k in reversed(range(2**level))]
        while pieces:
            level, k, known = pieces.pop()
            a, b = k / 2**level, (k + 1) / 2**level
            middle = 0.5 * (a + b)
            where = _Where(times, i, a, b, state)
            solve.evaluations = count()
            if solve.evaluations >= tol.max_evaluations:
                raise where.error(f"took {solve.evaluations} evaluations, the bound of {tol},")
            if level >= DEEPEST:
                raise where.error(f"does not meet {tol}: the step underflows,")
            coarse = step(i, a, b, state) if known is None else known
            halfway = step(i, a, middle, state)
            fine = step(i, middle, b, halfway)
            error = _error(coarse, fine, state, tol)
            if error <= (share * (b - a)) ** 0.5:
                state = fine
                solve.steps += 2
                solve.shortest = min(solve.shortest, where.length / 2)
            else:
                solve.rejected += 1
                pieces += [(level + 1, 2 * k + 1, None), (level + 1, 2 * k, halfway)]
        at_grid(state)
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


class _Where:
    """The place of a step, for an error message."""

    def __init__(self, times: Tensor, i: int, a: float, b: float, state: State) -> None:
        row = times.reshape(-1, times.shape[-1])[0]
        start, end = float(row[i]), float(row[i + 1])
        self.t, self.length = start + a * (end - start), (b - a) * (end - start)
        self.state = state

    def error(self, what: str) -> SolutionError:
        norms = ", ".join(f"{float(s.detach().abs().max()):.3g}" for s in self.state)
        return SolutionError(
            f"the solution {what} at t={self.t:g} with a step of {self.length:.3g}, where the "
            f"largest entry of the state is {norms}: the equation blows up there or is stiff; "
            "loosen the tolerance, raise max_evaluations, or bound the field"
        )
