"""What the processes share: checked parameters and one careful function."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor
from torch.distributions import Distribution

from .._shapes import broadcast_shapes

__all__ = ["as_parameters", "phi", "validates", "with_time"]


def validates(validate_args: bool | None) -> bool:
    """Whether arguments are to be checked: what the caller said, or else Pyro's default.

    NUTS switches the default off, as its first leaps may overflow: it takes what is not finite as
    a wall.
    """
    return bool(Distribution._validate_args if validate_args is None else validate_args)


def as_parameters(
    validate_args: bool | None, **values: Tensor | float
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Tensors of one dtype, not expanded, and the shape that they broadcast to."""
    tensors = {k: torch.as_tensor(v) for k, v in values.items()}
    given = [v.dtype for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = reduce(torch.promote_types, given) if given else torch.get_default_dtype()
    try:
        shape = broadcast_shapes(*(v.shape for v in tensors.values()))
    except RuntimeError as e:
        found = {k: tuple(v.shape) for k, v in tensors.items()}
        raise ValueError(
            f"parameters must broadcast to batch_shape + (D,): found shapes {found}"
        ) from e
    checked = tensors if validates(validate_args) else {}
    for name, v in checked.items():
        x = values[name]
        if isinstance(x, float) and math.isfinite(x) and (x > 0 or name != "scale"):
            continue  # nothing to compute
        # A sum is finite only if all its terms are, and an operation less.
        if not (math.isfinite(v.detach().sum()) or bool(torch.isfinite(v).all())):
            raise ValueError(f"{name} must be finite: found {v[~torch.isfinite(v)].tolist()}")
        if name == "scale" and not bool((v > 0).all()):
            raise ValueError(
                f"scale must be positive: found {float(v.detach().min()):g}; a learned scale "
                "needs constraint=constraints.positive"
            )
    return [v.to(dtype) for v in tensors.values()], tuple(shape)


def phi(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x, smooth through zero in value and in derivatives of both modes.

    Below 1e-2 the derivative of the quotient cancels; there seven terms of the series leave an
    error under 1e-18.
    """
    small, one = x.abs() < 1e-2, torch.ones_like(x)
    y = torch.where(small, one, x)
    w = torch.where(small, x, torch.zeros_like(x))
    series = one
    for k in range(7, 1, -1):
        series = torch.addcmul(one, w, series, value=-1 / k)
    return torch.where(small, series, -torch.expm1(-y) / y)


def with_time(x: Tensor) -> Tensor:
    """A parameter of shape (..., D) as (..., 1, D), to meet a whole path."""
    return x.unsqueeze(-2) if x.dim() else x
