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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro.distributions import Distribution
from torch import Tensor
from torch.distributions import kl_divergence

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
class _Steps:
    """The steps of a path under q against p, time first.

    ``outputs`` are what the parameters of q enter through, with the states ``inputs`` that they
    were computed from: one tensor a step, or one for the whole path. ``w_stopped`` is w with
    those outputs held constant; ``by_output`` gives the derivatives of the log ratio with
    respect to them, from eps.
    """

    w: Tensor
    w_stopped: Tensor
    log_c: Tensor | None
    log_c_stopped: Tensor | None
    eps: Tensor
    inputs: list[Tensor]
    outputs: list[Sequence[Tensor]]
    factors: list[Tensor]

    def kl(self) -> Tensor:
        if self.log_c is None:
            return 0.5 * self.w.square()
        return 0.5 * (self.w.square() + torch.expm1(2 * self.log_c)) - self.log_c

    def martingale(self) -> Tensor:
        if self.log_c is None:
            return self.w * self.eps
        c2 = torch.expm1(2 * self.log_c)
        return self.w * self.log_c.exp() * self.eps + 0.5 * c2 * (self.eps.square() - 1)

    def stopped(self) -> Tensor:
        """log q - log p with the parameters of q stopped: its gradient is that of the path.

        Parameters enter only through the displacement xi that made the path, never through the
        density that weighs it.
        """
        eps = self.eps.detach()
        if self.log_c is None or self.log_c_stopped is None:
            ratio = 0.5 * self.w.square() + self.w_stopped * eps
        else:
            xi = self.w + self.log_c.exp() * eps
            back = (xi - self.w_stopped) * (-self.log_c_stopped).exp()
            ratio = 0.5 * (xi.square() - back.square()) - self.log_c_stopped
        return ratio.sum((0, -1)) + self._through_states(eps)

    def _through_states(self, eps: Tensor) -> Tensor | float:
        """What the stopped outputs still owe to the states: zero in value, exact in gradient.

        The derivative of the log ratio with respect to each output is known from eps, so one
        local vector-Jacobian product a step gives the states' share without touching the
        parameters' and without evaluating the network again.
        """
        if not torch.is_grad_enabled():
            return 0.0
        pairs = list(zip(self.outputs, self.inputs, strict=True))
        total: Tensor | float = 0.0
        cotangents = [eps * self.factors[0]]
        if len(self.factors) > 1:
            cotangents.append((eps.square() - 1) * self.factors[1])
        whole = len(pairs) == 1 and pairs[0][1].dim() == eps.dim()
        gradients, states = [], []
        for i, (outputs, z) in enumerate(pairs):
            live = [(o, c if whole else c[i]) for o, c in zip(outputs, cotangents, strict=True)]
            live = [(o, c) for o, c in live if o.requires_grad]
            if not live or not z.requires_grad:
                continue
            outs, cots = zip(*live, strict=True)
            (gradient,) = torch.autograd.grad(outs, z, cots, retain_graph=True, allow_unused=True)
            if gradient is not None:
                gradients.append(gradient)
                states.append(z)
        if not gradients:
            return total
        if whole:
            g, z = gradients[0], states[0]
            return (g * (z - z.detach())).sum((0, -1))
        g, z = torch.stack(gradients), torch.stack(states)
        return (g * (z - z.detach())).sum((0, -1))


def _compare(q: PathDistribution, p: PathDistribution, value: Tensor) -> _Steps:
    """Lay the steps of q and p side by side along ``value``, from its draw where that is known."""
    if q.times is not p.times and not (
        q.times.shape[-1] == p.times.shape[-1] and bool((q.times == p.times).all())
    ):
        raise ValueError(
            "the guide's path and the model's are on different time grids; build both on one"
        )
    draw = q.recall(value)
    time_first = value.movedim(-2, 0)
    t, dt = q.step_times(value.dim() - 2 - len(q.batch_shape))
    if isinstance(q, ControlledPath) and q.prior.is_same_process(p):
        root = dt.sqrt()
        if draw is not None and draw.u is not None:
            u, eps = torch.stack(draw.u), draw.eps
            log_c = None if draw.log_c is None else torch.stack(draw.log_c)
            inputs = draw.z
            outputs: list[Sequence[Tensor]] = (
                [(x,) for x in draw.u]
                if draw.log_c is None
                else list(zip(draw.u, draw.log_c, strict=True))
            )
        else:
            z = time_first[:-1]
            mean, scale = p.transition(t, dt, z)
            u, log_c = q.evaluate(t, z)
            eps = (time_first[1:] - mean) / scale - root * u
            eps = eps if log_c is None else eps * (-log_c).exp()
            inputs, outputs = [z], [(u,) if log_c is None else (u, log_c)]
        factors = [root] if log_c is None else [root * (-log_c.detach()).exp(), torch.ones(())]
        return _Steps(
            root * u,
            root * u.detach(),
            log_c,
            None if log_c is None else log_c.detach(),
            eps,
            inputs,
            outputs,
            factors,
        )
    z = time_first[:-1]
    mean_p, scale_p = p.transition(t, dt, z)
    if draw is not None:
        mean, scale, eps = torch.stack(draw.mean), torch.stack(draw.scale), draw.eps
        scale = _align(scale, mean)
        inputs = draw.z
        outputs = list(zip(draw.mean, draw.scale, strict=True))
    else:
        mean, scale = q.transition(t, dt, z)
        eps = (time_first[1:] - mean) / scale
        inputs, outputs = [z], [(mean, scale)]
    w = (mean - mean_p) / scale_p
    w_stopped = (mean.detach() - mean_p) / scale_p
    if isinstance(q, ControlledPath) and q.contraction is not None:
        log_c = scale.log() - scale_p.log()
        log_c_stopped = scale.log().detach() - scale_p.log()
        factors = [1 / scale.detach(), 1 / scale.detach()]
        return _Steps(w, w_stopped, log_c, log_c_stopped, eps, inputs, outputs, factors)
    _check_same_noise(q, scale, scale_p)
    factors = [1 / scale.detach()]
    return _Steps(w, w_stopped, None, None, eps, inputs, [o[:1] for o in outputs], factors)


def _align(scale: Tensor, mean: Tensor) -> Tensor:
    """Per-step scales, stacked without the batch, made to broadcast against per-step means."""
    ones = mean.dim() - scale.dim()
    return scale.reshape(scale.shape[:1] + (1,) * ones + scale.shape[1:])


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
    return _stopped_log_prob(q0, z0) - p0.log_prob(z0)


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
    return GirsanovTerms(
        outer.reduce(steps.kl().sum((0, -1))), outer.reduce(steps.martingale().sum((0, -1)))
    )


def path_divergence(q: Distribution, p: Distribution, value: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(q || p) from one path, the initial state included.

    ``"kl"`` is the quadratic part, ``"full"`` the whole log ratio, ``"stl"`` the log ratio with
    the parameters of q stopped.
    """
    outer, q_path, p_path, path = _pair(q, p, value)
    steps = _compare(q_path, p_path, path)
    if estimator == "stl":
        term = steps.stopped()
    else:
        term = steps.kl().sum((0, -1))
        if estimator == "full":
            term = term + steps.martingale().sum((0, -1))
    z0 = steps.inputs[0] if steps.inputs[0].dim() < path.dim() else path[..., 0, :]
    return outer.reduce(term + _initial_divergence(q_path, p_path, z0, estimator))
