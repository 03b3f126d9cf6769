"""Checks for mistakes that Pyro accepts and that would put an ELBO above the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyro.distributions import Unit
from pyro.poutine import Trace

from .._observed import takes_nan
from ..times import PARTICLES

__all__ = ["UNSQUEEZE", "check_event_shapes", "check_traces", "sites_of_size"]

UNSQUEEZE = (
    "Vectorised particles make a batch of every latent. A process of one number takes latents as "
    "they are drawn, OrnsteinUhlenbeck.scalar(rate, ...); one in R^D needs one more dimension for "
    "the state, rate.unsqueeze(-1), and a distribution under .to_event(n) needs n more"
)


def check_traces(model: Trace, guide: Trace) -> None:
    """Refuse dimensions that no plate claims, and latents that only one of the traces has."""
    for trace in (model, guide):
        for name, site in _counted_sites(trace):
            _check_claimed(name, site)
    _check_observes(model)
    for name, site in _counted_sites(model):
        if not site["is_observed"] and name not in guide:
            raise ValueError(
                f"site {name!r} of the model has neither data nor a site of that name in the "
                "guide, so the ELBO is not a bound of the evidence. Either give the ELBO the data, "
                "so that obs= of the site is not None, or add the site to the guide (an autoguide "
                "was set up with data there: make a new one)"
            )
    for name, site in _counted_sites(guide):
        if name not in model and not site["infer"].get("is_auxiliary"):
            raise ValueError(
                f"site {name!r} of the guide is not in the model, so the ELBO is not a bound of "
                'the evidence. Remove it, or mark it with infer={"is_auxiliary": True} if another '
                "site is computed from it"
            )


def _check_observes(model: Trace) -> None:
    """Refuse a batch of no data: the loss would be the KL alone."""
    data = {
        name: site
        for name, site in _counted_sites(model)
        if site["is_observed"] and not isinstance(site["fn"], Unit)  # as pyro.factor is
    }
    if data and all(not s["value"].numel() and not takes_nan(s["fn"]) for s in data.values()):
        shapes = {name: tuple(site["value"].shape) for name, site in data.items()}
        raise ValueError(
            f"the batch is empty: the observed sites have the shapes {shapes}. Leave the batch out"
        )


def sites_of_size(size: int, *traces: Trace) -> dict[str, str]:
    """Sites with an event dimension or a plate of this size, each with a description."""
    found = {}
    for trace in traces:
        for name, site in _counted_sites(trace):
            shape = tuple(site["fn"].event_shape)
            frames = [f for f in site["cond_indep_stack"] if f.name not in PARTICLES]
            plates = [f.name for f in frames if f.vectorized and f.size == size]
            if size in shape:
                found[name] = f"the event shape {shape} of site {name!r}"
            elif plates:
                found[name] = f"the plate {plates[0]!r} of site {name!r}"
    return found


def check_event_shapes(
    particles: int, trace: Trace, other_particles: int, other_trace: Trace
) -> None:
    """Refuse event shapes that change with the number of particles."""
    others = dict(_counted_sites(other_trace))
    for name, site in _counted_sites(trace):
        shape = tuple(site["fn"].event_shape)
        other = tuple(others[name]["fn"].event_shape) if name in others else shape
        if shape != other:
            raise ValueError(
                f"site {name!r} has the event shape {shape} with {particles} particles and {other} "
                f"with {other_particles}: the particles have become a part of the event. "
                f"{UNSQUEEZE}"
            )


def _counted_sites(trace: Trace) -> Iterator[tuple[str, Any]]:
    """Name and site of every sample site that contributes to an ELBO."""
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        masked = site["mask"] is False or getattr(site["fn"], "_mask", None) is False
        if not masked:  # as pyro.deterministic is
            yield name, site


def _check_claimed(name: str, site: Any) -> None:
    frames = [f for f in site["cond_indep_stack"] if f.vectorized]
    claimed = {f.dim for f in frames}
    shape = tuple(site["log_prob"].shape)
    for dim in range(-1, -len(shape) - 1, -1):
        if shape[dim] == 1 or dim in claimed:
            continue
        plates = ", ".join(f"{f.name!r} claims dim {f.dim}, of size {f.size}" for f in frames)
        raise ValueError(
            f"site {name!r} has a log_prob of batch shape {shape}, and no plate claims its dim "
            f"{dim}, of size {shape[dim]} ({plates or 'it is in no plate'}): the ELBO would count "
            f"the site {shape[dim]} times. Put independent elements into a pyro.plate, and "
            f"dependent ones into the event with .to_event(1). {UNSQUEEZE}. Where times "
            "make up a plate, read the path inside of that plate, process.at(z, times) or "
            "select(path, grid, times)[..., 0], or say plate_dim=: path[..., index, 0] will not do"
        )
