"""The terms of an ELBO by site, recorded from the traces of one evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import MultivariateNormal, TransformedDistribution, kl_divergence

from .._scopes import Scope
from ..simulation.step import whiten

__all__ = [
    "ElboParts",
    "ElboTerms",
    "PathDivergence",
    "PathParts",
    "PathTerms",
    "current_terms",
    "kl_by_site",
    "log_likelihood_by_site",
    "record_parts",
]

_records: Scope[ElboTerms] = Scope("pyro_sde_parts")


@dataclass
class PathDivergence:
    """The parts of the KL of a path, before the scale and mask of its site are applied."""

    times: Tensor
    dim: int
    start: Tensor
    path: Tensor
    steps: Tensor
    """``path`` by time step, time first."""


@dataclass
class PathTerms:
    """The KL of one path site. The loss contains ``start + path + martingale``.

    Example::

        >>> import torch
        >>> times, steps = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.3, 0.2])
        >>> found = PathTerms(times, path=0.5, steps=steps)
        >>> found.steps / found.times.diff()  # nats in a unit of time
        tensor([0.3000, 0.1000])
    """

    times: Tensor
    """The grid, of shape ``(T,)``, or ``(..., T)`` where each element of a batch has its own."""
    start: float = 0.0
    """The KL of the law of the initial state."""
    path: float = 0.0
    r"""The KL of the steps, :math:`\tfrac12 \int |u|^2 dt`."""
    martingale: float = 0.0
    """The martingale, noise of mean zero; 0 for the estimator ``"kl"``."""
    steps: Tensor | None = None
    """The KL of each step, of shape ``(T - 1,)``; their sum is ``path``."""
    intensity: float = 0.0
    """The average KL per step and dimension, in nats, without the scale of the site: half the mean
    square of the shift of a step in units of its noise."""


@dataclass
class ElboTerms:
    """The terms of one evaluation of an ELBO by site, scaled as in the loss.

    ``elbo`` is the log likelihood less the KL, which is minus the loss.

    Example::

        >>> ElboTerms(kl={"z": 1.5}, log_likelihood={"y": -2.0}).elbo
        -3.5
    """

    kl: dict[str, float] = field(default_factory=dict)
    """The KL of each latent site."""
    log_likelihood: dict[str, float] = field(default_factory=dict)
    """The log likelihood of each observed site."""
    paths: dict[str, PathTerms] = field(default_factory=dict)
    """The parts of the KL of each latent path site."""

    @property
    def elbo(self) -> float:
        """The ELBO: the log likelihood of all sites less the KL of all sites."""
        return sum(self.log_likelihood.values()) - sum(self.kl.values())

    def clear(self) -> None:
        """Remove all terms."""
        for part in (self.kl, self.log_likelihood, self.paths):
            part.clear()

    @torch.no_grad()
    def add(self, model: Trace, guide: Trace, particles: int, traces: int, analytic: bool) -> None:
        """Add the terms of a pair of traces.

        :param model: The trace of the model.
        :param guide: The trace of the guide.
        :param particles: The number of particles, by which the loss divides.
        :param traces: The number of pairs of traces: 1 if particles are vectorised.
        :param analytic: Whether the ELBO uses an analytic KL where there is one.
        """
        for name, value in log_likelihood_by_site(model):
            self._count(self.log_likelihood, name, value, particles)
        for name, value in kl_by_site(model, guide, analytic):
            # AutoNormal computes a constrained site from an auxiliary one: they are one latent.
            base = name.removesuffix("_unconstrained")
            owner = base if name not in model.nodes and base in model.nodes else name
            parts = _by_latent(guide.nodes.get(name)) or {owner: value}
            for latent, part in parts.items():
                self._count(self.kl, latent, part, particles)
        for name, site in guide.nodes.items():
            if "path_terms" in site:
                self._count_path(name, site, particles, traces)

    @staticmethod
    def _count(part: dict[str, float], name: str, value: Any, particles: int) -> None:
        part[name] = part.get(name, 0.0) + float(value) / particles

    def _count_path(self, name: str, site: Any, particles: int, traces: int) -> None:
        terms: PathDivergence = site["path_terms"]

        def total(x: Tensor) -> Tensor:
            return scale_and_mask(x, site["scale"], site["mask"])

        parts = self.paths.setdefault(name, PathTerms(terms.times))
        start, path = (float(total(x).sum()) / particles for x in (terms.start, terms.path))
        parts.start += start
        parts.path += path
        parts.martingale += float(site["log_prob_sum"]) / particles - start - path
        steps = total(terms.steps).reshape(len(terms.steps), -1).sum(-1) / particles
        parts.steps = steps if parts.steps is None else parts.steps + steps
        number = (terms.times.shape[-1] - 1) * terms.dim * traces
        parts.intensity += float(terms.path.mean()) / number


ElboParts, PathParts = ElboTerms, PathTerms  # their former names


def log_likelihood_by_site(model: Trace) -> Iterator[tuple[str, Tensor]]:
    """Yield name and log likelihood of every observed site."""
    for name, site in model.nodes.items():
        if site["type"] == "sample" and site["is_observed"]:
            yield name, site["log_prob_sum"]


def kl_by_site(model: Trace, guide: Trace, analytic: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield name and estimated KL of every latent site of the model, then name and log density of
    every auxiliary site of the guide.

    :param analytic: Whether to use an analytic KL where there is one.
    """
    for name, site in model.nodes.items():
        if site["type"] == "sample" and not site["is_observed"]:
            other = guide.nodes.get(name)
            kl = _analytic_kl(other, site) if analytic and other is not None else None
            if kl is None:
                kl = -site["log_prob_sum"]
                if other is not None:
                    kl = kl + _own_density(other, analytic)
            yield name, kl
    for name, site in guide.nodes.items():
        if site["type"] == "sample" and name not in model.nodes:
            yield name, _own_density(site, analytic)


def _by_latent(site: Any) -> dict[str, Tensor]:
    """The log density of a joint auxiliary site, split into one term for each latent: its density
    given the latents before it. Empty for other sites."""
    sizes = None if site is None else site.get("latent_sizes")
    if not sizes:
        return {}
    fn, x, log_slopes = site["fn"], site["value"], 0.0
    if isinstance(fn, TransformedDistribution) and not any(
        t.domain.event_dim for t in fn.transforms
    ):
        for transform in reversed(fn.transforms):
            y, x = x, transform.inv(x)
            log_slopes = log_slopes + transform.log_abs_det_jacobian(x, y)
        fn = fn.base_dist
    if not isinstance(fn, MultivariateNormal):
        return {}
    eps = whiten(fn.loc, fn.scale_tril, x)
    log_scale = fn.scale_tril.diagonal(dim1=-2, dim2=-1).log()
    log_q = -0.5 * eps.square() - log_scale - 0.5 * math.log(2 * math.pi) - log_slopes
    parts = (x.sum(-1) for x in log_q.split(list(sizes.values()), -1))
    scaled = (scale_and_mask(x, site["scale"], site["mask"]).sum() for x in parts)
    return dict(zip(sizes, scaled, strict=True))


def _own_density(site: Any, analytic: bool) -> Tensor:
    if analytic:
        return torch.as_tensor(site["score_parts"].entropy_term).sum()
    return site["log_prob_sum"]


def _analytic_kl(guide_site: Any, model_site: Any) -> Tensor | None:
    if _is_delta(guide_site["fn"]):
        # Pyro's KL of a Delta drops its log_density, the Jacobian of a constrained latent.
        return None
    try:
        kl = kl_divergence(guide_site["fn"], model_site["fn"])
    except NotImplementedError:
        return None
    kl = scale_and_mask(kl, guide_site["scale"], guide_site["mask"])
    if isinstance(kl, Tensor):
        assert kl.shape == guide_site["fn"].batch_shape, model_site["name"]
        return kl.sum()
    return kl * torch.Size(guide_site["fn"].batch_shape).numel()


def _is_delta(fn: Any) -> bool:
    while not isinstance(fn, Delta) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, Delta)


def current_terms() -> ElboTerms | None:
    """The record that ELBOs fill, or None outside of :func:`record_parts`."""
    return _records.current


@contextmanager
def record_parts() -> Iterator[ElboTerms]:
    """A context that records the parts of an ELBO: KL by latent site (for paths also by time
    step) and log likelihood by observed site.

    The record holds the last evaluation of a :class:`TraceSDE_ELBO` or
    :class:`TraceMeanFieldSDE_ELBO` in this thread, inside of the context. The model is not run
    again.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde import AutoSDE, TraceSDE_ELBO
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> pyro.clear_param_store()
        >>> def model(y):
        ...     z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.linspace(0, 1, 9)))
        ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
        >>> svi = pyro.infer.SVI(model, AutoSDE(model), pyro.optim.Adam({}), TraceSDE_ELBO())
        >>> with record_parts() as parts:
        ...     loss = svi.step(torch.tensor(1.0))
        >>> list(parts.kl), list(parts.log_likelihood), parts.paths["z"].steps.shape
        (['z'], ['y'], torch.Size([8]))
        >>> abs(parts.elbo + loss) < 1e-4
        True

    :returns: A context manager that yields the terms, empty until an ELBO is evaluated.
    """
    parts = ElboTerms()
    _records.enter(parts)
    try:
        yield parts
    finally:
        _records.leave(parts)
