"""The guide of the latents that are no paths, where they are few."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from pyro.distributions import MultivariateNormal, Normal, TransformedDistribution
from pyro.distributions.transforms import LowerCholeskyAffine
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor, nn
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import AffineTransform, ComposeTransform, Transform

__all__ = ["CorrelatedNormal", "SinhArcsinh", "begin_at_median"]

DRAWS = 1001

begin_at_median = partial(init_to_median, num_samples=DRAWS)
"""Pyro's own, with so many draws of the prior that the seed does not matter."""


class SinhArcsinh(Transform):
    """y = sinh(tail (asinh(x) + skew)), elementwise (Jones and Pewsey 2009)."""

    domain = codomain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, skew: Tensor, tail: Tensor, cache_size: int = 0) -> None:
        super().__init__(cache_size)
        self.skew, self.tail = skew, tail

    def with_cache(self, cache_size: int = 1) -> SinhArcsinh:
        return SinhArcsinh(self.skew, self.tail, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return torch.sinh(self.tail * (torch.asinh(x) + self.skew))

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.sinh(torch.asinh(y) / self.tail - self.skew)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tail.log() + 0.5 * (torch.log1p(y.square()) - torch.log1p(x.square()))


class CorrelatedNormal(AutoMultivariateNormal):
    r"""Pyro's AutoMultivariateNormal, measured in units of the prior, with a skewness and tails for
    each latent:

    .. math:: x = \mathrm{start} + \mathrm{unit}\,(\mathrm{loc}
        + \mathrm{scale}\;T(L\,\varepsilon))

    with x the latents in unconstrained space, start and unit the prior's median and spread there,
    and T the :class:`SinhArcsinh` transform, before training the identity. So the optimiser takes
    steps that are as large as the prior is wide, whether a latent is a probability or a price; and
    the logarithm of a noise, say, may have the long left tail that few data leave to it.

    :param model: The model.
    :param float init_scale: The standard deviations before training, in units of the prior.
    :param begin: Values of all latents at which training begins; by default their medians.
    """

    start: Tensor
    unit: Tensor
    prototype_trace: Any
    scale: Any
    scale_tril: Any

    def __init__(
        self, model: Any, init_scale: float = 0.1, begin: Mapping[str, Tensor] | None = None
    ) -> None:
        self._begin = begin
        super().__init__(model, init_loc_fn=begin_at_median, init_scale=init_scale)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        # The same units for the same model: parameters that are loaded are measured in them.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super()._setup_prototype(*args, **kwargs)
        self.skew, self.log_tail = (nn.Parameter(torch.zeros_like(self.start)) for _ in range(2))

    def _init_loc(self) -> Tensor:
        start = super()._init_loc()
        sites = [site for _, site in self.prototype_trace.iter_stochastic_nodes()]
        self.register_buffer("start", start)
        self.register_buffer("unit", torch.cat([_spread(site) for site in sites]).to(start))
        if self._begin is None:
            return torch.zeros_like(start)
        values = ((biject_to(s["fn"].support).inv, self._begin[s["name"]]) for s in sites)
        begin = torch.cat([inverse(value).flatten() for inverse, value in values]).to(start)
        return torch.where(begin.isfinite(), (begin - start) / self.unit, 0.0)

    def _elementwise(self) -> list[Transform]:
        """From L eps to the latents in unconstrained space."""
        loc, scale = self.start + self.unit * self.loc, self.unit * self.scale
        skewed = SinhArcsinh(self.skew, self.log_tail.exp(), cache_size=1)
        return [skewed, AffineTransform(loc, scale, cache_size=1)]

    def get_transform(self, *args: Any, **kwargs: Any) -> ComposeTransform:
        zero = torch.zeros_like(self.start)
        return ComposeTransform(
            [LowerCholeskyAffine(zero, scale_tril=self.scale_tril), *self._elementwise()]
        )

    def get_posterior(self, *args: Any, **kwargs: Any) -> TransformedDistribution:
        base = MultivariateNormal(torch.zeros_like(self.start), scale_tril=self.scale_tril)
        return TransformedDistribution(base, self._elementwise())

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median of each latent."""
        return {name: x[0] for name, x in self.quantiles([0.5], *args, **kwargs).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles of each latent, in a leading dimension."""
        levels = torch.as_tensor(quantiles, dtype=self.start.dtype, device=self.start.device)
        x = Normal(0.0, self.scale_tril.square().sum(-1).sqrt()).icdf(levels.unsqueeze(-1))
        for transform in self._elementwise():
            x = transform(x)
        found: dict[str, list[Tensor]] = {}
        for row in x:
            for site, value in self._unpack_latent(row):
                found.setdefault(site["name"], []).append(biject_to(site["fn"].support)(value))
        return {name: torch.stack(values) for name, values in found.items()}


@torch.no_grad()
def _spread(site: Any) -> Tensor:
    """Half the width of the interval that holds the middle 68 % of the prior, in unconstrained
    space; 1 where the prior cannot be drawn from."""
    inverse = biject_to(site["fn"].support).inv
    try:
        draws = inverse(site["fn"].sample((DRAWS,)))
    except NotImplementedError:
        return torch.ones_like(inverse(site["value"])).flatten()
    low, high = torch.quantile(draws.reshape(DRAWS, -1), draws.new_tensor([0.16, 0.84]), dim=0)
    width = (high - low) / 2
    return torch.where(torch.isfinite(width) & (width > 0), width, 1.0)
