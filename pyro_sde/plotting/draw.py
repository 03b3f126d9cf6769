"""The elements of figures of paths: lines, bands and points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .style import INK

__all__ = ["check_levels", "draw_band", "draw_paths", "draw_points"]


def draw_paths(ax: Any, t: np.ndarray, x: np.ndarray, color: Any, label: str | None) -> None:
    alpha = max(0.35, min(0.6, 8 / max(len(x), 1)))
    for i, row in enumerate(x):
        ax.plot(t, row, color=color, lw=0.6, alpha=alpha, label=None if i else label)


def draw_band(
    ax: Any,
    t: np.ndarray,
    x: np.ndarray,
    levels: Sequence[float],
    color: Any,
    label: str | None,
    median: bool = True,
) -> None:
    for i, level in enumerate(sorted(levels, reverse=True)):  # the widest at the back
        # The quantiles of metrics.interval, so that figures and coverages show the same intervals.
        low, high = np.quantile(x, [0.5 - level / 2, 0.5 + level / 2], axis=0, method="weibull")
        name = label and f"{label}, {100 * level:g} %"
        ax.fill_between(t, low, high, color=color, alpha=0.25 + 0.1 * i, lw=0, label=name)
    if median:
        name = label and f"{label}, median"
        ax.plot(t, np.median(x, axis=0), color=color, lw=1.5, label=name)


def draw_points(
    ax: Any, points: tuple[np.ndarray, np.ndarray] | None, name: str, color: str = INK
) -> None:
    if points is not None:
        size = 4.0 if len(points[0]) <= 60 else 2.0
        ax.plot(*points, "o", ms=size, mew=0, color=color, alpha=0.85, label=name, zorder=3)


def check_levels(levels: Sequence[float]) -> None:
    if not levels or not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels must lie between 0 and 1: found {list(levels)}")
