r"""The reversible Heun method (Kidger, Foster, Li and Lyons 2021) for random ODEs.

Beside the solution y runs a second one, :math:`\hat y`, at which alone the field is evaluated:

.. math::

    \hat y_{n+1} = 2 y_n - \hat y_n + f(\hat y_n)\,dt, \qquad
    y_{n+1} = y_n + \tfrac12\,(f(\hat y_n) + f(\hat y_{n+1}))\,dt

Of second order at one evaluation a step, and the same two lines read backwards give
:math:`(y_n, \hat y_n)` from :math:`(y_{n+1}, \hat y_{n+1})`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .backward import Back, Lean

__all__ = ["ReversibleHeun", "reversible_heun"]


def reversible_heun(
    field: Callable[[Tensor, Tensor, Any], Tensor],
    h0: Tensor,
    w: Sequence[Any],
    t: Sequence[Tensor],
    dt: Sequence[Tensor],
    each: Callable[[Tensor], None] = lambda y_hat: None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""y, :math:`\hat y` and the field there, at the last time.

    :param w: One entry for each time; ``t`` too, ``dt`` one less.
    :param each: Called with every :math:`\hat y`.
    """
    y = y_hat = h0
    each(y_hat)
    f = field(t[0], y_hat, w[0])
    for n in range(len(dt)):
        y_hat = 2 * y - y_hat + f * dt[n]
        each(y_hat)
        f_next = field(t[n + 1], y_hat, w[n + 1])
        y = y + 0.5 * dt[n] * (f + f_next)
        f = f_next
    return y, y_hat, f


class ReversibleHeun(Lean):
    """Its backward pass.

    :param keep: Whether the points of evaluation are kept, or reconstructed from the last.
    """

    def __init__(self, field: Callable, times: Tensor, keep: bool) -> None:
        super().__init__(field, times)
        self.keep = keep

    def forward(self, h: Tensor, w: Any) -> tuple[Tensor, ...]:
        points: list[Tensor] = []
        each = points.append if self.keep else (lambda y_hat: None)
        y, y_hat, _ = reversible_heun(self.field, h, w, self.t, self.dt, each)
        return (y, *points) if self.keep else (y, y, y_hat)

    def backward(self, saved: tuple[Tensor, ...], w: Any, grad: Tensor, back: Back) -> Tensor:
        """By y, y_hat and f(y_hat): a, b and c, from the last time to the first."""
        a, b, c = grad, torch.zeros_like(grad), torch.zeros_like(grad)
        f_after: Any = None
        y: Any = saved[0]
        y_hat: Any = saved[1]
        for n in range(len(self.t) - 1, -1, -1):
            if n < len(self.dt):
                dt = self.dt[n]
                a, b, c = a + 2 * b, -b, 0.5 * dt * a + dt * b
                if not self.keep:
                    y_hat = 2 * y - y_hat - dt * f_after
            if n > 0:
                c = c + 0.5 * self.dt[n - 1] * a
            f, by_point = back.vjp(
                lambda h, *w, n=n: self.field(self.t[n], h, w[0]),
                saved[n] if self.keep else y_hat,
                (w[n],),
                (n,),
                c,
            )
            b = b + by_point
            if not self.keep and n < len(self.dt):
                y = y - 0.5 * self.dt[n] * (f + f_after)
            f_after = f
        return a + b
