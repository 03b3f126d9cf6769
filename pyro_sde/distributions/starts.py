"""Laws of the initial state that are made of parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pyro.distributions import Normal, TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent, constraints

from .._checks import broadcast_shapes

__all__ = ["PartlyFixed", "SideBySide", "join_starts", "side_by_side"]


def side_by_side(parts: Iterable[Tensor]) -> Tensor:
    """Concatenates tensors ``(..., D_i)`` along their last dimension; their batches broadcast."""
    parts = list(parts)
    batch = broadcast_shapes(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(batch + p.shape[-1:]) for p in parts], -1)


class _Start(TorchDistribution):
    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    has_rsample = True

    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    @property
    def variance(self) -> Tensor:
        return self.stddev.square()


class SideBySide(_Start):
    """Independent laws over R^D_1, R^D_2, ... as one over the space of their states side by side.

    :param parts: Distributions with one event dimension each.
    """

    def __init__(self, parts: Sequence[Distribution], validate_args: bool | None = None) -> None:
        batch = broadcast_shapes(*(p.batch_shape for p in parts))
        self.parts = [p.expand(batch) for p in parts]
        self.sizes = [p.event_shape[0] for p in parts]
        super().__init__(batch, torch.Size([sum(self.sizes)]), validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SideBySide:
        return SideBySide([p.expand(torch.Size(batch_shape)) for p in self.parts], False)

    @property
    def support(self) -> Any:
        supports = [getattr(p.support, "base_constraint", p.support) for p in self.parts]
        if all(s is constraints.real for s in supports):
            return constraints.real_vector
        if any(s.event_dim for s in supports):
            raise NotImplementedError(
                "processes side by side whose starts have supports that mix their entries (a "
                "Dirichlet, say); give these entries laws of their own"
            )
        return constraints.independent(constraints.cat(supports, -1, self.sizes), 1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return torch.cat([p.rsample(sample_shape) for p in self.parts], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        values = value.split(self.sizes, -1)
        return sum(p.log_prob(v) for p, v in zip(self.parts, values, strict=True))

    @property
    def mean(self) -> Tensor:
        return torch.cat([p.mean for p in self.parts], -1)

    @property
    def stddev(self) -> Tensor:
        return torch.cat([p.stddev for p in self.parts], -1)


class PartlyFixed(_Start):
    """A start of which some entries are drawn and the others are fixed.

    :param law: The law of those that are drawn, over R^k.
    :param fixed: A value of shape ``(..., D)``, which is used where ``is_drawn`` is False.
    :param is_drawn: Which of the D entries are drawn, k of them.
    """

    support = constraints.real_vector

    def __init__(
        self,
        law: Distribution,
        fixed: Tensor,
        is_drawn: Sequence[bool],
        validate_args: bool | None = None,
    ) -> None:
        batch = broadcast_shapes(law.batch_shape, fixed.shape[:-1])
        self.law = law.expand(batch)
        self.fixed, self.is_drawn = fixed.expand(*batch, fixed.shape[-1]), tuple(is_drawn)
        self._drawn = torch.tensor(self.is_drawn, device=fixed.device)
        super().__init__(batch, fixed.shape[-1:], validate_args)

    def with_law(self, law: Distribution) -> PartlyFixed:
        """The same with another law of what is drawn."""
        return PartlyFixed(law, self.fixed, self.is_drawn)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PartlyFixed:
        batch = torch.Size(batch_shape)
        fixed = self.fixed.expand(batch + self.event_shape)
        return PartlyFixed(self.law.expand(batch), fixed, self.is_drawn)

    def drawn(self, value: Tensor) -> Tensor:
        """Those entries of a value that are drawn."""
        return value[..., self._drawn]

    def _fill(self, drawn: Tensor, fixed: Tensor) -> Tensor:
        fixed = fixed.expand(drawn.shape[:-1] + self.event_shape)
        index = self._drawn.nonzero().squeeze(-1)
        dtype = torch.promote_types(fixed.dtype, drawn.dtype)
        return fixed.to(dtype).index_copy(-1, index, drawn.to(dtype))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self._fill(self.law.rsample(sample_shape), self.fixed)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.law.log_prob(self.drawn(value)) + self.log_prob_of_fixed(value)

    def log_prob_of_fixed(self, value: Tensor) -> Tensor:
        """Zero where the fixed entries are what they should be, and minus infinity elsewhere."""
        fixed, value = (x[..., ~self._drawn] for x in (self.fixed, value))
        tol = 64 * torch.finfo(value.dtype).eps
        off = ((value - fixed).abs() > tol * (1 + fixed.abs())).any(-1)
        return torch.zeros_like(off, dtype=value.dtype).masked_fill(off, -torch.inf)

    @property
    def mean(self) -> Tensor:
        return self._fill(self.law.mean, self.fixed)

    @property
    def stddev(self) -> Tensor:
        return self._fill(self.law.stddev, torch.zeros_like(self.fixed))


def join_starts(starts: Sequence[Tensor | Distribution]) -> Tensor | Distribution:
    """The starts of several processes, side by side, in the simplest form."""
    points = [s for s in starts if isinstance(s, Tensor)]
    if len(points) == len(starts):
        return side_by_side(points)
    laws: list[Any] = [_law_of(s) for s in starts if not isinstance(s, Tensor)]
    laws = [q for p in laws for q in (p.parts if isinstance(p, SideBySide) else [p])]
    law = laws[0] if len(laws) == 1 else SideBySide(laws)
    if all(isinstance(p, Independent) and isinstance(p.base_dist, Normal) for p in laws):
        loc = side_by_side(p.base_dist.loc for p in laws)
        law = Normal(loc, side_by_side(p.base_dist.scale for p in laws)).to_event(1)
    points += [s.fixed for s in starts if isinstance(s, PartlyFixed)]
    if not points:
        return law
    fixed, is_drawn = zip(*(_fixed_part(s, points[0]) for s in starts), strict=True)
    return PartlyFixed(law, side_by_side(fixed), sum(is_drawn, ()))


def _law_of(start: Distribution) -> Distribution:
    return start.law if isinstance(start, PartlyFixed) else start


def _fixed_part(start: Tensor | Distribution, like: Tensor) -> tuple[Tensor, tuple[bool, ...]]:
    """The values of a start where it is fixed, zero elsewhere, and which entries are drawn."""
    if isinstance(start, PartlyFixed):
        return start.fixed, start.is_drawn
    if isinstance(start, Tensor):
        return start, (False,) * start.shape[-1]
    return like.new_zeros(start.event_shape), (True,) * start.event_shape[0]
