"""A path and a random ODE along it, solved together with adaptive steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..simulation.adaptive import State, adapt, step_function, time_at
from ..simulation.tolerance import tolerance

__all__ = ["integrate_adaptively"]


def integrate_adaptively(
    field: Callable[[Tensor, Tensor, Any], Tensor], h0: Tensor, path: Tensor, tol: tolerance
) -> Tensor:
    r"""Solve :math:`dh/dt = \mathrm{field}(t, h, w_t)` and the SDE of w with common steps: those of
    Heun's method for h, and those of w's law for w.

    :param path: A path that was drawn inside of ``tol``, which finds its law and its noise.
    :returns: h at the path's last time.
    """
    refined = tol.find(path)
    if refined is None:
        raise ValueError(
            f"the weights, of shape {tuple(path.shape)}, were not drawn inside of this {tol}, so "
            "they are not known between the times of their grid. Draw the weights and predict "
            "inside of the same `with` block"
        )
    shape = path.shape[:-2] + path.shape[-1:]
    advance = step_function(refined)
    times = refined.task.target.times
    slopes: list[tuple[Tensor, Tensor]] = []
    calls = 0

    def evaluate(at: float, h: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return field(time_at(times, at), h, w.reshape(shape))

    def slope(at: float, h: Tensor, w: Tensor) -> Tensor:
        """dh/dt at the start of a step, which the whole step and its first half share."""
        for known, k in slopes:
            if known is h:
                return k
        slopes.append((h, evaluate(at, h, w)))
        del slopes[:-3]
        return slopes[-1][1]

    def step(a: float, b: float, state: State) -> State:
        w, h = state
        dt = time_at(times, b) - time_at(times, a)
        k = slope(a, h, w)
        w_next = advance(a, b, w)
        return w_next, h + 0.5 * dt * (k + evaluate(b, h + dt * k, w_next))

    span = (0, len(times) - 1)
    return adapt(step, (refined.task.z0, h0), refined, tol, lambda: calls, span)[1]
