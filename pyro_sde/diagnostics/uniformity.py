"""Exact tests of ranks that should be uniform, and the band of their empirical distribution."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["ecdf_band", "ecdf_p_value", "normal_scores", "sum_p_value"]

POINTS = 100
"""The most ranks at which the empirical distribution is compared with the uniform one."""
RESOLUTION = 100
"""Scores are rounded to a hundredth, so that the law of their sum is one on a lattice."""
SMALLEST = 1e-12
"""Below this a p-value is lost in rounding."""


@functools.cache
def normal_scores(draws: int) -> np.ndarray:
    r"""The quantiles of a Normal that belong to the ranks 0 to ``draws``,

    .. math:: x_r = \Phi^{-1}((r + 1/2) / (L + 1))

    A truth from Normal(m + b s, c s), ranked among draws from Normal(m, s), has scores with about
    the mean b and the standard deviation c.
    """
    levels = (torch.arange(draws + 1, dtype=torch.float64) + 0.5) / (draws + 1)
    return torch.special.ndtri(levels).numpy()


def sum_p_value(ranks: np.ndarray, draws: int, power: int) -> float:
    """The two-sided p-value of the sum of the scores of ``n`` ranks, or of their squares. It is
    exact for the scores as they are rounded.

    :param ranks: Ranks from 0 to ``draws``, of shape ``(n,)``.
    :param power: 1 for the scores, which tests a shift, or 2 for their squares, a width.
    """
    below, above = _tails_of_sum(len(ranks), draws, power)
    total = _lattice(draws, power)[ranks].sum()
    return _clip(2 * min(below[total], above[total]))


def _lattice(draws: int, power: int) -> np.ndarray:
    scores = normal_scores(draws) ** power
    return np.rint((scores - scores.min()) * RESOLUTION).astype(int)


@functools.lru_cache(maxsize=8)
def _tails_of_sum(n: int, draws: int, power: int) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities that the sum is at most, and at least, each of its values."""
    one = np.bincount(_lattice(draws, power)) / (draws + 1)
    size = n * (len(one) - 1) + 1
    padded = 1 << (size - 1).bit_length()
    law = np.fft.irfft(np.fft.rfft(one, padded) ** n, padded)[:size].clip(min=0)
    return law.cumsum(), law[::-1].cumsum()[::-1]


def ecdf_p_value(ranks: np.ndarray, draws: int) -> float:
    r"""The exact p-value of the largest deviation of the empirical distribution from the uniform
    one.

    The number of ranks below k is Binomial(n, k / (L + 1)). The deviation at k is measured by the
    probability of one as large at that k alone, and the p-value is the probability that a smaller
    one occurs at any k (Säilynoja et al. 2022).

    :param ranks: Ranks from 0 to ``draws``, of shape ``(n,)``.
    """
    counts = (ranks[:, None] < _points(draws)).sum(0)
    smallest = _tails(len(ranks), draws)[np.arange(len(counts)), counts].min()
    return _clip(1 - _probability_inside(len(ranks), draws, float(smallest)))


@functools.lru_cache(maxsize=8)
def ecdf_band(n: int, draws: int, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The band that holds the empirical distribution of ``n`` uniform ranks at all points at once.

    :param level: The least probability of that.
    :returns: The points as shares of the ranks, and the lowest and highest shares in the band.
    """
    low, high = np.log(SMALLEST), 0.0
    for _ in range(30):
        middle = (low + high) / 2
        if _probability_inside(n, draws, float(np.exp(middle))) >= level:
            low = middle
        else:
            high = middle
    ends = np.array(list(_allowed(n, draws, float(np.exp(low)))))
    return _points(draws) / (draws + 1), ends[:, 0] / n, ends[:, 1] / n


def _clip(p: float) -> float:
    return float(min(max(p, SMALLEST), 1.0))


@functools.cache
def _points(draws: int) -> np.ndarray:
    """The ranks k at which those below k are counted."""
    number = min(draws + 1, POINTS)
    return np.unique(np.rint(np.linspace(0, draws + 1, number + 1)).astype(int)[1:-1])


@functools.lru_cache(maxsize=8)
def _tails(n: int, draws: int) -> np.ndarray:
    """The two-sided probability of every count 0 to n at every point, of shape (points, n + 1)."""
    counts = np.arange(n + 1)
    share = (_points(draws) / (draws + 1))[:, None]
    law = np.exp(_log_binomial(n, counts, share))
    below, above = law.cumsum(1), law[:, ::-1].cumsum(1)[:, ::-1]
    return np.minimum(2 * np.minimum(below, above), 1.0)


def _allowed(n: int, draws: int, smallest: float) -> Iterator[tuple[int, int]]:
    """At every point the lowest and the highest count that is more probable than ``smallest``."""
    for tails in _tails(n, draws):
        found = np.flatnonzero(tails > smallest * (1 + 1e-9))
        yield (int(found[0]), int(found[-1])) if len(found) else (1, 0)


@functools.lru_cache(maxsize=1024)
def _probability_inside(n: int, draws: int, smallest: float) -> float:
    """The probability that at all points the count is more probable than ``smallest``. The counts
    are a Markov chain: n - c ranks at or above a point fall below the next one independently."""
    before, counts, law = 0.0, np.zeros(1, int), np.ones(1)
    shares = _points(draws) / (draws + 1)
    for share, (low, high) in zip(shares, _allowed(n, draws, smallest), strict=True):
        after = np.arange(low, high + 1)
        step = _log_binomial(
            n - counts[:, None], after - counts[:, None], (share - before) / (1 - before)
        )
        before, counts, law = share, after, law @ np.exp(step)
    return float(law.sum())


def _log_binomial(n: np.ndarray | int, k: np.ndarray, p: np.ndarray | float) -> np.ndarray:
    """The log probability of k of n; minus infinity where k is negative."""
    is_possible = k >= 0
    k = np.where(is_possible, k, 0)
    choose = _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)
    return np.where(is_possible, choose + k * np.log(p) + (n - k) * np.log1p(-p), -np.inf)


def _log_factorial(n: np.ndarray | int) -> np.ndarray:
    return torch.lgamma(torch.as_tensor(n, dtype=torch.float64) + 1).numpy()
