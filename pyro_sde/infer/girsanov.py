r"""The KL of a path site and its three estimators, from the log ratio of guide and model.

The formulas are those of :mod:`pyro_sde.simulation.ratio`. Without contraction and with
:math:`w = u \sqrt{dt}`, the sums over the steps are Girsanov's two terms,
:math:`\tfrac12 \int |u|^2 dt` and :math:`\int u\,dB`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from .._checks import broadcast_shapes
from .._ops.common import inside_func
from .._ops.first_order import first_order_only
from ..distributions.path import PathDistribution
from ..distributions.starts import PartlyFixed
from ..distributions.wrapping import WrappedPath, unwrap
from ..simulation.ratio import LogRatio, kl, stopped
from ..simulation.step import contraction_between, whiten
from .comparison import log_ratio
from .elbo_terms import PathDivergence

__all__ = ["ESTIMATORS", "GirsanovTerms", "girsanov", "path_divergence"]

ESTIMATORS = ("stl", "full", "kl")


class GirsanovTerms(NamedTuple):
    """The two parts of log q - log p over the steps of a path, each of the site's batch shape.

    Example::

        >>> import torch
        >>> terms = GirsanovTerms(torch.tensor(2.0), torch.tensor(-0.5))
        >>> sum(terms)  # log q - log p
        tensor(1.5000)
    """

    quadratic: Tensor
    """The KL of the steps."""
    martingale: Tensor
    """The rest of the log ratio, which has mean zero under q."""


def _initial_divergence(
    q: PathDistribution, p: PathDistribution, z0: Tensor, estimator: str
) -> Tensor | float:
    q0, p0 = q.initial, p.initial
    if q0 is p0 or _is_same_view(q0, p0):
        return 0.0
    if isinstance(p0, Tensor):
        tol = 64 * torch.finfo(p0.dtype).eps
        if not isinstance(q0, Tensor) or bool(((q0 - p0).abs() > tol * (1 + p0.abs())).any()):
            raise ValueError(
                "the model's path starts at a fixed point and the guide's path does not start "
                "there: the KL is infinite. Leave the guide's initial out, or give the model's "
                "path a Distribution as initial"
            )
        return 0.0
    if isinstance(p0, PartlyFixed):
        _check_fixed_entries(q0, p0)
    if isinstance(q0, Tensor):
        return -p0.log_prob(z0)
    if isinstance(p0, PartlyFixed) and isinstance(q0, PartlyFixed):
        return _divergence_of_laws(q0.law, p0.law, p0.drawn(z0), estimator)
    return _divergence_of_laws(q0, p0, z0, estimator)


def _check_fixed_entries(q0: Any, p0: PartlyFixed) -> None:
    point = q0.fixed if isinstance(q0, PartlyFixed) else q0
    if (
        isinstance(point, Tensor)
        and not bool(p0.log_prob_of_fixed(point).isinf().any())
        and (point is q0 or q0.is_drawn == p0.is_drawn)
    ):
        return
    raise ValueError(
        "the model's path and the guide's start at different points, where they are fixed: the "
        "KL is infinite. Give both the same initial, entry by entry"
    )


def _divergence_of_laws(q0: Distribution, p0: Distribution, z0: Tensor, estimator: str) -> Tensor:
    of_q, of_p = _moments(q0), _moments(p0)
    if estimator == "full":
        return q0.log_prob(z0) - p0.log_prob(z0)
    if of_q is not None and of_p is not None:
        return _divergence_of_normals(of_q, of_p, z0, estimator)
    if estimator == "kl":
        try:
            return kl_divergence(q0, p0)
        except NotImplementedError:
            return q0.log_prob(z0) - p0.log_prob(z0)
    return _stopped_log_prob(q0, z0) - p0.log_prob(z0)


def _is_same_view(a: Any, b: Any) -> bool:
    """Whether two tensors are views of the same memory, and need no comparison."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or inside_func():
        return False  # tensors inside of torch.func have no address
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _moments(d: Distribution) -> tuple[Tensor, Tensor] | None:
    """Location and scale of a Normal law over R^D, the scale a vector or a lower-triangular
    matrix."""
    if isinstance(d, MultivariateNormal):
        return d.loc, d.scale_tril
    if isinstance(d, Independent) and isinstance(d.base_dist, Normal):
        return d.base_dist.loc, d.base_dist.scale
    return None


def _divergence_of_normals(
    of_q: tuple[Tensor, Tensor], of_p: tuple[Tensor, Tensor], z0: Tensor, estimator: str
) -> Tensor:
    """The KL of a Normal start under a Normal prior, by the formulas of a step."""
    (loc_q, scale_q), (loc_p, scale_p) = of_q, of_p
    shape = broadcast_shapes(z0.shape, loc_q.shape, loc_p.shape)
    loc_q, loc_p = loc_q.expand(shape), loc_p.expand(shape)
    scale_q, scale_p = (
        _expand_scale(s, loc, shape) for s, loc in ((scale_q, of_q[0]), (scale_p, of_p[0]))
    )
    w = whiten(loc_p, scale_p, loc_q)
    contraction = contraction_between(scale_q, scale_p, w)
    if estimator == "kl":
        return kl(w, contraction)
    eps = whiten(loc_q, scale_q, z0.expand(shape)).detach()
    return stopped(w, contraction, eps)


def _expand_scale(scale: Tensor, loc: Tensor, shape: torch.Size) -> Tensor:
    matrix = scale.dim() > loc.dim()
    return scale.expand((*shape, shape[-1]) if matrix else shape)


def _stopped_log_prob(q0: Distribution, z0: Tensor) -> Tensor:
    """The log density at ``z0`` with the parameters of ``q0`` stopped."""
    # Where the parameters move the support, the score has a mean: nothing may be stopped.
    if not torch.is_grad_enabled() or _has_learned_support(q0):
        return q0.log_prob(z0)
    point = z0.detach().requires_grad_()
    log_q = q0.log_prob(point)
    if not log_q.requires_grad:  # a Uniform, say
        return log_q
    (slope,) = torch.autograd.grad(log_q.sum(), point, allow_unused=True)
    if slope is None:
        return log_q.detach()
    return log_q.detach() + (slope * (z0 - z0.detach())).sum(-1)


def _has_learned_support(law: Distribution) -> bool:
    try:
        return _is_learned(law.support)
    except NotImplementedError:
        return False


def _is_learned(support: Any) -> bool:
    """Whether a constraint has bounds with gradients, as that of a Uniform law may."""
    if isinstance(support, Tensor):
        return support.requires_grad
    if isinstance(support, list):
        return any(_is_learned(x) for x in support)
    return any(_is_learned(x) for x in getattr(support, "__dict__", {}).values())


def _pair(q: Distribution, p: Distribution, value: Tensor) -> tuple[WrappedPath, Any, Any, Tensor]:
    outer_q, outer_p = unwrap(q), unwrap(p)
    if outer_q is None or outer_p is None:
        found = type(p if outer_p is None else q).__name__
        raise TypeError(f"q and p must both be path distributions, or wrap one: found {found}")
    if outer_q.transforms != outer_p.transforms:
        raise ValueError(
            "the paths of guide and model have different transforms: "
            f"{outer_q.transforms} and {outer_p.transforms}; use the same transforms, in one order"
        )
    if len(outer_q.masks) != len(outer_p.masks) or not all(
        bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
        for a, b in zip(outer_q.masks, outer_p.masks, strict=True)
    ):
        raise ValueError("the paths of guide and model have different masks; use the same mask")
    return outer_p, outer_q.path, outer_p.path, outer_q.to_path(value)


def girsanov(q: Distribution, p: Distribution, value: Tensor) -> GirsanovTerms:
    r"""The two parts of :math:`\log q - \log p` over the steps of a path ``value``.

    The quadratic part is the KL of the steps, :math:`\tfrac12 \int |u|^2 dt`. The martingale
    :math:`\int u\,dB` has mean zero under q. Where q and p have the same law of the initial state,
    the sum of both parts is exactly ``q.log_prob(value) - p.log_prob(value)``.

    Example::

        >>> import torch
        >>> from pyro_sde.distributions import BrownianMotion, ControlledPath
        >>> p = BrownianMotion(1.0, torch.linspace(0.0, 1.0, 11), 0.0)
        >>> q = ControlledPath(p, lambda t, z: torch.full_like(z, 2.0))
        >>> z = q.sample()
        >>> terms = girsanov(q, p, z)
        >>> f"{terms.quadratic:.4f}"  # half of 2 squared, for a time of 1
        '2.0000'
        >>> bool((sum(terms) - (q.log_prob(z) - p.log_prob(z))).abs() < 1e-4)
        True

    :param q: The path distribution that ``value`` was drawn from.
    :param p: The path distribution to compare q with, of the same diffusion.
    :param value: A path.
    :returns: The quadratic part and the martingale, each of the batch shape of ``value``.
    """
    outer, q_path, p_path, path = _pair(q, p, value)
    ratio = log_ratio(q_path, p_path, path)
    return GirsanovTerms(outer.reduce(ratio.kl()), outer.reduce(ratio.martingale()))


def path_divergence(
    q: Distribution,
    p: Distribution,
    value: Tensor,
    estimator: str,
    watch: Callable[[PathDivergence], None] | None = None,
) -> Tensor:
    """An estimate of KL(q || p) from one path, the initial state included.

    The estimator ``"kl"`` is the quadratic part, ``"full"`` the whole log ratio, and ``"stl"`` the
    log ratio with all parameters held fixed in the densities, as a function of the path alone.

    :param watch: A function that is called with the parts of the estimate.
    :returns: The estimate, of the site's batch shape.
    """
    outer, q_path, p_path, path = _pair(q, p, value)
    ratio = log_ratio(q_path, p_path, path)
    if estimator == "stl":
        term = ratio.stopped()
    else:
        term = ratio.kl() if estimator == "kl" else ratio.kl() + ratio.martingale()
    start = _initial_divergence(q_path, p_path, path[..., 0, :], estimator)
    if watch is not None:
        with torch.no_grad():
            watch(_terms(ratio, start, term, q_path, outer))
    total = outer.reduce(term + start)
    return first_order_only(total) if estimator == "stl" else total


def first_step_not_finite(q: Distribution, p: Distribution, value: Tensor) -> float | None:
    """The time at which the first step begins whose KL is not finite; None if all are finite."""
    _, q_path, p_path, path = _pair(q, p, value)
    with torch.no_grad():
        bad = ~log_ratio(q_path, p_path, path).kl_by_step().isfinite()
        first = bad.reshape(len(bad), -1).any(1).nonzero()
        times = q_path.times.reshape(-1, q_path.times.shape[-1])[0]
        return float(times[first[0]]) if len(first) else None


def _terms(
    ratio: LogRatio,
    start: Tensor | float,
    like: Tensor,
    path: PathDistribution,
    outer: WrappedPath,
) -> PathDivergence:
    by_step = ratio.kl_by_step()
    return PathDivergence(
        path.times,
        path.event_shape[-1],
        outer.reduce(torch.zeros_like(like) + start),
        outer.reduce(by_step.sum(0).expand_as(like)),
        outer.reduce(by_step.expand(by_step.shape[:1] + like.shape)),
    )
