"""Calibration of a classifier: how often it is right, against how often it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..metrics import ReliabilityCurve, reliability_curve
from .choose import plain
from .style import ACCENT, INK, MUTED, POSTERIOR, finish, new_axes

__all__ = ["plot_reliability"]

STRIP = 1.05, 0.17  # of the counts: its foot above accuracies of 1, its height


def plot_reliability(
    curve: ReliabilityCurve | Tensor,
    labels: Tensor | None = None,
    *,
    bins: int = 15,
    color: Any = POSTERIOR,
    ax: Any = None,
) -> Any:
    """The reliability diagram: accuracy in each bin of confidence, and the gap between them.

    The strip on top shows how many predictions each bin has, the fullest one at full height. The
    expected calibration error is in the legend: see :func:`~pyro_sde.metrics.ece`.

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

    :param curve: What :func:`~pyro_sde.metrics.reliability_curve` returned; or probabilities of
        shape ``(n, classes)`` or ``(samples, n, classes)``.
    :param labels: The right classes, of shape ``(n,)``, if probabilities were given.
    :param bins: Number of equal bins of [0, 1], if probabilities were given.
    :param color: The colour of the bars.
    :param ax: Where to draw, by default a new figure.
    :returns: The matplotlib Axes.
    """
    if not isinstance(curve, ReliabilityCurve):
        if labels is None:
            raise ValueError("labels is missing: pass the right classes beside the probabilities")
        curve = reliability_curve(curve, labels, bins)
    elif labels is not None:
        raise ValueError("labels go with probabilities: a ReliabilityCurve has counted them")
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
