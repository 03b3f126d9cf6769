"""The other latents of a model as the context of a control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions import Distribution

from ..distributions.starts import side_by_side
from .units import location_and_scale

__all__ = ["MAX_LATENTS", "LatentContext", "concat_context", "readable"]

MAX_LATENTS = 64
"""So many numbers of other latents are read without being asked for."""


class LatentContext(nn.Module):
    """Latents, concatenated and measured in units of their priors, as the context of a control.

    :param sites: Those latents, as they were in a first run of the model.
    :param event_dims: How many dimensions of the path's batch are no plates.
    :param is_asked_for: Whether the user named them, so that a control of their own takes them.
    """

    loc: Tensor
    scale: Tensor

    def __init__(
        self, sites: Mapping[str, Any], event_dims: int = 0, is_asked_for: bool = True
    ) -> None:
        super().__init__()
        self.event_dims, self.is_asked_for = event_dims, is_asked_for
        self.dims = {name: site["fn"].event_dim for name, site in sites.items()}
        units = [_units(site["fn"], site["value"]) for site in sites.values()]
        loc, scale = (torch.cat(x) for x in zip(*units, strict=True))
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)

    def forward(self, trace: Trace) -> Tensor:
        """The context, from a trace that has drawn the latents: plates, then its entries."""
        drawn = ((trace.nodes[name]["value"], dim) for name, dim in self.dims.items())
        x = (side_by_side([_row(x, dim) for x, dim in drawn]) - self.loc) / self.scale
        x = x.to(self.loc.dtype)  # the path's, which may be another than that of the latents
        return x.reshape(x.shape[:-1] + (1,) * self.event_dims + x.shape[-1:])

    def extra_repr(self) -> str:
        return ", ".join(self.dims)


def readable(
    condition_on: bool | str | Iterable[str],
    latents: Mapping[str, Any],
    paths: Iterable[str],
    path: str,
) -> dict[str, Any]:
    """The latents that the posterior of a path is conditioned on.

    :param condition_on: Their names; or True, all that are in no plate but those of the path; or
        ``"auto"``, of these, in the order of the model, as many as have :data:`MAX_LATENTS`
        numbers.
    :param latents: The sites of all latents, ``paths`` among them.
    """
    around = {frame.name for frame in latents[path]["cond_indep_stack"]}
    others = {name: site for name, site in latents.items() if name not in set(paths)}
    foreign = {
        name: plates
        for name, site in others.items()
        if (plates := {f.name for f in site["cond_indep_stack"]} - around)
    }
    if condition_on is True or condition_on == "auto":
        found = {name: site for name, site in others.items() if name not in foreign}
        return found if condition_on is True else _first(found, MAX_LATENTS)
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


def _first(sites: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Those sites that fit into the limit, one after the other."""
    found = {}
    for name, site in sites.items():
        size = site["fn"].event_shape.numel()
        if size <= limit:
            found[name], limit = site, limit - size
    return found


def concat_context(
    context: Callable[[Tensor], Tensor] | None, x: Tensor
) -> Callable[[Tensor], Tensor]:
    """A function of time that concatenates ``context``, if there is one, and the constant ``x``."""
    if context is None:
        return lambda t: x
    return lambda t: side_by_side([context(t), x])


def _row(x: Any, event_dim: int) -> Tensor:
    return x.reshape(x.shape[: x.dim() - event_dim] + (-1,))


def _units(prior: Distribution, value: Tensor) -> tuple[Tensor, ...]:
    """Mean and standard deviation of each entry, averaged over the elements of plates."""
    dim = len(prior.event_shape)
    like = torch.zeros_like(value)
    found = (x.expand_as(like) for x in location_and_scale(prior, like))
    rows = (_row(x.detach(), dim) for x in found)
    return tuple(x.reshape(-1, x.shape[-1]).mean(0) for x in rows)
