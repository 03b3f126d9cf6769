"""Weights of posterior draws: their tail, and draws that are corrected by them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

from .importance_check import GOOD, ImportanceCheck

__all__ = ["reweight", "smooth_weights", "tail_error"]

MIN_TAIL = 5
"""Weights in the tail that the fit of a Pareto distribution needs."""


def smooth_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Normalised log weights whose largest are replaced by quantiles of a generalised Pareto
    distribution, and the shape of that, k-hat (Vehtari et al. 2024, arXiv:1507.02646).

    Weights that are equal to rounding have no tail, and k-hat is then minus infinity. Where too
    few are positive for a fit it is infinity.

    :param log_weights: Of shape ``(num_samples,)``; they need not be normalised.
    """
    x = log_weights.double()
    x = x - x.max()
    n = len(x)
    if float(x.min()) > -1e-6:
        return x - x.logsumexp(0), -math.inf
    order = x.argsort()
    cutoff = x[order[-_tail_length(n) - 1]]
    cutoff = cutoff.clamp(min=math.log(torch.finfo(x.dtype).tiny))
    tail = order[x[order] > cutoff]
    if len(tail) < MIN_TAIL:
        return x - x.logsumexp(0), math.inf
    k, sigma = fit_generalized_pareto((x[tail].exp() - cutoff.exp()).cpu())
    if math.isfinite(k) and sigma > 0:
        p = (torch.arange(len(tail), dtype=x.dtype, device=x.device) + 0.5) / len(tail)
        rate = -torch.log1p(-p)
        excess = sigma * (torch.expm1(k * rate) / k if abs(k) > 1e-12 else rate)
        x = x.index_copy(0, tail, (excess + cutoff.exp()).log().clamp(max=0.0))
    return x - x.logsumexp(0), k if math.isfinite(k) else math.inf


def _tail_length(n: int) -> int:
    return math.ceil(min(n / 5, 3 * math.sqrt(n)))


def tail_error(log_weights: Tensor, k_hat: float) -> float:
    r"""How uncertain the logarithm of the mean weight is because of weights that were not drawn.

    Above the cutoff, weights have the mean :math:`\sigma / (1 - k)` in excess of it, and m of them
    tell k with a standard error of :math:`(1 + k) / \sqrt m`. Where k-hat is at most a half, the
    variance of the weights is finite and tells it all: the result is 0. From 1 on there is no mean
    to be known: it is infinity.
    """
    if k_hat <= GOOD:
        return 0.0
    if not k_hat < 1:
        return math.inf
    weights = (log_weights.double() - log_weights.max()).exp().sort().values
    m = _tail_length(len(weights))
    excess = (weights[-m:] - weights[-m - 1]).sum() / weights.sum()
    return float(excess) * (1 + k_hat) / ((1 - k_hat) * math.sqrt(m))


@torch.no_grad()
def reweight(
    draws: Mapping[str, Tensor],
    weights: ImportanceCheck | Tensor,
    num_samples: int | None = None,
) -> dict[str, Tensor]:
    """Resample draws of a guide by their importance weights, so that they follow the posterior
    more closely.

    The largest weights are smoothed by a fit of their tail, and resampling is systematic: a draw
    of weight w is kept about ``num_samples * w`` times. The result is of the form that
    ``Predictive(model, posterior_samples=...)`` and :func:`~pyro_sde.to_arviz` take. Draws near a
    mode that the guide does not visit cannot be made from draws elsewhere.

    Given an :class:`ImportanceCheck` that found a plate with all sites inside of it, the elements
    of the plate are resampled apart. Given a tensor of log weights, whole draws are.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde.diagnostics import importance, reweight
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))
        >>> def guide():  # the posterior is Normal(1, 0.71)
        ...     pyro.sample("x", dist.Normal(0.8, 0.8))
        >>> pyro.set_rng_seed(0)
        >>> result = importance(model, guide, num_samples=4000)
        >>> x = reweight(result.draws, result)["x"]
        >>> bool(abs(x.mean() - 1.0) < 0.05 and abs(x.std() - 0.71) < 0.05)
        True

    :param draws: Tensors by site, of shape ``(num_samples, ...)``: those of the check, or others
        that belong to the same weights.
    :param weights: What :func:`importance` returned; or log weights of shape ``(num_samples,)``,
        which need not be normalised.
    :param num_samples: How many draws to return; as many as there are, if not given.
    """
    by_element, dims = weights, {}
    if isinstance(weights, ImportanceCheck):
        by_element, dims = weights.element_log_weights, weights.plate_dims
    assert isinstance(by_element, Tensor)
    count = len(by_element)
    for name, value in draws.items():
        if len(value) != count:
            raise ValueError(
                f"draws[{name!r}] has {len(value)} samples, and there are {count} weights: pass "
                "the draws that the weights were computed for"
            )
    if isinstance(weights, ImportanceCheck) and weights.plate is None:
        by_element = by_element[:, 0]
    number = count if num_samples is None else num_samples
    if number < 1:
        raise ValueError(f"num_samples must be at least 1: found {number}")
    if by_element.dim() == 1:
        index = _resample(by_element, number)
        return {name: value[index.to(value.device)] for name, value in draws.items()}
    if by_element.dim() != 2 or not isinstance(weights, ImportanceCheck):
        raise ValueError(
            "weights must be log weights of shape (num_samples,), or the result of importance(): "
            f"found the shape {tuple(by_element.shape)}"
        )
    index = torch.stack([_resample(column, number) for column in by_element.unbind(1)], 1)
    unknown = sorted(set(draws) - set(dims))
    if unknown:
        raise ValueError(
            f"draws has the sites {unknown}, which the check did not draw, so that the dimension "
            f"of the plate {weights.plate!r} in them is not known: resample the latents, and draw "
            "the rest with Predictive(model, posterior_samples=...)"
        )
    found = {}
    for name, value in draws.items():
        rows = index.to(value.device)
        columns = torch.arange(rows.shape[1], device=value.device).expand_as(rows)
        dim = dims[name]
        found[name] = value.movedim(dim, 1)[rows, columns].movedim(1, dim)
    return found


def _resample(log_weights: Tensor, number: int) -> Tensor:
    """Indices of draws, each about ``number`` times its weight often."""
    weights = smooth_weights(log_weights)[0].exp()
    if not bool(weights.isfinite().all()):
        raise ValueError(
            "the log weights have no largest value that is finite, so that nothing can be "
            "resampled: no draw is possible under the model"
        )
    points = torch.arange(number, dtype=weights.dtype, device=weights.device)
    points = (points + torch.rand((), dtype=weights.dtype).to(weights.device)) / number
    return torch.searchsorted(weights.cumsum(0), points).clamp(max=len(weights) - 1)
