"""The importance check: how close a guide is to the exact posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._buffers import keep_buffers
from .._threads import one_thread
from .importance_check import ERRORS, MIN_EFFECTIVE, Estimate, ImportanceCheck, SiteCheck
from .reweighting import smooth_weights, tail_error
from .weighted_draws import Problem, draw_guide, draw_prior

__all__ = ["importance", "importance_line"]

MIN_SAMPLES = 50
MAX_ELEMENTS = 2**24
"""The most elements, over all draws, of a check that runs without having been asked for."""
PRIOR_SAMPLES = 10
"""The number of draws of the prior for each draw of the guide, where draws are vectorised. Where
ten times as many bring enough of them near the data, there are ten times as many."""
ENOUGH_SAMPLES = 1000
"""The number of draws that suffices where a single draw is large."""
UNLIKELY = 10.0
"""Nats. The probability that an unbiased estimate exceeds the evidence by c nats is at most
exp(-c), however few of its draws have weight."""


@one_thread("importance")
def importance(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int = 4000,
    parallel: bool | None = None,
    seconds: float | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> ImportanceCheck:
    r"""Check how close a guide is to the exact posterior, by importance sampling.

    Draws :math:`z_i \sim q` of the guide have the weights

    .. math:: w_i = p(x, z_i) / q(z_i)

    The mean of the weights is an unbiased estimate of the evidence. Their spread tells how far q
    is from the posterior, in two ways: k-hat is the shape of the tail of the weights, and
    weighting the draws of a site shifts its mean and standard deviation. Where model and guide
    have all sites in one plate, the elements of the plate are independent, and each element is
    checked with weights of its own.

    - k-hat is below 0.5 and no site moves: the posterior is right.
    - k-hat is below 0.7: the posterior is usable, and :func:`reweight` corrects its draws.
    - k-hat is above 0.7: the posterior is not to be trusted, and weights cannot repair it.

    The weights know only the region where the guide draws: a guide that covers one of two modes
    may look right. So draws of the prior, weighted by their likelihood, give a second estimate of
    the evidence. Where that estimate is significantly higher, the guide misses a part of the
    posterior. Where hardly any draw of the prior comes near the data (with many or precise
    observations), the second estimate is useless: :attr:`ImportanceCheck.missed` is then None, and
    a mode that the guide does not visit remains undetected.

    The check changes neither parameters nor the random state. It raises an error where a site is
    scaled or subsampled, because such a model has no evidence.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))
        >>> def exact():
        ...     pyro.sample("x", dist.Normal(1.0, 0.5**0.5))
        >>> pyro.set_rng_seed(0)
        >>> found = importance(model, exact)
        >>> f"{found.log_evidence.value:.4f}", found.verdict
        ('-2.2655', 'the posterior is right')
        >>> print(f"{dist.Normal(0.0, 2**0.5).log_prob(torch.tensor(2.0)):.4f}")
        -2.2655

    :param model: The model.
    :param guide: The guide, of any kind that has a density.
    :param args: Arguments of both.
    :param kwargs: Keyword arguments of both.
    :param num_samples: How many draws of the guide, at least 50. The prior is drawn as often, or
        ten times as often where draws are vectorised, or a hundred times where that helps.
    :param parallel: Whether to vectorise the draws, which model and guide must allow. By default
        they are vectorised where that does not change the likelihood of two draws.
    :param seconds: The time limit for the draws of the guide, and again for those of the prior.
        Fewer than 50 draws within the limit are an error.
    :param progress: Whether to show a progress bar.
    :returns: An :class:`ImportanceCheck`. Print it, or read its fields.
    """
    return _importance(model, guide, args, kwargs, num_samples, parallel, seconds, progress)


@torch.no_grad()
def _importance(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    num_samples: int,
    parallel: bool | None = None,
    seconds: float | None = None,
    progress: bool = False,
    max_elements: float = math.inf,
) -> ImportanceCheck:
    if num_samples < MIN_SAMPLES:
        raise ValueError(f"num_samples must be at least {MIN_SAMPLES}: found {num_samples}")
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices), keep_buffers(model, guide):
        problem = Problem.of(model, guide, args, kwargs)
        size = sum(shape.numel() for shape in problem.shapes.values())
        fewest = min(num_samples, ENOUGH_SAMPLES)
        if size * fewest > max_elements:
            raise RuntimeError(
                f"{fewest} draws of {size:,} numbers are more than fit keeps in memory: call "
                "pyro_sde.diagnostics.importance, which has no limit"
            )
        num_samples = int(min(num_samples, max_elements // max(1, size)))
        draws, log_weights, vectorized = draw_guide(
            problem, num_samples, parallel, seconds, progress
        )
        if len(log_weights) < MIN_SAMPLES:
            raise RuntimeError(
                f"{len(log_weights)} draws took {seconds:g} seconds, and the check needs "
                f"{MIN_SAMPLES} draws: call pyro_sde.diagnostics.importance with more seconds"
            )
        _check_weights(log_weights)
        for name in problem.deltas:
            if bool((draws[name] == draws[name][:1]).all()):
                raise ValueError(
                    f"the guide has a point at site {name!r} instead of a density "
                    "(AutoDelta?), and a point has no importance weight. Use a guide with a density"
                )
        is_cheap = vectorized and problem.chunk >= MIN_SAMPLES
        number = len(log_weights) * (PRIOR_SAMPLES if is_cheap else 1)
        try:
            prior = draw_prior(problem, number, vectorized, seconds, progress)
            enough = _effective(prior).min() / MIN_EFFECTIVE
            if is_cheap and 1 / PRIOR_SAMPLES < enough < 1:
                more = (PRIOR_SAMPLES - 1) * number
                prior = torch.cat([prior, draw_prior(problem, more, True, seconds, progress)])
        except (ValueError, ArithmeticError, RuntimeError):
            prior = torch.zeros(0)  # a prior whose draws the likelihood refuses tells nothing
    n = len(log_weights)
    smoothed = [smooth_weights(column) for column in log_weights.unbind(1)]
    weights = torch.stack([x[0] for x in smoothed], 1).exp()
    evidence, variance = _evidence(log_weights)
    effective = float(_effective(log_weights).min())
    per_term = math.isqrt(n)
    terms = log_weights[: n // per_term * per_term].unflatten(0, (-1, per_term))
    missed, misses = _missed(evidence, variance, prior)
    unseen = [tail_error(x, k) for x, (_, k) in zip(log_weights.unbind(1), smoothed, strict=True)]
    error = math.hypot(float(variance.sum().sqrt()), *unseen)
    sites = [_site(k, v, weights, problem.plate_dims.get(k)) for k, v in draws.items()]
    sites.sort(key=lambda s: -max(abs(s.shift), abs(math.log(max(s.ratio, 1e-300)))))
    return ImportanceCheck(
        log_evidence=Estimate(float(evidence.sum()), error),
        elbo=_mean(log_weights.sum(1)),
        bound=_mean((terms.logsumexp(1) - math.log(per_term)).sum(1)),
        bound_samples=per_term,
        k_hat=max(x[1] for x in smoothed),
        effective=effective,
        num_samples=n,
        sites=tuple(sites),
        missed=missed,
        misses=misses,
        plate=None if problem.plate is None else problem.plate.name,
        plate_dims=problem.plate_dims,
        draws=draws,
        element_log_weights=log_weights,
    )


def importance_line(
    model: Callable, guide: Callable, args: tuple, kwargs: dict, num_samples: int, seconds: float
) -> tuple[ImportanceCheck | None, str]:
    """Run the importance check, and describe the result or the failure in one line.

    :returns: The check, or None where it failed, and the line.
    """
    try:
        check = _importance(
            model, guide, args, kwargs, num_samples, seconds=seconds, max_elements=MAX_ELEMENTS
        )
    except (Exception, KeyboardInterrupt) as e:  # a training must not fail because its check did
        return None, f"importance check: not made, because {str(e) or type(e).__name__}"
    return check, check.line


def _check_weights(log_weights: Tensor) -> None:
    bad = int((log_weights.isnan() | (log_weights == math.inf)).any(1).sum())
    if bad:
        raise ValueError(
            f"{bad} of {len(log_weights)} log weights are NaN or infinite: the log density of the "
            "model or the guide overflows. Find the site with pyro_sde.diagnostics.elbo_parts"
        )
    if not bool(log_weights.isfinite().any(0).all()):
        raise ValueError(
            f"none of the {len(log_weights)} draws of the guide is possible under the model: "
            "compare the supports of the sites in model and guide"
        )


def _mean(x: Tensor) -> Estimate:
    return Estimate(float(x.mean()), float(x.std() / math.sqrt(len(x))))


def _evidence(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """For each element of the plate, the logarithm of the mean weight, and its variance."""
    n = len(log_weights)
    log_mean = log_weights.logsumexp(0) - math.log(n)
    return log_mean, (log_weights - log_mean).exp().var(0) / n


def _effective(log_weights: Tensor) -> Tensor:
    return (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp()


def _missed(evidence: Tensor, variance: Tensor, prior: Tensor) -> tuple[Estimate | None, bool]:
    """By how much the log evidence is higher by draws of the prior, and whether that is
    significant."""
    prior = prior.masked_fill(prior.isnan(), -math.inf)
    if len(prior) < MIN_SAMPLES:
        return None, False
    other, other_variance = _evidence(prior)
    ratio = (other - evidence).exp()
    t = (ratio - 1) / (ratio.square() * other_variance + variance).sqrt().clamp(min=1e-12)
    t = t.masked_fill(~(_effective(prior) >= MIN_EFFECTIVE), -math.inf)
    # Bonferroni's correction for many elements.
    chance = torch.special.ndtr(torch.tensor(-ERRORS, dtype=t.dtype)) / len(t)
    significant = (t > -torch.special.ndtri(chance)) & (other - evidence > 0.05)
    certain = other - evidence > UNLIKELY + math.log(len(t))
    i = int((certain * UNLIKELY**9 + t).argmax())
    misses = bool(significant[i] | certain[i])
    if not misses and not bool(t.isfinite().all()):
        return None, False
    gap = Estimate(float(other[i] - evidence[i]), float((other_variance + variance)[i].sqrt()))
    return gap, misses


def _site(name: str, draws: Tensor, weights: Tensor, plate_dim: int | None) -> SiteCheck:
    x = draws.to(weights)
    x = x.unsqueeze(1) if plate_dim is None else x.movedim(plate_dim, 1)
    w = weights.reshape(weights.shape + (1,) * (x.dim() - 2))
    mean, sd = x.mean(0), x.std(0)
    weighted = (w * x).sum(0)
    weighted_sd = (w * (x - weighted).square()).sum(0).sqrt()
    varies = sd > 1e-6 * (1e-30 + mean.abs())  # the start of a path may be a fixed point
    shift = torch.where(varies, (weighted - mean) / sd, 0.0)
    ratio = torch.where(varies, weighted_sd / sd, 1.0)

    def worst(value: Tensor, size: Tensor) -> tuple[float, tuple[int, ...]]:
        if plate_dim is None:
            value, size = value.squeeze(0), size.squeeze(0)
        else:
            value, size = (v.movedim(0, plate_dim - 1) for v in (value, size))
        i = size.argmax()
        at = tuple(int(k) for k in torch.unravel_index(i, size.shape)) if size.dim() else ()
        return float(value.flatten()[i]), at

    shift_of, shift_at = worst(shift, shift.abs())
    ratio_of, ratio_at = worst(ratio, ratio.log().abs())
    return SiteCheck(name, shift_of, ratio_of, shift_at, ratio_at)
