"""What the processes share: checked parameters and one careful function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["as_parameters", "broadcast_shapes", "check_shape", "phi", "with_time"]


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """As ``torch.broadcast_shapes``, which costs as much as several operations on small tensors."""
    result = []
    for sizes in zip_longest(*(reversed(s) for s in shapes), fillvalue=1):
        size = {n for n in sizes if n != 1} or {1}
        if len(size) > 1:
            raise RuntimeError(f"shapes {[tuple(s) for s in shapes]} do not broadcast together")
        result.append(size.pop())
    return torch.Size(reversed(result))


def as_parameters(**values: Tensor | float) -> tuple[list[Tensor], tuple[int, ...]]:
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
    # Switched off by NUTS, whose first leaps may overflow: it takes what is not finite as a wall.
    checked = tensors if Distribution._validate_args else {}
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


def check_shape(
    what: str, value: Tensor | float, t: Tensor, z: Tensor, broadcast: bool = False
) -> Tensor:
    """The value of a drift, diffusion or control, or an error that says when it went wrong."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=z.dtype, device=z.device)
    if value.shape == z.shape or value.dim() == 0:
        return value
    if broadcast:
        try:
            if broadcast_shapes(value.shape, z.shape) == z.shape:
                return value
        except RuntimeError:
            pass
    when = f"t={t.item():g}" if t.numel() == 1 else f"t from {float(t.min()):g}"
    raise ValueError(
        f"{what}(t, z) returned shape {tuple(value.shape)} at {when} for a state of shape "
        f"{tuple(z.shape)}; it must return the state's shape"
    )


def phi(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x, smooth through zero in value and gradient.

    Below 1e-2 the quotient's gradient cancels; there seven terms of the series leave an error
    under 1e-18.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return torch.where(x == 0, 1.0, -torch.expm1(-x) / x)
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
