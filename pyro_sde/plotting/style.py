"""The style of all figures: axes, colours, and the position of the legend."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._extras import import_extra

__all__ = ["ACCENT", "INK", "MUTED", "PALETTE", "POSTERIOR", "finish", "new_axes"]

INK, POSTERIOR, ACCENT, MUTED = "#222222", "#2f6db3", "#d1495b", "#8a8a8a"
# Told apart with any kind of colour blindness: hues of Okabe and Ito beside the blue of the house.
PALETTE = (POSTERIOR, "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
FONT = 8.0  # size of the legend's font, in points
LEGEND_PLACE = "place of the legend"


def new_axes(function: str, ax: Any, width: float = 7.0, height: float = 3.6) -> Any:
    """``ax``, or that of a new figure.

    :param function: The function that the user has called, for the error if there is no matplotlib.
    :param ax: The matplotlib Axes that the user has passed, or None.
    :param width: Of a new figure, in inches.
    :param height: Of a new figure, in inches.
    :returns: The matplotlib Axes.
    """
    if ax is not None:
        return ax
    plt = import_extra("matplotlib.pyplot", function)
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def finish(ax: Any, xlabel: str, ylabel: str) -> Any:
    """Add labels where there are none, and a legend above the axes, where it hides no curve.

    A title that is set then or later stands above the legend.
    """
    if not ax.get_xlabel():
        ax.set_xlabel(xlabel)
    if not ax.get_ylabel():
        ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        legend = ax.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            borderaxespad=0.1,
            borderpad=0.2,
            columnspacing=1.2,
            ncols=_columns(labels, ax.bbox.width * 72 / ax.figure.dpi),
            frameon=False,
            fontsize=FONT,
        )
        for strip in [child for child in ax.child_axes if child.get_label() == LEGEND_PLACE]:
            strip.remove()  # of an earlier legend
        strip = ax.inset_axes((0.0, 1.0, 1.0, 0.1), label=LEGEND_PLACE)
        strip.set_axis_off()
        strip.set_axes_locator(_PlaceOf(legend))  # titles are moved above inset axes, not legends
    return ax


class _PlaceOf:
    """Where a legend is, in the coordinates of its figure."""

    def __init__(self, legend: Any) -> None:
        self.legend = legend

    def __call__(self, ax: Any, renderer: Any) -> Any:
        box = self.legend.get_window_extent(renderer)
        return box.transformed(ax.figure.transSubfigure.inverted())


def _columns(labels: list[str], room: float) -> int:
    """The number of columns that fit into ``room`` points, where a letter takes half the font's
    size, and handle and spaces 4.2 times that size. A legend that is too wide would make the
    layout shrink the axes."""
    for n in range(len(labels), 1, -1):
        widest = [max(map(len, part)) for part in np.array_split(labels, n)]
        if FONT * sum(4.2 + 0.5 * letters for letters in widest) < room:
            return n
    return 1
