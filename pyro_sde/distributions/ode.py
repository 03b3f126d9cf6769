"""Ordinary differential equations with a random start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from .._checks import broadcast_shapes, check_shape
from ..simulation.base import current_tolerance, simulate
from .guard import path_log_prob_is_skipped
from .path import PathDistribution

__all__ = ["ODEPath"]


class ODEPath(PathDistribution):
    r"""The solution of :math:`dz = f(t, z)\,dt` from a random start: the latent ODE, which is the
    limit of :class:`SDEPath` as the diffusion goes to zero.

    Posterior and prior of such a path differ only in the law of the start, which alone determines
    the KL. The density is with respect to the start. A path that does not solve the equation is an
    error.

    Example::

        >>> import torch
        >>> times = torch.linspace(0.0, 1.0, 11)
        >>> start = torch.distributions.Normal(torch.zeros(2), 1.0)
        >>> start = torch.distributions.Independent(start, 1)
        >>> ODEPath(lambda t, z: -z, start, times).sample((5,)).shape
        torch.Size([5, 11, 2])

    :param drift: f, any callable of ``(t, z)`` that returns the shape of ``z``.
    :param initial: A Tensor of shape ``(..., D)`` or a Distribution over :math:`\mathbb{R}^D`.
    :param times: The grid, of shape ``(T,)`` or ``(..., T)``.
    :param method: ``"midpoint"``, of second order; or ``"euler"``.
    """

    def __init__(
        self,
        drift: Callable[[Tensor, Tensor], Tensor | float],
        initial: Tensor | float | Distribution,
        times: Tensor,
        method: str = "midpoint",
        validate_args: bool | None = None,
    ) -> None:
        if not callable(drift):
            raise TypeError(
                f"drift must be a callable of (t, z), found {drift!r}; a constant is "
                f"lambda t, z: {drift!r}"
            )
        if method not in ("midpoint", "euler"):
            raise ValueError(f'method must be "midpoint" or "euler": found {method!r}')
        self.drift, self.method = drift, method
        super().__init__(times, initial, validate_args=validate_args)

    def starting_at(self, initial: Tensor | Distribution) -> ODEPath:
        r"""The same equation from another start.

        :param initial: The new start, a Tensor or a Distribution over :math:`\mathbb{R}^D`.
        :returns: The new distribution.
        """
        new = ODEPath(self.drift, initial, self.times, self.method, self._validate_args)
        new._record = self._record
        return new

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        f = check_shape("drift", self.drift(t, z), t, z)
        if self.method == "midpoint":
            middle, halfway = t + 0.5 * dt, z + 0.5 * dt * f
            f = check_shape("drift", self.drift(middle, halfway), middle, halfway)
        return z + dt * f, torch.zeros_like(z)

    def flow(self, z0: Tensor) -> Tensor:
        """Solve the equation from a given start.

        :param z0: The start, of shape ``(..., D)``.
        :returns: The path, of shape ``(..., T, D)``.
        """
        task = self._task(z0)
        task.validate = False  # its scale is zero
        return simulate(task, noise=z0.new_zeros(()).expand(task.steps, *z0.shape)).value

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        if current_tolerance() is not None:
            raise NotImplementedError(
                "an ODEPath is solved on its grid, also inside of tolerance(); give it a finer one"
            )
        value = self.flow(self._draw_initial(torch.Size(sample_shape)))
        if self._validate_args and not bool(torch.isfinite(value.detach().sum())):
            raise ValueError(
                "the drift of ODEPath leads to a non-finite state; bound it, or use smaller steps"
            )
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        shape = broadcast_shapes(value.shape[:-2], self.batch_shape)
        if path_log_prob_is_skipped():
            return value.new_zeros(shape)
        nothing = self.check_solution(value)
        return nothing + self._initial_log_prob(value[..., 0, :].expand(shape + value.shape[-1:]))

    @torch.no_grad()
    def check_solution(self, value: Tensor) -> Tensor:
        """Raise an error if a path does not solve the equation.

        :param value: A path of shape ``(..., T, D)``.
        :returns: Zeros of the batch shape.
        """
        shape = broadcast_shapes(value.shape[:-2], self.batch_shape)
        value = value.expand(shape + value.shape[-2:])
        gap = (self.flow(value[..., 0, :]) - value).abs()
        if bool((gap > 1e-4 * (1 + value.abs().amax(-2, keepdim=True))).any()):
            raise ValueError(
                f"the path is up to {float(gap.max()):.3g} away from the solution of the ODE that "
                "has the same start: its density is zero, and the KL to another ODE infinite. "
                "Share the drift of model and guide, or use SDEPath, which has noise"
            )
        return torch.zeros_like(gap[..., 0, 0])
