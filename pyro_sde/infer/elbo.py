"""ELBOs that compute the KL of path sites by Girsanov's theorem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import scale_and_mask
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.trace_elbo import JitTrace_ELBO
from pyro.infer.trace_mean_field_elbo import JitTraceMeanField_ELBO
from pyro.infer.traceenum_elbo import TraceEnum_ELBO
from pyro.infer.util import check_fully_reparametrized, is_validation_enabled, torch_item
from pyro.poutine import Trace
from pyro.poutine.guide import GuideMessenger
from torch import Tensor

from .._observed import naming_empty
from .._sharing import shared_parameters_only
from .._threads import one_thread
from ..distributions.guard import restore_path_log_prob, skip_path_log_prob
from ..distributions.wrapping import unwrap
from ..simulation.tolerance import current_tolerance
from .elbo_terms import ElboTerms, current_terms, kl_by_site, log_likelihood_by_site
from .finite import check_finite
from .girsanov import ESTIMATORS, path_divergence
from .site_checks import UNSQUEEZE, check_event_shapes, check_traces, sites_of_size

__all__ = ["TraceMeanFieldSDE_ELBO", "TraceSDE_ELBO"]


class _PathELBO:
    """A mixin of Pyro's Trace ELBOs that rewrites the path sites of their traces."""

    num_particles: int
    _vectorized_num_particles: Callable[[Callable], Callable]

    def __init__(self, *args: Any, path_estimator: str = "stl", **kwargs: Any) -> None:
        if path_estimator not in ESTIMATORS:
            raise ValueError(
                f"path_estimator must be one of {', '.join(ESTIMATORS)}: found {path_estimator!r}"
            )
        self.path_estimator = path_estimator
        self._tried_sites: set[str] = set()
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, (TraceEnum_ELBO, JitTrace_ELBO, JitTraceMeanField_ELBO)):
            raise TypeError(
                f"{cls.__name__} cannot estimate paths: TraceEnum_ELBO and the Jit ELBOs compute "
                "log densities of their own; build on Trace_ELBO or TraceMeanField_ELBO"
            )

    def _get_traces(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[Trace, Trace]]:
        inner = poutine.unwrap(guide)
        if isinstance(inner, GuideMessenger) and inner.model != model:
            raise ValueError(
                f"{type(inner).__name__} runs the model that it was built with, and the ELBO was "
                "given another model, which would be ignored. Give both the same callable, after "
                "all handlers (poutine.scale, poutine.condition, ...) have been applied"
            )
        traces = super()._get_traces(model, guide, args, kwargs)  # type: ignore[misc]
        parts = current_terms()
        return traces if parts is None else self._recorded(traces, parts)

    def _recorded(
        self, traces: Iterator[tuple[Trace, Trace]], parts: ElboTerms
    ) -> Iterator[tuple[Trace, Trace]]:
        parts.clear()
        elbo: Any = self
        number = 1 if elbo.vectorize_particles else elbo.num_particles
        analytic = isinstance(self, TraceMeanField_ELBO)
        for model_trace, guide_trace in traces:
            parts.add(model_trace, guide_trace, elbo.num_particles, number, analytic)
            yield model_trace, guide_trace

    @one_thread("an ELBO", with_handlers=True)
    def _get_trace(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Trace, Trace]:
        if current_tolerance() is not None:
            raise RuntimeError(
                "an ELBO cannot be evaluated inside of tolerance(): a path that is solved with "
                "steps of its own has no density on the grid of model and guide. Train outside; "
                "tolerance() is for prediction"
            )
        with naming_empty(args, kwargs), shared_parameters_only(), skip_path_log_prob():
            model_trace, guide_trace = super()._get_trace(  # type: ignore[misc]
                restore_path_log_prob()(model), restore_path_log_prob()(guide), args, kwargs
            )
        for name, site in model_trace.nodes.items():
            if site["type"] == "sample" and unwrap(site["fn"]) is not None:
                other = guide_trace.nodes.get(name)
                if not site["is_observed"] and other is not None and _is_drawn_path(other["fn"]):
                    self._rewrite(name, site, other)
                else:
                    _forget_log_prob(site)
        for site in guide_trace.nodes.values():
            if "score_parts" in site and "path_divergence" not in site and unwrap(site["fn"]):
                _forget_log_prob(site)
        # Paths that are not a pair of model and guide (observed ones, say) keep their own density.
        model_trace.compute_log_prob()
        guide_trace.compute_score_parts()
        check_traces(model_trace, guide_trace)
        return model_trace, guide_trace

    def _get_vectorized_trace(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Trace, Trace]:
        traces = super()._get_vectorized_trace(model, guide, args, kwargs)  # type: ignore[misc]
        particles: int = self.num_particles
        found = sites_of_size(particles, *traces) if particles > 1 else {}
        if found.keys() <= self._tried_sites:
            return traces
        # Sizes that are equal broadcast silently: try with another number of particles, once.
        inner = poutine.unwrap(guide)
        state = dict(vars(inner)) if isinstance(inner, GuideMessenger) else {}
        self.num_particles = particles + 1
        try:
            with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
                model, guide = (self._vectorized_num_particles(f) for f in (model, guide))
                others = _PathELBO._get_trace(self, model, guide, args, kwargs)
        except Exception as e:
            place = next(iter(found.values()))
            raise ValueError(
                f"the ELBO fails with {particles + 1} particles and not with {particles}, which is "
                f"also a size of {place}: the particles are taken for that dimension. "
                f"{UNSQUEEZE}. The error with {particles + 1} particles was: {e}"
            ) from e
        finally:
            self.num_particles = particles
            vars(inner).update(state)  # a messenger remembers its last draw
        for trace, other in zip(traces, others, strict=True):
            check_event_shapes(particles, trace, particles + 1, other)
        self._tried_sites.update(found)
        return traces

    def _differentiable_loss_particle(
        self, model_trace: Trace, guide_trace: Trace
    ) -> tuple[Any, Any]:
        found = super()._differentiable_loss_particle(model_trace, guide_trace)  # type: ignore[misc]
        check_finite(found[0], model_trace, guide_trace)
        return found

    def _rewrite(self, name: str, model_site: dict, guide_site: dict) -> None:
        for key in ("scale", "mask"):
            if not _same(model_site[key], guide_site[key]):
                raise ValueError(
                    f"site {name!r} has different values of {key} in model and guide; apply "
                    f"poutine.{key} to both"
                )
        watch = None
        if current_terms() is not None:
            watch = functools.partial(guide_site.__setitem__, "path_terms")
        term = path_divergence(
            guide_site["fn"], model_site["fn"], guide_site["value"], self.path_estimator, watch
        )
        scaled = scale_and_mask(term, guide_site["scale"], guide_site["mask"])
        no_score: Any = 0  # a path is always reparametrised
        guide_site.update(
            path_divergence=term,
            unscaled_log_prob=term,
            log_prob=scaled,
            log_prob_sum=scaled.sum(),
            score_parts=ScoreParts(scaled, no_score, scaled),
        )
        zero = torch.zeros_like(term)
        model_site.update(unscaled_log_prob=zero, log_prob=zero, log_prob_sum=zero.sum())


def _is_drawn_path(fn: Any) -> bool:
    return fn.has_rsample and unwrap(fn) is not None


def _forget_log_prob(site: dict) -> None:
    for key in ("unscaled_log_prob", "log_prob", "log_prob_sum", "score_parts"):
        site.pop(key, None)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        return False
    return bool((torch.as_tensor(a) == torch.as_tensor(b)).all())


class TraceSDE_ELBO(_PathELBO, Trace_ELBO):
    """:class:`~pyro.infer.Trace_ELBO` with the path KL of Girsanov's theorem.

    The KL of sites that are paths in model and guide is estimated by ``path_estimator``; all other
    sites are treated as by the parent class.

    - ``"stl"`` (the default, "sticking the landing"): the quadratic term and the martingale, with
      the guide's parameters held fixed in the martingale. The variance of its gradient vanishes as
      the guide approaches the posterior.
    - ``"full"``: both terms. It equals :class:`~pyro.infer.Trace_ELBO`.
    - ``"kl"``: the quadratic term alone. It equals an analytic KL of every step.

    ``"stl"`` has first-order gradients only: differentiating twice is an error.

    Example::

        >>> import pyro, torch
        >>> from pyro.infer import Trace_ELBO
        >>> from pyro_sde import TraceSDE_ELBO
        >>> from pyro_sde.distributions import BrownianMotion, ControlledPath
        >>> prior = BrownianMotion(1.0, torch.linspace(0.0, 1.0, 11), 0.0)
        >>> def model():
        ...     pyro.sample("z", prior)
        >>> def guide():  # pushed by u = 2: the KL is half of 2 squared, for a time of 1
        ...     pyro.sample("z", ControlledPath(prior, lambda t, z: torch.full_like(z, 2.0)))
        >>> f"{TraceSDE_ELBO(path_estimator='kl').loss(model, guide):.4f}"
        '2.0000'
        >>> losses = []
        >>> for elbo in (TraceSDE_ELBO(path_estimator="full"), Trace_ELBO()):
        ...     pyro.set_rng_seed(0)
        ...     losses.append(elbo.loss(model, guide))
        >>> abs(losses[0] - losses[1]) < 1e-4
        True

    :param args: Arguments of the parent class, ``num_particles`` first.
    :param path_estimator: ``"stl"``, ``"full"`` or ``"kl"``.
    :param kwargs: Keyword arguments of the parent class: ``num_particles``,
        ``vectorize_particles``, ...
    """


class TraceMeanFieldSDE_ELBO(_PathELBO, TraceMeanField_ELBO):
    """:class:`~pyro.infer.TraceMeanField_ELBO` with the path KL of Girsanov's theorem.

    It differs from :class:`TraceSDE_ELBO` at sites that are not paths: these use an analytic KL
    where there is one. In contrast to the parent class, it counts the ``log_density`` of a Delta in
    the guide, which is where AutoNormal keeps the Jacobian of a constrained latent. Without it the
    ELBO could exceed the evidence.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde import TraceMeanFieldSDE_ELBO
        >>> from pyro_sde.distributions import BrownianMotion, ControlledPath
        >>> prior = BrownianMotion(1.0, torch.linspace(0.0, 1.0, 11), 0.0)
        >>> def model():
        ...     pyro.sample("z", prior)
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> def guide():
        ...     pyro.sample("z", ControlledPath(prior, lambda t, z: torch.full_like(z, 2.0)))
        ...     pyro.sample("x", dist.Normal(1.0, 1.0))
        >>> elbo = TraceMeanFieldSDE_ELBO(path_estimator="kl")
        >>> f"{elbo.loss(model, guide):.4f}"  # 2 for the path, 1/2 for x, without noise
        '2.5000'

    :param args: Arguments of the parent class, ``num_particles`` first.
    :param path_estimator: ``"stl"``, ``"full"`` or ``"kl"``.
    :param kwargs: Keyword arguments of the parent class.
    """

    def _differentiable_loss_particle(
        self, model_trace: Trace, guide_trace: Trace
    ) -> tuple[float, Tensor]:
        if is_validation_enabled():
            for site in guide_trace.nodes.values():
                if site["type"] == "sample":
                    check_fully_reparametrized(site)
        kl = sum(term for _, term in kl_by_site(model_trace, guide_trace, analytic=True))
        loss: Any = kl - sum(term for _, term in log_likelihood_by_site(model_trace))
        check_finite(loss, model_trace, guide_trace)
        return torch_item(loss), loss
