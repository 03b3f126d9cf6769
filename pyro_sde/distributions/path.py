"""The base of every path measure: a Gaussian Markov chain on a time grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from .._lean import check_memory
from .checks import check_draw, check_scale, check_times, expand_initial, initial_shape
from .fused import Affine, FusedDraw, NetworkSteps
from .guard import refuse_unsupported_inference, scoring_is_deferred
from .lean import LeanDraw, simulate
from .refine import refined_sample
from .tolerance import current_tolerance
from .util import broadcast_shapes

__all__ = ["Draw", "PathDistribution"]

Step = Callable[[int, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Draw:
    """How a path was made, kept beside it so that nothing has to be evaluated twice.

    ``z``, ``mean``, ``scale``, ``u`` and ``log_c`` hold one tensor a step, still attached to the
    graph of that step alone; ``eps`` is the standard normal noise with time first.
    """

    value: Tensor
    has_grad: bool
    z: list[Tensor]
    mean: list[Tensor]
    scale: list[Tensor]
    eps: Tensor
    u: list[Tensor] | None = None
    log_c: list[Tensor] | None = None

    def scales(self) -> Tensor:
        """The scale of every step, time first."""
        return torch.stack([scale.detach() for scale in self.scale])

    def control_at(self, i: int) -> Tensor | None:
        return None if self.u is None else self.u[i]


AnyDraw = Draw | FusedDraw | LeanDraw


class _Origin:
    """The identity of a process, shared with its expanded copies, and what it drew last."""

    def __init__(self) -> None:
        self.last: AnyDraw | None = None

    def __getstate__(self) -> dict:
        return {}  # a draw belongs to a graph, which can be neither copied nor saved

    def __setstate__(self, state: dict) -> None:
        self.last = None


class PathDistribution(TorchDistribution):
    r"""A process on a time grid :math:`t_0 < \dots < t_N`, as a Gaussian Markov chain:

    .. math:: z_{i+1} \mid z_i \sim N(\mathrm{mean}_i(z_i), \mathrm{scale}_i(z_i)^2)

    A subclass defines the process by :meth:`transition` alone. The value is a plain tensor of
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
        learned point) or a Distribution over R^D. A scalar stands for any D.
    :param param_shape: The common shape of the parameters, ``batch_shape + (D,)``; ``()`` leaves
        D to ``initial``.
    :param memory: ``"graph"``; or ``"recompute"``, and of a path that is drawn only the states and
        the noise are kept: each step is redone in the backward pass.
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
        self._origin = _Origin()
        event_shape = torch.Size((self.times.shape[-1], shape[-1]))
        super().__init__(shape[:-1], event_shape, validate_args)

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and scale of the state a time ``dt`` after it was ``z`` at time ``t``.

        ``z`` has shape ``(..., D)``; ``t`` and ``dt`` broadcast against ``z[..., :1]``. For a
        whole path at once, time is the leading dimension of all three.
        """
        raise NotImplementedError

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Drift and diffusion of the SDE that the transition discretises, of the shape of ``z``."""
        raise NotImplementedError(f"{type(self).__name__} does not say what SDE it discretises")

    def milstein(self, t: Tensor, dt: Tensor, z: Tensor, scale: Tensor) -> Tensor | None:
        """By how much ``scale`` would change if the state moved by it, entry by entry, or None
        where it does not depend on the state: half of it, times eps^2 - 1, makes Milstein's step,
        of strong order 1, out of Euler's."""
        return None

    def kernel(self) -> Step:
        """The transition as a function ``(i, z) -> (mean, scale)`` of the step's number.

        Override it to compute once per path what does not depend on the state.
        """
        t, dt = self.step_times()
        return lambda i, z: self.transition(t[i], dt[i], z)

    def affine(self) -> Affine | None:
        """Decay, shift and scale of every step, time first, if the mean is shift + decay z and
        the scale does not depend on the state; else None."""
        return None

    def networked(self, t: Tensor, dt: Tensor) -> tuple[Affine, NetworkSteps] | tuple[None, None]:
        """As :meth:`affine`, if ``dt`` times the output of a network is added to that mean, and
        that network on the grid; else nothing."""
        return None, None

    def control_step(
        self, t: Tensor, dt: Tensor, z: Tensor, out: Any = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None] | None]:
        """The transition and, for a path pushed by a control, w and log c (see
        :mod:`~pyro_sde.distributions.ratio`) against the one that is pushed; else None.

        :param out: What the control returns there, if it is known.
        """
        return *self.transition(t, dt, z), None

    def stepwise(self, t: Tensor) -> tuple[Sequence[Tensor], Callable[..., Any] | None]:
        """What a control knows ahead at the start of every step, time first, and the control as a
        function of ``(t, z)`` and of one row of each of these; else nothing, and None."""
        return (), None

    def step_times(self, sample_ndim: int | None = None) -> tuple[Tensor, Tensor]:
        """Start and length of every step, time first, the last dimension of size 1.

        With ``sample_ndim``, ones are put after the time so that both broadcast against a path
        with that many dimensions left of ``batch_shape``.
        """
        times = self.times.movedim(-1, 0).unsqueeze(-1)
        if sample_ndim is not None:
            ones = sample_ndim + len(self.batch_shape) + 2 - times.dim()
            times = times.reshape(times.shape[:1] + (1,) * ones + times.shape[1:])
        return times[:-1], times[1:] - times[:-1]

    def elapsed(self) -> Tensor:
        """Time since ``t_0``, of shape ``(..., T, 1)``."""
        return (self.times - self.times[..., :1]).unsqueeze(-1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PathDistribution:
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

    def without_memory_of_draws(self) -> PathDistribution:
        new = self.expand(self.batch_shape)
        new._origin = _Origin()
        return new

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        refuse_unsupported_inference()
        z0 = self._draw_initial(torch.Size(sample_shape))
        tol = current_tolerance()
        if tol is not None:
            self._origin.last = None
            return refined_sample(self, z0, tol)
        N = self.times.shape[-1] - 1
        eps = torch.randn((N, *z0.shape), dtype=z0.dtype, device=z0.device)
        try:
            draw = self._simulate(z0, eps) if self.memory == "graph" else simulate(self, z0, eps)
        except RuntimeError as e:
            if "dtype" not in str(e):
                raise
            raise ValueError(
                f"a step of the path fails on states of {z0.dtype}, times being "
                f"{self.times.dtype}: {e}. Use one dtype: times.to(...) as the networks are, or "
                "network.double()"
            ) from e
        if self._validate_args:
            check_draw(self, draw)
        self._origin.last = draw
        return draw.value

    def _draw_initial(self, sample_shape: torch.Size) -> Tensor:
        shape = self._extended_shape(sample_shape)
        if isinstance(self.initial, Tensor):
            z0 = self.initial.expand(shape[:-2] + shape[-1:])
        else:
            z0 = self.initial.expand(self.batch_shape).rsample(sample_shape)
        return z0.to(torch.promote_types(z0.dtype, self.times.dtype))

    def _simulate(self, z0: Tensor, eps: Tensor) -> Draw | FusedDraw:
        step, z = self.kernel(), [z0]
        means, scales = [], []
        for i, e in enumerate(eps.unbind(0)):
            mean, scale = step(i, z[-1])
            z.append(torch.addcmul(mean, scale, e))
            means.append(mean)
            scales.append(scale)
        return Draw(torch.stack(z, -2), torch.is_grad_enabled(), z[:-1], means, scales, eps)

    def recall(self, value: Tensor) -> AnyDraw | None:
        """How ``value`` was drawn, if it is the very tensor that was drawn last."""
        draw = self._origin.last
        if draw is None or value is not draw.value:
            return None
        return draw if draw.has_grad or not torch.is_grad_enabled() else None

    def is_same_process(self, other: PathDistribution) -> bool:
        """Whether ``other`` is this distribution or an expanded copy of it."""
        return self._origin is other._origin

    def log_prob(self, value: Tensor) -> Tensor:
        shape = broadcast_shapes(value.shape[:-2], self.batch_shape)
        if scoring_is_deferred():
            return value.new_zeros(shape)
        if self._validate_args:
            self._validate_sample(value)
        z = value.expand(shape + self.event_shape).movedim(-2, 0)
        t, dt = self.step_times(len(shape) - len(self.batch_shape))
        mean, scale = self.transition(t, dt, z[:-1])
        if self._validate_args:
            check_scale(self, scale.detach())
        eps = (z[1:] - mean) / scale
        log_p = -0.5 * eps.square() - scale.log() - 0.5 * math.log(2 * math.pi)
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
