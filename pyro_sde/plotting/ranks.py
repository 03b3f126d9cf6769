"""The ranks of simulation-based calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._extras import import_extra
from ..diagnostics.calibration_check import CalibrationCheck, RankCheck
from ..diagnostics.uniformity import ecdf_band
from .draw import check_levels
from .style import ACCENT, INK, MUTED, POSTERIOR, finish

__all__ = ["plot_sbc"]

MAX_PANELS, COLUMNS = 6, 3


def plot_sbc(
    check: CalibrationCheck,
    show: Sequence[str] | None = None,
    *,
    level: float = 0.95,
    ax: Any = None,
) -> list[Any]:
    """Draw how far the ranks of simulation-based calibration are from uniform: for each quantity
    the empirical distribution function of its ranks, minus that of uniform ranks.

    The curve of an exact posterior stays near zero. That of a posterior too narrow is above zero
    first and below it later, and one too wide does the reverse. A curve that is below zero
    everywhere belongs to a posterior that is too low. Significant deviations are drawn in red, and
    named.

    The grey band holds the whole curve of an exact posterior with probability ``level``, exactly.
    A posterior may be found too narrow while its curve is in the band, because
    :class:`~pyro_sde.diagnostics.CalibrationCheck` also has tests that look for that alone.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> from pyro_sde.diagnostics import CalibrationCheck
        >>> ranks = {"rate": torch.tensor([0, 9] * 20).reshape(-1, 1)}
        >>> check = CalibrationCheck(ranks, {"rate": ((),)}, draws=9, simulations=40)
        >>> (ax,) = plot_sbc(check)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['95 % band, n = 40', 'rate: too narrow']
        >>> plt.close(ax.figure)

    :param check: The result of :func:`~pyro_sde.diagnostics.sbc`.
    :param show: Names of sites or statistics, or labels of single numbers such as ``"z[12]"``. By
        default all, or, of more than six numbers, the six with the smallest p-values.
    :param level: The probability of the band.
    :param ax: The Axes to draw on, one for each number; by default those of a new figure.
    :returns: The matplotlib Axes, one for each number.
    """
    check_levels([level])
    chosen = _chosen(check, show)
    axes = _new_axes(len(chosen)) if ax is None else list(np.atleast_1d(ax).flat)
    if len(axes) < len(chosen):
        raise ValueError(f"ax has {len(axes)} Axes, and {len(chosen)} numbers are to be drawn")
    band = ecdf_band(check.completed, check.draws, level)
    points, low, high = (np.r_[0.0, part, 1.0] for part in band)
    ranks_below = np.rint(points * (check.draws + 1))
    for quantity, panel in zip(chosen, axes, strict=False):
        share = (quantity.ranks.numpy()[:, None] < ranks_below).mean(0)
        name = f"{100 * level:g} % band, n = {check.completed}"
        style = {"color": MUTED, "alpha": 0.25, "lw": 0, "label": name}
        panel.fill_between(points, low - points, high - points, **style)
        panel.axhline(0.0, ls="--", color=INK, lw=0.9)
        words = quantity.deviation(check.level)
        name = f"{quantity.label}: {words}" if words else quantity.label
        panel.plot(points, share - points, color=ACCENT if words else POSTERIOR, lw=1.3, label=name)
        panel.set_xlim(0, 1)
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])  # short: those of two panels stand apart
        finish(panel, "rank of the truth / number of draws", "ECDF - uniform")
        if ax is None and panel.get_subplotspec().colspan.start:
            panel.set_ylabel("")
    return axes[: len(chosen)]


def _chosen(check: CalibrationCheck, show: Sequence[str] | None) -> list[RankCheck]:
    if show is not None:
        known = {name for q in check.quantities for name in (q.name, q.label)}
        unknown = sorted(set(show) - known)
        if unknown:
            raise ValueError(f"show has {unknown}, and the check has {sorted(known)}")
        kept = set(show)
    else:
        kept = {q.label for q in check.quantities[:MAX_PANELS]}
    found = [q for q in check.quantities if kept & {q.name, q.label}]
    return sorted(found, key=lambda q: (list(check.ranks).index(q.name), q.entry))


def _new_axes(number: int) -> list[Any]:
    plt = import_extra("matplotlib.pyplot", "plot_sbc")
    columns = min(number, COLUMNS)
    rows = -(-number // columns)
    size = (3.4 * columns + 0.4, 2.7 * rows + 0.2)
    options = {"sharey": True, "squeeze": False, "layout": "constrained"}
    axes = plt.subplots(rows, columns, figsize=size, **options)[1]
    for empty in axes.flat[number:]:
        empty.remove()
    return list(axes.flat[:number])
