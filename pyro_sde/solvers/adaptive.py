"""A path and a random ODE along it, solved together with error control."""

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
    r"""The solution at the path's last time of :math:`dh/dt = \mathrm{field}(t, h, w_t)` and of
    the SDE of w, with common steps: Heun's for h, those of w's own law for w.

    :param path: A path that was drawn inside of ``tol``; by its states its law and its noise are
        found again.
    """
    refined = tol.find(path)
    if refined is None:
        raise ValueError(
            f"the weights, of shape {tuple(path.shape)}, were not drawn inside of this {tol}: what "
            "they do between the times of their grid is not known. Call guide or model inside of "
            "it, with the same `with` block for the draw and for the prediction"
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
        """At the start of a step, which its first half and its first quarter share."""
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
