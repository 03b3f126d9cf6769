"""Sums over the state along a path, without a temporary tensor as large as the path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["products", "squares"]

SMALL = 2**16
"""Up to so many numbers a step, all steps are summed in one operation."""


def squares(x: Tensor) -> Tensor:
    """The sum of x^2 over the last dimension; ``x`` has time first."""
    return _Squares.apply(x)


def products(x: Tensor, y: Tensor) -> Tensor:
    """The sum of x y over the last dimension, of which ``y`` is a constant."""
    return _Products.apply(x, y)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    if x[0].numel() <= SMALL:
        return (x * y).sum(-1)
    return torch.stack([(a * b).sum(-1) for a, b in zip(x.unbind(0), y.unbind(0), strict=True)])


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _sum(x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * grad).unsqueeze(-1) * x


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return _sum(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * y, None
