"""Refusing a simulation that went wrong: a scale that is not positive, a state not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .step import diagonal_of, is_matrix

__all__ = ["check_draw", "check_scale"]


def check_draw(
    process: Any,
    value: Tensor,
    scale: Tensor | None,
    control_at: Callable[[int, Tensor], Tensor | None],
) -> None:
    """Refuse a path whose scales are not positive or whose states are not finite.

    :param process: What was drawn from, to be named in the message.
    :param scale: The scale of every step, time first; None if it was checked.
    :param control_at: Returns u at a step's number and a state; None without a control.
    """
    if scale is not None:
        check_scale(process, scale, value.movedim(-2, 0)[1:])
    value = value.detach()
    # A sum is finite only if all its terms are, and needs no mask as large as the path.
    if math.isfinite(value.sum()) or bool(torch.isfinite(value).all()):
        return
    finite = torch.isfinite(value).movedim(-2, 0).flatten(1).all(1)
    first = int((~finite).nonzero()[0])
    if first == 0:
        raise ValueError(f"initial drew a non-finite state at {_time(process, 0)}")
    i = first - 1
    z = value.select(-2, i)
    with torch.no_grad():
        u = control_at(i, z)
    what = "control" if u is not None and not bool(u.isfinite().all()) else "drift"
    raise ValueError(
        f"the {what} of {type(process).__name__} returned a non-finite value at "
        f"{_time(process, i)}, where the state was still finite (largest |z| "
        f"{float(z.abs().max()):.3g}); bound it, or take smaller steps"
    )


def check_scale(process: Any, scale: Tensor, z: Tensor, first: int = 0) -> None:
    """Refuse a scale, for states ``z`` with time first from step ``first`` on, that is not positive
    or, if it is a matrix, not lower-triangular."""
    scale = scale.detach()
    diagonal = diagonal_of(scale, z)
    bad = ~(diagonal > 0)
    if bool(bad.any()):
        i = int(bad.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"the scale of {type(process).__name__} must be positive: found "
            f"{float(diagonal[i].min()):g} at {_time(process, first + i)}; pass the diffusion "
            "through softplus or exp"
        )
    if is_matrix(scale, z) and bool(scale.triu(1).any()):
        raise ValueError(
            f"the scale of {type(process).__name__} is a matrix with entries above its diagonal: "
            "return a lower-triangular one, torch.linalg.cholesky(covariance), say"
        )


def _time(process: Any, i: int) -> str:
    t = process.times[..., i]
    return f"t={t.item():g}" if t.dim() == 0 else f"step {i} (t from {t.min():g} to {t.max():g})"
