r"""The log ratio of two path measures, taken apart.

A step of q and p differs by a shift w (in units of the prior's scale) and, with contraction, by
a factor c of the scale. With eps the standard normal draw of the step,

.. math::

    \log q - \log p = \underbrace{\tfrac12 (w^2 + c^2 - 1) - \log c}_{\text{KL of the step}}
        + \underbrace{w c\,\varepsilon + \tfrac12 (c^2 - 1)(\varepsilon^2 - 1)}_{\text{mean zero}}

For c = 1 and :math:`w = u \sqrt{dt}` the sums over the steps are Girsanov's two terms,
:math:`\tfrac12 \int |u|^2 dt` and :math:`\int u\,dB`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from pyro.distributions import Normal
from torch import Tensor
from torch.distributions import Distribution, Independent, kl_divergence

from ..distributions.controlled import ControlledPath
from ..distributions.path import PathDistribution
from ..distributions.wrapping import WrappedPath, unwrap

__all__ = ["ESTIMATORS", "GirsanovTerms", "girsanov", "path_divergence"]

ESTIMATORS = ("stl", "full", "kl")


class GirsanovTerms(NamedTuple):
    """The two parts of log q - log p over the steps of a path, each of the site's batch shape."""

    quadratic: Tensor
    martingale: Tensor


@dataclass
class _Tap:
    """What was computed from ``states``, and how: the place to ask for a local derivative."""

    states: Tensor
    outputs: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    """The derivative of the log ratio with respect to each output."""


@dataclass
class _Steps:
    """The steps of a path under q against p, time first, attached to all that made them."""

    w: Tensor
    log_c: Tensor | None
    eps: Tensor
    taps: Callable[[Tensor, Tensor | None], Iterable[_Tap]]
    """From the derivatives of the log ratio with respect to w and log c, where they come from."""

    def kl(self) -> Tensor:
        if self.log_c is None:
            return 0.5 * self.w.square().sum((0, -1))
        c2 = torch.expm1(2 * self.log_c)
        return (0.5 * (self.w.square() + c2) - self.log_c).sum((0, -1))

    def martingale(self) -> Tensor:
        if self.log_c is None:
            return (self.w * self.eps).sum((0, -1))
        c2 = torch.expm1(2 * self.log_c)
        m = self.w * self.log_c.exp() * self.eps + 0.5 * c2 * (self.eps.square() - 1)
        return m.sum((0, -1))

    def stopped(self) -> Tensor:
        """log q - log p as a function of the path alone, every parameter in it stopped.

        Parameters keep the gradient that they have through the displacement xi that made the
        path; the densities that weigh it see only its states.
        """
        eps = self.eps.detach()
        if self.log_c is None:
            ratio = 0.5 * self.w.square() + self.w.detach() * eps
            taps = self.taps(eps, None)
        else:
            w, log_c = self.w.detach(), self.log_c.detach()
            xi = self.w + self.log_c.exp() * eps
            back = (xi - w) * (-log_c).exp()
            ratio = 0.5 * (xi.square() - back.square()) - log_c
            taps = self.taps(eps * (-log_c).exp(), eps.square() - 1)
        result = ratio.sum((0, -1))
        return result + _through_states(taps, eps.dim()) if torch.is_grad_enabled() else result


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


def _compare(q: PathDistribution, p: PathDistribution, value: Tensor) -> _Steps:
    """Lay the steps of q and p side by side along ``value``, from its draw where that is known."""
    if q.times is not p.times and not (
        q.times.shape[-1] == p.times.shape[-1] and bool((q.times == p.times).all())
    ):
        raise ValueError(
            "the guide's path and the model's are on different time grids; build both on one"
        )
    if isinstance(q, ControlledPath) and q.prior.is_same_process(p):
        return _compare_control(q, value)
    return _compare_transitions(q, p, value)


def _compare_control(q: ControlledPath, value: Tensor) -> _Steps:
    """q is p pushed by a control: that control is all there is between them."""
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    root, draw = dt.sqrt(), q.recall(value)
    if draw is not None and draw.u is not None:
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

    return _Steps(root * u, log_c, eps, taps)


def _compare_transitions(q: PathDistribution, p: PathDistribution, value: Tensor) -> _Steps:
    """q and p are two processes of their own: compare the means and scales of their steps."""
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    time_first, draw = value.movedim(-2, 0), q.recall(value)
    z = time_first[:-1]
    mean_p, scale_p = p.transition(t, dt, z)
    if draw is not None:
        mean_q, eps = torch.stack(draw.mean), draw.eps
        scale_q = torch.stack([s.expand(mean_q.shape[1:]) for s in draw.scale])
    else:
        mean_q, scale_q = q.transition(t, dt, z)
        eps = (time_first[1:] - mean_q) / scale_q
    w, log_c = (mean_q - mean_p) / scale_p, None
    if isinstance(q, ControlledPath) and q.contraction is not None:
        log_c = scale_q.log() - scale_p.log()
    else:
        _check_same_noise(q, scale_q, scale_p)

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

    return _Steps(w, log_c, eps, taps)


def _fit(slopes: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Slopes summed over what their outputs were broadcast along."""
    return tuple(s.sum_to_size(o.shape) for s, o in zip(slopes, outputs, strict=True))


def _check_same_noise(q: PathDistribution, scale_q: Tensor, scale_p: Tensor) -> None:
    gap = ((scale_q - scale_p) / scale_p).detach().abs()
    tol = 1e4 * torch.finfo(gap.dtype).eps
    if bool((gap > tol).any()):
        i = int((gap > tol).flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"the guide's diffusion differs from the model's by up to {float(gap.max()):.3g} "
            f"(relative), first at step {i} (t={float(q.times[..., i].min()):g}): the KL between "
            "their path measures is infinite. Give both the same diffusion, latent or learned "
            "scales included, or build the guide as ControlledPath(prior, control)"
        )


def _initial_divergence(
    q: PathDistribution, p: PathDistribution, z0: Tensor, estimator: str
) -> Tensor | float:
    q0, p0 = q.initial, p.initial
    if q0 is p0:
        return 0.0
    if isinstance(p0, Tensor):
        tol = 64 * torch.finfo(p0.dtype).eps
        if not isinstance(q0, Tensor) or bool(((q0 - p0).abs() > tol * (1 + p0.abs())).any()):
            raise ValueError(
                "the model's path starts at a fixed point and the guide's does not start there: "
                "the KL is infinite. Leave the guide's initial out, or give the model's path a "
                "Distribution as initial"
            )
        return 0.0
    if isinstance(q0, Tensor):
        return -p0.log_prob(z0)
    if estimator == "kl":
        try:
            return kl_divergence(q0, p0)
        except NotImplementedError:
            pass
    if estimator != "stl":
        return q0.log_prob(z0) - p0.log_prob(z0)
    if _is_normal(q0) and _is_normal(p0):
        return _normal_start(q0.base_dist, p0.base_dist, z0).stopped()
    return _stopped_log_prob(q0, z0) - p0.log_prob(z0)


def _is_normal(d: Distribution) -> TypeGuard[Independent]:
    return isinstance(d, Independent) and type(d.base_dist) is Normal


def _normal_start(q0: Normal, p0: Normal, z0: Tensor) -> _Steps:
    """A Normal start under a Normal prior is one more step, from nowhere."""
    w = (q0.loc - p0.loc) / p0.scale
    log_c = q0.scale.log() - p0.scale.log()
    eps = (z0 - q0.loc) / q0.scale
    return _Steps(w.unsqueeze(0), log_c.unsqueeze(0), eps.unsqueeze(0), taps=lambda *_: ())


def _stopped_log_prob(q0: Distribution, z0: Tensor) -> Tensor:
    """The log density at ``z0`` with the parameters of ``q0`` stopped."""
    if not torch.is_grad_enabled():
        return q0.log_prob(z0)
    point = z0.detach().requires_grad_()
    log_q = q0.log_prob(point)
    (slope,) = torch.autograd.grad(log_q.sum(), point, allow_unused=True)
    if slope is None:
        return log_q.detach()
    return log_q.detach() + (slope * (z0 - z0.detach())).sum(-1)


def _pair(q: Distribution, p: Distribution, value: Tensor) -> tuple[WrappedPath, Any, Any, Tensor]:
    outer_q, outer_p = unwrap(q), unwrap(p)
    if outer_q is None or outer_p is None:
        found = type(p if outer_p is None else q).__name__
        raise TypeError(f"q and p must both be path distributions, or wrap one: found {found}")
    if outer_q.transforms != outer_p.transforms:
        raise ValueError(
            "the guide's path and the model's stand under different transforms: "
            f"{outer_q.transforms} and {outer_p.transforms}; use the same ones, in one order"
        )
    if len(outer_q.masks) != len(outer_p.masks) or not all(
        bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
        for a, b in zip(outer_q.masks, outer_p.masks, strict=True)
    ):
        raise ValueError("the guide's path and the model's have different masks; use the same")
    return outer_p, outer_q.path, outer_p.path, outer_q.to_path(value)


def girsanov(q: Distribution, p: Distribution, value: Tensor) -> GirsanovTerms:
    r"""The two parts of :math:`\log q - \log p` over the steps of a path ``value``.

    The quadratic part is the KL of the steps, :math:`\tfrac12 \int |u|^2 dt`; the martingale
    :math:`\int u\,dB` has mean zero under q. Their sum is exactly ``q.log_prob(value) -
    p.log_prob(value)``, but for the law of the initial state, which is not a matter of the drift.

    :param q: The path distribution that ``value`` was drawn from.
    :param p: The one to compare it with, of the same diffusion.
    :param value: A path.
    """
    outer, q_path, p_path, path = _pair(q, p, value)
    steps = _compare(q_path, p_path, path)
    return GirsanovTerms(outer.reduce(steps.kl()), outer.reduce(steps.martingale()))


def path_divergence(q: Distribution, p: Distribution, value: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(q || p) from one path, the initial state included.

    ``"kl"`` is the quadratic part, ``"full"`` the whole log ratio, ``"stl"`` the log ratio as a
    function of the path alone.
    """
    outer, q_path, p_path, path = _pair(q, p, value)
    steps = _compare(q_path, p_path, path)
    if estimator == "stl":
        term = steps.stopped()
    else:
        term = steps.kl() if estimator == "kl" else steps.kl() + steps.martingale()
    start = _initial_divergence(q_path, p_path, path[..., 0, :], estimator)
    return outer.reduce(term + start)
