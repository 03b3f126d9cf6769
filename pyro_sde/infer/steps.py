"""The steps of two path measures side by side, and what their log ratio is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributions import ratio
from ..distributions.controlled import ControlledPath
from ..distributions.fused import FusedDraw, Sums
from ..distributions.lean import LeanDraw, LeanTerms, terms_of
from ..distributions.ode import ODEPath
from ..distributions.path import Draw, PathDistribution
from ..distributions.util import broadcast_shapes

__all__ = ["AnySteps", "LeanSteps", "Steps", "compare"]


@dataclass
class _Tap:
    """What was computed from ``states``, and how: the place to ask for a local derivative."""

    states: Tensor
    outputs: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    """The derivative of the log ratio with respect to each output."""


@dataclass
class Steps:
    """The steps of a path under q against p, time first, attached to all that made them."""

    w: Tensor
    log_c: Tensor | None
    eps: Tensor
    taps: Callable[[Tensor, Tensor | None], Iterable[_Tap]]
    """Given the derivatives of the log ratio with respect to w and log c, where those come from."""
    of_states: tuple[Tensor, Tensor | None] | None = None
    """w and log c with a gradient by the states alone, where they are known: no taps then."""

    def kl_of_steps(self) -> Tensor:
        """Time first."""
        return ratio.kl(self.w, self.log_c).sum(-1)

    def kl(self) -> Tensor:
        return self.kl_of_steps().sum(0)

    def martingale(self) -> Tensor:
        return ratio.martingale(self.w, self.log_c, self.eps).sum((0, -1))

    def stopped(self) -> Tensor:
        """log q - log p as a function of the path alone, every parameter in it stopped.

        Parameters keep the gradient that they have through the displacement that made the path;
        the densities that weigh it see only its states.
        """
        eps = self.eps.detach()
        result = ratio.stopped(self.w, self.log_c, eps, self.of_states).sum((0, -1))
        if self.of_states is not None or not torch.is_grad_enabled():
            return result
        return result + _through_states(self.taps(*ratio.slopes(self.log_c, eps)), eps.dim())


def _through_states(taps: Iterable[_Tap], ndim: int) -> Tensor | float:
    """What the stopped terms owe to the states: zero in value, exact in gradient.

    The derivatives of the log ratio are known in closed form, so one local vector-Jacobian
    product for each tap gives the states' share, without touching the parameters' and without
    evaluating a network again.
    """
    total: Tensor | float = 0.0
    states, gradients = [], []
    for tap in taps:
        live = [(o, s) for o, s in zip(tap.outputs, tap.slopes, strict=True) if o.requires_grad]
        if not live or not tap.states.requires_grad:
            continue
        outputs, slopes = zip(*live, strict=True)
        (gradient,) = torch.autograd.grad(
            outputs, tap.states, slopes, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            continue
        if tap.states.dim() == ndim:
            total = total + (gradient * (tap.states - tap.states.detach())).sum((0, -1))
        else:
            states.append(tap.states)
            gradients.append(gradient)
    if states:
        z = torch.stack(states)
        total = total + (torch.stack(gradients) * (z - z.detach())).sum((0, -1))
    return total


@dataclass
class PushedSteps:
    """As :class:`Steps`, of a path with a control and without contraction: sums over the state
    first, of which there may be many dimensions, then weights of the steps."""

    sums: Sums
    root: Tensor

    def kl_of_steps(self) -> Tensor:
        """Time first."""
        return _weighted(0.5 * self.root.square(), self.sums.squares)

    def kl(self) -> Tensor:
        return self.kl_of_steps().sum(0)

    def martingale(self) -> Tensor:
        return _weighted(self.root, self.sums.products).sum(0)

    def stopped(self) -> Tensor:
        return self.kl() + _weighted(self.root.detach(), self.sums.of_states).sum(0)


def _weighted(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x.unsqueeze(-1)).squeeze(-1)


class LeanSteps:
    """As :class:`Steps`, from terms that are summed already."""

    def __init__(self, terms: LeanTerms) -> None:
        self.terms = terms

    def kl(self) -> Tensor:
        return self.terms.kl

    def martingale(self) -> Tensor:
        return self.terms.martingale

    def stopped(self) -> Tensor:
        return self.terms.stopped


AnySteps = Steps | PushedSteps | LeanSteps


def compare(q: PathDistribution, p: PathDistribution, value: Tensor) -> AnySteps:
    """Lay the steps of q and p side by side along ``value``, from its draw where that is known."""
    if q.times is not p.times and not (
        q.times.shape[-1] == p.times.shape[-1] and bool((q.times == p.times).all())
    ):
        raise ValueError(
            "the guide's path and the model's are on different time grids; build both on one"
        )
    shape = broadcast_shapes(value.shape[:-2], q.batch_shape, p.batch_shape)
    if shape != value.shape[:-2]:
        value = value.expand(shape + value.shape[-2:])
    if isinstance(q, ODEPath) or isinstance(p, ODEPath):
        return _compare_flows(q, p, value)
    if isinstance(q, ControlledPath) and q.prior.is_same_process(p):
        return _compare_control(q, value)
    return _compare_transitions(q, p, value)


def _compare_flows(q: PathDistribution, p: PathDistribution, value: Tensor) -> LeanSteps:
    """Without noise all that can differ is the start."""
    if not isinstance(q, ODEPath) or not isinstance(p, ODEPath):
        raise ValueError(
            "one of the guide's path and the model's is an ODEPath, without noise, and the other "
            "is not: the KL is infinite. Give both the same kind"
        )
    if not q.is_same_process(p):
        p.check_solution(value)
    zero = value.new_zeros(value.shape[:-2])
    return LeanSteps(LeanTerms(zero, zero, zero))


def _compare_control(q: ControlledPath, value: Tensor) -> AnySteps:
    """q is p pushed by a control: that control is all there is between them."""
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    root, draw = dt.sqrt(), q.recall(value)
    if isinstance(draw, LeanDraw) and draw.terms is not None:
        return LeanSteps(draw.terms)
    if isinstance(draw, FusedDraw):
        terms = draw.terms
        if isinstance(terms, Sums):
            return PushedSteps(terms, root)
        of_states = root.detach() * terms.of_states[0], terms.of_states[1]
        return Steps(root * terms.u, terms.log_c, draw.eps, lambda *_: (), of_states)
    if isinstance(draw, Draw) and draw.u is not None:
        us, log_cs, states = draw.u, draw.log_c, draw.z
        u, eps = torch.stack(us), draw.eps
        log_c = None if log_cs is None else torch.stack(log_cs)

        def taps(by_w: Tensor, by_log_c: Tensor | None) -> Iterable[_Tap]:
            by_u = root * by_w
            for i, z in enumerate(states):
                if log_cs is None or by_log_c is None:
                    yield _Tap(z, (us[i],), (by_u[i],))
                else:
                    yield _Tap(z, (us[i], log_cs[i]), (by_u[i], by_log_c[i]))
    else:
        time_first = value.movedim(-2, 0)
        z = time_first[:-1]
        mean, scale = q.prior.transition(t, dt, z)
        u, log_c = q.evaluate(t, z)
        eps = (time_first[1:] - mean) / scale - root * u
        eps = eps if log_c is None else eps * (-log_c).exp()

        def taps(by_w: Tensor, by_log_c: Tensor | None) -> Iterable[_Tap]:
            if log_c is None or by_log_c is None:
                yield _Tap(z, (u,), (root * by_w,))
            else:
                yield _Tap(z, (u, log_c), (root * by_w, by_log_c))

    return Steps(root * u, log_c, eps, taps)


def _compare_transitions(
    q: PathDistribution, p: PathDistribution, value: Tensor
) -> Steps | LeanSteps:
    """q and p are two processes of their own: compare the means and scales of their steps."""
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    time_first, draw = value.movedim(-2, 0), q.recall(value)
    if isinstance(draw, LeanDraw):
        return _compare_leanly(q, p, draw, t, dt)
    z = time_first[:-1]
    mean_p, scale_p = p.transition(t, dt, z)
    if isinstance(draw, FusedDraw):
        draw = None
    if draw is not None:
        mean_q, eps = torch.stack(draw.mean), draw.eps
        scale_q = torch.stack([s.expand(mean_q.shape[1:]) for s in draw.scale])
    else:
        mean_q, scale_q = q.transition(t, dt, z)
        eps = (time_first[1:] - mean_q) / scale_q
    w, log_c = (mean_q - mean_p) / scale_p, None
    contracted = isinstance(q, ControlledPath) and q.contraction is not None
    if contracted or _differ(scale_q, scale_p).any():
        if not contracted:
            _check_same_diffusion(q, p, t, dt, z)
        log_c = scale_q.log() - scale_p.log()

    def taps(by_w: Tensor, by_log_c: Tensor | None) -> Iterable[_Tap]:
        by_mean = by_w / scale_p.detach()
        by_scale = by_mean * w.detach()
        slopes_q: tuple[Tensor, ...] = (by_mean,)
        if by_log_c is not None:
            by_scale = by_scale + by_log_c / scale_p.detach()
            slopes_q = (by_mean, by_log_c / scale_q.detach())
        if draw is None:
            outputs = (mean_q, scale_q)[: len(slopes_q)]
            yield _Tap(z, outputs, _fit(slopes_q, outputs))
        else:
            for i, state in enumerate(draw.z):
                outputs = (draw.mean[i], draw.scale[i])[: len(slopes_q)]
                yield _Tap(state, outputs, _fit(tuple(s[i] for s in slopes_q), outputs))
        yield _Tap(z, (mean_p, scale_p), _fit((-by_mean, -by_scale), (mean_p, scale_p)))

    return Steps(w, log_c, eps, taps)


def _compare_leanly(
    q: PathDistribution, p: PathDistribution, draw: LeanDraw, t: Tensor, dt: Tensor
) -> LeanSteps:
    """The same, step by step, for a path of which only the states were kept."""
    contracted = isinstance(q, ControlledPath) and q.contraction is not None
    with torch.no_grad():
        differ = contracted
        for i, z in enumerate(draw.z):
            if differ:
                break
            scale_q, scale_p = (d.transition(t[i], dt[i], z)[1] for d in (q, p))
            differ = bool(_differ(scale_q, scale_p).any())
            if differ:
                states = torch.stack(draw.z)
                _check_same_diffusion(q, p, t, dt, states)

    def shift(i: int, z: Tensor) -> tuple[Tensor, Tensor | None]:
        mean_q, scale_q = q.transition(t[i], dt[i], z)
        mean_p, scale_p = p.transition(t[i], dt[i], z)
        log_c = (scale_q.log() - scale_p.log()).expand_as(z) if differ else None
        return (mean_q - mean_p) / scale_p, log_c

    return LeanSteps(terms_of(shift, draw.value, draw.eps))


def _fit(slopes: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Slopes summed over what their outputs were broadcast along."""
    return tuple(s.sum_to_size(o.shape) for s, o in zip(slopes, outputs, strict=True))


def _differ(a: Tensor, b: Tensor, tol: float = 1e3) -> Tensor:
    """Where two positive tensors differ by more than ``tol`` units of rounding."""
    return ((a - b) / b).detach().abs() > tol * torch.finfo(a.dtype).eps


@torch.no_grad()
def _check_same_diffusion(
    q: PathDistribution, p: PathDistribution, t: Tensor, dt: Tensor, z: Tensor
) -> None:
    """Refuse a pair whose scales differ, unless it is only by how they discretise one diffusion
    (exact steps against Euler's): then the KL is finite, and its excess vanishes with dt.

    The diffusion itself is what is left of the scale in a very short step.
    """
    h = 1e-6 * dt
    diffusion_q, diffusion_p = (d.transition(t, h, z)[1] / h.sqrt() for d in (q, p))
    # A linear drift of rate r leaves a relative trace of r h / 2.
    tol = max(1e3, 1e-5 / torch.finfo(z.dtype).eps)
    off = _differ(diffusion_q, diffusion_p, tol)
    if bool(off.any()):
        gap = ((diffusion_q - diffusion_p) / diffusion_p).abs().max()
        i = int(off.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"the guide's diffusion differs from the model's by up to {float(gap):.3g} "
            f"(relative), first at step {i} (t={float(q.times[..., i].min()):g}): the KL between "
            "their path measures is infinite. Give both the same diffusion, latent or learned "
            "scales included, or build the guide as ControlledPath(prior, control)"
        )
