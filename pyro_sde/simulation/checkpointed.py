"""Paths of which only the states and the noise are kept: each step is redone going back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops.common import BLOCK
from .._ops.recompute import Grads, LocalVjp, Recomputed, run_recomputed
from . import ratio
from .base import Draw, Simulator, Step, Task
from .checks import check_scale
from .ratio import LogRatio, Shift
from .step import checkable

__all__ = ["Checkpointed", "recomputed_ratio"]


class Checkpointed(Simulator):
    """Draws paths with ``memory="recompute"``."""

    def __call__(self, task: Task, noise: Tensor | None = None) -> Draw:
        noise = task.draw_noise() if noise is None else noise
        path = _Path(task)
        value, *terms = run_recomputed(path, task.z0, noise, *path.inputs())
        return Draw(value, noise, self, _summed(*terms) if terms else None)


def _summed(kl: Tensor, martingale: Tensor, stopped: Tensor) -> LogRatio:
    return LogRatio(lambda: kl, lambda: martingale, lambda: stopped)


def _terms(
    w: Tensor, contraction: Tensor | None, eps: Tensor, grads: Grads | None = None
) -> list[Tensor]:
    """KL, martingale and stopped ratio of a step; of these, those with a gradient in ``grads``. The
    last of them, if the stopped ratio is among them, is what it owes to the state before."""
    wanted = [True] * 3 if grads is None else [g is not None for g in grads]
    terms = []
    if wanted[0]:
        terms.append(ratio.kl(w, contraction))
    if wanted[1]:
        terms.append(ratio.martingale(w, contraction, eps))
    if wanted[2]:
        slopes = (None, None) if grads is None else ratio.slopes(contraction, eps)
        terms.append(ratio.stopped(w, contraction, eps, slopes[0]))
        if slopes[0] is not None:
            terms.append(_through_state(w, contraction, *slopes))
    return terms


def _through_state(
    w: Tensor, contraction: Tensor | None, by_w: Tensor, by_contraction: Tensor | None
) -> Tensor:
    """What the stopped ratio owes to the state before the step, to be differentiated with respect
    to that state alone.

    :param by_w: The :func:`~pyro_sde.simulation.ratio.slopes`.
    """
    total = (by_w * w).sum(-1)
    if contraction is None or by_contraction is None:
        return total
    return total + (by_contraction * contraction).flatten(w.dim() - 1).sum(-1)


class _Sums:
    """The terms of the ratio of all steps, from few operations: many steps at once if they are
    small."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor | None, Tensor]] = []
        self.kls: list[Tensor] = []
        self.totals: list[Tensor] = []

    def add(self, w: Tensor, contraction: Tensor | None, eps: Tensor) -> None:
        self.pending.append((w, contraction, eps))
        numbers = w.numel() if contraction is None else contraction.numel()
        if len(self.pending) * numbers >= BLOCK:
            self._sum()

    def _sum(self) -> None:
        w, contraction, eps = zip(*self.pending, strict=True)
        whole = None if contraction[0] is None else torch.stack(contraction)
        kl, *terms = _terms(torch.stack(w), whole, torch.stack(eps))
        sums = [x.sum(0) for x in terms]
        if self.kls:
            sums = [a + b for a, b in zip(self.totals, sums, strict=True)]
        self.totals = sums
        self.kls.append(kl)
        self.pending = []

    def outputs(self) -> tuple[Tensor, ...]:
        """The KL of every step, the martingale and the stopped ratio; nothing if there are none."""
        if self.pending:
            self._sum()
        return (torch.cat(self.kls), *self.totals) if self.kls else ()


class _Path(Recomputed):
    """From start and noise to a path and, for one pushed by a control, the terms of its ratio.

    Further inputs are what is known of the steps and needs a gradient. Were a step to take its row
    of that itself, the backward pass would fill a tensor of all steps for each.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.differs = [x.requires_grad and torch.is_grad_enabled() for x in task.known]
        self.fixed = [() if d else x.unbind(0) for x, d in self._known()]

    def _known(self) -> Iterator[tuple[Tensor, bool]]:
        return zip(self.task.known, self.differs, strict=True)

    def inputs(self) -> list[Tensor]:
        """What is known of the steps and needs a gradient."""
        return [x for x, differs in self._known() if differs]

    def step(self, i: int, z: Tensor, eps: Tensor, rows: Sequence[Tensor]) -> Step:
        own = iter(rows)
        whole = (next(own) if d else f[i] for d, f in zip(self.differs, self.fixed, strict=True))
        return self.task.step(z, eps, *whole)

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        z, noise, *known = inputs
        value = z.new_empty((*z.shape[:-1], len(noise) + 1, z.shape[-1]))
        value.select(-2, 0).copy_(z)
        sums = _Sums()
        rows: Any = zip(*(x.unbind(0) for x in known), strict=True) if known else None
        for i, eps in enumerate(noise.unbind(0)):
            step = self.step(i, z, eps, next(rows) if known else ())
            z = step.after
            if self.task.validate:
                scale = checkable(step.scale, step.contraction, z)
                check_scale(self.task.target, scale.unsqueeze(0), z.unsqueeze(0), i)
            value.select(-2, i + 1).copy_(z)
            if step.w is not None:
                sums.add(step.w, step.contraction, eps)
        return (value, *sums.outputs()), (value,)

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: LocalVjp
    ) -> Grads:
        (value,), (_, noise, *known), (grad_value, *grad_terms) = saved, inputs, grads
        grad_stopped = grad_terms[-1] if grad_terms else None
        grad_z = torch.zeros_like(value.select(-2, 0))
        grad_known = [torch.empty_like(x) for x in known]
        for i in range(len(noise), -1, -1):
            if i < len(noise):

                def step(z: Tensor, *rows: Tensor, i: int = i) -> tuple[Tensor, ...]:
                    found = self.step(i, z, noise[i], rows)
                    if found.w is None:
                        return (found.after,)
                    return found.after, *_terms(found.w, found.contraction, noise[i], grad_terms)

                args = [value.select(-2, i), *(x[i] for x in known)]
                by = [grad_z, *_at_step(i, grad_terms)]
                _, (grad_z, *rows) = vjp(step, args, by, grad_stopped)
                for grad, row in zip(grad_known, rows, strict=True):
                    grad[i] = row
            if grad_value is not None:
                grad_z = grad_z + grad_value.select(-2, i)
        return grad_z, None, *grad_known


def _at_step(i: int, grads: Grads) -> list[Tensor]:
    """The gradients of the terms of step ``i`` that there are: the KL has one for each step."""
    return [g[i] if k == 0 else g for k, g in enumerate(grads) if g is not None]


class _Comparison(Recomputed):
    """From a path that has been drawn, and its noise, to the terms of its log ratio."""

    def __init__(self, shift: Callable[[int, Tensor], Shift]) -> None:
        self.shift = shift

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        value, noise = inputs
        sums = _Sums()
        for i, eps in enumerate(noise.unbind(0)):
            sums.add(*self.shift(i, value.select(-2, i)), eps)
        return sums.outputs(), ()

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: LocalVjp
    ) -> Grads:
        value, noise = inputs
        grad_value = torch.zeros_like(value)
        for i, eps in enumerate(noise.unbind(0)):

            def terms(z: Tensor, i: int = i, eps: Tensor = eps) -> tuple[Tensor, ...]:
                return tuple(_terms(*self.shift(i, z), eps, grads))

            _, (grad_z,) = vjp(terms, [value.select(-2, i)], _at_step(i, grads), grads[-1])
            grad_value.select(-2, i).copy_(grad_z)
        return grad_value, None


def recomputed_ratio(
    shift: Callable[[int, Tensor], Shift], value: Tensor, noise: Tensor
) -> LogRatio:
    """The log ratio of a drawn path of which only states and noise are kept.

    :param shift: Returns w and the contraction from a step's number and the state before it.
    """
    return _summed(*run_recomputed(_Comparison(shift), value, noise))
