"""Finding a path inside of the wrappers that Pyro puts around distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions import MaskedDistribution, TransformedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from .path import PathDistribution
from .scalar import DropState

__all__ = ["WrappedPath", "unwrap"]


@dataclass
class WrappedPath:
    """A path inside of its wrappers, innermost wrapper first.

    ``to_path`` maps the site's value to the path's, ``reduce`` maps terms of the path's batch shape
    to the site's, and ``rewrap`` builds the same wrappers around another path.
    """

    path: PathDistribution
    event_dims: int = 0
    transforms: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    _reducers: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    _wrappers: list[Callable[[Any], Any]] = field(default_factory=list)

    @property
    def is_scalar(self) -> bool:
        """Whether values of the site have no dimension for the state."""
        return any(isinstance(transform, DropState) for transform in self.transforms)

    def to_path(self, value: Tensor) -> Tensor:
        for transform in reversed(self.transforms):
            value = transform.inv(value)
        return value

    def reduce(self, term: Tensor) -> Tensor:
        for reducer in self._reducers:
            term = reducer(term)
        return term

    def rewrap(self, path: Any) -> Any:
        for wrapper in self._wrappers:
            path = wrapper(path)
        return path


def unwrap(fn: Any) -> WrappedPath | None:
    """The path inside ``fn``, or None where there is none.

    A path under elementwise bijections is a path: they cancel in every density ratio.
    """
    if isinstance(fn, PathDistribution):
        return WrappedPath(fn)
    inside = unwrap(fn.base_dist) if hasattr(fn, "base_dist") else None
    if inside is None:
        return None
    if isinstance(fn, torch.distributions.Independent):
        n = fn.reinterpreted_batch_ndims
        inside.event_dims += n
        inside._reducers.append(lambda term: sum_rightmost(term, n))
        inside._wrappers.append(lambda d: d.to_event(n))
    elif isinstance(fn, MaskedDistribution):
        mask = fn._mask
        inside.masks.append(mask)
        inside._reducers.append(
            lambda term: torch.where(torch.as_tensor(mask), term, torch.zeros_like(term))
        )
        inside._wrappers.append(lambda d: d.mask(mask))
    elif isinstance(fn, torch.distributions.TransformedDistribution):
        for transform in fn.transforms:
            is_elementwise = not transform.domain.event_dim and not transform.codomain.event_dim
            if not is_elementwise and not isinstance(transform, DropState):
                raise ValueError(
                    f"a path can only be transformed elementwise: {transform} mixes the entries "
                    "of a path; transform the sampled value instead"
                )
        # A cached transform gives back the very path that was drawn, and with it its draw.
        cached = [transform.with_cache(1) for transform in fn.transforms]
        inside.transforms.extend(fn.transforms)
        inside._wrappers.append(lambda d: TransformedDistribution(d, cached))
    elif not isinstance(fn, ExpandedDistribution):
        return None
    return inside
