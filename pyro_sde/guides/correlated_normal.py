"""The guide of the latents that are no paths, where they are few."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyro.distributions import MultivariateNormal
from pyro.distributions.transforms import LowerCholeskyAffine
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor
from torch.distributions import biject_to

__all__ = ["CorrelatedNormal", "begin_at_median"]

DRAWS = 1001

begin_at_median = partial(init_to_median, num_samples=DRAWS)
"""Pyro's own, with so many draws of the prior that the seed does not matter."""


class CorrelatedNormal(AutoMultivariateNormal):
    r"""Pyro's AutoMultivariateNormal, measured in units of the prior:

    .. math:: x = \mathrm{start} + \mathrm{unit}\,(\mathrm{loc} + \mathrm{scale}\,L\,\varepsilon)

    with x the latents in unconstrained space, and start and unit the prior's median and spread
    there. So the optimiser takes steps that are as large as the prior is wide, whether a latent
    is a probability or a price.
    """

    start: Tensor
    unit: Tensor
    prototype_trace: Any
    scale: Any
    scale_tril: Any

    def __init__(self, model: Any, init_scale: float = 0.1) -> None:
        super().__init__(model, init_loc_fn=begin_at_median, init_scale=init_scale)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        # The same units for the same model: parameters that are loaded are measured in them.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super()._setup_prototype(*args, **kwargs)

    def _init_loc(self) -> Tensor:
        start = super()._init_loc()
        sites = [site for _, site in self.prototype_trace.iter_stochastic_nodes()]
        self.register_buffer("start", start)
        self.register_buffer("unit", torch.cat([_spread(site) for site in sites]).to(start))
        return torch.zeros_like(start)

    def _moments(self) -> tuple[Tensor, Tensor]:
        tril = (self.unit * self.scale).unsqueeze(-1) * self.scale_tril
        return self.start + self.unit * self.loc, tril

    def get_transform(self, *args: Any, **kwargs: Any) -> LowerCholeskyAffine:
        loc, tril = self._moments()
        return LowerCholeskyAffine(loc, scale_tril=tril)

    def get_posterior(self, *args: Any, **kwargs: Any) -> MultivariateNormal:
        loc, tril = self._moments()
        return MultivariateNormal(loc, scale_tril=tril)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        loc, tril = self._moments()
        return loc, tril.square().sum(-1).sqrt()


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
