"""The other latents of a model as the context of a control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions import Distribution

from .._checks import broadcast_shapes

__all__ = ["LatentContext", "concat_context", "location_and_scale", "readable"]


class LatentContext(nn.Module):
    """Latents, concatenated and measured in units of their priors, as the context of a control.

    :param sites: Those latents, as they were in a first run of the model.
    :param event_dims: How many dimensions of the path's batch are no plates.
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, sites: Mapping[str, Any], event_dims: int = 0) -> None:
        super().__init__()
        self.event_dims = event_dims
        self.dims = {name: site["fn"].event_dim for name, site in sites.items()}
        units = [_units(site["fn"], site["value"]) for site in sites.values()]
        loc, scale = (torch.cat(x) for x in zip(*units, strict=True))
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)

    def forward(self, trace: Trace) -> Tensor:
        """The context, from a trace that has drawn the latents: plates, then its entries."""
        drawn = ((trace.nodes[name]["value"], dim) for name, dim in self.dims.items())
        x = (_concatenate([_row(x, dim) for x, dim in drawn]) - self.loc) / self.scale
        return x.reshape(x.shape[:-1] + (1,) * self.event_dims + x.shape[-1:])

    def extra_repr(self) -> str:
        return ", ".join(self.dims)


def readable(
    condition_on: bool | Iterable[str], latents: Mapping[str, Any], paths: Iterable[str], path: str
) -> dict[str, Any]:
    """The latents that the control of a path is conditioned on.

    :param condition_on: Their names; or True, all that are in no plate but those of the path.
    :param latents: The sites of all latents, ``paths`` among them.
    """
    around = {frame.name for frame in latents[path]["cond_indep_stack"]}
    others = {name: site for name, site in latents.items() if name not in set(paths)}
    foreign = {
        name: plates
        for name, site in others.items()
        if (plates := {f.name for f in site["cond_indep_stack"]} - around)
    }
    if condition_on is True:
        return {name: site for name, site in others.items() if name not in foreign}
    for name in condition_on or ():
        if name not in others:
            raise ValueError(
                f"condition_on names {name!r}, but the latents other than paths are "
                f"{sorted(others)}"
            )
        if name in foreign:
            raise ValueError(
                f"the path {path!r} cannot be conditioned on {name!r}, of which there are many for "
                f"each path: it is inside of the plate "
                f"{', '.join(map(repr, sorted(foreign[name])))}, and the path is not"
            )
    return {name: others[name] for name in condition_on or ()}


def concat_context(
    context: Callable[[Tensor], Tensor] | None, x: Tensor
) -> Callable[[Tensor], Tensor]:
    """A function of time that concatenates ``context``, if there is one, and the constant ``x``."""
    if context is None:
        return lambda t: x
    return lambda t: _concatenate([context(t), x])


def _concatenate(parts: list[Tensor]) -> Tensor:
    batch = broadcast_shapes(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(batch + p.shape[-1:]) for p in parts], -1)


def _row(x: Any, event_dim: int) -> Tensor:
    return x.reshape(x.shape[: x.dim() - event_dim] + (-1,))


def _units(prior: Distribution, value: Tensor) -> tuple[Tensor, ...]:
    """Mean and standard deviation of each entry, averaged over the elements of plates."""
    dim = len(prior.event_shape)
    like = torch.zeros_like(value)
    found = (x.expand_as(like) for x in location_and_scale(prior, like))
    rows = (_row(x.detach(), dim) for x in found)
    return tuple(x.reshape(-1, x.shape[-1]).mean(0) for x in rows)


def location_and_scale(prior: Distribution, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation, or 0 and 1 where there are none."""
    try:
        loc, scale = prior.mean, prior.stddev
    except NotImplementedError:
        pass
    else:
        if bool(torch.isfinite(loc).all() and torch.isfinite(scale).all()):
            return loc, scale
    return torch.zeros_like(like), torch.ones_like(like)
