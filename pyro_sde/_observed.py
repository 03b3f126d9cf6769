"""Checks of the values that a site is observed at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from ._checks import broadcast_shapes, broadcasts_to

__all__ = ["check_observed"]


def check_observed(name: str, fn: Any, value: Any) -> None:
    """Refuse data that are not a tensor, that have NaN, or that would be expanded."""
    if not isinstance(fn, Distribution):
        return
    if not isinstance(value, Tensor):
        raise TypeError(
            f"site {name!r} is observed at a {type(value).__name__}: pass a tensor, "
            "obs=torch.as_tensor(...)"
        )
    shape = fn.batch_shape + fn.event_shape
    if not broadcasts_to(value.shape, shape) and _broadcast(value.shape, shape):
        raise ValueError(
            f"site {name!r} is observed at a value of shape {tuple(value.shape)}, and its "
            f"distribution has batch_shape {tuple(fn.batch_shape)} and event_shape "
            f"{tuple(fn.event_shape)}: both would be expanded to more numbers than were observed. "
            "Reshape one of them, by unsqueeze(-1) or [..., 0], say, or put the site into a plate"
        )
    is_missing = value.is_floating_point() and bool(value.isnan().any())
    if is_missing and not _takes_nan(fn):
        raise ValueError(
            f"site {name!r} is observed at {int(value.isnan().sum())} values that are NaN: replace "
            "them, values, mask = pyro_sde.fill_missing(values), and mask the likelihood, "
            "dist.Normal(...).mask(mask)"
        )


def _takes_nan(fn: Any) -> bool:
    """Whether a distribution accepts NaN, as PoissonProcess does for the padding of events."""
    while not getattr(fn, "takes_nan", False):
        if not hasattr(fn, "base_dist"):
            return False
        fn = fn.base_dist
    return True


def _broadcast(*shapes: torch.Size) -> bool:
    try:
        return bool(broadcast_shapes(*shapes))
    except RuntimeError:
        return False  # the density then raises its own error
