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
    in_place: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    """From the function's value."""


def _softplus_(x: Tensor) -> Tensor:
    return torch.ops.aten.softplus.out(x, out=x)


def _slope_of_tanh(h: Tensor) -> Tensor:
    return torch.addcmul(h.new_ones(()), h, h, value=-1)


def _slope_of_softplus(h: Tensor) -> Tensor:
    return torch.expm1(-h).neg_()


UNITS = {
    "tanh": Unit(torch.tanh, torch.tanh_, _slope_of_tanh),
    "softplus": Unit(softplus, _softplus_, _slope_of_softplus),
}
