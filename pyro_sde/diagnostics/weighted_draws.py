"""Draws of a guide with their importance weights, and the likelihood of draws of the prior."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor
from tqdm.auto import tqdm

from ..infer import TraceSDE_ELBO

__all__ = ["Problem", "check_at_once", "draw_guide", "draw_prior", "draw_traces"]

MAX_PARTICLES = 1000
"""The most draws at once."""
MAX_ELEMENTS = 2**20
"""The most elements of all sites of the draws at once."""


class _NotVectorised(RuntimeError):
    """Draws at once are not what draws one by one are."""


@dataclass
class Problem:
    """A model and a guide with their arguments, and what one run of both has shown."""

    model: Callable
    guide: Callable
    args: tuple
    kwargs: dict
    shapes: dict[str, torch.Size]
    """Of each latent, in a single draw."""
    deltas: frozenset[str]
    """Latents that are a Delta in the guide: of another site (AutoNormal), or a point."""
    observed: frozenset[str]
    nesting: int
    """The number of dimensions that plates take."""
    chunk: int
    """How many draws at once are not too many."""
    plate: Any
    """The plate that all sites are in, with its ``name``, ``size`` and ``dim``; or None."""
    plate_dims: dict[str, int]
    """Its dimension in the draws of each latent, those of a leading dimension."""

    @classmethod
    def of(cls, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Problem:
        elbo = TraceSDE_ELBO(path_estimator="full")
        traces = next(iter(elbo._get_traces(model, guide, args, kwargs)))
        _check(*traces)
        sites = [site for trace in traces for _, site in _samples(trace)]
        frames = [f for site in sites for f in site["cond_indep_stack"] if f.vectorized]
        latents = {name: s for name, s in _samples(traces[0]) if not s["is_observed"]}
        if not latents:
            raise ValueError("the model has no latent site: there is no posterior to check")
        observed = frozenset(name for name, s in _samples(traces[0]) if s["is_observed"])
        deltas = frozenset(k for k in latents if _is_delta(traces[1].nodes[k]))
        size = sum(site["value"].numel() for site in sites)
        plate = _common_plate(sites)
        dims = {}
        for name, site in latents.items() if plate is not None else ():
            dims[name] = 1 + site["value"].dim() - site["fn"].event_dim + plate.dim
        return cls(
            model,
            guide,
            args,
            kwargs,
            {name: site["value"].shape for name, site in latents.items()},
            deltas,
            observed,
            max((-f.dim for f in frames), default=0),
            min(max(MAX_ELEMENTS // size, 1), MAX_PARTICLES),
            plate,
            dims,
        )

    def elbo(self, particles: int) -> TraceSDE_ELBO:
        return TraceSDE_ELBO(
            num_particles=particles,
            vectorize_particles=True,
            max_plate_nesting=self.nesting,
            path_estimator="full",
        )

    def by_draw(self, sites: Iterable[tuple[str, Any]], particles: int) -> Tensor:
        """The log densities of the sites, summed, of shape ``(particles, elements)``."""
        total = torch.zeros(particles, self.plate.size if self.plate else 1, dtype=torch.float64)
        for name, site in sites:
            x = site["log_prob"]
            ones = self.nesting + 1 - x.dim()
            if ones < 0 or (ones > 0 and particles > 1):
                raise _NotVectorised(f"the log density of {name!r} has shape {tuple(x.shape)}")
            x = x.reshape((1,) * ones + x.shape).to("cpu", torch.float64)
            if len(x) != particles:
                raise _NotVectorised(f"the log density of {name!r} has shape {tuple(x.shape)}")
            x = x.unsqueeze(1) if self.plate is None else x.movedim(self.plate.dim, 1)
            total += x.reshape(*x.shape[:2], -1).sum(-1)
        return total

    def seen(self, trace: Trace) -> Iterator[tuple[str, Any]]:
        return ((name, site) for name, site in _samples(trace) if name in self.observed)


def _samples(trace: Trace) -> Iterator[tuple[str, Any]]:
    site: Any
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not site["infer"].get("_deterministic", False):
            yield name, site


def _check(model_trace: Trace, guide_trace: Trace) -> None:
    """Refuse what has no evidence, or whose weights would not be those of the draws."""
    for name, site in (*_samples(model_trace), *_samples(guide_trace)):
        for frame in site["cond_indep_stack"]:
            if frame.size != (frame.full_size or frame.size):
                raise ValueError(
                    f"site {name!r} is in the plate {frame.name!r}, which draws {frame.size} of "
                    f"{frame.full_size} elements: the evidence of a mini-batch is not that of the "
                    "data. Call it with all of the data"
                )
        if bool((torch.as_tensor(site["scale"]) != 1).any()):
            raise ValueError(
                f"site {name!r} has the scale {site['scale']} (poutine.scale, anneal_kl): a scaled "
                "density has no evidence. Take the handler away"
            )
        if name not in guide_trace.nodes and not site["is_observed"]:
            raise ValueError(
                f"the model draws site {name!r} and the guide does not, so that its weight is not "
                "known. Give the guide that site, or sum it out in the model"
            )
        is_extra = name not in model_trace.nodes and not site["infer"].get("is_auxiliary")
        if is_extra and not site["is_observed"]:
            raise ValueError(
                f"the guide draws site {name!r}, which the model does not have: name it as in the "
                "model, or mark what other sites are made of with infer={'is_auxiliary': True}"
            )


def _common_plate(sites: list[Any]) -> Any:
    """The largest of the plates that all sites are in, whose elements are independent then."""
    first, *others = ({f.name: f for f in site["cond_indep_stack"]} for site in sites)
    for other in others:
        first = {name: f for name, f in first.items() if name in other}

    def holds(f: Any) -> bool:
        shapes = (site["log_prob"].shape for site in sites)
        return f.vectorized and all(len(s) >= -f.dim and s[f.dim] == f.size > 1 for s in shapes)

    return max((f for f in first.values() if holds(f)), key=lambda f: f.size, default=None)


@torch.no_grad()
def draw_guide(
    problem: Problem, number: int, parallel: bool | None, seconds: float | None, progress: bool
) -> tuple[dict[str, Tensor], Tensor, bool]:
    """Draws by site, their log weights, and whether they were drawn at once.

    :param parallel: Whether to draw at once; None, to try.
    :param seconds: How long to go on drawing.
    """
    if parallel is not False and number > 1:
        try:
            first = _draw(problem, min(number, problem.chunk))
            _check_vectorised(problem, *first)
        except Exception as e:  # whatever a model raises on shapes that it was not written for
            if parallel:
                raise ValueError(
                    f"the model cannot be drawn from at once ({e}): leave parallel=True out"
                ) from e
        else:
            found = _collect(problem, number, problem.chunk, seconds, progress, _draw, [first])
            return *found, True
    return *_collect(problem, number, 1, seconds, progress, _draw, []), False


def _collect(
    problem: Problem,
    number: int,
    chunk: int,
    seconds: float | None,
    progress: bool,
    draw: Callable,
    found: list,
) -> tuple[dict[str, Tensor], Tensor]:
    end = None if seconds is None else time.monotonic() + seconds
    done = sum(len(x[1]) for x in found)
    with tqdm(total=number, initial=done, desc="importance", disable=not progress) as bar:
        while done < number and (end is None or time.monotonic() < end or not found):
            found.append(draw(problem, min(chunk, number - done)))
            done += len(found[-1][1])
            bar.update(len(found[-1][1]))
    values = {name: torch.cat([x[0][name] for x in found]) for name in found[0][0]}
    return values, torch.cat([x[1] for x in found])


def _draw(problem: Problem, particles: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Draws by site, their log weights, and the log likelihood in these."""
    model_trace, _, log_weights = draw_traces(problem, particles)
    values = {}
    for name, shape in problem.shapes.items():
        value: Any = model_trace.nodes[name]["value"]
        if value.numel() != particles * shape.numel():
            raise _NotVectorised(f"site {name!r} has shape {tuple(value.shape)}")
        values[name] = value.detach().reshape(particles, *shape)
    return values, log_weights, problem.by_draw(problem.seen(model_trace), particles)


def draw_traces(problem: Problem, particles: int) -> tuple[Trace, Trace, Tensor]:
    """Draws of the guide at once: the traces of model and guide, and log weights of shape
    ``(particles, elements)``."""
    elbo = problem.elbo(particles)
    traces = elbo._get_traces(problem.model, problem.guide, problem.args, problem.kwargs)
    model_trace, guide_trace = next(iter(traces))
    log_p = problem.by_draw(_samples(model_trace), particles)
    log_q = problem.by_draw(_samples(guide_trace), particles)
    return model_trace, guide_trace, log_p - log_q


@torch.no_grad()
def check_at_once(problem: Problem) -> None:
    """An error if draws at once are not what they are alone."""
    _check_vectorised(problem, *_draw(problem, problem.chunk))


def _is_delta(site: Any) -> bool:
    fn = site["fn"]
    while type(fn).__name__ in ("Independent", "ExpandedDistribution", "MaskedDistribution"):
        fn = fn.base_dist
    return isinstance(fn, Delta)


def _check_vectorised(
    problem: Problem, values: dict[str, Tensor], _: Tensor, log_likelihood: Tensor
) -> None:
    """Two of the draws, alone, must have the likelihood that they have among all."""
    for i in (0, len(log_likelihood) - 1):
        one = poutine.condition(problem.model, data={name: v[i] for name, v in values.items()})
        trace = poutine.trace(one).get_trace(*problem.args, **problem.kwargs)
        trace.compute_log_prob(site_filter=lambda name, _: name in problem.observed)
        alone = problem.by_draw(problem.seen(trace), 1)[0]
        if not torch.allclose(alone, log_likelihood[i], rtol=1e-3, atol=1e-3, equal_nan=True):
            raise _NotVectorised("its likelihood is another one for draws at once")


@torch.no_grad()
def draw_prior(
    problem: Problem, number: int, parallel: bool, seconds: float | None, progress: bool
) -> Tensor:
    """The log likelihood of draws of the prior, of shape ``(number, elements)``."""
    chunk = problem.chunk if parallel else 1
    return _collect(problem, number, chunk, seconds, progress, _draw_model, [])[1]


def _draw_model(problem: Problem, particles: int) -> tuple[dict[str, Tensor], Tensor]:
    model = problem.elbo(particles)._vectorized_num_particles(problem.model)
    trace = poutine.trace(model).get_trace(*problem.args, **problem.kwargs)
    trace = prune_subsample_sites(trace)
    trace.compute_log_prob(site_filter=lambda name, _: name in problem.observed)
    return {}, problem.by_draw(problem.seen(trace), particles)
