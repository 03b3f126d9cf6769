"""A stochastic differential equation with any drift and diffusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from .._arrays import as_tensor
from .._checks import DIAGONAL, check_shape
from ..simulation.base import GridNetwork, LinearSteps
from .parameters import as_parameters, validates
from .path import PathDistribution

__all__ = ["SDEPath"]


class _Constant:
    """A diffusion that is the same in all states and at all times."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def __call__(self, t: Tensor, z: Tensor) -> Tensor:
        return self.scale

    def without_state(self, t: Tensor) -> Tensor:
        return self.scale


class SDEPath(PathDistribution):
    r"""The process :math:`dz = f(t, z)\,dt + g(t, z)\,dB` by Euler-Maruyama steps on the grid:

    .. math:: \mathrm{mean} = z + f\,dt, \qquad \mathrm{scale} = g\,\sqrt{dt}

    The noise is diagonal. ``drift`` and ``diffusion`` are callables of ``(t, z)``, modules
    included, with ``z`` of shape ``(..., D)`` and ``t`` that broadcasts against ``z[..., :1]``.
    They must treat each row of the batch independently. There is a warning for a drift that
    contracts at a rate above 2 / dt, because its Euler steps overshoot.

    Example::

        >>> import torch, pyro.distributions as dist
        >>> times = torch.linspace(0.0, 1.0, 51)
        >>> double_well = SDEPath(lambda t, z: z - z**3, 0.5, torch.zeros(1), times)
        >>> double_well.sample((10,)).shape
        torch.Size([10, 51, 1])

    :param drift: f, which returns the shape of ``z``, or one number for all entries.
    :param diffusion: g, positive: a callable that returns a tensor that broadcasts to ``z``. If it
        is the same at all times and in all states, a number or a Tensor that broadcasts to
        ``batch_shape + (D,)``.
    :param initial: A Tensor of shape ``(..., D)`` or a Distribution over :math:`\mathbb{R}^D`.
    :param times: The grid, of shape ``(T,)`` or ``(..., T)``.
    :param memory: ``"graph"``; or ``"recompute"``, to keep only the states and the noise of a
        drawn path, and of what a guide draws in its place.
    """

    def __init__(
        self,
        drift: Callable[[Tensor, Tensor], Tensor | float],
        diffusion: Callable[[Tensor, Tensor], Tensor | float] | Tensor | float,
        initial: Tensor | float | Distribution,
        times: Tensor,
        memory: str = "graph",
        validate_args: bool | None = None,
    ) -> None:
        shape: tuple[int, ...] = ()
        if isinstance(diffusion, (int, float, Tensor, np.ndarray, np.generic)):
            constant: Any = as_tensor(diffusion, "diffusion")
            if validates(validate_args) and _looks_like_a_matrix(constant):
                raise ValueError(
                    f"diffusion is a matrix of shape {tuple(constant.shape)}. {DIAGONAL}"
                )
            (scale,), shape = as_parameters(validate_args, scale=constant)
            diffusion = _Constant(scale)
        for name, f in (("drift", drift), ("diffusion", diffusion)):
            if not callable(f):
                raise TypeError(
                    f"{name} must be a callable of (t, z), found {f!r}; a constant is "
                    f"lambda t, z: {f!r}"
                )
        self.drift, self.diffusion = drift, diffusion
        super().__init__(
            times, initial, param_shape=shape, memory=memory, validate_args=validate_args
        )

    def linear_steps(self) -> LinearSteps | None:
        t, dt = self.step_times(0)
        drift, g = _ask(self.drift, "on_grid", t), _ask(self.diffusion, "without_state", t)
        if g is None or not isinstance(drift, GridNetwork) or drift.contraction:
            return None
        return LinearSteps(torch.ones_like(dt), torch.zeros_like(dt), g * dt.sqrt(), drift, dt)

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        f, g = self._evaluate(t, z)
        return z + f * dt, g * dt.sqrt()

    def _evaluate(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        f = check_shape("drift", self.drift(t, z), t, z)
        return f, check_shape("diffusion", self.diffusion(t, z), t, z, broadcast=True)

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        f, g = self._evaluate(t, z)
        return f.expand_as(z), g.expand_as(z)


def _looks_like_a_matrix(x: Any) -> bool:
    """Whether ``x`` is square and cannot be a batch of diagonals, because it has zeros."""
    return (
        torch.is_tensor(x) and x.dim() > 1 and x.shape[-1] == x.shape[-2] and bool((x <= 0).any())
    )


def _ask(f: Any, method: str, t: Tensor) -> Any:
    found = getattr(f, method, None)
    return None if found is None else found(t)
