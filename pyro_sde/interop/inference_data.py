"""Conversion of samples to ArviZ, with the times of a path as coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from .._arrays import as_arguments
from .._extras import import_extra
from .sites import Samples, Site, array, by_chain, sites_of

__all__ = ["to_arviz"]


def to_arviz(
    model: Callable,
    data: Sequence[Any] | Mapping[str, Any],
    posterior: Samples | Any,
    *,
    posterior_predictive: Samples | None = None,
    prior: Samples | None = None,
    log_likelihood: bool = False,
    group_by_chain: bool = False,
    dims: Mapping[str, Sequence[str]] | None = None,
    coords: Mapping[str, Any] | None = None,
) -> Any:
    """Convert samples of a model to ``arviz.InferenceData``.

    A path ``z`` has the dimensions ``z_time``, whose coordinates are the times of its grid, and
    ``z_state``. Where each series has a grid of its own, the first dimension is ``z_step``, and
    ``z_time`` is a coordinate of two dimensions. Dimensions of plates have the names of the plates.
    Samples of observed sites go to the predictive groups, and all others to the posterior or the
    prior. Samples of sites that the model does not have are left out, as are samples that equal the
    data. The data are NaN where they are masked.

    Needs ``pip install 'pyro-sde[arviz]'``.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import Predictive
        >>> from pyro_sde import AutoSDE, to_arviz
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> grid = torch.tensor([0.0, 0.5, 1.0])
        >>> def model(y=None):
        ...     z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid))
        ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
        >>> guide = AutoSDE(model).setup(torch.tensor(1.0))
        >>> draws = Predictive(model, guide=guide, num_samples=100)()
        >>> found = to_arviz(model, (torch.tensor(1.0),), draws)
        >>> found.groups()
        ['posterior', 'posterior_predictive', 'observed_data']
        >>> dict(found.posterior["z"].sizes)
        {'chain': 1, 'draw': 100, 'z_time': 3, 'z_state': 1}
        >>> found.posterior["z"].sel(z_time=0.5).dims
        ('chain', 'draw', 'z_state')

    :param model: The model. It is run once, to find its sites, plates and paths.
    :param data: The arguments of the model, a tuple or a dict, with the observations.
    :param posterior: Samples by site, of shape ``(samples, ...)``, from ``Predictive``; or a
        ``pyro.infer.MCMC`` after its run, whose chains are kept separate.
    :param posterior_predictive: Samples of the observed sites, if ``posterior`` has none, from
        ``Predictive(model, mcmc.get_samples())``. There must be as many as in ``posterior``.
    :param prior: Samples of the prior, from ``Predictive(model, num_samples=...)``.
    :param log_likelihood: Whether to compute the log density of the data for every sample, summed
        over each event. The model is then run once for each sample.
    :param group_by_chain: Whether the samples of ``posterior`` have shape ``(chains, samples,
        ...)``.
    :param dims: Names of the dimensions that do not belong to a plate or a path, by site.
    :param coords: Coordinates of dimensions, by name: ``{"obs": times}`` for a plate of that name.
    :returns: The ``arviz.InferenceData``.
    """
    arviz = import_extra("arviz", "to_arviz")
    args, kwargs = as_arguments(dict(data) if isinstance(data, Mapping) else tuple(data))
    sites = sites_of(_trace(model, args, kwargs), dims or {})
    if hasattr(posterior, "get_samples"):
        posterior, group_by_chain = posterior.get_samples(group_by_chain=True), True
    draws = by_chain(posterior, sites, "posterior", 2 if group_by_chain else 1)
    groups = _split(draws, sites, "posterior", "posterior_predictive")
    latents = groups.get("posterior", {})
    if posterior_predictive is not None:
        chains = next(iter(draws.values())).shape[:2]
        more = by_chain(posterior_predictive, sites, "posterior_predictive", 1, chains)
        groups |= {"posterior_predictive": _split(more, sites, "latents", "seen")["seen"]}
    if log_likelihood:
        groups["log_likelihood"] = _log_likelihood(model, args, kwargs, latents, sites)
    if prior is not None:
        groups |= _split(by_chain(prior, sites, "prior", 1), sites, "prior", "prior_predictive")
    groups["observed_data"] = {k: site.value for k, site in sites.items() if site.is_observed}
    made = {k: _dataset(v, sites, coords or {}, k) for k, v in groups.items() if v}
    return arviz.InferenceData(**made)


@torch.no_grad()
def _trace(model: Callable, args: tuple, kwargs: dict) -> Any:
    with torch.random.fork_rng(devices=[]):
        return poutine.trace(model).get_trace(*args, **kwargs)


def _split(
    draws: dict[str, Tensor], sites: dict[str, Site], latent: str, predictive: str
) -> dict[str, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = {latent: {}, predictive: {}}
    for k, v in draws.items():
        site = sites[k]
        # Predictive(guide) gives back the data themselves as draws of what was observed.
        if site.is_observed and bool(((v == site.value) | site.value.isnan()).all()):
            continue
        groups[predictive if site.is_observed else latent][k] = v
    return groups


@torch.no_grad()
def _log_likelihood(
    model: Callable, args: tuple, kwargs: dict, latents: dict[str, Tensor], sites: dict[str, Site]
) -> dict[str, Tensor]:
    latents = {k: v for k, v in latents.items() if sites[k].is_latent}
    missing = [k for k, site in sites.items() if site.is_latent and k not in latents]
    if missing:
        raise ValueError(
            f"log_likelihood=True needs samples of every latent: posterior lacks {missing}"
        )
    lead = next(iter(latents.values())).shape[:2]
    terms: dict[str, list[Tensor]] = {k: [] for k, site in sites.items() if site.is_observed}
    for i in range(lead.numel()):
        values = {k: v.flatten(0, 1)[i] for k, v in latents.items()}
        nodes = _trace(poutine.condition(model, data=values), args, kwargs).nodes
        for k, found in terms.items():
            found.append(nodes[k]["fn"].log_prob(nodes[k]["value"]))
    return {k: torch.stack(v).unflatten(0, tuple(lead)) for k, v in terms.items()}


def _dataset(
    group: dict[str, Tensor], sites: dict[str, Site], coords: Mapping[str, Any], name: str
) -> Any:
    import xarray

    lead = () if name == "observed_data" else ("chain", "draw")
    variables: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for k, v in group.items():
        site = sites[k]
        dims = site.dims[: site.batch_dims] if name == "log_likelihood" else site.dims
        variables[k] = (lead + dims, array(v))
        known |= site.coords if dims == site.dims else {}
    sizes = {dim: n for dims, v in variables.values() for dim, n in zip(dims, v.shape, strict=True)}
    index = {dim: np.arange(n) for dim, n in sizes.items() if dim not in known}
    given = {k: array(v) if isinstance(v, Tensor) else v for k, v in coords.items() if k in sizes}
    attrs = {"inference_library": "pyro_sde"}
    return xarray.Dataset(variables, {**index, **known, **given}, attrs)
