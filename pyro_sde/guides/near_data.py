"""Where training begins: draws of the prior that come near the data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor
from torch.distributions import biject_to

from .._buffers import keep_buffers
from ..times import FEW
from .visibility import without_handlers

__all__ = ["draws_near_data", "medians"]

DRAWS, MIN_DRAWS = 1000, 100
"""Draws of the prior among which those near the data are looked for, and the fewest that do."""
MAX_ELEMENTS = 2**21
"""The most elements of all sites in these draws."""
NEAR = 20.0
"""How many of the draws, effectively, are near the data."""
KEPT = 64


@torch.no_grad()
def draws_near_data(
    model: Callable, args: tuple, kwargs: dict, first: Trace, latents: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    r"""Draws of the latents from a law between prior and posterior, always the same ones:

    .. math:: p(z)\,p(x \mid z)^\beta

    with the largest beta up to 1 for which 20 of 1000 draws of the prior count. They say where
    training should begin. A prior that is much wider than the posterior tells little about that.

    :param first: A run of the model.
    :param latents: Its latent sites.
    :returns: Draws by site, of shape ``(64, ...)``; None for a model that is large or cannot be
        run on many draws at once, and where too few draws are possible.
    """
    observed = [k for k, s in first.nodes.items() if s["type"] == "sample" and s["is_observed"]]
    sites: list[Any] = [first.nodes[name] for name in (*latents, *observed)]
    frames = [f for site in sites for f in site["cond_indep_stack"]]
    number = min(DRAWS, MAX_ELEMENTS // max(1, sum(s["value"].numel() for s in sites)))
    if number < MIN_DRAWS or not observed or not all(f.vectorized for f in frames):
        return None
    nesting = max((-f.dim for f in frames), default=0)
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices), without_handlers(), keep_buffers(model):
        try:
            for n in (FEW, number):
                torch.manual_seed(0)
                draws, log_lik = _draw_prior(model, args, kwargs, latents, observed, n, nesting)
                _check_alone(model, args, kwargs, draws, log_lik, observed)
            kept = _temper(log_lik)
        except Exception:  # whatever a model raises on draws that it was not written for
            return None
        index = torch.multinomial(kept, KEPT, replacement=True)
        return {name: x[index.to(x.device)] for name, x in draws.items()}


def _draw_prior(
    model: Callable,
    args: tuple,
    kwargs: dict,
    latents: Mapping[str, Any],
    observed: list[str],
    number: int,
    nesting: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """So many draws at once, by site, and the log likelihood of each."""
    trace: Any
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the path that is drawn in training warns
        with pyro.plate("num_particles_vectorized", number, dim=-nesting - 1):
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        trace = prune_subsample_sites(trace)
        draws = {
            name: _rows(trace.nodes[name]["value"], number, site["value"].shape)
            for name, site in latents.items()
        }
        return draws, _log_likelihood(trace, observed, number, nesting)


def _rows(x: Tensor, number: int, shape: torch.Size) -> Tensor:
    """Draws one after the other; an error if there are not so many."""
    return x.reshape(number, *shape)


def _log_likelihood(trace: Trace, observed: list[str], number: int, nesting: int) -> Tensor:
    """Of every draw, of shape ``(number,)``."""
    trace.compute_log_prob(site_filter=lambda name, _: name in observed)
    total = torch.zeros(number, dtype=torch.float64)
    for name in observed:
        x: Any = trace.nodes[name]["log_prob"]
        if x.dim() != nesting + 1 or len(x) != number:
            raise ValueError(f"the log density of {name!r} has the shape {tuple(x.shape)}")
        total += x.reshape(number, -1).sum(1).to(total)
    return total


def _check_alone(
    model: Callable,
    args: tuple,
    kwargs: dict,
    draws: Mapping[str, Tensor],
    log_lik: Tensor,
    observed: list[str],
) -> None:
    """The best draw, alone, must have the likelihood that it has among all."""
    best = int(log_lik.nan_to_num(nan=-math.inf).argmax())
    one = poutine.condition(model, data={name: x[best] for name, x in draws.items()})
    trace: Any = poutine.trace(one).get_trace(*args, **kwargs)
    trace.compute_log_prob(site_filter=lambda name, _: name in observed)
    alone = sum(float(trace.nodes[name]["log_prob"].sum()) for name in observed)
    if not math.isclose(alone, float(log_lik[best]), rel_tol=1e-3, abs_tol=1e-3):
        raise ValueError("its likelihood is another one for draws at once")


def _temper(log_lik: Tensor) -> Tensor:
    """The weights of draws, as much like their likelihoods as :data:`NEAR` effective draws
    allow."""
    x = log_lik.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    x = x - x.max()
    if int(x.isfinite().sum()) < NEAR:
        raise ValueError("hardly any draw of the prior is possible")

    def effective(beta: float) -> float:
        weights = (beta * x).softmax(0)
        return float(1 / weights.square().sum())

    low, high = 0.0, 1.0
    if effective(high) < NEAR:
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if effective(middle) >= NEAR else (low, middle)
        high = low
    return (high * x).nan_to_num(nan=-math.inf, neginf=-math.inf).softmax(0)


@torch.no_grad()
def medians(draws: Mapping[str, Tensor], sites: Mapping[str, Any]) -> dict[str, Tensor]:
    """The medians of draws in unconstrained space, of continuous sites, as values of these."""
    found = {}
    for name, site in sites.items():
        if site["fn"].support.is_discrete:
            continue
        transform = biject_to(site["fn"].support)
        found[name] = transform(transform.inv(draws[name]).median(0).values)
    return found
