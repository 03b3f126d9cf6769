"""The Ornstein-Uhlenbeck process, exact on any grid."""

from __future__ import annotations

from pyro.distributions import Normal
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.utils.weak import WeakIdKeyDictionary

from ..simulation.base import LinearSteps
from .parameters import as_parameters, phi, validates, with_time
from .path import PathDistribution

__all__ = ["OrnsteinUhlenbeck"]


# The steps of the last process with constant parameters on each grid: a model builds that process
# anew for every path.
_steps_on_grid = WeakIdKeyDictionary()


class OrnsteinUhlenbeck(PathDistribution):
    r"""The process :math:`dz = -\mathrm{rate}\,(z - \mathrm{loc})\,dt + \mathrm{scale}\,dB` by its
    exact transition, which is right on any grid, however coarse:

    .. math::

        \mathrm{mean} = \mathrm{loc} + (z - \mathrm{loc})\,e^{-\mathrm{rate}\,dt}, \qquad
        \mathrm{var} = \mathrm{scale}^2\,\frac{1 - e^{-2\,\mathrm{rate}\,dt}}{2\,\mathrm{rate}}

    A rate of zero is Brownian motion. Parameters broadcast to ``batch_shape + (D,)``; scalars
    mean any D.

    Example::

        >>> import torch
        >>> OrnsteinUhlenbeck(1.0, 0.0, 0.7, torch.linspace(0.0, 3.0, 31)).sample().shape
        torch.Size([31, 1])

    :param rate: Speed of the return to ``loc``.
    :param loc: The long-run mean.
    :param scale: The diffusion, positive (not the stationary standard deviation, which is
        ``scale / sqrt(2 * rate)``).
    :param times: The grid, of shape ``(T,)`` or ``(..., T)``.
    :param initial: A Tensor, or a Distribution over :math:`\mathbb{R}^D`; by default the stationary
        law, which needs a positive rate.
    :param memory: ``"graph"``; or ``"recompute"``, to keep only the states and the noise of a
        drawn path, and of what a guide draws in its place.
    """

    # Without "loc" and "scale", by which Pyro's AutoReparam recognises a location-scale family. A
    # path is not one. Both arguments are checked in spite of that.
    arg_constraints = {"rate": constraints.real}  # noqa: RUF012

    def __init__(
        self,
        rate: Tensor | float,
        loc: Tensor | float,
        scale: Tensor | float,
        times: Tensor,
        initial: Tensor | float | Distribution | None = None,
        memory: str = "graph",
        validate_args: bool | None = None,
    ) -> None:
        (self.rate, self.loc, self.scale), shape = as_parameters(
            validate_args, rate=rate, loc=loc, scale=scale
        )
        numbers = (rate, loc, scale)
        self._numbers = numbers if all(isinstance(x, float) for x in numbers) else None
        if initial is None:
            if validates(validate_args) and not bool((self.rate > 0).all()):
                raise ValueError(
                    "the default initial is the stationary law, which needs rate > 0: found "
                    f"rate={float(self.rate.min()):g}; pass initial= a Tensor or a Distribution"
                )
            spread = self.scale / (2 * self.rate).sqrt()
            stationary = Normal(self.loc, spread, validate_args=validate_args)
            initial = stationary.expand(shape or (1,)).to_event(1)
        super().__init__(
            times, initial, param_shape=shape, memory=memory, validate_args=validate_args
        )

    def _decay_and_scale(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        x = self.rate * dt
        return (-x).exp(), self.scale * (dt * phi(2 * x)).sqrt()

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        decay, scale = self._decay_and_scale(dt)
        return self.loc + (z - self.loc) * decay, scale

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return -self.rate * (z - self.loc), self.scale.expand_as(z)

    def linear_steps(self) -> LinearSteps:
        times = self.times
        # The steps have as many dimensions as the batch.
        key = (self._numbers, self.rate.dtype, len(self.batch_shape), times._version)
        found = None if self._numbers is None else _steps_on_grid.get(times)
        if found is not None and found[0] == key:
            return found[1]
        _, dt = self.step_times(0)
        decay, scale = self._decay_and_scale(dt)
        steps = LinearSteps(decay, self.loc * (1 - decay), scale)
        if self._numbers is not None and not (times.requires_grad or scale.is_inference()):
            _steps_on_grid[times] = (key, steps)
        return steps

    @property
    def mean(self) -> Tensor:
        start = self.initial if isinstance(self.initial, Tensor) else self.initial.mean
        loc, rate = with_time(self.loc), with_time(self.rate)
        mean = loc + (with_time(start) - loc) * (-rate * self.elapsed()).exp()
        return mean.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        x = with_time(self.rate) * self.elapsed()
        var = with_time(self.scale).square() * self.elapsed() * phi(2 * x)
        if not isinstance(self.initial, Tensor):
            var = var + with_time(self.initial.variance) * (-2 * x).exp()
        return var.expand(self.batch_shape + self.event_shape)
