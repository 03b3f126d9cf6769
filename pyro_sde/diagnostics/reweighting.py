"""Importance weights of posterior draws: smoothing of their tail, and resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

from .importance_check import GOOD, ImportanceCheck

__all__ = ["reweight", "smooth_weights", "tail_error"]

MIN_TAIL = 5
"""The fewest weights in the tail to which a Pareto distribution can be fitted."""


def smooth_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed importance weights (Vehtari et al. 2024, arXiv:1507.02646).

    The largest weights are replaced by quantiles of a generalised Pareto distribution that is
    fitted to them. The shape of that distribution is k-hat. Weights that are equal to rounding have
    no tail, and k-hat is minus infinity; where too few weights are positive for a fit, it is
    infinity.

    :param log_weights: Log weights of shape ``(num_samples,)``, which need not be normalised.
    :returns: Normalised log weights of shape ``(num_samples,)``, and k-hat.
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
    r"""The error of the logarithm of the mean weight that is due to weights that were not drawn.

    The excess of the weights over the cutoff of the tail has the mean :math:`\sigma / (1 - k)`, and
    m weights determine k with a standard error of :math:`(1 + k) / \sqrt m`. Where k-hat is at most
    0.5 the variance of the weights is finite and includes the tail, so the result is 0. Where k-hat
    is 1 or more the weights have no mean, so the result is infinity.

    :param log_weights: Log weights of shape ``(num_samples,)``.
    :param k_hat: The shape of their tail.
    :returns: A standard error, in nats.
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

    The tail of the weights is Pareto-smoothed, and resampling is systematic: a draw of weight w is
    kept about ``num_samples * w`` times. ``Predictive(model, posterior_samples=...)`` and
    :func:`~pyro_sde.to_arviz` take the result as it is. Resampling cannot make draws near a mode
    that the guide does not visit.

    Given an :class:`ImportanceCheck` of a model whose sites are all in one plate, the elements of
    the plate are resampled separately. Given a tensor of log weights, whole draws are resampled.

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
    :param num_samples: How many draws to return; by default as many as ``draws`` has.
    :returns: The resampled draws by site, each of shape ``(num_samples, ...)``.
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
            f"draws has the sites {unknown}, which the check did not draw, so the dimension of the "
            f"plate {weights.plate!r} in them is not known: resample the latents, and draw the "
            "other sites with Predictive(model, posterior_samples=...)"
        )
    found = {}
    for name, value in draws.items():
        rows = index.to(value.device)
        columns = torch.arange(rows.shape[1], device=value.device).expand_as(rows)
        dim = dims[name]
        found[name] = value.movedim(dim, 1)[rows, columns].movedim(1, dim)
    return found


def _resample(log_weights: Tensor, number: int) -> Tensor:
    """The indices of ``number`` draws: a draw of weight w occurs about ``number * w`` times."""
    weights = smooth_weights(log_weights)[0].exp()
    if not bool(weights.isfinite().all()):
        raise ValueError(
            "weights cannot be resampled, because no log weight is finite: no draw is possible "
            "under the model"
        )
    points = torch.arange(number, dtype=weights.dtype, device=weights.device)
    points = (points + torch.rand((), dtype=weights.dtype).to(weights.device)) / number
    return torch.searchsorted(weights.cumsum(0), points).clamp(max=len(weights) - 1)
