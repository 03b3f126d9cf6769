"""Posterior predictive draws without leftover dimensions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.infer
import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from ._arrays import as_tensors
from ._buffers import keep_buffers
from ._checks import check_whole
from ._threads import one_thread
from .times import FEW

__all__ = ["Predictive"]

MAX_ELEMENTS = 2**24
"""The most elements of all sites of draws that are made at once without being asked to."""


class Predictive(pyro.infer.Predictive):
    """Pyro's ``Predictive``, with plain shapes, and draws made at once where the model allows it.

    A sample has the shape ``(num_samples, *shape of one draw)``: Pyro's own has dimensions of size
    1 in between, one for each plate that a site is not in. Whether a model allows many draws at
    once is tried out: two of them, alone, must have the density that they have among all. If not,
    they are made one after the other.

    Example::

        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_sde import AutoSDE, Predictive
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> times = torch.linspace(0.0, 1.0, 11)
        >>> def model(y=None):
        ...     prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 1.0, times)
        ...     z = pyro.sample("z", prior)
        ...     with pyro.plate("observations", 3):
        ...         pyro.sample("y", dist.Normal(prior.at(z, times[-3:]), 0.1), obs=y)
        >>> guide = AutoSDE(model).setup(torch.zeros(3))  # to be trained
        >>> draws = Predictive(model, guide=guide, num_samples=100)()
        >>> draws["z"].shape, draws["y"].shape
        (torch.Size([100, 11]), torch.Size([100, 3]))

    :param model: The model.
    :param posterior_samples: Draws of latents by site, samples first, in the place of a guide.
    :param guide: The guide that draws the latents.
    :param num_samples: How many draws.
    :param return_sites: The sites to return; by default all that are drawn.
    :param parallel: True, to draw at once in any case; False, one after the other.
    """

    def __init__(
        self,
        model: Callable,
        posterior_samples: Mapping[str, Tensor] | None = None,
        guide: Callable | None = None,
        num_samples: int | None = None,
        return_sites: Any = (),
        parallel: bool | None = None,
    ) -> None:
        if num_samples is not None:
            check_whole("num_samples", num_samples, 1)
        samples = None if posterior_samples is None else dict(posterior_samples)
        super().__init__(model, samples, guide, num_samples, return_sites, parallel)

    @one_thread("Predictive")
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw.

        :param args: Arguments of the model.
        :param kwargs: Keyword arguments of the model.
        :returns: Samples by site, of shape ``(num_samples, *shape of one draw)``.
        """
        args, kwargs = as_tensors(args, kwargs)
        traces = self._trace_one(args, kwargs)
        shapes: dict[str, torch.Size] = {}
        for trace in traces:
            shapes |= {name: site["value"].shape for name, site in _samples(trace)}
        samples = None
        if self.parallel is None:
            samples = self._at_once(shapes, traces[-1], args, kwargs)
        if samples is None:
            samples = super().forward(*args, **kwargs)
        return {name: self._plain(x, shapes.get(name)) for name, x in samples.items()}

    def _plain(self, x: Any, shape: torch.Size | None) -> Any:
        if shape is None or x.numel() != self.num_samples * shape.numel():
            return x
        return x.reshape(self.num_samples, *shape)

    @torch.no_grad()
    def _trace_one(self, args: tuple, kwargs: dict) -> list[Trace]:
        """A run of the guide, if there is one, and one of the model on its latents."""
        functions = [f for f in (self.guide, self.model) if f is not None]
        given, traces = {name: x[0] for name, x in self.posterior_samples.items()}, []
        devices = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=devices), keep_buffers(*functions):
            for f in functions:
                trace = poutine.trace(poutine.condition(f, data=given)).get_trace(*args, **kwargs)
                traces.append(prune_subsample_sites(trace))
                given |= {k: s["value"] for k, s in _samples(trace) if not s["is_observed"]}
        return traces

    @torch.no_grad()
    def _at_once(
        self, shapes: Mapping[str, torch.Size], one: Trace, args: tuple, kwargs: dict
    ) -> dict[str, Tensor] | None:
        """Draws at once; None if the model cannot make them."""
        if self.num_samples * sum(shape.numel() for shape in shapes.values()) > MAX_ELEMENTS:
            return None
        state, settings = torch.get_rng_state(), (self.return_sites, self.num_samples)
        given, samples = self.posterior_samples, None
        self.return_sites, self.parallel = None, True
        try:
            with keep_buffers(*(f for f in (self.guide, self.model) if f is not None)):
                number = self.num_samples
                for n in (FEW, number) if number > 10 * FEW else (number,):
                    torch.set_rng_state(state)
                    self.num_samples = n
                    self.posterior_samples = {name: x[:n] for name, x in given.items()}
                    samples = super().forward(*args, **kwargs)
                    self._check_alone(samples, one, args, kwargs)
        except Exception:  # whatever a model raises on shapes that it was not written for
            samples = None
            torch.set_rng_state(state)
        finally:
            return_sites, self.num_samples = settings
            self.return_sites, self.parallel, self.posterior_samples = return_sites, None, given
        if samples is None or return_sites is None:
            return samples
        default = set(samples) - set(self.posterior_samples) if self.guide is None else samples
        return {k: x for k, x in samples.items() if k in (return_sites or default)}

    def _check_alone(
        self, samples: Mapping[str, Tensor], one: Trace, args: tuple, kwargs: dict
    ) -> None:
        """An error, unless two of the draws, alone, have the density that they have among all."""
        model = getattr(self.model, "model", self.model)  # that of an autoguide
        frames = [f for _, s in _samples(one) for f in s["cond_indep_stack"] if f.vectorized]
        nesting, n = max((-f.dim for f in frames), default=0), self.num_samples
        many, alone = {}, {}
        for name, site in _samples(one):
            shape, inner = site["value"].shape, nesting - len(site["fn"].batch_shape)
            many[name] = samples[name].reshape(n, *(1,) * inner, *shape)
            alone[name] = samples[name].reshape(n, *shape)
        devices = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pyro.plate("_num_predictive_samples", n, dim=-nesting - 1):
                sites = _log_densities(poutine.condition(model, data=many), args, kwargs)
            found = torch.zeros(n, dtype=torch.float64)
            for name, x in sites.items():
                if x.dim() != nesting + 1 or len(x) != n:
                    raise ValueError(f"the log density of {name!r} has the shape {tuple(x.shape)}")
                found += x.reshape(n, -1).sum(1).to(found)
            for i in {0, n - 1}:
                data = {name: x[i] for name, x in alone.items()}
                sites = _log_densities(poutine.condition(model, data=data), args, kwargs)
                single = sum(float(x.sum()) for x in sites.values())
                if not math.isclose(single, float(found[i]), rel_tol=1e-3, abs_tol=1e-3):
                    raise ValueError("its density is another one for draws at once")


def _samples(trace: Trace) -> list[tuple[str, Any]]:
    return [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]


def _log_densities(model: Callable, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    trace = prune_subsample_sites(poutine.trace(model).get_trace(*args, **kwargs))
    trace.compute_log_prob()
    return {name: site["log_prob"] for name, site in _samples(trace)}
