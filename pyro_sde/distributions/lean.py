"""Drawing a path of which only the states and the noise are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._lean import Grads, Lean, Vjp, run_leanly
from . import ratio
from .checks import check_scale

if TYPE_CHECKING:
    from .path import PathDistribution

__all__ = ["LeanDraw", "LeanTerms", "simulate", "terms_of"]

Shift = tuple[Tensor, Tensor | None]
"""w and log c of a step."""


@dataclass
class LeanTerms:
    """The parts of a path's log ratio, summed over steps and state."""

    kl: Tensor
    martingale: Tensor
    stopped: Tensor


@dataclass
class LeanDraw:
    """How a path was made: see :class:`~pyro_sde.distributions.path.Draw`."""

    value: Tensor
    has_grad: bool
    eps: Tensor
    control: Callable[[int], Tensor | None]
    terms: LeanTerms | None = None
    """Against the prior, for a path pushed by a control: they cost no second pass there."""

    @property
    def z(self) -> tuple[Tensor, ...]:
        """The states, but for the last."""
        return self.value.unbind(-2)[:-1]

    def scales(self) -> None:
        """None: each was checked when its step was made."""

    def control_at(self, i: int) -> Tensor | None:
        return self.control(i)


def _terms(shift: Shift, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w, log_c = shift
    return (
        ratio.kl(w, log_c).sum(-1),
        ratio.martingale(w, log_c, eps).sum(-1),
        ratio.stopped(w, log_c, eps).sum(-1),
    )


def _through_state(shift: Shift, eps: Tensor) -> Tensor:
    """What the stopped part owes to the state before the step, to be differentiated by it."""
    w, log_c = shift
    by_w, by_log_c = ratio.slopes(log_c, eps)
    total = by_w * w
    if log_c is not None and by_log_c is not None:
        total = total + by_log_c * log_c
    return total.sum(-1)


class _Simulation(Lean):
    """From start and noise to a path and, for one pushed by a control, its terms.

    Further inputs are what the control knows on the grid. Were a step to take its row of them
    itself, the backward pass would fill a tensor of all steps for each.
    """

    def __init__(self, path: PathDistribution, sample_ndim: int) -> None:
        # A copy that does not know what it drew, lest a loss that is kept keep that too.
        self.path = path.without_memory_of_draws()
        t, dt = path.step_times(sample_ndim)
        self.t, self.dt = t.unbind(0), dt.unbind(0)
        self.known, self.control = path.stepwise(t)

    def control_step(self, i: int, z: Tensor, known: Sequence[Tensor]) -> Any:
        control = self.control
        out = None if control is None else control(self.t[i], z, *known)
        return self.path.control_step(self.t[i], self.dt[i], z, out)

    def step(
        self, i: int, z: Tensor, eps: Tensor, known: Sequence[Tensor], with_state: bool
    ) -> tuple[Tensor, ...]:
        mean, scale, shift = self.control_step(i, z, known)
        if self.path._validate_args:
            check_scale(self.path, scale.detach().unsqueeze(0), i)
        after = torch.addcmul(mean, scale, eps)
        if shift is None:
            return (after,)
        more = (_through_state(shift, eps),) if with_state else ()
        return after, *_terms(shift, eps), *more

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        z, eps, *known = inputs
        value = z.new_empty((*z.shape[:-1], len(eps) + 1, z.shape[-1]))
        value.select(-2, 0).copy_(z)
        totals: list[Tensor] = []
        for i, e in enumerate(eps.unbind(0)):
            z, *terms = self.step(i, z, e, [x[i] for x in known], False)
            value.select(-2, i + 1).copy_(z)
            totals = [a + b for a, b in zip(totals, terms, strict=True)] if totals else terms
        return (value, *totals), (value,)

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: Vjp
    ) -> Grads:
        (value,), (_, eps, *known), (by_value, *by_terms) = saved, inputs, grads
        stopped = by_terms[-1] if by_terms else None
        by_z = torch.zeros_like(value.select(-2, 0))
        by_known = [torch.empty_like(x) for x in known]
        for i in range(len(eps), -1, -1):
            if i < len(eps):

                def step(z: Tensor, *known: Tensor, i: int = i) -> tuple[Tensor, ...]:
                    return self.step(i, z, eps[i], known, stopped is not None)

                args = [value.select(-2, i), *(x[i] for x in known)]
                _, (by_z, *rows) = vjp(step, args, [by_z, *by_terms], stopped)
                for by, row in zip(by_known, rows, strict=True):
                    by[i] = row
            if by_value is not None:
                by_z = by_z + by_value.select(-2, i)
        return by_z, None, *by_known


def simulate(path: PathDistribution, z0: Tensor, eps: Tensor) -> LeanDraw:
    """Draw as ``path`` does, each step to be redone in the backward pass."""
    simulation = _Simulation(path, z0.dim() - 1 - len(path.batch_shape))
    known = simulation.known
    value, *terms = run_leanly(simulation, z0, eps, *known)

    def control(i: int) -> Tensor | None:
        z = value.select(-2, i).detach()
        shift = simulation.control_step(i, z, [x[i] for x in known])[2]
        return None if shift is None else shift[0]

    lean = LeanTerms(*terms) if terms else None
    return LeanDraw(value, torch.is_grad_enabled(), eps, control, lean)


class _Comparison(Lean):
    """From a path that has been drawn, and its noise, to its terms."""

    def __init__(self, shift: Callable[[int, Tensor], Shift]) -> None:
        self.shift = shift

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        value, eps = inputs
        totals: list[Tensor] = []
        for i, e in enumerate(eps.unbind(0)):
            terms = _terms(self.shift(i, value.select(-2, i)), e)
            totals = [a + b for a, b in zip(totals, terms, strict=True)] if totals else [*terms]
        return tuple(totals), ()

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: Vjp
    ) -> Grads:
        value, eps = inputs
        by_value = torch.zeros_like(value)
        for i, e in enumerate(eps.unbind(0)):

            def terms(z: Tensor, i: int = i, e: Tensor = e) -> tuple[Tensor, ...]:
                shift = self.shift(i, z)
                return *_terms(shift, e), _through_state(shift, e)

            _, (by_z,) = vjp(terms, [value.select(-2, i)], grads, grads[-1])
            by_value.select(-2, i).copy_(by_z)
        return by_value, None


def terms_of(shift: Callable[[int, Tensor], Shift], value: Tensor, eps: Tensor) -> LeanTerms:
    """The terms of a path by w and log c of the step's number and the state before it."""
    return LeanTerms(*run_leanly(_Comparison(shift), value, eps))
