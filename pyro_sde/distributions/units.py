"""Hidden units of the networks that are walked through by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["UNITS", "Unit"]


class Unit(NamedTuple):
    """A function whose slope is known from its value, so that nothing else has to be kept."""

    of: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """From the function's value."""
    in_place: Callable[[Tensor], Callable[[Tensor], Tensor]]
    """From a tensor of the right dtype and device to what computes the function in the place of
    its argument, which is ``factor`` times that of the function."""
    factor: float = 1.0
    compiled: Callable[[Tensor], Tensor] | None = None
    """In operations that compile to something faster; None if ``of`` does."""


def _slope_of_tanh(h: Tensor) -> Tensor:
    return torch.addcmul(h.new_ones(()), h, h, value=-1)


def _tanh_of_half_(like: Tensor) -> Callable[[Tensor], Tensor]:
    """tanh x is 2 sigmoid(2 x) - 1, which torch computes in a fifth of the time, and to the same
    rounding of numbers up to 1. Twice x costs nothing where that is a product anyway."""
    minus_one = like.new_full((), -1.0)
    return lambda x: torch.add(minus_one, x.sigmoid_(), alpha=2, out=x)


def _tanh_by_sigmoid(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


def _slope_of_softplus(h: Tensor) -> Tensor:
    return torch.expm1(-h).neg_()


def _softplus_(like: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.ops.aten.softplus.out(x, out=x)


UNITS = {
    "tanh": Unit(torch.tanh, _slope_of_tanh, _tanh_of_half_, 2.0, _tanh_by_sigmoid),
    "softplus": Unit(softplus, _slope_of_softplus, _softplus_),
}
