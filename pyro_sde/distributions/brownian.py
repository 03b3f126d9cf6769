"""Brownian motion with drift, and its exponential."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import Normal, TransformedDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.transforms import ExpTransform

from .._arrays import as_numbers
from ..simulation.base import LinearSteps
from ..times import select
from .parameters import as_parameters, validates, with_time
from .path import PathDistribution
from .scalar import ScalarPath, scalar_process

__all__ = ["BrownianMotion", "GeometricBrownianMotion"]


class BrownianMotion(PathDistribution):
    r"""The process :math:`dz = \mathrm{drift}\,dt + \mathrm{scale}\,dB`, exact on any grid.

    Parameters broadcast to ``batch_shape + (D,)``; scalars mean any D.

    Example::

        >>> import torch
        >>> path = BrownianMotion(0.5, torch.tensor([0.0, 1.0, 4.0]), torch.zeros(2), drift=0.1)
        >>> path.sample((7,)).shape
        torch.Size([7, 3, 2])
        >>> path.mean[:, 0], path.stddev[:, 0]
        (tensor([0.0000, 0.1000, 0.4000]), tensor([0.0000, 0.5000, 1.0000]))

    :param scale: The diffusion, positive.
    :param times: The grid, of shape ``(T,)`` or ``(..., T)``.
    :param initial: A Tensor or a Distribution over :math:`\mathbb{R}^D`.
    :param drift: The constant drift.
    :param memory: ``"graph"``; or ``"recompute"``, to keep only the states and the noise of a
        drawn path, and of what a guide draws in its place.
    """

    arg_constraints = {  # noqa: RUF012
        "scale": constraints.positive,
        "drift": constraints.real,
    }

    def __init__(
        self,
        scale: Tensor | float,
        times: Tensor,
        initial: Tensor | float | Distribution,
        drift: Tensor | float = 0.0,
        memory: str = "graph",
        validate_args: bool | None = None,
    ) -> None:
        (self.scale, self.drift), shape = as_parameters(validate_args, scale=scale, drift=drift)
        super().__init__(
            times, initial, param_shape=shape, memory=memory, validate_args=validate_args
        )

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return z + self.drift * dt, self.scale * dt.sqrt()

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.drift.expand_as(z), self.scale.expand_as(z)

    def linear_steps(self) -> LinearSteps:
        _, dt = self.step_times(0)
        return LinearSteps(torch.ones_like(dt), self.drift * dt, self.scale * dt.sqrt())

    @property
    def mean(self) -> Tensor:
        start = self.initial if isinstance(self.initial, Tensor) else self.initial.mean
        mean = start.unsqueeze(-2) + with_time(self.drift) * self.elapsed()
        return mean.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        var = with_time(self.scale).square() * self.elapsed()
        if not isinstance(self.initial, Tensor):
            var = var + self.initial.variance.unsqueeze(-2)
        return var.expand(self.batch_shape + self.event_shape)


class GeometricBrownianMotion(TransformedDistribution):
    r"""The positive process :math:`dx = \mathrm{drift}\,x\,dt + \mathrm{scale}\,x\,dB`, which is
    the exponential of a Brownian motion with drift ``drift - scale**2 / 2``.

    Example::

        >>> import torch
        >>> price = GeometricBrownianMotion(0.2, torch.linspace(0.0, 1.0, 13), 100.0, drift=0.05)
        >>> round(float(price.mean[-1]), 2)
        105.13

    :param scale: The volatility, positive.
    :param times: The grid, of shape ``(T,)`` or ``(..., T)``.
    :param initial: A positive Tensor, or a Distribution over the positive part of
        :math:`\mathbb{R}^D`.
    :param drift: The expected rate of growth.
    :param memory: ``"graph"``; or ``"recompute"``, to keep only the states and the noise of a
        drawn path, and of what a guide draws in its place.
    """

    def __init__(
        self,
        scale: Tensor | float,
        times: Tensor,
        initial: Tensor | float | Distribution = 1.0,
        drift: Tensor | float = 0.0,
        memory: str = "graph",
        validate_args: bool | None = None,
    ) -> None:
        (scale, drift), _ = as_parameters(validate_args, scale=scale, drift=drift)
        if isinstance(initial, Distribution):
            start: Any = _log(initial)
        else:
            start = as_numbers(initial, "initial").to(scale.dtype)
            if validates(validate_args) and not bool((start > 0).all()):
                raise ValueError(f"initial must be positive: found {float(start.min()):g}")
            start = start.log()
        growth = drift - 0.5 * scale.square()
        base = BrownianMotion(scale, times, start, growth, memory, validate_args)
        super().__init__(base, [ExpTransform()], validate_args=validate_args)
        self.drift, self.scale = drift, scale
        self._start = initial

    def expand(self, batch_shape: Any, _instance: Any = None) -> GeometricBrownianMotion:
        """The same process with a larger batch shape.

        :param batch_shape: The new batch shape, to which the old one can be expanded.
        :returns: The expanded distribution.
        """
        new = self._get_checked_instance(GeometricBrownianMotion, _instance)
        new.drift, new.scale, new._start = self.drift, self.scale, self._start
        return super().expand(batch_shape, _instance=new)

    @classmethod
    def scalar(cls, *args: Any, **kwargs: Any) -> ScalarPath:
        """The process of one number, with the arguments of the class; see
        :meth:`PathDistribution.scalar`.

        :returns: A :class:`ScalarPath`.
        """
        return scalar_process(cls, args, kwargs)

    def at(self, z: Tensor, times: Tensor, *, plate_dim: int | None = None) -> Tensor:
        """The states of the path ``z`` at ``times``; see :meth:`PathDistribution.at`.

        :returns: States of shape ``(..., n, D)``.
        """
        return select(z, self.base_dist.times, times, plate_dim=plate_dim)

    def _growth(self) -> Tensor:
        return (with_time(self.drift) * self.base_dist.elapsed()).exp()

    @property
    def mean(self) -> Tensor:
        start = self._start
        if isinstance(start, Distribution):
            start = start.mean
        start = torch.as_tensor(start, dtype=self.scale.dtype)
        mean = with_time(start) * self._growth()
        return mean.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        spread = (with_time(self.scale).square() * self.base_dist.elapsed()).exp()
        var = self.mean.square() * (spread - 1)
        if isinstance(self._start, Distribution):
            var = var + with_time(self._start.variance) * self._growth().square() * spread
        return var


def _log(law: Distribution) -> Distribution:
    """The law of the logarithm: for a LogNormal, the Normal that it was made of."""
    inside = getattr(law, "base_dist", None)
    if isinstance(inside, torch.distributions.LogNormal):
        return Normal(inside.loc, inside.scale).to_event(1)
    return TransformedDistribution(law, [ExpTransform().inv])
