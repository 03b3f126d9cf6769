"""What a step of the fused path computes with: activations, hidden layers, scaled sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .inputs import Net, context_columns

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "HiddenLayers",
    "add_product_",
    "per_step_factors",
]


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


class HiddenLayers:
    """The hidden layers of a network, computed in place of their biases."""

    def __init__(self, net: Net, activation: str, rows: int) -> None:
        f = ACTIVATIONS[activation]
        self.net, self.rows = net, rows
        self.weights = [w.t() for w in net.weights]
        self.activation_, self.factor = f.in_place(net.last), f.factor

    def buffers(self, at: slice) -> list[Tensor]:
        """The biases of a block of steps in one copy, which addmm would make for each."""
        biases = (b[at].expand(-1, self.rows, -1) for b in self.net.biases)
        buffers = [torch.mul(b, self.factor, out=b.new_empty(b.shape)) for b in biases]
        for buffer, weight in zip(buffers, self.net.context_weights, strict=False):
            for i, columns in context_columns(self.net.context, weight):
                context, w = self.net.context[i][at].flatten(0, 1), weight[:, columns].t()
                buffer.flatten(0, 1).addmm_(context, w, alpha=self.factor)
        return buffers

    def __call__(self, h: Tensor, buffers: Sequence[Tensor]) -> Tensor:
        """The last hidden layer at the states ``h``."""
        for weight_t, buffer in zip(self.weights, buffers, strict=True):
            h = self.activation_(buffer.addmm_(h, weight_t, alpha=self.factor))
        return h


Factors = Sequence[float] | Sequence[Tensor]


def per_step_factors(x: Tensor) -> Factors:
    """One factor a step, from shape ``(N, rows, K)``: a number where it is the same for all, as a
    view of each step costs as much as an operation."""
    if x.shape[1:] == (1, 1) and x.device.type == "cpu":
        return x.flatten().tolist()
    return x.unbind(0)


def add_product_(total: Tensor, factor: Any, x: Tensor) -> Tensor:
    if isinstance(factor, float):
        return total.add_(x, alpha=factor)
    return total.addcmul_(factor, x)
