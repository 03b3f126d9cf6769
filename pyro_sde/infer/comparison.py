"""The log ratio of a guide's path measure to the model's along one path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .._checks import broadcast_shapes
from ..distributions.controlled import ControlledPath
from ..distributions.ode import ODEPath
from ..distributions.path import PathDistribution
from ..simulation.base import Draw
from ..simulation.checkpointed import recomputed_ratio
from ..simulation.ratio import Local, LogRatio, Shift
from ..simulation.step import contraction_between, is_matrix, uncontract, whiten

__all__ = ["log_ratio"]

Moments = tuple[Tensor, Tensor]
"""Mean and scale of a step, or of all steps with time first."""


def log_ratio(q: PathDistribution, p: PathDistribution, value: Tensor) -> LogRatio:
    """The log ratio log q - log p over the steps of ``value``, from the draw of q where ``value``
    is that draw."""
    if q.times is not p.times and not (
        q.times.shape[-1] == p.times.shape[-1] and bool((q.times == p.times).all())
    ):
        raise ValueError(
            "the paths of guide and model are on different time grids; build both on one grid"
        )
    shape = broadcast_shapes(value.shape[:-2], q.batch_shape, p.batch_shape)
    if shape != value.shape[:-2]:
        value = value.expand(shape + value.shape[-2:])
    if isinstance(q, ODEPath) or isinstance(p, ODEPath):
        return _ratio_of_flows(q, p, value)
    draw = q.last_draw(value)
    if not isinstance(q, ControlledPath) or not q.pushes(p):
        return _ratio_of_transitions(q, p, value, draw)
    return _ratio_of_control(q, value) if draw is None or draw.ratio is None else draw.ratio


def _ratio_of_flows(q: PathDistribution, p: PathDistribution, value: Tensor) -> LogRatio:
    """The log ratio of two paths without noise, which can differ only in their start."""
    if not isinstance(q, ODEPath) or not isinstance(p, ODEPath):
        raise ValueError(
            "one of the paths of guide and model is an ODEPath, without noise, and the other is "
            "not: the KL is infinite. Use the same kind of path in both"
        )
    if not q.is_same_process(p):
        p.check_solution(value)
    return LogRatio.zero(value.new_zeros(value.shape[:-2]))


def _ratio_of_control(q: ControlledPath, value: Tensor) -> LogRatio:
    """The log ratio where q is p pushed by a control."""
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    time_first = value.movedim(-2, 0)
    z = time_first[:-1]
    u, contraction = q.evaluate(t, z)
    w = dt.sqrt() * u
    xi = whiten(*q.prior.transition(t, dt, z), time_first[1:])
    noise = uncontract(w, contraction, xi)

    def local(slopes: Shift) -> Iterator[Local]:
        present = [(x, s) for x, s in zip((w, contraction), slopes, strict=True) if s is not None]
        yield z, *zip(*present, strict=True)  # type: ignore[misc]

    return LogRatio.of_steps(w, contraction, noise, local)


def _ratio_of_transitions(
    q: PathDistribution, p: PathDistribution, value: Tensor, draw: Draw | None
) -> LogRatio:
    """The log ratio of two arbitrary processes, from the means and scales of their steps."""
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    z, z_next = value.movedim(-2, 0)[:-1], value.movedim(-2, 0)[1:]
    noise = None if draw is None else draw.noise
    if noise is not None and q.memory == "recompute":

        def at_step(i: int, z: Tensor) -> Shift:
            return _shift(q.transition(t[i], dt[i], z), p.transition(t[i], dt[i], z), z, differ)

        with torch.no_grad():
            rows = zip(t.unbind(0), dt.unbind(0), z.unbind(0), strict=True)
            scales = ((q.transition(*x)[1], p.transition(*x)[1], x[2]) for x in rows)
            differ = _contracts(q, p, t, dt, z, scales)
        return recomputed_ratio(at_step, value, noise)
    of_p = p.transition(t, dt, z)
    steps = [] if draw is None or draw.steps is None else draw.steps
    taken = [step.transition() for step in steps]
    of_q = _stacked(taken, z) if taken else q.transition(t, dt, z)
    if noise is None or not taken:
        noise = whiten(*of_q, z_next)
    differ = _contracts(q, p, t, dt, z, [(of_q[1], of_p[1], z)])
    w, contraction = _shift(of_q, of_p, z, differ)

    def local(slopes: Shift) -> Iterator[Local]:
        by_q, by_p = _slopes_of_moments(of_q, of_p, z, slopes)
        yield z, of_p, by_p
        if not taken:
            yield z, of_q, by_q
        for i, (step, moments) in enumerate(zip(steps, taken, strict=True)):
            by = [s[i].sum_to_size(m.shape) for s, m in zip(by_q, moments, strict=True)]
            yield step.before, moments, by

    return LogRatio.of_steps(w, contraction, noise, local)


def _stacked(steps: Sequence[Moments], z: Tensor) -> Moments:
    """Mean and scale of all steps, time first."""
    means, scales = zip(*steps, strict=True)
    matrix = scales[0].dim() > means[0].dim()
    shape = z.shape[1:] + z.shape[-1:] if matrix else z.shape[1:]
    return torch.stack(means), torch.stack([s.expand(shape) for s in scales])


def _shift(of_q: Moments, of_p: Moments, z: Tensor, differ: bool) -> Shift:
    """The shift w of a step of q relative to p and, if the scales differ, the contraction."""
    (mean_q, scale_q), (mean_p, scale_p) = of_q, of_p
    contraction = contraction_between(scale_q, scale_p, z) if differ else None
    return whiten(mean_p, scale_p, mean_q).expand_as(z), contraction


def _slopes_of_moments(
    of_q: Moments, of_p: Moments, z: Tensor, slopes: Shift
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The derivatives of log q - log p with respect to the means and scales of q and p, from those
    with respect to w and to the contraction."""
    leaves = [x.detach().requires_grad_() for x in (*of_q, *of_p)]
    differ = slopes[1] is not None
    outputs = _shift((leaves[0], leaves[1]), (leaves[2], leaves[3]), z.detach(), differ)
    tensors = [x for x in outputs if x is not None]
    gradients = [x for x in slopes if x is not None]
    found = torch.autograd.grad(
        tensors, leaves, gradients, allow_unused=True, materialize_grads=True
    )
    return found[:2], found[2:]


@torch.no_grad()
def _contracts(
    q: PathDistribution,
    p: PathDistribution,
    t: Tensor,
    dt: Tensor,
    z: Tensor,
    scales: Iterable[tuple[Tensor, Tensor, Tensor]],
) -> bool:
    """Whether the scales of q and p differ. It is an error if their diffusions differ, because the
    KL is then infinite.

    :param scales: Scales of q and of p and the states of one step, or of all steps.
    """
    if isinstance(q, ControlledPath) and q.contraction is not None:
        return True
    differ = any(bool((_relative_gap(*x) > 1e3 * _eps(z)).any()) for x in scales)
    if differ:
        _check_same_diffusion(q, p, t, dt, z)
    return differ


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _relative_gap(scale_q: Tensor, scale_p: Tensor, z: Tensor) -> Tensor:
    """By how much two scales differ: vectors entry by entry, matrices relative to ``scale_p``."""
    if not is_matrix(scale_q, z) and not is_matrix(scale_p, z):
        return ((scale_q - scale_p) / scale_p).abs()
    return contraction_between(scale_q, scale_p, z).abs().amax(-1)


def _check_same_diffusion(
    q: PathDistribution, p: PathDistribution, t: Tensor, dt: Tensor, z: Tensor
) -> None:
    """Refuse two processes with different diffusions.

    Scales may differ because the processes discretise one diffusion differently, by exact steps and
    by Euler's. The KL is then finite, and the excess vanishes with dt. The diffusions themselves
    are compared by the scales of very short steps.
    """
    h = 1e-6 * dt
    scale_q, scale_p = (d.transition(t, h, z)[1] for d in (q, p))
    gap = _relative_gap(scale_q, scale_p, z)
    # A linear drift of rate r leaves a relative trace of r h / 2.
    off = gap > max(1e3 * _eps(z), 1e-5)
    if bool(off.any()):
        i = int(off.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"the guide's diffusion differs from the model's by up to {float(gap.max()):.3g} "
            f"(relative), first at step {i} (t={float(q.times[..., i].min()):g}): the KL between "
            "their path measures is infinite. Give both the same diffusion, latent or learned "
            "scales included, or build the guide as ControlledPath(prior, control)"
        )
