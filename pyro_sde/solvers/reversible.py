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

from .._ops.recompute import Grads, LocalVjp, Recomputed

__all__ = ["GridSolution", "ReversibleHeun", "reversible_heun", "states_of"]


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


def states_of(path: Sequence[Tensor], n: int) -> Sequence[Any]:
    """One entry for each of n times: the states of the one path there is, or None."""
    return path[0].unbind(-2) if path else [None] * n


class GridSolution(Recomputed):
    """The solution of a random ODE; its inputs are the start and, if there is one, the path."""

    def __init__(self, field: Callable, times: Tensor) -> None:
        self.field = field
        self.t, self.dt = times.unbind(0), times.diff().unbind(0)

    def along(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Any], list[Tensor]]:
        """The path's state at each time, or None; and zeros to add its gradient to."""
        return states_of(inputs[1:], len(self.t)), [torch.zeros_like(p) for p in inputs[1:]]


class ReversibleHeun(GridSolution):
    """The solution by the reversible Heun method, with its backward pass.

    :param keep: Whether the points of evaluation are kept, or reconstructed from the last.
    """

    def __init__(self, field: Callable, times: Tensor, keep: bool) -> None:
        super().__init__(field, times)
        self.keep = keep

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        w = states_of(inputs[1:], len(self.t))
        points: list[Tensor] = []
        each = points.append if self.keep else (lambda y_hat: None)
        y, y_hat, _ = reversible_heun(self.field, inputs[0], w, self.t, self.dt, each)
        return (y,), tuple(points) if self.keep else (y, y_hat)

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: LocalVjp
    ) -> Grads:
        """a, b and c are the gradients with respect to y, y_hat and f(y_hat) at a time, from the
        last to the first."""
        w, grad_path = self.along(inputs)
        a: Any = grads[0]
        b, c = torch.zeros_like(a), torch.zeros_like(a)
        f_after: Any = None
        y, y_hat = saved[:2]
        for n in range(len(self.t) - 1, -1, -1):
            if n < len(self.dt):
                dt = self.dt[n]
                a, b, c = a + 2 * b, -b, 0.5 * dt * a + dt * b
                if not self.keep:
                    y_hat = 2 * y - y_hat - dt * f_after
            if n > 0:
                c = c + 0.5 * self.dt[n - 1] * a

            def evaluate(h: Tensor, *w: Tensor, n: int = n) -> tuple[Tensor]:
                return (self.field(self.t[n], h, *(w or (None,))),)

            point = saved[n] if self.keep else y_hat
            (f,), (grad_point, *grad_w) = vjp(
                evaluate, [point, w[n]] if grad_path else [point], [c]
            )
            b = b + grad_point
            for g in grad_w:
                grad_path[0].select(-2, n).copy_(g)
            if not self.keep and n < len(self.dt):
                y = y - 0.5 * self.dt[n] * (f + f_after)
            f_after = f
        return a + b, *grad_path
