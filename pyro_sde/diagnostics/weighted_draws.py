"""Draws of a guide with their importance weights, and the likelihood of draws of the prior."""

from __future__ import annotations

import time
import warnings
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

from .._arrays import as_tensors
from ..infer import TraceSDE_ELBO
from ..times import FEW

__all__ = ["Problem", "check_at_once", "draw_guide", "draw_prior", "draw_traces"]

MAX_PARTICLES = 1000
"""The most draws in one vectorised run."""
MAX_ELEMENTS = 2**20
"""The most elements, over all sites and draws, in one vectorised run."""


class _NotVectorised(RuntimeError):
    """Vectorised draws differ from draws one by one."""


@dataclass
class Problem:
    """A model and a guide with their arguments, and facts about them from one run of both."""

    model: Callable
    guide: Callable
    args: tuple
    kwargs: dict
    shapes: dict[str, torch.Size]
    """The shape of a single draw of each latent."""
    deltas: frozenset[str]
    """Latents that are a Delta in the guide: of another site's value (AutoNormal), or a point."""
    observed: frozenset[str]
    """The names of the observed sites."""
    nesting: int
    """The number of dimensions that plates take."""
    chunk: int
    """The number of draws in one vectorised run."""
    plate: Any
    """The plate that all sites are in, with its ``name``, ``size`` and ``dim``; or None."""
    plate_dims: dict[str, int]
    """The dimension of the plate in each latent's draws, which have a leading dimension."""

    @classmethod
    def of(cls, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Problem:
        """Run model and guide once, and refuse a model whose evidence is not defined."""
        args, kwargs = as_tensors(args, kwargs)
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
        """An ELBO that runs model and guide with vectorised particles."""
        return TraceSDE_ELBO(
            num_particles=particles,
            vectorize_particles=True,
            max_plate_nesting=self.nesting,
            path_estimator="full",
        )

    def by_draw(self, sites: Iterable[tuple[str, Any]], particles: int) -> Tensor:
        """The sum of the log densities of the sites, of shape ``(particles, elements)``."""
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
        """The observed sites of a trace."""
        return ((name, site) for name, site in _samples(trace) if name in self.observed)


def _samples(trace: Trace) -> Iterator[tuple[str, Any]]:
    site: Any
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not site["infer"].get("_deterministic", False):
            yield name, site


def _check(model_trace: Trace, guide_trace: Trace) -> None:
    """Refuse models whose evidence is not defined, and guides whose draws cannot be weighted."""
    for name, site in (*_samples(model_trace), *_samples(guide_trace)):
        for frame in site["cond_indep_stack"]:
            if frame.size != (frame.full_size or frame.size):
                raise ValueError(
                    f"site {name!r} is in the plate {frame.name!r}, which draws {frame.size} of "
                    f"{frame.full_size} elements: the evidence of a mini-batch is not that of the "
                    "data. Call model and guide with all of the data"
                )
        if bool((torch.as_tensor(site["scale"]) != 1).any()):
            raise ValueError(
                f"site {name!r} has the scale {site['scale']} (poutine.scale, anneal_kl): a scaled "
                "density has no evidence. Take the handler away"
            )
        if name not in guide_trace.nodes and not site["is_observed"]:
            raise ValueError(
                f"the model draws site {name!r} and the guide does not, so the draw has no "
                "importance weight. Add the site to the guide, or sum it out in the model"
            )
        is_extra = name not in model_trace.nodes and not site["infer"].get("is_auxiliary")
        if is_extra and not site["is_observed"]:
            raise ValueError(
                f"the guide draws site {name!r}, which the model does not have: name it as in the "
                "model, or mark it with infer={'is_auxiliary': True} if other sites are computed "
                "from it"
            )


def _common_plate(sites: list[Any]) -> Any:
    """The largest of the plates that contain all sites: its elements are independent."""
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
    """Draw from the guide, and weight the draws.

    :param parallel: Whether to vectorise the draws; None vectorises them where that is possible.
    :param seconds: The time limit.
    :returns: The draws by site, their log weights of shape ``(number, elements)``, and whether the
        draws were vectorised.
    """
    if parallel is not False and number > 1:
        try:
            check_at_once(problem)
            first = _draw(problem, min(number, problem.chunk))
        except Exception as e:  # whatever a model raises on shapes that it was not written for
            if parallel:
                raise ValueError(
                    f"draws of the model cannot be vectorised ({e}): leave parallel=True out"
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
    """Draws by site, their log weights, and the log likelihood that is part of the weights."""
    model_trace, _, log_weights = draw_traces(problem, particles)
    values = {}
    for name, shape in problem.shapes.items():
        value: Any = model_trace.nodes[name]["value"]
        if value.numel() != particles * shape.numel():
            raise _NotVectorised(f"site {name!r} has shape {tuple(value.shape)}")
        values[name] = value.detach().reshape(particles, *shape)
    return values, log_weights, problem.by_draw(problem.seen(model_trace), particles)


def draw_traces(problem: Problem, particles: int) -> tuple[Trace, Trace, Tensor]:
    """Vectorised draws of the guide.

    :returns: The trace of the model, that of the guide, and log weights of shape
        ``(particles, elements)``.
    """
    elbo = problem.elbo(particles)
    traces = elbo._get_traces(problem.model, problem.guide, problem.args, problem.kwargs)
    model_trace, guide_trace = next(iter(traces))
    log_p = problem.by_draw(_samples(model_trace), particles)
    log_q = problem.by_draw(_samples(guide_trace), particles)
    return model_trace, guide_trace, log_p - log_q


@torch.no_grad()
def check_at_once(problem: Problem) -> None:
    """Raise an error if vectorised draws differ from draws one by one. The random state is left as
    it was."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        _check_vectorised(problem, *_draw(problem, FEW))


def _is_delta(site: Any) -> bool:
    fn = site["fn"]
    while type(fn).__name__ in ("Independent", "ExpandedDistribution", "MaskedDistribution"):
        fn = fn.base_dist
    return isinstance(fn, Delta)


def _check_vectorised(
    problem: Problem, values: dict[str, Tensor], _: Tensor, log_likelihood: Tensor
) -> None:
    """Run the model on two of the draws alone: their likelihood must be that of the vectorised
    run."""
    for i in (0, len(log_likelihood) - 1):
        one = poutine.condition(problem.model, data={name: v[i] for name, v in values.items()})
        trace = poutine.trace(one).get_trace(*problem.args, **problem.kwargs)
        trace.compute_log_prob(site_filter=lambda name, _: name in problem.observed)
        alone = problem.by_draw(problem.seen(trace), 1)[0]
        if not torch.allclose(alone, log_likelihood[i], rtol=1e-3, atol=1e-3, equal_nan=True):
            raise _NotVectorised("the likelihood of vectorised draws differs from that of one draw")


@torch.no_grad()
def draw_prior(
    problem: Problem, number: int, parallel: bool, seconds: float | None, progress: bool
) -> Tensor:
    """The log likelihood of draws of the prior, of shape ``(number, elements)``."""
    chunk = problem.chunk if parallel else 1
    return _collect(problem, number, chunk, seconds, progress, _draw_model, [])[1]


def _draw_model(problem: Problem, particles: int) -> tuple[dict[str, Tensor], Tensor]:
    model = problem.elbo(particles)._vectorized_num_particles(problem.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # draws of the prior may overflow, and then count nothing
        trace = poutine.trace(model).get_trace(*problem.args, **problem.kwargs)
        trace = prune_subsample_sites(trace)
        trace.compute_log_prob(site_filter=lambda name, _: name in problem.observed)
    return {}, problem.by_draw(problem.seen(trace), particles)
