"""The latents of a guide are those of a run of the model with data."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample

__all__ = ["check_still_latent", "latent_sites"]


def latent_sites(trace: Trace) -> dict[str, Any]:
    """The latent sites of the run of the model that a guide is set up from, by name.

    A run without data, in which what is observed later is a latent too, is refused. A model of
    one site is none: that site is a path, and nothing could be data.
    """
    drawn: dict[str, Any] = {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site)
    }
    latents = {name: site for name, site in drawn.items() if not site["is_observed"]}
    data = [n for n in drawn.keys() - latents.keys() if not drawn[n]["infer"].get("_deterministic")]
    if len(latents) > 1 and not data:
        raise ValueError(
            f"the model observes nothing with these arguments, and all of its sites, "
            f"{sorted(latents)}, would be latents of the guide for good, the data too. Set the "
            "guide up with the arguments of training before anything else: guide.setup(...), or "
            "the first step of SVI; then call it, or Predictive, without data"
        )
    return latents


def check_still_latent(name: str, latents: Collection[str]) -> None:
    """Refuse data for a site that the guide has been set up to draw.

    :param name: A site that is observed.
    :param latents: The names of the sites that the guide draws.
    """
    if name in latents:
        raise ValueError(
            f"site {name!r} is observed now, and was not when the guide was set up, so that it is "
            "a latent of the guide. Make a new guide, after pyro.clear_param_store(), and set it "
            "up with the data: guide.setup(...) with the arguments of training"
        )
