"""Activations of the networks whose backward pass is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["ACTIVATIONS", "Activation"]


class Activation(NamedTuple):
    """A function f whose derivative is known from its value, so that nothing else is kept."""

    function: Callable[[Tensor], Tensor]
    grad_from_output: Callable[[Tensor], Tensor]
    """The derivative of f, from the value of f."""
    in_place: Callable[[Tensor], Callable[[Tensor], Tensor]]
    """``in_place(like)`` returns ``f_(x)``, which overwrites ``x`` with ``f(x / factor)``; ``like``
    fixes dtype and device."""
    factor: float = 1.0
    compiled: Callable[[Tensor], Tensor] | None = None
    """f in operations that compile to something faster; None if ``function`` does."""


def _grad_of_tanh(h: Tensor) -> Tensor:
    return torch.addcmul(h.new_ones(()), h, h, value=-1)


def _tanh_of_half_(like: Tensor) -> Callable[[Tensor], Tensor]:
    """tanh x is 2 sigmoid(2 x) - 1, which torch computes in a fifth of the time, and to the same
    rounding of numbers up to 1. Twice x costs nothing where that is a product anyway."""
    minus_one = like.new_full((), -1.0)
    return lambda x: torch.add(minus_one, x.sigmoid_(), alpha=2, out=x)


def _tanh_by_sigmoid(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


def _grad_of_softplus(h: Tensor) -> Tensor:
    return torch.expm1(-h).neg_()


def _softplus_(like: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.ops.aten.softplus.out(x, out=x)


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, _grad_of_tanh, _tanh_of_half_, 2.0, _tanh_by_sigmoid),
    "softplus": Activation(softplus, _grad_of_softplus, _softplus_),
}
