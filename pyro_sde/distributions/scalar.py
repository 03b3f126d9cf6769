"""Processes of one number: no dimension for the state, in parameters or in values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pyro.distributions import TransformedDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, Transform, constraints

from .._arrays import as_tensor
from .._checks import broadcasts_to
from ..times import select

__all__ = ["DropState", "ScalarPath", "scalar_process"]


class DropState(Transform):
    """From paths of shape ``(..., T, 1)`` to ``(..., T)``."""

    domain = constraints.independent(constraints.real, 2)
    codomain = constraints.independent(constraints.real, 1)
    bijective = True
    sign = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DropState)

    __hash__ = Transform.__hash__

    def with_cache(self, cache_size: int = 1) -> DropState:
        return self if self._cache_size == cache_size else DropState(cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        return y.unsqueeze(-1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-2])

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        return shape[:-1]

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape, 1))


class ScalarPath(TransformedDistribution):
    """A process with one state, whose value has no dimension for it: ``batch_shape + (T,)``.

    ``OrnsteinUhlenbeck.scalar(...)``, and ``scalar(...)`` of every other process, makes one from
    parameters of the batch shape, as those of a ``Normal`` are. So a latent parameter is passed as
    it was drawn, in plates and with vectorised particles, too.

    Example::

        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> times = torch.linspace(0.0, 1.0, 11)
        >>> def model():
        ...     rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
        ...     prior = OrnsteinUhlenbeck.scalar(rate, 0.0, 1.0, times)
        ...     z = pyro.sample("z", prior)
        ...     return z, prior.at(z, times[-3:])
        >>> z, last = model()
        >>> z.shape, last.shape
        (torch.Size([11]), torch.Size([3]))

    :param path: A path distribution with D = 1, or one under elementwise transforms.
    """

    def __init__(self, path: Any, validate_args: bool | None = None) -> None:
        if isinstance(path, ScalarPath) or len(path.event_shape) != 2:
            raise TypeError(
                "path must be a path distribution whose values have shape (..., T, 1): found "
                f"{type(path).__name__} of event_shape {tuple(path.event_shape)}"
            )
        if path.event_shape[-1] != 1:
            raise ValueError(
                f"a scalar process has one state, and {type(path).__name__} has "
                f"{path.event_shape[-1]}: parameters and initial must have the batch shape, "
                "without a dimension for the state. A process in R^D is made without scalar"
            )
        super().__init__(path, [DropState()], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ScalarPath:
        """The same process with a larger batch shape.

        :param batch_shape: The new batch shape, to which the old one can be expanded.
        :returns: The expanded distribution.
        """
        new = self._get_checked_instance(ScalarPath, _instance)
        return super().expand(batch_shape, _instance=new)

    @property
    def path(self) -> Any:
        """The path distribution inside, with values of shape ``(..., T, 1)``."""
        return self.base_dist

    @property
    def times(self) -> Tensor:
        """The grid."""
        inside = self.base_dist
        while not hasattr(inside, "times"):
            inside = inside.base_dist
        return inside.times

    @constraints.dependent_property
    def support(self) -> Any:
        return constraints.independent(self.base_dist.support.base_constraint, 1)

    @property
    def mean(self) -> Tensor:
        return self.base_dist.mean.squeeze(-1)

    @property
    def variance(self) -> Tensor:
        return self.base_dist.variance.squeeze(-1)

    def at(self, z: Tensor, times: Tensor, *, plate_dim: int | None = None) -> Tensor:
        """The values of the path ``z`` at ``times``, which must be on the grid.

        Inside of a ``pyro.plate`` with as many elements as there are times, they are placed in
        that plate.

        Example::

            >>> import torch
            >>> from pyro_sde.distributions import BrownianMotion
            >>> path = BrownianMotion.scalar(1.0, torch.tensor([0.0, 1.0, 2.0]), 0.0)
            >>> path.at(torch.tensor([0.0, 3.0, 5.0]), torch.tensor([2.0, 1.0]))
            tensor([5., 3.])

        :param z: A path of this process, of shape ``(..., T)``.
        :param times: Times of shape ``(n,)`` or ``(..., n)``.
        :param plate_dim: As in :func:`~pyro_sde.select`.
        :returns: Values of shape ``(..., n)``.
        """
        T = self.event_shape[0]
        if z.shape[-1:] != (T,):
            raise ValueError(
                f"z must be a path of this process, of shape (..., {T}): found {tuple(z.shape)}"
            )
        return select(z.unsqueeze(-1), self.times, times, plate_dim=plate_dim).squeeze(-1)


def scalar_process(make: Callable[..., Any], args: tuple, kwargs: dict) -> ScalarPath:
    """``make(*args, **kwargs)`` as a scalar process.

    Tensors other than ``times`` and distributions get a last dimension for the state, functions
    are called without one.
    """
    bound = inspect.signature(make).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        if name != "times":
            bound.arguments[name] = _with_state(name, value)
    return ScalarPath(make(*bound.args, **bound.kwargs))


def _with_state(name: str, value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = as_tensor(np.ma.asarray(value), name)
    if isinstance(value, Tensor):
        return value.unsqueeze(-1) if value.dim() else value
    if isinstance(value, ScalarPath):
        return value.path
    if isinstance(value, Distribution):
        return _law_with_state(name, value)
    if callable(value) and not isinstance(value, (nn.Module, type)):
        return _OfScalars(name, value)
    return value


def _law_with_state(name: str, law: Distribution) -> Distribution:
    if not law.batch_shape or law.event_shape:
        return law
    try:
        parameters = {k: getattr(law, k).unsqueeze(-1) for k in law.arg_constraints}
        return type(law)(**parameters).to_event(1)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, NotImplementedError) as e:
        raise ValueError(
            f"{name} is a {type(law).__name__} of batch_shape {tuple(law.batch_shape)}, which "
            "cannot be given a dimension for the state: make its parameters one dimension larger, "
            "x.unsqueeze(-1), and it .to_event(1)"
        ) from e


class _OfScalars:
    """A function of ``(t, z)`` whose states have no dimension of their own, as one whose have."""

    def __init__(self, name: str, f: Callable[[Tensor, Tensor], Any]) -> None:
        self.name, self.f = name, f

    def __call__(self, t: Tensor, z: Tensor) -> Any:
        x = z.squeeze(-1)
        found = self.f(t.squeeze(-1) if t.dim() else t, x)
        if isinstance(found, tuple):
            return tuple(self._grown(y, x) for y in found)
        return self._grown(found, x)

    def _grown(self, y: Any, x: Tensor) -> Any:
        if not isinstance(y, Tensor) or not y.dim():
            return y
        if not broadcasts_to(y.shape, x.shape):
            raise ValueError(
                f"{self.name}(t, z) returned shape {tuple(y.shape)} for states of shape "
                f"{tuple(x.shape)}. The states of a scalar process have no dimension of their own: "
                "a latent is used as it was drawn, without unsqueeze(-1)"
            )
        return y.expand_as(x).unsqueeze(-1)
