"""The result of simulation-based calibration."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .importance_check import Estimate
from .table import table
from .uniformity import ecdf_p_value, normal_scores, sum_p_value

__all__ = ["CalibrationCheck", "RankCheck"]

LEVEL = 0.01
"""The probability that a check of an exact posterior finds anything wrong with it."""
SURE, CLAIMED = 0.9, 0.8
"""The power of an ideal test at the deviations that the verdict names, and what is left of it,
because three tests share the level and ranks are coarser than distances."""
TESTS, SIGNIFICANT = 3, 3.0
"""The number of tests of a quantity; and of standard errors, where one deviation may be due to
another."""
ROUNDING = 1e-10
"""Below this, p-values are lost in rounding."""
MAX_ROWS, MAX_NAMED = 20, 3
"""The most rows of the table, and the most quantities in the verdict."""


@dataclass(frozen=True)
class RankCheck:
    """The ranks of one quantity: of a number of a latent site, or of a statistic.

    Example::

        >>> import torch
        >>> narrow = RankCheck("rate", (), torch.tensor([0, 9] * 20), draws=9)
        >>> narrow.deviation(), narrow.label, round(narrow.ratio.value, 1)
        ('too narrow', 'rate', 1.8)
    """

    name: str
    """The name of the site or statistic."""
    entry: tuple[int, ...]
    """The index of the number in one draw of the site."""
    ranks: Tensor = field(repr=False)
    """The rank of the truth among the posterior draws in each simulation, of shape ``(n,)``."""
    draws: int
    """The number of posterior draws in each simulation: ranks are 0 to ``draws``."""

    @property
    def label(self) -> str:
        """Name and entry, as one writes them in Python."""
        return self.name + (f"[{', '.join(map(str, self.entry))}]" if self.entry else "")

    @property
    def shift(self) -> Estimate:
        """How far the truth lies above the mean of the posterior on average, in standard deviations
        of the posterior. Above 0 the posterior is too low."""
        x = self._scores
        return Estimate(float(x.mean()), float(x.std() / math.sqrt(max(len(x) - 1, 1))))

    @property
    def ratio(self) -> Estimate:
        """The standard deviation that the posterior should have, divided by the one it has. Above 1
        the posterior is too narrow. A ratio far above 1 is larger than this estimate, because ranks
        do not tell how far beyond all draws the truth lies."""
        x, exact = self._scores, normal_scores(self.draws)
        value = float(x.std() / exact.std())
        return Estimate(value, value / math.sqrt(2 * max(len(x) - 1, 1)))

    @functools.cached_property
    def _scores(self) -> np.ndarray:
        return normal_scores(self.draws)[self.ranks.numpy()]

    @functools.cached_property
    def _p(self) -> tuple[float, float, float]:
        """Exact p-values of a shift, a wrong width, and a wrong shape."""
        ranks = self.ranks.numpy()
        of_sums = (sum_p_value(ranks, self.draws, power) for power in (1, 2))
        return (*of_sums, ecdf_p_value(ranks, self.draws))  # type: ignore[return-value]

    @property
    def p_value(self) -> float:
        """The p-value of the ranks, if the posterior is exact: three times the least of those of a
        shift, a width and a shape, each of which is exact."""
        return min(1.0, TESTS * min(self._p))

    def deviation(self, level: float = LEVEL) -> str:
        """The significant deviation of the posterior from the exact one, in words.

        :param level: The p-value from which on a deviation is significant.
        :returns: "too low", "too high", "too narrow", "too wide", two of them, or "of another
            shape"; empty if nothing is significant.
        """
        is_shifted, is_other_width, is_other_shape = (TESTS * p < level for p in self._p)
        # A shift also increases the mean square of the scores, and a width the spread of their
        # mean. Where both are significant, each must be so beyond the other.
        both = is_shifted and is_other_width
        (shift, error_of_shift), (ratio, error_of_ratio) = self.shift, self.ratio
        words = []
        if is_shifted and not (both and abs(shift) < SIGNIFICANT * error_of_shift):
            words.append("too low" if shift > 0 else "too high")
        is_wide = np.square(self._scores).mean() < np.square(normal_scores(self.draws)).mean()
        agree = (ratio < 1) == is_wide and abs(ratio - 1) > SIGNIFICANT * error_of_ratio
        if is_other_width and (agree or not both):
            words.append("too wide" if is_wide else "too narrow")
        if is_other_shape and not words:
            words.append("of another shape")
        return " and ".join(words)


@dataclass(frozen=True)
class CalibrationCheck:
    """The result of :func:`sbc`. Print it, read its fields, or draw it with
    :func:`~pyro_sde.plotting.plot_sbc`.

    A deviation is significant if an exact posterior has such ranks in less than 1 % of all checks,
    whatever the number of quantities (Bonferroni's correction).

    Example::

        >>> import textwrap, torch
        >>> ranks = {"rate": torch.arange(100).reshape(-1, 1)}
        >>> check = CalibrationCheck(ranks, {"rate": ((),)}, draws=99, simulations=100)
        >>> print(textwrap.fill(check.line, 85))
        simulation-based calibration: 100 simulations, 1 quantity: the posterior is
        calibrated as far as 100 simulations tell (they find a shift of 0.42 standard
        deviations, or a width too narrow by a factor of 1.3, with 80 % probability)
    """

    ranks: dict[str, Tensor]
    """The ranks by site or statistic, each of shape ``(n, entries)`` for n simulations that
    succeeded."""
    entries: dict[str, tuple[tuple[int, ...], ...]]
    """The index of each entry in one draw of the site or statistic."""
    draws: int
    """The number of posterior draws in each simulation: ranks are 0 to ``draws``."""
    simulations: int
    """The number of simulations that were asked for."""
    failures: dict[int, str] = field(default_factory=dict)
    """The error of each simulation that failed, by its number, from 0. A diverged training is
    one."""

    @property
    def quantities(self) -> tuple[RankCheck, ...]:
        """The check of each quantity, the least probable first."""
        return self._quantities

    @functools.cached_property
    def _quantities(self) -> tuple[RankCheck, ...]:
        found = [
            RankCheck(name, entry, column, self.draws)
            for name, ranks in self.ranks.items()
            for entry, column in zip(self.entries[name], ranks.unbind(1), strict=True)
        ]
        return tuple(sorted(found, key=lambda q: q.p_value))

    @property
    def p_values(self) -> dict[str, Tensor]:
        """The p-value of each quantity by site or statistic, each of shape ``(entries,)``. They are
        not corrected for the number of quantities."""
        by_label = {(q.name, q.entry): q.p_value for q in self.quantities}
        return {
            name: torch.tensor([by_label[name, entry] for entry in entries], dtype=torch.float64)
            for name, entries in self.entries.items()
        }

    @property
    def level(self) -> float:
        """The p-value of a single quantity from which on it is significant."""
        return LEVEL / len(self.quantities)

    @property
    def completed(self) -> int:
        """The number of simulations that succeeded."""
        return len(next(iter(self.ranks.values())))

    @property
    def is_right(self) -> bool:
        """Whether no quantity deviates significantly."""
        return self.quantities[0].p_value >= self.level

    @property
    def resolution(self) -> tuple[float, float]:
        """What is found with 80 % probability at least, for posteriors that are Normal: a shift in
        standard deviations, and a factor by which the posterior is too narrow."""
        tail = torch.tensor([self.level / TESTS / 2, 1 - SURE], dtype=torch.float64)
        errors = float(-torch.special.ndtri(tail).sum())
        return errors / math.sqrt(self.completed), math.exp(errors / math.sqrt(2 * self.completed))

    @property
    def verdict(self) -> str:
        """One clause that says whether the posterior is calibrated, and if not, what is wrong."""
        if self.is_right:
            shift, factor = self.resolution
            made = _count(self.completed, "simulation")
            return (
                f"the posterior is calibrated as far as {made} tell (they find a shift of "
                f"{shift:.2g} standard deviations, or a width too narrow by a factor of "
                f"{factor:.2g}, with {100 * CLAIMED:g} % probability)"
            )
        wrong = [q for q in self.quantities if q.p_value < self.level]
        named = [f"{q.label} is {q.deviation(self.level)}" for q in wrong[:MAX_NAMED]]
        if len(wrong) > MAX_NAMED:
            named.append(f"{len(wrong) - MAX_NAMED} more are wrong")
        return "the posterior is not calibrated: " + ", ".join(named)

    @property
    def line(self) -> str:
        """The check in one line."""
        made = _count(self.completed, "simulation")
        lost = self.simulations - self.completed
        if lost:
            made = f"{self.completed} of {_count(self.simulations, 'simulation')}"
            stopped = lost - len(self.failures)
            ends = [f"{len(self.failures)} failed"] if self.failures else []
            ends += [f"{stopped} not made"] if stopped else []
            made += f" ({', '.join(ends)})"
        number = len(self.quantities)
        what = "1 quantity" if number == 1 else f"{number} quantities"
        return f"simulation-based calibration: {made}, {what}: {self.verdict}"

    def __str__(self) -> str:
        rows = [self._row(q) for q in self.quantities[:MAX_ROWS]]
        left = len(self.quantities) - MAX_ROWS
        if left > 0:
            rows.append([f"... and {left} with larger p-values", "", "", "", "", ""])
        head = ["site", "entry", "shift of mean / sd", "ratio of sd", "p-value", "posterior"]
        return table(self.line, head, rows)

    __repr__ = __str__

    def _row(self, q: RankCheck) -> Sequence[str]:
        return [
            q.name,
            str(q.entry),
            f"{q.shift.value:+.2f} ± {q.shift.error:.2f}",
            f"{q.ratio.value:.2f} ± {q.ratio.error:.2f}",
            f"{q.p_value:.2g}" if q.p_value > ROUNDING else f"< {ROUNDING:g}",
            q.deviation(self.level),
        ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
