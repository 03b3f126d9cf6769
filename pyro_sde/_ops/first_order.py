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
    return _FirstOrderOnly.apply(x)


class _FirstOrderOnly(torch.autograd.Function):
    """Forward: the identity, which keeps its argument. Backward: the identity, to which a zero is
    added that has no gradient, so that whoever differentiates it meets an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + _ZeroWithoutGradient.apply(x) if torch.is_grad_enabled() else grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        raise RuntimeError(MESSAGE)


class _ZeroWithoutGradient(torch.autograd.Function):
    """Forward: zero, which keeps nothing. Backward: an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(MESSAGE)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        raise RuntimeError(MESSAGE)
