"""Figures of a training run: the ELBO, its parts and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .style import ACCENT, INK, MUTED, PALETTE, POSTERIOR, finish, new_axes

__all__ = ["plot_kl", "plot_training"]

LIKELIHOOD = "#d9822b"


def plot_training(history: Any, *, smooth: int = 1, rate: bool = False, ax: Any = None) -> Any:
    """Draw the ELBO and the log likelihood of a training run. The distance between them is the KL.

    The limits of the axes ignore the first tenth of the steps, whose values are far below all
    others. ``ax.autoscale()`` shows the whole curve.

    Example::

        >>> import matplotlib.pyplot as plt
        >>> history = {"step": [1, 2, 3], "elbo": [-9.0, -5.0, -4.0],
        ...            "log_likelihood": [-6.0, -3.0, -2.5], "validation": [(3, -4.5)]}
        >>> ax = plot_training(history)
        >>> {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
        {'log likelihood': [-6.0, -3.0, -2.5], 'ELBO': [-9.0, -5.0, -4.0], 'validation': [-4.5]}
        >>> plt.close(ax.figure)

    :param history: A :class:`~pyro_sde.History`, another object with lists as attributes, or a dict
        of lists: ``step`` and ``elbo``; and, where known, ``log_likelihood``, ``lr`` and
        ``validation`` (pairs of a step and an ELBO).
    :param smooth: The number of steps to average over; single steps are drawn faintly.
    :param rate: Whether to draw the learning rate, on a second axis at the right.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    step, elbo = _part(history, "step"), _part(history, "elbo")
    likelihood, validation = _part(history, "log_likelihood"), _part(history, "validation")
    lr = _part(history, "lr")
    if not len(elbo) or len(step) != len(elbo):
        raise ValueError(
            f"history needs a step for every elbo, and at least one: found {len(step)} steps and "
            f"{len(elbo)} ELBOs"
        )
    if rate and not len(lr):
        raise ValueError("rate=True needs a history with lr, the learning rate of every step")
    _check_smooth(smooth)
    ax = new_axes("plot_training", ax)
    if len(likelihood):
        (t, low), (_, high) = (_smooth(step, y, smooth) for y in (elbo, likelihood))
        ax.fill_between(t, low, high, color=LIKELIHOOD, alpha=0.15, lw=0, label="KL")
        _curve(ax, step, likelihood, smooth, LIKELIHOOD, "log likelihood")
    _curve(ax, step, elbo, smooth, POSTERIOR, "ELBO")
    if len(validation):
        t, y = validation.T
        ax.plot(t, y, "o-", ms=3.5, lw=1, color=ACCENT, label="validation")
    late = [y[len(y) // 10 :] for y in (elbo, likelihood) if len(y)]
    seen = np.concatenate([*late, validation.reshape(-1, 2)[:, 1]])
    seen = seen[np.isfinite(seen)]
    if len(seen) and seen.max() > seen.min():
        margin = 0.05 * (seen.max() - seen.min())
        ax.set_ylim(seen.min() - margin, max(seen.max(), np.nanmax(elbo)) + margin)
    if rate:
        right = ax.twinx()
        right.plot(step, lr, ":", color=MUTED, lw=1.2)
        right.set_ylabel("learning rate (dotted)", color=MUTED)
        right.tick_params(colors=MUTED)
        right.set_ylim(bottom=0)
        right.spines["top"].set_visible(False)
    return finish(ax, "step", "nats")


def plot_kl(history: Any, *, smooth: int = 1, ax: Any = None) -> Any:
    """Draw the KL of a training run, in total and by site, on a logarithmic axis.

    Example::

        >>> import matplotlib.pyplot as plt
        >>> history = {"step": [1, 2], "kl": [3.0, 2.0],
        ...            "kl_by_site": {"z": [2.5, 1.5], "scale": [0.5, 0.5]}}
        >>> ax = plot_kl(history)
        >>> {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
        {'KL': [3.0, 2.0], 'z': [2.5, 1.5], 'scale': [0.5, 0.5]}
        >>> plt.close(ax.figure)

    :param history: A :class:`~pyro_sde.History`, another object with such attributes, or a dict:
        lists ``step`` and ``kl``; and, where known, ``kl_by_site``, a dict of lists. Estimates that
        are not positive leave a gap.
    :param smooth: The number of steps to average over; single steps are drawn faintly.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    step, kl = _part(history, "step"), _part(history, "kl")
    if not len(kl) or len(step) != len(kl):
        raise ValueError(
            f"history needs a step for every kl, and at least one: found {len(step)} steps and "
            f"{len(kl)} KLs"
        )
    by_site = _get(history, "kl_by_site") or {}
    _check_smooth(smooth)
    ax = new_axes("plot_kl", ax)
    _curve(ax, step, kl, smooth, INK, "KL")
    for i, (name, values) in enumerate(by_site.items()):
        color = PALETTE[i % len(PALETTE)]
        _curve(ax, step, np.asarray(values, float), smooth, color, name)
    ax.set_yscale("log", nonpositive="mask")
    return finish(ax, "step", "KL, nats")


def _get(history: Any, name: str) -> Any:
    return history.get(name) if isinstance(history, Mapping) else getattr(history, name, None)


def _part(history: Any, name: str) -> np.ndarray:
    """A part of the history as an array; empty where it is missing, or NaN in all steps."""
    found = _get(history, name)
    values = np.asarray([] if found is None else found, float)
    return values if np.isfinite(values).any() else values[:0]


def _check_smooth(smooth: int) -> None:
    if smooth < 1:
        raise ValueError(f"smooth must be at least 1: found {smooth}")


def _smooth(step: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over windows, each at the mean of its steps. A shorter run is one window."""
    window = min(window, len(values))
    kernel = np.full(window, 1 / window)
    return np.convolve(step, kernel, "valid"), np.convolve(values, kernel, "valid")


def _curve(
    ax: Any, step: np.ndarray, values: np.ndarray, smooth: int, color: Any, label: str
) -> None:
    if smooth > 1:
        ax.plot(step, values, color=color, lw=0.6, alpha=0.25)
    ax.plot(*_smooth(step, values, smooth), color=color, lw=1.5, label=label)
