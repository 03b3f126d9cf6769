"""What an encoder says at many times, as one operation.

There are as many rows as times, of all series, and each is as wide as a layer. Autograd would make
and keep several tensors of that size; here a few rows are computed at a time, and computed again
going back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._operations import BLOCK, fits_cpu, gradients_with_graph, inside_of_func

__all__ = ["look"]


def look(known: Tensor, rows: Tensor, more: Tensor, wait: Tensor, out: Tensor, b: Tensor) -> Tensor:
    """The linear layer ``out`` of tanh(known[rows] + wait more).

    :param known: What is known, ``(K, hidden)``.
    :param rows: Numbers of its rows, ``(n,)``.
    :param more: What is added to each by the weight ``wait``, ``(n, features)``.
    :param b: The bias of ``out``.
    """
    inputs = (known, more, wait, out, b)
    if inside_of_func() or not fits_cpu(*inputs):
        return _plainly(rows, *inputs)
    return _Look.apply(rows, *inputs)


def _plainly(
    rows: Tensor, known: Tensor, more: Tensor, wait: Tensor, out: Tensor, b: Tensor
) -> Tensor:
    return linear(torch.tanh(known.index_select(0, rows) + linear(more, wait)), out, b)


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, known: Tensor, more: Tensor, wait: Tensor, out: Tensor, b: Tensor
    ) -> Tensor:
        found = known.new_empty(len(rows), len(out))
        for at, h in _hidden(rows, known, more, wait):
            torch.addmm(b, h, out.t(), out=found[at])
        ctx.save_for_backward(rows, known, more, wait, out, b)
        return found

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> Any:
        rows, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or inside_of_func(by):
            plainly = lambda *x: (_plainly(rows, *x),)  # noqa: E731
            return None, *gradients_with_graph(plainly, inputs, needed, (by,))
        known, more, wait, out, _ = inputs
        by_known, by_more = torch.zeros_like(known), torch.empty_like(more)
        # A product with few columns takes several times as long as its transpose.
        by_wait, by_out = wait.new_zeros(wait.shape[::-1]), torch.zeros_like(out)
        one = known.new_ones(())
        for at, h in _hidden(rows, known, more, wait):
            by_out.addmm_(by[at].t(), h)
            by_h = (by[at] @ out).mul_(torch.addcmul(one, h, h, value=-1))
            by_known.index_add_(0, rows[at], by_h)
            by_wait.addmm_(more[at].t(), by_h)
            if needed[1]:
                torch.mm(by_h, wait, out=by_more[at])
        found = (by_known, by_more, by_wait.t().contiguous(), by_out, by.sum(0))
        return None, *(x if need else None for x, need in zip(found, needed, strict=True))


def _hidden(
    rows: Tensor, known: Tensor, more: Tensor, wait: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """tanh(known[rows] + wait more), a block after the other."""
    size, minus_one = max(1, BLOCK // known.shape[1]), known.new_full((), -1.0)
    for i in range(0, len(rows), size):
        at = slice(i, i + size)
        h = known.index_select(0, rows[at])
        # tanh x = 2 sigmoid(2 x) - 1 takes a fifth of the time; the first 2 is in the product.
        h.addmm_(more[at], wait.t(), beta=2, alpha=2).sigmoid_()
        yield at, torch.add(minus_one, h, alpha=2, out=h)
