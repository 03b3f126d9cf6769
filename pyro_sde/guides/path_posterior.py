"""What AutoSDE learns about one path site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.nn.module import PyroModule, PyroParam
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions import Distribution

from ..distributions import ControlledPath, ODEPath, PathDistribution
from ..distributions.wrapping import WrappedPath
from ..simulation.base import GridControl, grid_control
from ..simulation.network import GridNetwork
from .controls import MLPControl
from .defaults import is_factory
from .encoders import Encoding
from .latent_context import LatentContext, concat_context
from .start import StartPosterior

__all__ = ["PathPosterior"]

EMBEDDING = 16


class PathPosterior(PyroModule):
    """The control of a path site, the law of its start, and an embedding of each plate element.

    :param wrapped: The prior, from a first run of the model.
    :param shape: The batch shape of the parameters, plates at their full size.
    :param control: A control, or a class or ``functools.partial`` of one that makes it.
    :param contraction: ``"full"``, ``"diagonal"`` or None: what the control returns beside u.
    :param like: A tensor of the dtype and device to use.
    :param start: Mean and standard deviation that the law of the start has before training; by
        default the prior's.
    :param encoder: What tells the control about each series, and gives the law of its start, in
        the place of embeddings.
    :param compile: Whether the steps of its paths are compiled.
    :param latents: The other latents that control and start are conditioned on.
    :param draws: Paths of the prior, for the units of the state; None leaves these at 1.
    """

    embedding: Any

    def __init__(
        self,
        wrapped: WrappedPath,
        shape: torch.Size,
        control: Any,
        contraction: str | None,
        like: Tensor,
        start: tuple[Tensor, Tensor] | None = None,
        encoder: Any = None,
        compile: bool = False,
        latents: LatentContext | None = None,
        draws: Tensor | None = None,
    ) -> None:
        super().__init__()
        path, self.compiles = wrapped.path, compile
        self.reader = None if latents is None else latents.to(dtype=like.dtype, device=like.device)
        self.control_reads = latents is not None and (is_factory(control) or latents.is_asked_for)
        self.dim, self.contraction = path.event_shape[-1], contraction
        self.has_embedding = is_factory(control) and shape.numel() > 1 and encoder is None
        entries = 0 if latents is None else len(latents.loc)
        if is_factory(control):
            times = path.times
            if times.dim() > 1:  # every series has a grid of its own: spread one over them all
                times = torch.linspace(float(times.min()), float(times.max()), times.shape[-1])
            if len(times) == 2:  # one step, not an interval of unknown steps
                times = torch.cat([times[:1], times.mean(0, keepdim=True), times[1:]])
            context = encoder.context if encoder is not None else EMBEDDING * self.has_embedding
            control = control(
                self.dim, times=times, context=context + entries, contraction=self.contraction
            )
            control = control.to(dtype=like.dtype, device=like.device)
            if isinstance(control, MLPControl) and draws is not None:
                control.take_units(draws)
            if isinstance(control, MLPControl) and control.context is not None and entries:
                # The path follows the latents where that helps, not at random.
                nn.init.zeros_(control.context.weight.data[:, -entries:])
        if not isinstance(path, ODEPath):
            self.control = control
        if self.has_embedding:
            zeros = like.new_zeros((*shape, EMBEDDING))
            self.embedding = PyroParam(zeros, event_dim=1 + wrapped.event_dims)
        self.start: StartPosterior | None = None
        if not isinstance(path.initial, Tensor):
            encoded = 0 if encoder is None else encoder.hidden
            self.start = StartPosterior(
                path.initial, shape, wrapped.event_dims, like, encoded, entries, start
            )

    def forward(
        self,
        prior: PathDistribution,
        encoding: Encoding | None = None,
        until: Tensor | None = None,
        others: Trace | None = None,
    ) -> PathDistribution:
        """The posterior of a path with the law ``prior``.

        :param encoding: What the encoder knows of the series of its batch.
        :param until: After this time, one for each series or for all, the prior takes over.
        :param others: Where the other latents were drawn.
        """
        if prior.event_shape[-1] != self.dim:
            raise ValueError(
                f"a path was in R^{self.dim} when the guide was set up, now it is in "
                f"R^{prior.event_shape[-1]}. The last dimension of a path's parameters is the "
                "state's: give a latent parameter one of its own, x.unsqueeze(-1), before "
                "particles or plates put a batch there"
            )
        latents = None if self.reader is None else self.reader(others)
        initial = self._start(prior, encoding, latents)
        if isinstance(prior, ODEPath):
            return prior.starting_at(initial)
        control, context = self.control, None
        if encoding is not None:
            context = _of_batch(encoding.context, prior)
        elif self.has_embedding:
            context = concat_context(None, self.embedding)
        if latents is not None and self.control_reads:
            context = concat_context(context, latents)
        if context is not None:
            control = _WithContext(control, context)
        if until is not None:
            control = _Until(control, until)
        contracts = None if self.contraction is None else True
        return ControlledPath(prior, control, initial, contracts, compile=self.compiles)

    def _start(
        self, prior: PathDistribution, encoding: Encoding | None, latents: Tensor | None
    ) -> Tensor | Distribution:
        if isinstance(prior.initial, Tensor) or self.start is None:
            return prior.initial
        encoded = None
        if encoding is not None:
            encoded = _of_batch(encoding.start, prior)(prior.times[..., :1])
        return self.start(prior.initial, encoded, latents)


def _of_batch(f: Callable[[Tensor], Tensor], prior: PathDistribution) -> Callable[[Tensor], Tensor]:
    """A function of an encoding, at times of shape (..., 1), for the batch of ``prior``."""
    if prior.batch_shape:
        return lambda t: f(t.squeeze(-1))
    return lambda t: f(t).squeeze(-2)  # one series alone, outside of any plate


class _WithContext:
    """A control with its context, as the control of (t, z) that a path wants."""

    def __init__(self, control: Any, context: Callable[[Tensor], Tensor]) -> None:
        self.control, self.context = control, context

    def __call__(self, t: Tensor, z: Tensor) -> Any:
        return self.control(t, z, self.context(t))

    def on_grid(self, t: Tensor) -> GridControl:
        context = self.context(t)
        if context.dim() < t.dim():  # the same at all times
            context = context.reshape((1,) * (t.dim() - context.dim()) + context.shape)
            context = context.expand(len(t), *context.shape[1:])
        return grid_control(self.control, t, context)


class _Until:
    """A control that ends: from the time ``end`` on the process is the prior again."""

    def __init__(self, control: Any, end: Tensor) -> None:
        self.control, self.end = control, end.unsqueeze(-1)

    def __call__(self, t: Tensor, z: Tensor) -> Any:
        return _silence(self.control(t, z), t < self.end)

    def on_grid(self, t: Tensor) -> GridControl:
        control, active = grid_control(self.control, t), t < self.end
        if isinstance(control, GridNetwork):
            return replace(control, active=active)
        return _Silenced(control, (*control.known, active))


@dataclass
class _Silenced:
    """A control on a grid that is zero where the last row says so."""

    control: GridControl
    known: tuple[Tensor, ...]

    def __call__(self, z: Tensor, *rows: Tensor) -> Any:
        *known, active = rows
        return _silence(self.control(z, *known), active)


def _silence(out: Any, active: Tensor) -> Any:
    if isinstance(out, tuple):
        u, contraction = out
        is_matrix = contraction.dim() > u.dim()
        kept = active.unsqueeze(-1) if is_matrix else active
        return torch.where(active, u, 0.0), torch.where(kept, contraction, 0.0)
    return torch.where(active, out, 0.0)
