"""What :mod:`~pyro_sde.distributions.at_once` is a function of, and how a step uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Inputs", "add_product_", "factors", "halves"]


class Inputs(NamedTuple):
    """The step is z' = shift + decay z + gain u + scale c eps, with u and log c the outputs of a
    network. What is on the grid has shape ``(N, rows, K)``, or ``(N, 1, K)`` if all rows agree."""

    z0: Any
    decay: Any
    shift: Any
    gain: Any
    scale: Any
    last: Any
    last_bias: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Inputs:
        end = 7 + (len(flat) - 7) // 2
        z0, decay, shift, gain, scale, last, last_bias = flat[:7]
        rest = tuple(flat[7:end]), tuple(flat[end:])
        return cls(z0, decay, shift, gain, scale, last, last_bias, *rest)

    def flat(self) -> tuple[Any, ...]:
        return *self[:7], *self.weights, *self.biases


def halves(out: Tensor, d: int) -> tuple[Tensor, Tensor | None]:
    """u and, if it is there, log c."""
    return out[..., :d], out[..., d:] if out.shape[-1] > d else None


Factors = Sequence[float] | Sequence[Tensor]


def factors(x: Tensor) -> Factors:
    """One factor a step, of shape ``(N, rows, K)``: a number where it is the same for all, as a
    view of each step costs as much as an operation."""
    if x.shape[1:] == (1, 1) and x.device.type == "cpu":
        return x.flatten().tolist()
    return x.unbind(0)


def add_product_(total: Tensor, factor: Any, x: Tensor) -> Tensor:
    if isinstance(factor, float):
        return total.add_(x, alpha=factor)
    return total.addcmul_(factor, x)
