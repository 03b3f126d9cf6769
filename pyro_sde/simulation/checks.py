"""Refusing a simulation that went wrong: a scale that is not positive, a state not finite; and
warning of steps that are too long."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ops.common import inside_func
from .step import diagonal_of, is_matrix
from .tolerance import current_tolerance

__all__ = ["check_draw", "check_scale"]


def check_draw(
    process: Any,
    value: Tensor,
    scale: Tensor | None,
    control_at: Callable[[int, Tensor], Tensor | None],
) -> None:
    """Refuse a path whose scales are not positive or whose states are not finite, and warn if its
    steps are too long for its drift.

    :param process: What was drawn from, to be named in the message.
    :param scale: The scale of every step, time first; None if it was checked.
    :param control_at: Returns u at a step's number and a state; None without a control.
    """
    if scale is not None:
        check_scale(process, scale, value.movedim(-2, 0)[1:])
    value = value.detach()
    # A sum is finite only if all its terms are, and needs no mask as large as the path.
    if math.isfinite(value.sum()) or bool(torch.isfinite(value).all()):
        warn_of_long_steps(process, value)
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


_draws: dict[Any, int] = {}
"""How often each process was drawn; 0 if there is nothing more to say of its steps."""


def warn_of_long_steps(process: Any, value: Tensor) -> None:
    """Warn, once for a process, if a step as long as the longest of its grid overshoots from most
    states of a path.

    A drift that contracts at a rate r multiplies distances by exp(-r dt), its Euler step by
    1 - r dt, and below -1 the steps swing ever further, whatever the SDE does. This is looked at
    in draw number 1, 2, 4, 8, ... of a process, which costs nothing in a training.
    """
    law = process
    while hasattr(law, "prior"):  # a control belongs to the grid, and to no SDE
        law = law.prior
    if current_tolerance() is not None or inside_func():
        return
    drift = getattr(law, "drift", None)
    key = type(law), getattr(drift, "__code__", type(drift)), process.event_shape
    count = _draws.get(key, 1)
    _draws[key] = count and count + 1
    if count == 0 or count & (count - 1):
        return
    t, dt = process.step_times(value.dim() - 2 - len(process.batch_shape))
    # Some states are enough, and several copies of a path as long as it is deep would not be free.
    some = slice(None, None, max(1, len(t) // 32, value.numel() // 2**18))
    t, z = t[some], value.movedim(-2, 0)[:-1][some]
    dt = dt.amax(0, keepdim=True).expand_as(t)
    try:
        factor = _step_factor(lambda z: law.transition(t, dt, z)[0], z)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return  # a drift that takes single states alone: drawing from it is no error
    far = factor < -1
    if 2 * int(far.sum()) <= far.numel():
        return
    _draws[key] = 0
    rate = float(((1 - factor) / dt[..., 0])[far].median())
    warnings.warn(
        f"the steps of {type(law).__name__} are too long for its drift, which contracts at a rate "
        f"of about {rate:.3g}: a step of {float(dt.max()):.3g} overshoots, to "
        f"{float(factor[far].median()):.3g} times the distance, and the path is not that of the "
        f"SDE. Use steps of at most {1 / rate:.2g}, as time_grid(..., dt={1 / rate:.2g}) makes "
        "them, or, for a linear drift, OrnsteinUhlenbeck, which is exact on any grid",
        UserWarning,
        stacklevel=2,
    )


@torch.no_grad()
def _step_factor(mean: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The eigenvalue farthest from 1 of the Jacobian of ``mean`` at each state, if it is real, by
    the power method and finite differences."""

    def displacement(z: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same dropout every time, and outside nothing has changed
            return mean(z) - z

    h = torch.finfo(z.dtype).eps ** 0.4 * (1 + z.norm(dim=-1, keepdim=True))
    v = torch.arange(1.0, z.shape[-1] + 1, dtype=z.dtype, device=z.device).cos().expand_as(z)
    start = displacement(z)
    eigenvalue = z.new_zeros(z.shape[:-1])
    for _ in range(10 if z.shape[-1] > 1 else 1):
        v = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
        image = (displacement(z + h * v) - start) / h
        eigenvalue = (v * image).sum(-1)
        v = image
    return 1 + eigenvalue


def _time(process: Any, i: int) -> str:
    t = process.times[..., i]
    return f"t={t.item():g}" if t.dim() == 0 else f"step {i} (t from {t.min():g} to {t.max():g})"
