"""Random ordinary differential equations: dh/dt = field(t, h; w_t) along a given path w."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["METHODS", "integrate"]

Step = Callable[[Callable, Tensor, Tensor, Tensor, Any, Any], Tensor]


def _euler(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    return h + dt * f(t, h, w)


def _heun(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    k = f(t, h, w)
    return h + 0.5 * dt * (k + f(t + dt, h + dt * k, w_next))


def _midpoint(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    halfway = h + 0.5 * dt * f(t, h, w)
    return h + dt * f(t + 0.5 * dt, halfway, None if w is None else torch.lerp(w, w_next, 0.5))


METHODS: dict[str, tuple[Step, int]] = {
    "euler": (_euler, 1),
    "heun": (_heun, 2),
    "midpoint": (_midpoint, 2),
}
"""The steps by name, and how often each evaluates the field."""


def integrate(
    field: Callable[[Tensor, Tensor, Any], Tensor],
    h0: Tensor,
    path: Tensor | None,
    times: Tensor,
    *,
    method: str = "euler",
) -> Tensor:
    r"""The solution at the last of ``times`` of :math:`dh/dt = \mathrm{field}(t, h, w_t)`,
    :math:`h(t_0) = h_0`, with one step of ``method`` between neighbouring times.

    The path is rough: between two grid times it is not known, and no method on the grid has a
    strong order above 1. ``"heun"`` and ``"midpoint"`` are of second order in the deterministic
    part of the error, which dominates while the noise is small.

    Example::

        >>> times = torch.linspace(0.0, 1.0, 101)
        >>> h = integrate(lambda t, h, w: -h, torch.ones(1), None, times, method="heun")
        >>> bool((h - torch.exp(torch.tensor(-1.0))).abs() < 1e-5)
        True

    :param field: Called as ``field(t, h, w)``; returns the shape of ``h``.
    :param h0: The state at ``times[0]``.
    :param path: w on the grid, of shape ``(..., T, D)``; or None, and ``field`` gets None.
    :param times: The grid, increasing, of shape ``(T,)``.
    :param method: ``"euler"``, ``"heun"`` or ``"midpoint"``.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {sorted(METHODS)}: found {method!r}")
    if path is not None and path.shape[-2] != len(times):
        raise ValueError(
            f"path has {path.shape[-2]} states, times {len(times)}: pass the grid that the path "
            "was drawn on"
        )
    step, _ = METHODS[method]
    # One unbind, not one index a step: the backward pass of an index fills a whole path with zeros.
    w = [None] * len(times) if path is None else path.unbind(-2)
    t, dt = times[:-1].unbind(0), times.diff().unbind(0)
    h = h0
    for i in range(len(dt)):
        h = step(field, t[i], dt[i], h, w[i], w[i + 1])
    return h
