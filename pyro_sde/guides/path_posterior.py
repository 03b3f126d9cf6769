"""What AutoSDE learns about one path site."""

from __future__ import annotations

import functools
from typing import Any

import torch
from pyro.distributions import Normal
from pyro.nn.module import PyroModule, PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution

from ..distributions import ControlledPath, PathDistribution
from ..distributions.wrapping import WrappedPath

__all__ = ["PathPosterior"]

EMBEDDING = 16


class PathPosterior(PyroModule):
    """The control of a path site, the law of its start, and an embedding of each plate element.

    :param wrapped: The prior, from a first run of the model.
    :param shape: The batch shape of the parameters, plates at their full size.
    :param control: A control, or a class or ``functools.partial`` of one that makes it.
    :param contraction: Whether the control returns ``(u, log c)``.
    :param like: A tensor of the dtype and device to use.
    :param start: Mean and standard deviation that the law of the start has before training; by
        default the prior's.
    """

    embedding: Any
    shift: Any
    log_scale: Any

    def __init__(
        self,
        wrapped: WrappedPath,
        shape: torch.Size,
        control: Any,
        contraction: bool,
        like: Tensor,
        start: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        path = wrapped.path
        self.dim, self.contraction = path.event_shape[-1], contraction
        self.has_embedding = _is_factory(control) and shape.numel() > 1
        self.has_start = not isinstance(path.initial, Tensor)

        def local(size: int) -> PyroParam:
            zeros = like.new_zeros((*shape, size))
            return PyroParam(zeros, event_dim=1 + wrapped.event_dims)

        if _is_factory(control):
            times = path.times
            if times.dim() > 1:  # every series has a grid of its own: spread one over them all
                times = torch.linspace(float(times.min()), float(times.max()), times.shape[-1])
            context = EMBEDDING if self.has_embedding else 0
            control = control(self.dim, times=times, context=context, contraction=contraction)
            control = control.to(dtype=like.dtype, device=like.device)
        self.control = control
        if self.has_embedding:
            self.embedding = local(EMBEDDING)
        if self.has_start:
            self.shift, self.log_scale = local(self.dim), local(self.dim)
            if start is not None and not isinstance(path.initial, Tensor):
                loc, scale = _location_and_scale(path.initial, self.shift)
                self.shift = self.shift + (start[0] - loc) / scale
                self.log_scale = self.log_scale + (start[1] / scale).log()

    def forward(self, prior: PathDistribution) -> ControlledPath:
        if prior.event_shape[-1] != self.dim:
            raise ValueError(
                f"a path was in R^{self.dim} when the guide was set up, now it is in "
                f"R^{prior.event_shape[-1]}. The last dimension of a path's parameters is the "
                "state's: give a latent parameter one of its own, x.unsqueeze(-1), before "
                "particles or plates put a batch there"
            )
        control = self.control
        if self.has_embedding:
            control = _WithContext(control, self.embedding)
        return ControlledPath(prior, control, self._start(prior.initial), self.contraction)

    def _start(self, prior: Tensor | Distribution) -> Tensor | Distribution:
        """A Normal measured in units of the prior's start, as the control is in its noise."""
        if isinstance(prior, Tensor) or not self.has_start:
            return prior
        shift, log_scale = self.shift, self.log_scale
        loc, scale = _location_and_scale(prior, shift)
        return Normal(loc + scale * shift, scale * log_scale.exp()).to_event(1)


class _WithContext:
    """A control with its context, as the control of (t, z) that a path wants."""

    def __init__(self, control: Any, context: Tensor) -> None:
        self.control, self.context = control, context

    def __call__(self, t: Tensor, z: Tensor) -> Any:
        return self.control(t, z, self.context)

    def on_grid(self, t: Tensor) -> Any:
        return self.control.on_grid(t, self.context)


def _is_factory(control: Any) -> bool:
    maker = control.func if isinstance(control, functools.partial) else control
    return isinstance(maker, type) and issubclass(maker, nn.Module)


def _location_and_scale(prior: Distribution, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation, or 0 and 1 where there are none."""
    try:
        loc, scale = prior.mean, prior.stddev
    except NotImplementedError:
        pass
    else:
        if bool(torch.isfinite(loc).all() and torch.isfinite(scale).all()):
            return loc, scale
    return torch.zeros_like(like), torch.ones_like(like)
