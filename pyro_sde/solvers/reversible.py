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

from .._replay import Replay, capture, watch

__all__ = ["reversible_heun"]


def reversible_heun(
    field: Callable[[Tensor, Tensor, Any], Tensor],
    h0: Tensor,
    w: Sequence[Any],
    t: Sequence[Tensor],
    dt: Sequence[Tensor],
    memory: str = "graph",
) -> Tensor:
    """The solution at the last time.

    :param w: One entry for each time; ``t`` too, ``dt`` one less.
    """
    evaluate: Callable[[int, Tensor], Tensor]
    rewind = None
    if memory == "graph" or not torch.is_grad_enabled():

        def evaluate(n: int, y_hat: Tensor) -> Tensor:
            return field(t[n], y_hat, w[n])

    elif memory == "recompute":
        replay = Replay()

        def evaluate(n: int, y_hat: Tensor) -> Tensor:
            return replay.run(lambda y_hat: field(t[n], y_hat, w[n]), y_hat)

    else:
        rewind = _Rewind(field, w, t, dt)
        evaluate = rewind.evaluate
    y = y_hat = h0
    f = evaluate(0, y_hat)
    for n in range(len(dt)):
        y_hat = 2 * y - y_hat + f * dt[n]
        f_next = evaluate(n + 1, y_hat)
        y = y + 0.5 * dt[n] * (f + f_next)
        f = f_next
    if rewind is not None:
        rewind.finish(y, y_hat, f)
    return y


class _Rewind:
    """The evaluations of a solution, to be done again from its end backwards."""

    end: tuple[Tensor, Tensor, Tensor]

    def __init__(
        self, field: Callable, w: Sequence[Any], t: Sequence[Tensor], dt: Sequence[Tensor]
    ) -> None:
        self.field, self.w, self.t, self.dt = field, w, t, dt
        self.replay = Replay()
        self.needs_grad: list[bool] = []
        self.n: int | None = None  # where (y, y_hat, f) is; None before the first of all
        self.state: tuple[Tensor, Tensor, Tensor] | None = None

    def finish(self, *end: Tensor) -> None:
        y, y_hat, f = end
        self.end = y.detach(), y_hat.detach(), f.detach()
        self.unchanged = watch(end)

    def evaluate(self, n: int, y_hat: Tensor) -> Tensor:
        self.needs_grad.append(y_hat.requires_grad)
        return self.replay.record(
            lambda x: self.field(self.t[n], x, self.w[n]), (y_hat,), lambda: self.again(n)
        )

    def again(self, n: int) -> list[Tensor]:
        """What the gradient of evaluation ``n`` needs, from the state after it."""
        last = len(self.dt)
        if self.n is None or self.n <= n:
            self.unchanged()
            self.n, self.state = last, self.end
            if n == last:
                return self._capture(n, self.end[1])[1]
        kept: list[Tensor] = []
        while self.n > n:
            kept.clear()
            kept = self._back()
        return kept

    def _back(self) -> list[Tensor]:
        assert self.n is not None and self.state is not None
        (y, y_hat, f), dt = self.state, self.dt[self.n - 1]
        y_hat = 2 * y - y_hat - f * dt
        f_before, kept = self._capture(self.n - 1, y_hat)
        self.n, self.state = self.n - 1, (y - 0.5 * dt * (f + f_before), y_hat, f_before)
        return kept

    def _capture(self, n: int, y_hat: Tensor) -> tuple[Tensor, list[Tensor]]:
        point = y_hat.detach().requires_grad_(self.needs_grad[n])
        f, kept = capture(lambda x: self.field(self.t[n], x, self.w[n]), point)
        return f.detach(), kept
