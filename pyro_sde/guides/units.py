"""The units of a prior: where it lies and how wide it is, in unconstrained space."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    MultivariateNormal,
    TransformedDistribution,
    biject_to,
)
from torch.distributions.transforms import ComposeTransform, IndependentTransform

from ..distributions.starts import SideBySide, side_by_side

__all__ = ["location_and_scale", "push_units", "to_support", "unconstrained_units"]

Units = tuple[Tensor, Tensor]


def to_support(prior: Distribution) -> Any:
    """The transform from unconstrained space to the support of a prior over R^D, or None if that
    is all of R^D."""
    transform = inside = biject_to(prior.support)
    while isinstance(inside, IndependentTransform):
        inside = inside.base_transform
    is_identity = isinstance(inside, ComposeTransform) and not inside.parts
    return None if is_identity else transform


def unconstrained_units(prior: Distribution, transform: Any, like: Tensor) -> Units:
    """Location and scale of a prior in unconstrained space.

    They are exact for Normal and LogNormal laws, else a mean and a standard deviation, pushed
    through the transform to first order.

    :param transform: That of :func:`to_support`.
    :param like: What has the shape of the unconstrained values.
    :returns: A location and a scale, the lower-triangular matrix of a MultivariateNormal.
    """
    if isinstance(prior, MultivariateNormal):
        return prior.loc, prior.scale_tril
    loc, scale = location_and_scale(prior, like)
    if transform is None:
        return loc, scale
    if transform.inverse_shape(prior.event_shape) != prior.event_shape:
        return torch.zeros_like(like), torch.ones_like(like)  # a simplex, say
    return push_units(loc, scale, transform.inv)


def location_and_scale(prior: Distribution, like: Tensor) -> Units:
    """A location and a scale of each entry, or 0 and 1 where there are none."""
    if isinstance(prior, Independent):
        return location_and_scale(prior.base_dist, like)
    if isinstance(prior, SideBySide):
        parts = like.split([p.event_shape[0] for p in prior.parts], -1)
        found = (location_and_scale(p, x) for p, x in zip(prior.parts, parts, strict=True))
        loc, scale = (side_by_side(x) for x in zip(*found, strict=True))
        return loc, scale
    if isinstance(prior, TransformedDistribution) and all(
        t.bijective and not (t.domain.event_dim or t.codomain.event_dim) for t in prior.transforms
    ):
        loc, scale = location_and_scale(prior.base_dist, like)
        for t in prior.transforms:
            loc, scale = push_units(loc, scale, t)
        return loc, scale
    for find in (_moments, partial(_quantiles, like=like), _parameters):
        try:
            loc, scale = find(prior)
        except (NotImplementedError, AttributeError):
            continue
        if bool(torch.isfinite(loc).all() and torch.isfinite(scale).all()):
            return loc, scale
    return torch.zeros_like(like), torch.ones_like(like)


def _moments(prior: Distribution) -> Units:
    return prior.mean, prior.stddev


def _quantiles(prior: Any, like: Tensor) -> Units:
    """For tails without moments: a Cauchy law, say."""
    median, high = (prior.icdf(like.new_tensor(p)) for p in (0.5, 0.84))
    return median, high - median


def _parameters(prior: Any) -> Units:
    """Those of a StudentT without a variance, say."""
    return prior.loc, prior.scale


def push_units(loc: Tensor, scale: Tensor, f: Callable[[Tensor], Tensor]) -> Units:
    """The units of f(x) from those of x, for an elementwise f."""
    at = f(loc)
    width = (f(loc + scale) - at).abs()
    known = torch.isfinite(at) & torch.isfinite(width) & (width > 0)
    return torch.where(known, at, 0.0), torch.where(known, width, 1.0)
