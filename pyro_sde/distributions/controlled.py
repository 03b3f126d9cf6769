"""A path distribution pushed by a control: the form of every posterior of a path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from .._checks import check_shape
from ..simulation.base import Task, grid_control
from ..simulation.step import compose, displace
from .path import PathDistribution

__all__ = ["ControlledPath"]

Control = Callable[[Tensor, Tensor], Any]


class ControlledPath(PathDistribution):
    r"""The process ``prior`` pushed by a control u measured in units of its noise:

    .. math:: z' = \mathrm{mean}_p + S\,(\sqrt{dt} u(t, z) + C(t, z)\,\varepsilon)

    With C the identity this is the drift :math:`f_q = f_p + g\,u` of Girsanov's theorem on the
    grid. Prior and posterior share the noise by construction, so the KL between them is finite.
    With ``contraction`` C shrinks the noise of a step, and correlates it if it is a matrix.

    Example::

        >>> import torch
        >>> from pyro_sde.distributions import BrownianMotion
        >>> prior = BrownianMotion(0.5, torch.linspace(0.0, 1.0, 11), 0.0)
        >>> pushed = ControlledPath(prior, lambda t, z: torch.full_like(z, 4.0))  # drift 0.5 * 4
        >>> torch.manual_seed(0) and None
        >>> f"{pushed.sample((10_000,))[:, -1].mean():.1f}"
        '2.0'

    :param prior: The path distribution to push.
    :param control: u, any callable of ``(t, z)`` that returns the shape of ``z`` and treats each
        row of the batch independently. If it has a method ``on_grid(t)``, that method is called
        once per path. It returns a :class:`~pyro_sde.simulation.base.GridControl`, which has
        computed ahead what does not depend on the state, or None, and the control itself is then
        called in each step. The path is drawn in one operation if the result is a
        :class:`~pyro_sde.simulation.network.GridNetwork` and the prior is linear and Gaussian (or
        has a :class:`~pyro_sde.nn.NeuralDrift` and a diffusion that is the same in all states).
    :param initial: The law of the state at ``t_0``; by default the prior's.
    :param contraction: None; a callable of ``(t, z)``; or True, and ``control`` returns the pair
        ``(u, contraction)``. A contraction of the shape of ``z`` holds the logarithms of C's
        diagonal. One of shape ``(..., D, D)`` holds the entries of a lower-triangular C, but for
        its diagonal, which holds the logarithms of C's.
    :param memory: ``"graph"`` or ``"recompute"``; by default the prior's.
    :param compile: Take the steps of a path in chunks that torch.compile compiles when they are
        first met. It needs ``memory="graph"`` and ``MLPControl``, or another control whose
        ``on_grid`` returns a GridNetwork.
    """

    def __init__(
        self,
        prior: PathDistribution,
        control: Control,
        initial: Tensor | float | Distribution | None = None,
        contraction: Control | bool | None = None,
        memory: str | None = None,
        compile: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(prior, PathDistribution):
            raise TypeError(
                f"prior must be a path distribution, found {type(prior).__name__}; where it is "
                "wrapped (transformed, masked, to_event), control the path inside of the wrapper "
                "and wrap the result"
            )
        if not callable(control):
            raise TypeError(f"control must be a callable of (t, z), found {control!r}")
        self.prior, self.control, self.compile = prior, control, compile
        self.contraction = contraction if contraction is not False else None
        if initial is None:
            initial = prior.initial
        super().__init__(
            prior.times,
            initial,
            param_shape=prior.batch_shape + prior.event_shape[1:],
            memory=prior.memory if memory is None else memory,
            validate_args=validate_args,
        )
        if compile and self.memory != "graph":
            raise ValueError(f'compile=True needs memory="graph": found memory={self.memory!r}')

    @property
    def is_pushed(self) -> bool:
        """Whether the process is the prior pushed by the control. It is not in a subclass with a
        transition of its own."""
        return type(self).transition is ControlledPath.transition

    def pushes(self, process: PathDistribution) -> bool:
        """Whether this process differs from another one by its control alone.

        :param process: The other process.
        :returns: True if ``process`` is the prior of this one.
        """
        return self.is_pushed and self.prior.is_same_process(process)

    def evaluate(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """The control and the contraction.

        :param t: Times, which broadcast against ``z[..., :1]``.
        :param z: States of shape ``(..., D)``.
        :returns: u, of the shape of ``z``; and the contraction, of that shape or ``(..., D, D)``,
            or None.
        """
        return self._split(self.control(t, z), t, z)

    def _split(self, u: Any, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        contraction = self.contraction(t, z) if callable(self.contraction) else None
        if self.contraction is True:
            if not isinstance(u, tuple):
                raise ValueError(
                    "with contraction=True the control must return a pair (u, log c), found "
                    f"{type(u).__name__}"
                )
            u, contraction = u
        is_matrix = getattr(contraction, "shape", ()) == (*z.shape, z.shape[-1])
        if contraction is not None and not is_matrix:
            contraction = check_shape("contraction", contraction, t, z).expand_as(z)
        elif contraction is not None and self._validate_args and bool(contraction.triu(1).any()):
            raise ValueError(
                "a contraction of shape (..., D, D) must be lower-triangular, with logarithms on "
                "its diagonal: found entries above the diagonal; take its tril()"
            )
        u = check_shape("control", u, t, z)
        return u if u.shape == z.shape else u.expand_as(z), contraction

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.prior.transition(t, dt, z)
        u, contraction = self.evaluate(t, z)
        return displace(mean, scale, dt.sqrt() * u), compose(scale, contraction, z)

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.contraction is not None:
            raise ValueError(
                "a path with contraction does not discretise an SDE, because it shrinks the noise "
                "of the steps of its grid. Build it, or train AutoSDE, with contraction=None"
            )
        f, g = self.prior.coefficients(t, z)
        return torch.addcmul(f, g, self.evaluate(t, z)[0]), g

    def _task(self, z0: Tensor) -> Task:
        task = super()._task(z0)
        if not self.is_pushed:
            return task
        task.law, task.control = self.prior, grid_control(self.control, task.t)
        task.split, task.contraction = task.target._split, self.contraction  # type: ignore
        task.compile = self.compile
        return task
