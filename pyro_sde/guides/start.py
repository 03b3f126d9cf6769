"""What AutoSDE learns about the start of a path: q(z_0)."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import MultivariateNormal, Normal, TransformedDistribution
from pyro.nn.module import PyroModule, PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution

from .._checks import broadcast_shapes
from ..distributions.starts import PartlyFixed, side_by_side
from ..simulation.network import outputs_of, split_control
from ..simulation.step import (
    compose,
    contraction_between,
    displace,
    is_matrix,
    triangle_places,
    whiten,
)
from .units import push_units, to_support, unconstrained_units

__all__ = ["StartPosterior"]

MAX_CORRELATED = 16
"""Up to so many dimensions the start has a full covariance."""

HIDDEN = 64


class StartPosterior(PyroModule):
    r"""A Normal law of the state at t_0, measured in units of the prior's:

    .. math:: z_0 = T(\mathrm{loc} + S\,(m + L\,\varepsilon))

    with T the transform to the support of the prior (the identity for R^D), loc and S the prior's
    location and scale in unconstrained space, and m and L learned, for each element of the plates.
    L is lower-triangular up to 16 dimensions, else diagonal. A network adds to m and L what the
    other latents and the encoder tell. Entries that the prior has fixed stay fixed.

    :param initial: The prior's law of the start.
    :param shape: The batch shape of the parameters, plates at their full size.
    :param event_dims: How many of the last dimensions of ``shape`` are no plates.
    :param like: A tensor of the dtype and device to use.
    :param encoded: The size of what an encoder knows; 0 without an encoder.
    :param latents: The number of other latents to read.
    :param start: Mean and standard deviation before training; by default the prior's.
    """

    values: Any

    def __init__(
        self,
        initial: Distribution,
        shape: torch.Size,
        event_dims: int,
        like: Tensor,
        encoded: int = 0,
        latents: int = 0,
        start: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        law = initial.law if isinstance(initial, PartlyFixed) else initial
        transform = to_support(law)
        self.event_shape = law.event_shape
        self.dim = d = (
            law.event_shape[0] if transform is None else transform.inverse_shape(law.event_shape)[0]
        )
        self.kind = "full" if 1 < d <= MAX_CORRELATED else "diagonal"
        outputs = outputs_of(d, self.kind)
        self.head: nn.Module | None = None
        if latents:
            self.head = nn.Sequential(
                nn.Linear(encoded + latents, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
            )
        elif encoded:
            self.head = nn.Linear(encoded, outputs)
        if self.head is not None:
            self.head.to(like)
            last: Any = self.head[-1] if isinstance(self.head, nn.Sequential) else self.head
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        values = like.new_zeros((*shape, outputs))
        if start is not None:
            values[:] = self._values_at(initial, law, transform, like, start)
        if not encoded:
            self.values = PyroParam(values, event_dim=1 + event_dims)
        elif start is not None:  # one bias for all series: their mean, where the starts differ
            last.bias.data.copy_(values.reshape(-1, outputs).mean(0))

    @torch.no_grad()
    def _values_at(
        self, initial: Distribution, law: Distribution, transform: Any, like: Tensor, start: Any
    ) -> Tensor:
        """The parameters for which the start has that mean and that standard deviation."""
        mean, sd = torch.broadcast_tensors(
            *(torch.as_tensor(x).to(like) for x in start), like.new_empty(initial.event_shape)
        )[:2]
        if isinstance(initial, PartlyFixed):
            mean, sd = initial.drawn(mean), initial.drawn(sd)
        if transform is not None:
            mean, sd = push_units(mean, sd, transform.inv)
        loc, scale = _units(law, transform, mean)
        shift = whiten(loc, scale, mean.expand_as(loc))
        spread = contraction_between(sd, scale, shift)
        if self.kind == "full":
            spread = spread if is_matrix(spread, shift) else torch.diag_embed(spread)
            spread = spread.flatten(-2)[..., triangle_places(self.dim, spread.device)]
        elif is_matrix(spread, shift):
            spread = spread.diagonal(dim1=-2, dim2=-1)
        return torch.cat([shift, spread], -1)

    def forward(
        self, prior: Distribution, encoded: Tensor | None = None, latents: Tensor | None = None
    ) -> Distribution:
        """The law of the start where the prior's is ``prior``.

        :param encoded: What the encoder knows at t_0.
        :param latents: The other latents, in units of their priors.
        """
        if isinstance(prior, PartlyFixed):
            return prior.with_law(self(prior.law, encoded, latents))
        found: Any = self.values if encoded is None else 0.0
        if self.head is not None:
            inputs = [x for x in (encoded, latents) if x is not None]
            found = found + self.head(side_by_side(inputs))
        shift, spread = split_control(found, self.dim, self.kind)
        assert spread is not None
        transform = to_support(prior)
        loc, scale = _units(prior, transform, shift)
        shift = shift.expand_as(loc)
        if self.kind == "full":
            spread = spread.expand(*loc.shape, self.dim)
        loc, scale = displace(loc, scale, shift), compose(scale, spread, shift)
        if is_matrix(scale, loc):
            q: Any = MultivariateNormal(loc, scale_tril=scale)
        else:
            q = Normal(loc, scale).to_event(1)
        return q if transform is None else TransformedDistribution(q, [transform])


def _units(prior: Distribution, transform: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The units of a prior, in the batch of ``like`` and of the prior."""
    loc, scale = unconstrained_units(prior, transform, like)
    matrix = scale.dim() > loc.dim()
    loc = loc.expand(broadcast_shapes(loc.shape, like.shape))
    return loc, scale.expand(*loc.shape, loc.shape[-1]) if matrix else scale.expand_as(loc)
