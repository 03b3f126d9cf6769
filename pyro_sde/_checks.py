"""Checks of arguments and shapes, and fast broadcasting of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DIAGONAL",
    "broadcast_shapes",
    "broadcasts_to",
    "check_memory",
    "check_shape",
    "check_whole",
    "pad_after_time",
]


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """A fast ``torch.broadcast_shapes``, which takes as long as several small operations."""
    result = []
    for sizes in zip_longest(*(reversed(s) for s in shapes), fillvalue=1):
        size = {n for n in sizes if n != 1} or {1}
        if len(size) > 1:
            raise RuntimeError(f"shapes {[tuple(s) for s in shapes]} do not broadcast together")
        result.append(size.pop())
    return torch.Size(reversed(result))


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` can be expanded to ``target``."""
    try:
        return broadcast_shapes(shape, target) == torch.Size(target)
    except RuntimeError:
        return False


def pad_after_time(x: Tensor, ndim: int) -> Tensor:
    """``x`` with dimensions of size 1 after the first, which is time, until it has ``ndim``."""
    return x.reshape(x.shape[:1] + (1,) * (ndim - x.dim()) + x.shape[1:])


def check_shape(
    what: str, value: Tensor | float, t: Tensor, z: Tensor, broadcast: bool = False
) -> Tensor:
    """Check the value of a drift, diffusion or control. Errors name the time.

    :returns: The value as a tensor.
    """
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, dtype=z.dtype, device=z.device)
        except (TypeError, ValueError, RuntimeError) as e:
            raise TypeError(
                f"{what}(t, z) returned a {type(value).__name__}; it must return a tensor of the "
                f"state's shape, {tuple(z.shape)}"
            ) from e
    if value.shape == z.shape or value.dim() == 0:
        return value
    if broadcast and broadcasts_to(value.shape, z.shape):
        return value
    when = f"t={t.item():g}" if t.numel() == 1 else f"t from {float(t.min()):g}"
    raise ValueError(
        f"{what}(t, z) returned shape {tuple(value.shape)} at {when} for a state of shape "
        f"{tuple(z.shape)}; it must return the state's shape{_remedy(what, value, z)}"
    )


def _remedy(what: str, value: Tensor, z: Tensor) -> str:
    dim = z.shape[-1]
    if what == "diffusion" and value.shape[-2:] == (dim, dim):
        return f". {DIAGONAL}"
    if value.shape[-1] == 1 and broadcasts_to(value.shape, z.shape):
        return f": if it is to be the same in all {dim} dimensions, return it .expand_as(z)"
    return ""


DIAGONAL = (
    "A diffusion is the diagonal of the matrix that multiplies dB. For noise that is correlated, "
    "write a PathDistribution whose transition returns a lower-triangular scale"
)


def check_memory(memory: str, *allowed: str) -> str:
    if memory not in allowed:
        raise ValueError(f"memory must be one of {', '.join(allowed)}: found {memory!r}")
    return memory


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if is_integer and value >= least:
        return
    is_whole = isinstance(value, float) and value.is_integer() and value >= least
    remedy = f"; write {int(value)}" if is_whole else ""
    raise ValueError(f"{name} must be a whole number of at least {least}: found {value!r}{remedy}")
