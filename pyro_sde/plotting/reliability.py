"""The reliability diagram, a figure of the calibration of a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..metrics import ReliabilityCurve, reliability_curve
from .choose import plain
from .style import ACCENT, INK, MUTED, POSTERIOR, finish, new_axes

__all__ = ["plot_reliability"]

STRIP = 1.05, 0.17  # the strip of counts: its lower edge, above accuracies of 1, and its height


def plot_reliability(
    curve: ReliabilityCurve | Tensor,
    labels: Tensor | None = None,
    *,
    bins: int = 15,
    color: Any = POSTERIOR,
    ax: Any = None,
) -> Any:
    """Draw a reliability diagram: the accuracy in each bin of confidence, and its gap to the
    confidence.

    The strip on top shows how many predictions each bin has, relative to the fullest bin. The
    legend has the expected calibration error: see :func:`~pyro_sde.metrics.ece`.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> ax = plot_reliability(probs, torch.tensor([0, 1]), bins=2)
        >>> [float(bar.get_height()) for bar in ax.containers[0]]  # the first bin is empty
        [0.0, 0.5]
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['perfect', 'accuracy', 'gap (ECE 0.250)', 'count (of 2)']
        >>> plt.close(ax.figure)

    :param curve: The result of :func:`~pyro_sde.metrics.reliability_curve`; or probabilities of
        shape ``(n, classes)`` or ``(samples, n, classes)``.
    :param labels: The correct classes, of shape ``(n,)``, if ``curve`` holds probabilities.
    :param bins: Number of equal bins of [0, 1], if ``curve`` holds probabilities.
    :param color: The colour of the bars.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    if not isinstance(curve, ReliabilityCurve):
        if labels is None:
            raise ValueError("labels is missing: pass the correct classes with the probabilities")
        curve = reliability_curve(curve, labels, bins)
    elif labels is not None:
        raise ValueError("labels belong to probabilities: leave them out for a ReliabilityCurve")
    confidence, accuracy, count = (plain(part).numpy() for part in curve)
    n, full = count.sum(), count > 0
    if not n:
        raise ValueError("curve has no prediction in any bin")
    error = (count[full] / n * np.abs(accuracy - confidence)[full]).sum()
    accuracy, confidence = np.where(full, accuracy, 0.0), np.where(full, confidence, 0.0)
    width = 1 / len(count)
    middle = width * (np.arange(len(count)) + 0.5)
    ax = new_axes("plot_reliability", ax, 4.4, 4.6)
    ax.plot([0, 1], [0, 1], "--", color=INK, lw=0.9, zorder=3, label="perfect")
    ax.bar(middle, accuracy, 0.94 * width, color=color, alpha=0.75, lw=0, label="accuracy")
    gap = {"color": ACCENT, "alpha": 0.3, "lw": 0}
    name = f"gap (ECE {error:.3f})"
    ax.bar(middle, confidence - accuracy, 0.94 * width, accuracy, label=name, **gap)
    foot, height = STRIP
    strip = {"color": MUTED, "lw": 0, "label": f"count (of {n:.0f})"}
    ax.bar(middle, height * count / count.max(), 0.94 * width, foot, **strip)
    ax.set(xlim=(0, 1), ylim=(0, foot + height), yticks=np.linspace(0, 1, 6))
    ax.spines["left"].set_bounds(0, 1)
    return finish(ax, "confidence", "accuracy")
