r"""One hidden layer of gathered rows, as one operation.

Forward, for the numbers r of n rows,

.. math:: h_k = \tanh(\mathrm{table}_{r_k} + W\,x_k), \qquad o_k = V\,h_k + b

It keeps its inputs alone: there are as many rows as times, of all series, and each h is as wide as
a layer. Backward, with g the gradient with respect to o, a block of rows after the other computes h
again, and

.. math:: \delta_k = (1 - h_k^2) \odot V^T g_k

adds up to the gradients: :math:`\delta_k` to row :math:`r_k` of the table, :math:`\delta_k x_k^T`
to that of W, :math:`g_k h_k^T` to that of V, :math:`g_k` to that of b; that of :math:`x_k` is
:math:`W^T \delta_k`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .common import BLOCK, fits_cpu, gradients_with_graph, inside_func

__all__ = ["gathered_mlp"]


def gathered_mlp(
    table: Tensor, rows: Tensor, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor
) -> Tensor:
    """The linear layer ``out`` of tanh(table[rows] + weight x).

    :param table: Of shape ``(K, hidden)``.
    :param rows: Numbers of rows of the table, ``(n,)``.
    :param x: Features of each, ``(n, features)``.
    :param weight: Of shape ``(hidden, features)``.
    :param bias: The bias of ``out``.
    """
    inputs = (table, x, weight, out, bias)
    if inside_func() or not fits_cpu(*inputs):
        return _plain(rows, *inputs)
    return _GatheredMLP.apply(rows, *inputs)


def _plain(
    rows: Tensor, table: Tensor, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor
) -> Tensor:
    return linear(torch.tanh(table.index_select(0, rows) + linear(x, weight)), out, bias)


class _GatheredMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, table: Tensor, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor
    ) -> Tensor:
        found = table.new_empty(len(rows), len(out))
        for at, h in _hidden(rows, table, x, weight):
            torch.addmm(bias, h, out.t(), out=found[at])
        ctx.save_for_backward(rows, table, x, weight, out, bias)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or inside_func(grad):
            plain = lambda *tensors: (_plain(rows, *tensors),)  # noqa: E731
            return None, *gradients_with_graph(plain, inputs, needed, (grad,))
        table, x, weight, out, _ = inputs
        grad_table, grad_x = torch.zeros_like(table), torch.empty_like(x)
        # A product with few columns takes several times as long as its transpose.
        grad_weight_t, grad_out = weight.new_zeros(weight.shape[::-1]), torch.zeros_like(out)
        one = table.new_ones(())
        for at, h in _hidden(rows, table, x, weight):
            grad_out.addmm_(grad[at].t(), h)
            delta = (grad[at] @ out).mul_(torch.addcmul(one, h, h, value=-1))
            grad_table.index_add_(0, rows[at], delta)
            grad_weight_t.addmm_(x[at].t(), delta)
            if needed[1]:
                torch.mm(delta, weight, out=grad_x[at])
        found = (grad_table, grad_x, grad_weight_t.t().contiguous(), grad_out, grad.sum(0))
        return None, *(g if need else None for g, need in zip(found, needed, strict=True))


def _hidden(
    rows: Tensor, table: Tensor, x: Tensor, weight: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """tanh(table[rows] + weight x), one block of rows after the other."""
    size, minus_one = max(1, BLOCK // table.shape[1]), table.new_full((), -1.0)
    for i in range(0, len(rows), size):
        at = slice(i, i + size)
        h = table.index_select(0, rows[at])
        # tanh a = 2 sigmoid(2 a) - 1 takes a fifth of the time; the first 2 is in the product.
        h.addmm_(x[at], weight.t(), beta=2, alpha=2).sigmoid_()
        yield at, torch.add(minus_one, h, alpha=2, out=h)
