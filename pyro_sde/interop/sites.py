"""What a model says about its sites: names of dimensions, coordinates, and shapes of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..distributions.wrapping import unwrap

__all__ = ["Samples", "Site", "array", "by_chain", "sites_of"]

Samples = Mapping[str, Tensor]


@dataclass
class Site:
    """What the model says about one of its sites."""

    value: Tensor
    is_latent: bool
    is_observed: bool
    dims: tuple[str, ...]
    batch_dims: int
    coords: dict[str, Any]


def sites_of(trace: Any, dims: Mapping[str, Sequence[str]]) -> dict[str, Site]:
    sites = {}
    for name, node in trace.nodes.items():
        if node["type"] != "sample" or site_is_subsample(node):
            continue
        for frame in node["cond_indep_stack"]:
            if frame.vectorized and frame.size != (frame.full_size or frame.size):
                raise ValueError(
                    f"site {name!r} is in the plate {frame.name!r}, which draws {frame.size} of "
                    f"{frame.full_size} elements, others in every sample: let the model keep all"
                )
        sites[name] = _site(name, node, list(dims.get(name, ())))
    unknown = set(dims) - set(sites)
    if unknown:
        raise ValueError(f"dims names {sorted(unknown)}: the model has the sites {list(sites)}")
    return sites


def _site(name: str, node: Any, names: list[str]) -> Site:
    fn, value = node["fn"], node["value"].detach()
    batch_dims = value.dim() - fn.event_dim
    dims: list[str | None] = [None] * value.dim()
    for frame in node["cond_indep_stack"]:
        i = batch_dims + frame.dim if frame.vectorized else -1
        if i >= 0 and value.shape[i] == frame.size:
            dims[i] = frame.name
    wrapped = unwrap(fn)
    if wrapped is not None:
        own = [f"{name}_time", f"{name}_state"][: 1 if wrapped.is_scalar else 2]
        dims[-len(own) :] = own
    free = [i for i, dim in enumerate(dims) if dim is None]
    if names and len(names) != len(free):
        raise ValueError(
            f"dims[{name!r}] has {len(names)} names: of the shape {tuple(value.shape)} the "
            f"dimensions {free} have none yet"
        )
    for k, i in enumerate(free):
        dims[i] = names[k] if names else f"{name}_dim_{k}"
    coords: dict[str, Any] = {}
    if wrapped is not None:
        times = wrapped.path.times.detach()
        if times.numel() == times.shape[-1]:
            coords[f"{name}_time"] = array(times.flatten())
        else:
            dims[-2] = f"{name}_step"
            coords[f"{name}_time"] = (tuple(dims[:-1]), array(times.expand(value.shape[:-1])))
    is_latent = not node["is_observed"]
    is_observed = node["is_observed"] and not node["infer"].get("_deterministic", False)
    if is_observed:
        value = _without_masked(node)
    return Site(value, is_latent, is_observed, tuple(map(str, dims)), batch_dims, coords)


def _without_masked(node: Any) -> Tensor:
    """What was observed, and NaN where the value only fills the place of a missing one."""
    fn, value = node["fn"], node["value"].detach()
    masks = [(node["mask"], fn.event_dim)]
    while hasattr(fn, "base_dist"):
        if isinstance(fn, MaskedDistribution):
            masks.append((fn._mask, fn.event_dim))
        fn = fn.base_dist
    for mask, event_dim in masks:
        if isinstance(mask, Tensor) and not bool(mask.all()):
            mask = mask.reshape(mask.shape + (1,) * event_dim)
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            value = value.masked_fill(~mask.expand_as(value), torch.nan)
    return value


def by_chain(
    samples: Samples,
    sites: dict[str, Site],
    name: str,
    sample_dims: int,
    chains: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Samples of shape ``(chain, draw, ...)`` and then that of the site.

    ``Predictive(parallel=True)`` leaves dimensions of size 1 for the plates that a site is not in.
    """
    found = {}
    for k, v in samples.items():
        if k not in sites:
            continue
        v = torch.as_tensor(v, device=sites[k].value.device).detach()
        shape = tuple(sites[k].value.shape)
        lead = chains or (tuple(v.shape[:sample_dims]) if sample_dims == 2 else (1, len(v)))
        rest = tuple(v.shape[sample_dims:])
        padding = len(rest) - len(shape)
        if padding < 0 or rest != (1,) * padding + shape:
            raise ValueError(
                f"{name}[{k!r}] has shape {tuple(v.shape)}, where the model with these data draws "
                f"{shape} at that site: pass the data that the samples belong to, and "
                "group_by_chain=True if chains come first"
            )
        if v.shape[:sample_dims].numel() != lead[0] * lead[1]:
            raise ValueError(
                f"{name}[{k!r}] has {len(v)} samples, the posterior {lead[0]} chains of {lead[1]}: "
                "pass as many, in the same order"
            )
        found[k] = v.reshape(*lead, *shape)
    if not found:
        raise ValueError(
            f"{name} has the sites {list(samples)}, none of which the model has: {list(sites)}"
        )
    return found


def array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
