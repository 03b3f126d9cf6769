"""The autoguide of path sites: a posterior SDE with a neural control."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.effect import AutoMessenger
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn.module import PyroModule, pyro_method
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor, nn

from .._arrays import as_tensors
from .._checks import broadcast_shapes
from .._sharing import check_shared
from .._threads import one_thread
from ..distributions.wrapping import WrappedPath, unwrap
from .amortisation import EncodingCache, end_of_data
from .amortisation_mixin import EncoderMixin
from .controls import MLPControl
from .defaults import (
    contraction_of,
    default_guide,
    is_weights,
    joint_sizes,
    warn_of_several_paths,
)
from .encoders import Encoding, Observations
from .first_run import draws_of_prior, first_trace
from .latent_context import LatentContext, readable
from .latents import check_still_latent, latent_sites
from .near_data import draws_near_data, medians
from .param_store import register_parameters
from .path_posterior import PathPosterior
from .posterior_summary import PosteriorSummaryMixin
from .visibility import HideFromOuterTrace, MaskObserved, inside_trace, with_latent_scale

__all__ = ["AutoSDE"]


class AutoSDE(PosteriorSummaryMixin, EncoderMixin, AutoMessenger):  # type: ignore[metaclass]
    r"""An autoguide whose path sites follow a posterior SDE: the model's own process pushed by a
    learned control u(t, z), that is, with the drift

    .. math:: f_q(t, z) = f_p(t, z) + g(t, z)\,u(t, z)

    The guide runs the model once per ELBO, and meets each prior with the upstream latents already
    drawn from the posterior. So prior and posterior share their diffusion, whatever it depends on.
    Before training the posterior of a path is the prior. Sites inside plates learn an embedding of
    each element, which their control reads.

    By default the posterior is joint: the noise of each step is contracted and correlated, control
    and start read the other latents, and the other latents share one correlated Normal. Where the
    initial state has a Distribution, its posterior is a learned Normal in units of that
    distribution, with a full covariance up to 16 dimensions, mapped to the support. Several path
    sites do not see each other: combine them with :class:`~pyro_sde.distributions.Stack`.

    The first call (or :meth:`setup`) decides which sites are latent, so it must have the data: a
    model that observes nothing is refused, and so are data for a latent in later calls.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_sde import AutoSDE, TraceSDE_ELBO
        >>> from pyro_sde.distributions import BrownianMotion
        >>> def model(y):
        ...     z = pyro.sample("z", BrownianMotion(1.0, torch.linspace(0.0, 1.0, 6), 0.0))
        ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
        >>> y = torch.tensor(2.0)
        >>> pyro.set_rng_seed(0)
        >>> guide = AutoSDE(model)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-2}), TraceSDE_ELBO())
        >>> losses = [svi.step(y) for _ in range(100)]
        >>> guide.path_sites
        ('z',)
        >>> bool(guide.median(y)["z"][-1, 0] > 1.5)  # that of the prior is 0
        True

    :param model: A Pyro model with at least one latent path site.
    :param control: The control of the paths: a class (or ``functools.partial`` of one) that is
        called as ``MLPControl`` is; or a control itself, any callable or module u(t, z); or a dict
        from site names to either.
    :param contraction: Whether the posterior shrinks the noise of each step (``"diagonal"``), also
        correlates it (``"full"``), or neither (None). ``"auto"`` is ``"full"`` for states of up to
        16 dimensions, ``"diagonal"`` up to 512, and None for the weights of a network and for a
        control of your own. With a contraction, a control of your own returns ``(u,
        contraction)`` as described in :class:`~pyro_sde.distributions.ControlledPath`.
    :param other_guide: The autoguide class of all other latents. ``"auto"`` is, for up to 128
        numbers, Pyro's AutoMultivariateNormal in units of the prior and with a skewness of each
        latent, and AutoNormal beyond. Both begin where draws of the prior come near the data; for
        models that cannot be vectorised they begin at the medians of the priors. As everywhere in
        Pyro, latents inside of a plate that subsamples need
        ``partial(AutoNormal, create_plates=...)``.
    :param name: The prefix of the parameters; two guides need two names.
    :param amortized_plates: Names of plates whose elements share their parameters.
    :param encoder: A :class:`GRUEncoder`, say, instead of embeddings: it computes the posterior of
        each series from its observations, also for new series. The paths must be one batch along
        the plate of dim -1, the series.
    :param observations: What the encoder reads: a function of the model's arguments that returns
        times ``(series, n)``, values ``(series, n, obs_dim)`` and a mask ``(series, n)`` or of the
        shape of the values; by default the arguments of those names. NaN is missing. With a plate
        that subsamples, return either all series or those of the mini-batch.
    :param condition_on: Names of other latents that the control and the start read, so that the
        path moves with them: u(t, z, latents). True takes all latents that are in no plate but the
        path's, ``"auto"`` takes these if they are at most 64 numbers, and False takes none.
    :param compile: Whether torch.compile compiles the steps of the paths. That takes about
        half a minute for each new combination of shapes, and steps are faster afterwards. Without
        a C++ compiler there is a warning, and the steps are not compiled.
    :param former: The former names of two options: ``rest`` for ``other_guide``, ``reads`` for
        ``condition_on``.
    """

    def __init__(
        self,
        model: Callable,
        *,
        control: Any = MLPControl,
        contraction: str | bool | None = "auto",
        other_guide: str | Callable[..., Any] | None = "auto",
        name: str = "AutoSDE",
        amortized_plates: tuple[str, ...] = (),
        encoder: nn.Module | None = None,
        observations: Callable[..., Any] | None = None,
        condition_on: bool | str | Sequence[str] = "auto",
        compile: bool = False,
        **former: Any,
    ) -> None:
        other_guide = former.pop("rest", other_guide)
        condition_on = former.pop("reads", condition_on)
        if former:
            raise TypeError(f"AutoSDE has no option {next(iter(former))!r}")
        super().__init__(model, amortized_plates=amortized_plates)
        if observations is not None and encoder is None:
            raise ValueError("observations are read by an encoder: give AutoSDE an encoder, too")
        is_name = isinstance(condition_on, str) and condition_on != "auto"
        self._condition_on: Any = (condition_on,) if is_name else condition_on
        self.encoder: Any = encoder
        self._observations = observations
        self._encoding: Encoding | None = None
        self._given: Observations | None = None
        self._given_encoding, self._pyro_name = EncodingCache(), name
        self._control, self._other_guide = control, other_guide
        self.contraction, self._compiles = contraction, bool(compile)
        self.path_sites: tuple[str, ...] = ()
        self.other_sites: tuple[str, ...] = ()
        self._other_trace: Trace | None = None

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        if name.endswith("AutoCallable._guide"):
            raise TypeError(
                "AutoSDE cannot be a part of an AutoGuideList, which would run the model again, on "
                "other draws. Use AutoSDE alone and name the guide of the other latents: "
                "AutoSDE(model, other_guide=AutoNormal)"
            )
        super()._pyro_set_supermodule(name, context)

    def __getstate__(self) -> dict:
        kept_out = {"trace", "_other_trace", "_encoding", "_given", "_given_encoding", "_example"}
        return {k: v for k, v in PyroModule.__getstate__(self).items() if k not in kept_out}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.trace, self._given_encoding = Trace(), EncodingCache()
        self._other_trace = self._encoding = self._given = self._example = None

    @one_thread("AutoSDE.setup")
    def setup(self, *args: Any, **kwargs: Any) -> AutoSDE:
        """Build all parameters, from one run of the model with the given arguments.

        Afterwards ``parameters``, ``state_dict`` and ``load_state_dict`` include all of them, and
        ``path_sites`` and ``other_sites`` name the latents. The random state is not changed.

        :param args: Arguments of the model, with the data.
        :param kwargs: Keyword arguments of the model.
        :returns: The guide itself.
        """
        if self.path_sites:
            return self
        args, kwargs = as_tensors(args, kwargs)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), poutine.block():
            first = first_trace(self.model, args, kwargs)
            latents = latent_sites(first)
            paths = {name: w for name, s in latents.items() if (w := unwrap(s["fn"])) is not None}
            self._check_sites(latents, paths)
            warn_of_several_paths(latents, paths)
            self._set_up_encoder(args, kwargs, latents, paths)
            near = None
            if not any(is_weights(latents[k], w.path.event_shape[-1]) for k, w in paths.items()):
                near = draws_near_data(self.model, args, kwargs, first, latents)
            self.paths = PyroModule()
            for name, wrapped in paths.items():
                context = readable(self._condition_on, latents, paths, name)
                states = None if near is None else wrapped.to_path(near[name])
                posterior = self._posterior(name, wrapped, latents[name], context, states)
                deep_setattr(self.paths, name, posterior)
            others = frozenset(latents) - frozenset(paths)
            if others and self._other_guide is not None:
                hidden = functools.partial(_hide_all_but, others)
                other_guide: Any = self._other_guide
                if other_guide == "auto":
                    sites = {name: latents[name] for name in others}
                    begin = None if near is None else medians(near, sites)
                    other_guide = default_guide(sites, begin)
                self.rest = other_guide(poutine.block(self.model, hide_fn=hidden))
                self.rest(*args, **kwargs)
        self.path_sites, self.other_sites = tuple(paths), tuple(sorted(others))
        self._example = args, kwargs
        return self

    def _check_sites(self, latents: dict[str, Any], paths: dict[str, WrappedPath]) -> None:
        if not paths:
            raise ValueError(
                f"the model has no latent path site (its latents: {sorted(latents) or 'none'}); "
                "use AutoNormal or another autoguide of Pyro"
            )
        others = sorted(set(latents) - set(paths))
        if others and self._other_guide is None:
            raise ValueError(f"other_guide=None leaves the latents {others} without a guide")
        if isinstance(self._control, Mapping):
            unknown = sorted(set(self._control) - set(paths))
            if unknown:
                raise ValueError(f"control names {unknown}, but the path sites are {sorted(paths)}")

    def _posterior(
        self,
        name: str,
        wrapped: WrappedPath,
        site: Any,
        context: dict[str, Any],
        states: Tensor | None,
    ) -> PathPosterior:
        shape = list(wrapped.path.batch_shape)
        for frame in site["cond_indep_stack"]:
            if not frame.vectorized:
                raise NotImplementedError("AutoSDE does not support sequential pyro.plate")
            size = 1 if frame.name in self.amortized_plates else frame.full_size or frame.size
            shape[frame.dim - wrapped.event_dims] = size
        control: Any = self._control
        if isinstance(control, Mapping):
            control = control.get(name, MLPControl)
        if not callable(control):
            raise TypeError(f"control must be callable, found {control!r} for site {name!r}")
        dim = wrapped.path.event_shape[-1]
        if states is None and not is_weights(site, dim):
            states = draws_of_prior(wrapped.path)
        return PathPosterior(
            wrapped,
            torch.Size(shape),
            control,
            contraction_of(self.contraction, site, dim, control),
            site["value"],
            site["infer"].get("start"),
            self.encoder if name in self._amortised else None,
            self._compiles,
            LatentContext(context, wrapped.event_dims, self._condition_on != "auto")
            if context
            else None,
            states,
        )

    @pyro_method
    @one_thread("a guide", with_handlers=True)
    def __call__(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Draw the latents from the posterior, and run the model on them.

        :returns: A dict from latent site names to values.
        """
        args, kwargs = as_tensors(args, kwargs)
        self.setup(*args, **kwargs)
        check_shared(self.named_parameters())
        register_parameters(self)
        self.trace, self._other_trace = Trace(), None  # the last draw, before there is another
        self._encoding = None
        others = getattr(self, "rest", None)
        if others is not None:
            with HideFromOuterTrace():
                self._other_trace = poutine.trace(others).get_trace(*args, **kwargs)
        with MaskObserved(self._is_latent) if inside_trace() else nullcontext():
            samples = super().__call__(*args, **kwargs)
        return {name: samples[name] for name in samples if self._is_latent(name)}

    def _is_latent(self, name: str) -> bool:
        return name in self.path_sites or (
            self._other_trace is not None and name in self._other_trace.nodes
        )

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"]:
            return check_still_latent(name, self.path_sites + self.other_sites)
        if self._other_trace is not None and name in self._other_trace.nodes:
            site = self._other_trace.nodes[name]
            if not site_is_subsample(msg):
                msg["infer"]["prior"] = msg["fn"]
                msg["fn"] = site["fn"]
            msg["value"], msg["done"] = site["value"], True
        elif name in self.path_sites:
            prior = msg["infer"]["prior"] = msg["fn"]
            posterior = self.get_posterior(name, prior)
            # The latents that the posterior reads may have particles where the prior has none.
            shape = broadcast_shapes(posterior.batch_shape, prior.batch_shape)
            msg["fn"] = posterior if posterior.batch_shape == shape else posterior.expand(shape)

    def get_posterior(self, name: str, prior: Any) -> Any:
        wrapped = unwrap(prior)
        if wrapped is None:
            raise ValueError(
                f"site {name!r} was a path when the guide was set up, now it is a "
                f"{type(prior).__name__}"
            )
        posterior = attrgetter(name)(self.paths)
        until = None
        if self._given is not None:
            until = end_of_data(self._given, wrapped.path, name in self._amortised)
        encoding = self._encode(wrapped.path) if name in self._amortised else None
        return wrapped.rewrap(posterior(wrapped.path, encoding, until, self._other_trace))

    def get_traces(self) -> tuple[Trace, Trace]:
        model_trace, guide_trace = prune_subsample_sites(self.trace), Trace()
        site: Any
        for name, site in list(model_trace.nodes.items()):
            if site["type"] == "sample" and "prior" in site["infer"]:
                guide_trace.add_node(name, **site)
                model_trace.nodes[name] = {**site, "fn": site["infer"]["prior"]}
        if self._other_trace is not None:
            for name, site in self._other_trace.nodes.items():
                if site["type"] == "sample" and site["infer"].get("is_auxiliary"):
                    site = with_latent_scale(name, site, model_trace, self.other_sites)
                    sizes = joint_sizes(self.rest, name)
                    guide_trace.add_node(name, **site, latent_sizes=sizes)
        return model_trace, guide_trace


def _hide_all_but(names: frozenset[str], msg: Any) -> bool:
    """Hide the paths, and what was observed when the guide was set up, from the other guide."""
    if msg["type"] != "sample" or site_is_subsample(msg):
        return False
    return msg["name"] not in names
