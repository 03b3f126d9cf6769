"""A number that has first derivatives only, and says so when more is asked of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["first_order_only"]

MESSAGE = (
    'the path estimator "stl" has first derivatives only, and by reverse mode: the parameters are '
    "stopped in its densities, so a second derivative, or one by forward mode, would be wrong. Use "
    'path_estimator="full" or "kl" there'
)


def first_order_only(x: Tensor) -> Tensor:
    """``x``, with an error where its gradient is differentiated again or taken by forward mode."""
    return _FirstOrderOnly.apply(x, False)


class _FirstOrderOnly(torch.autograd.Function):
    """Forward: ``x``, or zero; it keeps ``x``. Backward, for ``x``: the identity, plus a zero
    that is computed from ``x``; and for that zero: an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_zero: bool) -> Tensor:
        return torch.zeros_like(x) if is_zero else x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        x, ctx.is_zero = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.is_zero:
            raise RuntimeError(MESSAGE)
        (x,) = ctx.saved_tensors
        return grad + _FirstOrderOnly.apply(x, True) if torch.is_grad_enabled() else grad, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        raise RuntimeError(MESSAGE)
