"""A path measure pushed by a control: the shape of every posterior here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from .._operations import inside_of_func
from .chunked import simulate_in_chunks
from .fused import FusedDraw, NetworkSteps, simulate_at_once
from .path import Draw, PathDistribution
from .util import check_shape

__all__ = ["ControlledPath"]

Control = Callable[[Tensor, Tensor], Any]


class ControlledPath(PathDistribution):
    r"""The process ``prior`` pushed by a control u measured in units of its noise:

    .. math:: \mathrm{mean}_q = \mathrm{mean}_p + \mathrm{scale}\,\sqrt{dt}\;u(t, z)

    which is the drift :math:`f_q = f_p + g\,u` of Girsanov's theorem on the grid. Prior and
    posterior share the noise by construction, so the KL between them is finite. With
    ``contraction`` the noise of a step shrinks too, :math:`\mathrm{scale}_q = \mathrm{scale}\,c`.

    Example::

        >>> import torch
        >>> from pyro_sde.distributions import BrownianMotion
        >>> prior = BrownianMotion(0.5, torch.linspace(0.0, 1.0, 11), 0.0)
        >>> pushed = ControlledPath(prior, lambda t, z: torch.full_like(z, 4.0))  # drift 0.5 * 4
        >>> torch.manual_seed(0) and None
        >>> f"{pushed.sample((10_000,))[:, -1].mean():.1f}"
        '2.0'

    :param prior: The path distribution to push.
    :param control: u, any callable of ``(t, z)`` that returns the shape of ``z``, each row of the
        batch treated alone. One with a method ``on_grid(t)`` is asked once per path for a
        function ``(i, z)`` of the step's number, to do ahead what does not depend on the state;
        None has the control itself called.
        Where that is a :class:`~pyro_sde.distributions.fused.NetworkSteps` and the prior is linear
        and Gaussian, or its drift a :class:`~pyro_sde.nn.NeuralDrift` and its diffusion the same
        in all states, the path is one operation.
    :param initial: The law of the state at ``t_0``; by default the prior's.
    :param contraction: None; a callable log c of ``(t, z)``; or True, and ``control`` returns the
        pair ``(u, log c)``.
    :param memory: ``"graph"`` or ``"recompute"``; by default the prior's.
    :param compile: Take the steps of a path in chunks that torch.compile compiles when they are
        first met. It needs ``memory="graph"`` and ``MLPControl``, or another control whose
        ``on_grid`` returns NetworkSteps.
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
                "wrapped (transformed, masked, to_event), control the path inside and wrap that"
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

    def evaluate(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """u and log c (None without contraction) at ``t`` and ``z``."""
        return self._split(self.control(t, z), t, z)

    def _split(self, u: Any, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        log_c = self.contraction(t, z) if callable(self.contraction) else None
        if self.contraction is True:
            if not isinstance(u, tuple):
                raise ValueError(
                    "with contraction=True the control must return a pair (u, log c), found "
                    f"{type(u).__name__}"
                )
            u, log_c = u
        if log_c is not None:
            log_c = check_shape("contraction", log_c, t, z).expand_as(z)
        return check_shape("control", u, t, z).expand_as(z), log_c

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.control_step(t, dt, z)[:2]

    def _on_grid(self, t: Tensor) -> Callable[[int, Tensor], Any] | None:
        prepare = getattr(self.control, "on_grid", None)
        return None if prepare is None else prepare(t)

    def stepwise(self, t: Tensor) -> tuple[Sequence[Tensor], Callable[..., Any]]:
        control = self._on_grid(t)
        if isinstance(control, NetworkSteps):
            return control.all_biases, control.at
        stepwise = getattr(self.control, "stepwise", None)
        return ((), self.control) if stepwise is None else stepwise(t)

    def control_step(
        self, t: Tensor, dt: Tensor, z: Tensor, out: Any = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None] | None]:
        mean, scale = self.prior.transition(t, dt, z)
        u, log_c = self._split(self.control(t, z) if out is None else out, t, z)
        root = dt.sqrt()
        mean = torch.addcmul(mean, scale * root, u)
        return mean, scale if log_c is None else scale * log_c.exp(), (root * u, log_c)

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.contraction is not None:
            raise ValueError(
                "a path with contraction shrinks the noise of the steps of its grid: it is the "
                "discretisation of no SDE. Build it, or train AutoSDE, with contraction=False"
            )
        f, g = self.prior.coefficients(t, z)
        return torch.addcmul(f, g, self.evaluate(t, z)[0]), g

    def milstein(self, t: Tensor, dt: Tensor, z: Tensor, scale: Tensor) -> Tensor | None:
        return self.prior.milstein(t, dt, z, scale)

    def _simulate(self, z0: Tensor, eps: Tensor) -> Draw | FusedDraw:
        t, dt = self.step_times(z0.dim() - 1 - len(self.batch_shape))
        control = self._on_grid(t)
        if isinstance(control, NetworkSteps) and self._can_fuse(control, z0):
            affine, drift = self.prior.affine(), None
            if affine is None and not self.compile:
                affine, drift = self.prior.networked(t, dt)
            drift_fits = drift is None or drift.fits(z0)
            if affine is not None and affine[2].dtype == z0.dtype and drift_fits:
                return simulate_at_once(affine, drift, control, dt, z0, eps, self.compile)
            if self.compile:
                return simulate_in_chunks(self.prior.transition, control, t, dt, z0, eps)
        if self.compile and not isinstance(control, NetworkSteps):
            warnings.warn(
                "compile=True has no effect on a path whose control is not an MLPControl",
                RuntimeWarning,
                stacklevel=2,
            )
        if control is None:
            ts, (known, call) = t.unbind(0), self.stepwise(t)
            rows = [x.unbind(0) for x in known]
            control = lambda i, z: call(ts[i], z, *(x[i] for x in rows))  # noqa: E731
        return self._simulate_by_steps(z0, eps, t, dt, control)

    def _can_fuse(self, control: NetworkSteps, z0: Tensor) -> bool:
        return (
            self.contraction is (True if control.contraction else None)
            and control.fits(z0)
            and not torch.is_autocast_enabled(z0.device.type)
            and not inside_of_func()
        )

    def _simulate_by_steps(
        self,
        z0: Tensor,
        eps: Tensor,
        t: Tensor,
        dt: Tensor,
        control: Callable[[int, Tensor], Any],
    ) -> Draw:
        step = self.prior.kernel()
        roots, ts = dt.sqrt().unbind(0), t.unbind(0)
        z = [z0]
        means: list[Tensor] = []
        scales: list[Tensor] = []
        us: list[Tensor] = []
        log_cs: list[Tensor] = []
        for i, e in enumerate(eps.unbind(0)):
            mean, scale = step(i, z[-1])
            u, log_c = self._split(control(i, z[-1]), ts[i], z[-1])
            mean = torch.addcmul(mean, scale * roots[i], u)
            if log_c is not None:
                scale = scale * log_c.exp()
                log_cs.append(log_c)
            z.append(torch.addcmul(mean, scale, e))
            means.append(mean)
            scales.append(scale)
            us.append(u)
        has_grad = torch.is_grad_enabled()
        value = torch.stack(z, -2)
        return Draw(value, has_grad, z[:-1], means, scales, eps, us, log_cs or None)
