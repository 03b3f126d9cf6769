"""Several processes as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._checks import broadcast_shapes, pad_after_time
from ..simulation.base import LinearSteps
from ..simulation.step import is_matrix
from .ode import ODEPath
from .path import PathDistribution
from .scalar import ScalarPath
from .starts import join_starts, side_by_side

__all__ = ["Stack"]


class Stack(PathDistribution):
    """Independent processes on one grid as one process, whose state concatenates their states.

    Processes that are observed together, such as the terms of a sum, are correlated in the
    posterior. Two sample sites have two controls that do not see each other's state, and their
    posterior is much too narrow. As one site they share one control of both states and one
    correlated noise.

    Example::

        >>> import torch
        >>> from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck
        >>> times = torch.linspace(0.0, 1.0, 11)
        >>> trend, cycles = BrownianMotion(0.3, times, 0.0), OrnsteinUhlenbeck(1.0, 0.0, 1.0, times)
        >>> stack = Stack(trend, cycles)
        >>> z = stack.sample()
        >>> z.shape
        torch.Size([11, 2])
        >>> a, b = stack.split(z)
        >>> a.shape, b.shape
        (torch.Size([11, 1]), torch.Size([11, 1]))

    :param processes: Path distributions on the same ``times``, scalar ones too; their batch
        shapes broadcast. A start may be a point for some and a Distribution for others.
    """

    def __init__(
        self, *processes: PathDistribution | ScalarPath, validate_args: bool | None = None
    ) -> None:
        if not processes:
            raise ValueError("Stack needs at least one process")
        self._is_scalar = [isinstance(p, ScalarPath) for p in processes]
        processes = tuple(p.path if isinstance(p, ScalarPath) else p for p in processes)
        for p in processes:
            if not isinstance(p, PathDistribution) or isinstance(p, ODEPath):
                raise TypeError(
                    f"Stack takes path distributions with noise, found {type(p).__name__}; where "
                    "one is wrapped (transformed, masked, to_event), stack the path inside and "
                    "transform its part of the value"
                )
        times = processes[0].times
        for i, p in enumerate(processes):
            if p.times is not times and not (
                p.times.shape == times.shape and bool((p.times == times).all())
            ):
                raise ValueError(
                    f"processes are stacked on one grid, but process {i} is on another than "
                    "process 0; build all of them with the same times"
                )
        self.processes = processes
        self.sizes = [p.event_shape[-1] for p in processes]
        shapes = [tuple(p.batch_shape) for p in processes]
        try:
            batch = broadcast_shapes(*shapes)
        except RuntimeError as e:
            raise ValueError(
                f"the batch shapes of processes must broadcast together: found {shapes}; add "
                "dimensions of size 1 where a batch is shared"
            ) from e
        recompute = any(p.memory == "recompute" for p in processes)
        super().__init__(
            times,
            join_starts([p.initial for p in processes]),
            param_shape=(*batch, sum(self.sizes)),
            memory="recompute" if recompute else "graph",
            validate_args=validate_args,
        )

    def split(self, z: Tensor) -> tuple[Tensor, ...]:
        """The states of the processes, from those of the stack.

        :param z: States of shape ``(..., D)``, or paths of shape ``(..., T, D)``.
        :returns: A tensor for each process, for a scalar process without the last dimension.
        """
        states = zip(self._split(z), self._is_scalar, strict=True)
        return tuple(x.squeeze(-1) if scalar else x for x, scalar in states)

    def _split(self, z: Tensor) -> tuple[Tensor, ...]:
        return z.split(self.sizes, -1)

    def _of_each(
        self, z: Tensor, f: Callable[[PathDistribution, Tensor], tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        return [f(p, x) for p, x in zip(self.processes, self._split(z), strict=True)]

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        steps = self._of_each(z, lambda p, x: p.transition(t, dt, x))
        states = self._split(z)
        means = [m.expand_as(x) for (m, _), x in zip(steps, states, strict=True)]
        if not any(is_matrix(s, x) for (_, s), x in zip(steps, states, strict=True)):
            scales = [s.expand_as(x) for (_, s), x in zip(steps, states, strict=True)]
            return torch.cat(means, -1), torch.cat(scales, -1)
        rows, start = [], 0
        for (_, s), x in zip(steps, states, strict=True):
            d = x.shape[-1]
            block = s if is_matrix(s, x) else torch.diag_embed(s.expand_as(x))
            block = block.expand(*x.shape, d)
            after = z.shape[-1] - start - d
            rows.append(torch.nn.functional.pad(block, (start, after)))
            start += d
        return torch.cat(means, -1), torch.cat(rows, -2)

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._of_each(z, lambda p, x: p.coefficients(t, x))
        drift, diffusion = (
            torch.cat([y.expand_as(x) for y, x in zip(ys, self._split(z), strict=True)], -1)
            for ys in zip(*parts, strict=True)
        )
        return drift, diffusion

    def linear_steps(self) -> LinearSteps | None:
        found = [p.linear_steps() for p in self.processes]
        steps = [s for s in found if s is not None and s.drift is None]
        n = len(self.batch_shape) + 2
        if (
            len(steps) < len(found)
            or any(
                x.dim() > len(p.batch_shape) + 2  # a matrix
                for p, s in zip(self.processes, steps, strict=True)
                for x in s[:3]
            )
        ):
            return None
        sizes = self.sizes

        def join(parts: list[Tensor]) -> Tensor:
            grown = (x.expand(*x.shape[:-1], d) for x, d in zip(parts, sizes, strict=True))
            return side_by_side(pad_after_time(x, n) for x in grown)

        decay, shift, scale = (join([s[k] for s in steps]) for k in range(3))  # type: ignore
        return LinearSteps(decay, shift, scale)

    @property
    def mean(self) -> Tensor:
        return side_by_side(p.mean for p in self.processes)

    @property
    def variance(self) -> Tensor:
        return side_by_side(p.variance for p in self.processes)
