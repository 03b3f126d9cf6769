"""The base class of all path distributions: a Gaussian Markov chain on a time grid."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from .._checks import broadcast_shapes, check_memory
from ..simulation.base import Draw, LinearSteps, Task, simulate
from ..simulation.checks import check_scale
from ..simulation.step import diagonal_of, whiten
from ..times import select
from .guard import path_log_prob_is_skipped, refuse_unsupported_inference
from .parameters import check_times, expand_initial, initial_shape
from .scalar import ScalarPath, scalar_process

__all__ = ["PathDistribution"]

DESCRIBES_TRANSITION = ("linear_steps", "coefficients", "mean", "variance")
"""Methods and properties that describe the process that ``transition`` defines."""


class _DrawRecord:
    """The identity of a process, shared with its expanded copies, and what it drew last."""

    def __init__(self) -> None:
        self.last: Draw | None = None

    def __getstate__(self) -> dict:
        return {}  # a draw belongs to a graph, which can be neither copied nor saved

    def __setstate__(self, state: dict) -> None:
        self.last = None


class PathDistribution(TorchDistribution):
    r"""A process on a time grid :math:`t_0 < \dots < t_N`, as a Gaussian Markov chain:

    .. math:: z_{i+1} \mid z_i \sim N(\mathrm{mean}_i(z_i), S_i(z_i)\,S_i(z_i)^T)

    with the scale S diagonal or lower-triangular. A subclass defines the process by
    :meth:`transition` alone. The value is a plain tensor of
    shape ``sample_shape + batch_shape + (len(times), D)``, the state at ``t_0`` included.

    Example::

        >>> import torch
        >>> class DoubleWell(PathDistribution):  # dz = (z - z^3) dt + 0.3 dB
        ...     def transition(self, t, dt, z):
        ...         return z + (z - z**3) * dt, 0.3 * dt.sqrt().expand_as(z)
        >>> path = DoubleWell(torch.linspace(0.0, 20.0, 201), torch.zeros(1))
        >>> z = path.sample((5,))
        >>> z.shape, path.log_prob(z).shape
        (torch.Size([5, 201, 1]), torch.Size([5]))

    :param times: The grid, strictly increasing, of shape ``(T,)`` or ``(..., T)``.
    :param initial: The law of the state at ``t_0``: a Tensor of shape ``(..., D)`` (a known or
        learned point) or a Distribution over :math:`\mathbb{R}^D`. A scalar stands for any D.
    :param param_shape: The common shape of the parameters, ``batch_shape + (D,)``; ``()`` leaves
        D to ``initial``.
    :param memory: ``"graph"``; or ``"recompute"``, to keep only the states and the noise of a
        drawn path: each step is computed again in the backward pass.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(
        self,
        times: Tensor,
        initial: Tensor | float | Distribution,
        *,
        param_shape: tuple[int, ...] = (),
        memory: str = "graph",
        validate_args: bool | None = None,
    ) -> None:
        self.memory = check_memory(memory, "graph", "recompute")
        self.times = check_times(times)
        shapes = {
            "parameters": tuple(param_shape) or (1,),
            "initial": initial_shape(initial),
            "times": (*self.times.shape[:-1], 1),
        }
        try:
            shape = broadcast_shapes(*shapes.values())
        except RuntimeError as e:
            raise ValueError(
                "the parameters and initial, of shape batch_shape + (D,), and times, of shape "
                f"batch_shape + (T,), must broadcast together: found {shapes} (times without "
                "their last dimension); add dimensions of size 1 where a batch is shared"
            ) from e
        self.initial = expand_initial(initial, shape)
        self._record = _DrawRecord()
        event_shape = torch.Size((self.times.shape[-1], shape[-1]))
        super().__init__(shape[:-1], event_shape, validate_args)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__

        def depth(name: str) -> int:
            return next(i for i, c in enumerate(order) if name in vars(c))

        for name in DESCRIBES_TRANSITION:
            # A parent's description of its own transition is not true of another transition.
            if depth(name) > depth("transition"):
                setattr(cls, name, getattr(PathDistribution, name))

    @classmethod
    def scalar(cls, *args: Any, **kwargs: Any) -> ScalarPath:
        """The process of one number, made from the arguments of the class.

        Parameters have the batch shape, as those of a ``Normal`` have. Functions see states
        without a dimension of their own, and the value has the shape ``batch_shape + (T,)``. Torch
        modules, and the ``transition`` of a subclass, see states of shape ``(..., 1)`` as always.

        Example::

            >>> import torch
            >>> from pyro_sde.distributions import SDEPath
            >>> rate, times = torch.tensor([0.5, 1.0, 2.0]), torch.linspace(0.0, 1.0, 11)
            >>> SDEPath.scalar(lambda t, z: -rate * z, 0.3, 1.0, times).expand([3]).sample().shape
            torch.Size([3, 11])

        :returns: A :class:`ScalarPath`.
        """
        return scalar_process(cls, args, kwargs)

    def at(self, z: Tensor, times: Tensor, *, plate_dim: int | None = None) -> Tensor:
        """The states of the path ``z`` at ``times``: ``select(z, self.times, times)``.

        :param z: A path of this process, of shape ``(..., T, D)``.
        :param times: Times on the grid, of shape ``(n,)`` or ``(..., n)``.
        :param plate_dim: As in :func:`~pyro_sde.select`.
        :returns: States of shape ``(..., n, D)``.
        """
        return select(z, self.times, times, plate_dim=plate_dim)

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and scale of the state a time ``dt`` after it was ``z`` at time ``t``.

        For a whole path at once, time is the leading dimension of all three arguments.

        :param t: The time before the step, which broadcasts against ``z[..., :1]``.
        :param dt: The length of the step, which broadcasts likewise.
        :param z: The state before the step, of shape ``(..., D)``.
        :returns: The mean, of the shape of ``z``; and the scale, a vector that broadcasts to the
            shape of ``z``, or a lower-triangular matrix of shape ``(..., D, D)``.
        """
        raise NotImplementedError

    def linear_steps(self) -> LinearSteps | None:
        """All steps at once, for a process whose mean is linear in the state (up to a network in
        the drift) and whose scale does not depend on the state.

        A subclass that overrides :meth:`transition` and not this method returns None.

        :returns: The coefficients of all steps, time first; None for other processes.
        """
        return None

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Drift and diffusion of the SDE that the transition discretises.

        A subclass that overrides :meth:`transition` and not this method raises an error.

        :param t: Times, which broadcast against ``z[..., :1]``.
        :param z: States of shape ``(..., D)``.
        :returns: Drift and diffusion, both of the shape of ``z``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what SDE its transition discretises: define "
            "coefficients(t, z) -> (drift, diffusion)"
        )

    @property
    def mean(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not know its mean: average draws")

    @property
    def variance(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not know its variance: use draws")

    def step_times(self, sample_ndim: int | None = None) -> tuple[Tensor, Tensor]:
        """The start and the length of every step.

        :param sample_ndim: The number of dimensions that a path has left of ``batch_shape``; the
            results then broadcast against it.
        :returns: Two tensors of shape ``(T - 1, ..., 1)``, time first.
        """
        times = self.times.movedim(-1, 0).unsqueeze(-1)
        if sample_ndim is not None:
            ones = sample_ndim + len(self.batch_shape) + 2 - times.dim()
            times = times.reshape(times.shape[:1] + (1,) * ones + times.shape[1:])
        return times[:-1], times[1:] - times[:-1]

    def elapsed(self) -> Tensor:
        """The time since ``t_0``.

        :returns: A tensor of shape ``(..., T, 1)``.
        """
        return (self.times - self.times[..., :1]).unsqueeze(-1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PathDistribution:
        """The same process with a larger batch shape.

        :param batch_shape: The new batch shape, to which the old one can be expanded.
        :returns: A distribution that shares the parameters and the last draw.
        """
        batch_shape = torch.Size(batch_shape)
        try:
            torch.empty(self.batch_shape, device="meta").expand(batch_shape)
        except RuntimeError as e:
            raise ValueError(
                f"cannot expand batch_shape {tuple(self.batch_shape)} to {tuple(batch_shape)}"
            ) from e
        # Parameters broadcast against the state from the right: nothing else has to grow.
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        new._batch_shape = batch_shape
        return new

    def _without_record(self) -> PathDistribution:
        """A copy that does not know what was drawn, lest a graph that holds it keep itself."""
        new = self.expand(self.batch_shape)
        new._record = _DrawRecord()
        return new

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw paths, with gradients to the parameters.

        :param sample_shape: The shape of the sample.
        :returns: Paths of shape ``sample_shape + batch_shape + (T, D)``.
        """
        refuse_unsupported_inference()
        draw = self.draw(self._draw_initial(torch.Size(sample_shape)))
        self._record.last = draw if draw.noise is not None else None
        return draw.value

    def draw(self, z0: Tensor, noise: Tensor | None = None) -> Draw:
        """Draw a path from a given start, with its noise and log ratio.

        :param z0: The start, of shape ``sample_shape + batch_shape + (D,)``.
        :param noise: The standard normal noise of the steps, time first; by default it is drawn.
        :returns: The path in ``value``, of shape ``sample_shape + batch_shape + (T, D)``; its
            ``noise``; and, for a path with a control, its log ratio to the prior in ``ratio``.
        """
        try:
            return simulate(self._task(z0), noise)
        except (RuntimeError, TypeError) as e:
            advice = self._advice(e, z0)
            if advice is None:
                raise
            raise ValueError(advice) from e

    def _advice(self, error: Exception, z0: Tensor) -> str | None:
        """A better message for errors of Python or torch that do not name the failing step."""
        if isinstance(error, TypeError) and "positional argument" in str(error):
            return (
                f"a step of {type(self).__name__} fails: {error}. Drift, diffusion and control are "
                "called with two arguments, (t, z)"
            )
        if type(error) is RuntimeError and ("shape" in str(error) or "size" in str(error)):
            return (
                f"a step of {type(self).__name__} fails on states of shape {tuple(z0.shape)}: "
                f"{error}. Drift, diffusion and control must take states in R^{z0.shape[-1]}, the "
                "last dimension, with any dimensions before it"
            )
        return None

    def _task(self, z0: Tensor) -> Task:
        """What a simulator has to do for a path that starts at ``z0``."""
        t, dt = self.step_times(z0.dim() - 1 - len(self.batch_shape))
        law = self if self.memory == "graph" else self._without_record()
        return Task(law, law, z0, t, dt, memory=self.memory, validate=self._validate_args)

    def _draw_initial(self, sample_shape: torch.Size) -> Tensor:
        shape = self._extended_shape(sample_shape)
        if isinstance(self.initial, Tensor):
            z0 = self.initial.expand(shape[:-2] + shape[-1:])
        else:
            z0 = self.initial.expand(self.batch_shape).rsample(sample_shape)
        return z0.to(torch.promote_types(z0.dtype, self.times.dtype))

    def last_draw(self, value: Tensor) -> Draw | None:
        """The noise and log ratio of the last draw.

        :param value: A path.
        :returns: The draw of ``value``; None if that is not the tensor that was drawn last.
        """
        draw = self._record.last
        if draw is None or value is not draw.value:
            return None
        return draw if draw.has_grad or not torch.is_grad_enabled() else None

    def is_same_process(self, other: PathDistribution) -> bool:
        """Whether another distribution is the same process.

        :param other: The other distribution.
        :returns: True if ``other`` is this distribution or an expanded copy of it.
        """
        return self._record is other._record

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density of paths: that of the start, and the sum over all steps.

        :param value: Paths of shape ``(..., T, D)``.
        :returns: Log densities of shape ``sample_shape + batch_shape``.
        """
        try:
            shape = broadcast_shapes(value.shape[:-2], self.batch_shape)
        except RuntimeError as e:
            raise ValueError(
                f"value has shape {tuple(value.shape)}, a path of this distribution "
                f"{tuple(self.batch_shape + self.event_shape)}: its dimensions before the last "
                "two, (T, D), must broadcast with batch_shape"
            ) from e
        if path_log_prob_is_skipped():
            return value.new_zeros(shape)
        if self._validate_args:
            self._validate_sample(value)
        z = value.expand(shape + self.event_shape).movedim(-2, 0)
        t, dt = self.step_times(len(shape) - len(self.batch_shape))
        mean, scale = self.transition(t, dt, z[:-1])
        if self._validate_args:
            check_scale(self, scale, z[1:])
        eps = whiten(mean, scale, z[1:])
        log_scale = diagonal_of(scale, eps).log()
        log_p = -0.5 * eps.square() - log_scale - 0.5 * math.log(2 * math.pi)
        return self._initial_log_prob(z[0]) + log_p.sum((0, -1))

    def _initial_log_prob(self, z0: Tensor) -> Tensor:
        if not isinstance(self.initial, Tensor):
            return self.initial.log_prob(z0)
        tol = 64 * torch.finfo(z0.dtype).eps
        gap = (z0 - self.initial).abs() - tol * (1 + self.initial.abs())
        off = (gap > 0).any(-1)
        if self._validate_args and bool(off.any()):
            raise ValueError(
                f"the path starts {float(gap.max()):.3g} away from initial, a fixed point, so its "
                "density is zero; give initial a Distribution (a narrow Normal, say) to let the "
                "start vary, as NUTS and mean-field guides need"
            )
        return torch.zeros(off.shape, dtype=z0.dtype, device=z0.device).masked_fill(off, -math.inf)
