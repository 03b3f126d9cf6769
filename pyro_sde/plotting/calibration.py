"""Calibration of a forecast: how often what happened lies below its quantiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..metrics import calibration_curve
from .choose import plain
from .draw import check_levels
from .style import INK, MUTED, PALETTE, finish, new_axes

__all__ = ["noise_half_width", "plot_calibration"]

SIMULATIONS = 10_000


def plot_calibration(
    samples: Tensor,
    observed: Tensor,
    *,
    mask: Tensor | None = None,
    bins: int = 20,
    level: float = 0.9,
    color: Any = None,
    label: str | None = "forecast",
    ax: Any = None,
) -> Any:
    """Calibration of a forecast of numbers: share of the observations below its quantiles.

    The curve of a calibrated forecast follows the diagonal. That of a forecast too narrow begins
    above it and ends below it, and one too wide does the reverse. A curve that is below the
    diagonal everywhere belongs to a forecast that is too low.

    The grey band holds the whole curve of a calibrated forecast with probability ``level``, if
    the observations are independent given their forecasts. Errors of one path at successive
    times are not: their curve strays further, and the band is too narrow for it.

    For several forecasts of the same observations call it with the same ``ax``.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> observed = torch.randn(200)
        >>> ax = plot_calibration(torch.randn(1000, 200), observed)
        >>> ax = plot_calibration(0.5 * torch.randn(1000, 200), observed, label="narrow", ax=ax)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['90 % band, n = 200', 'calibrated', 'forecast', 'narrow']
        >>> nominal, share = ax.lines[-1].get_data()
        >>> bool(share[1] > nominal[1] and share[-2] < nominal[-2])
        True
        >>> plt.close(ax.figure)

    :param samples: Predictive draws of shape ``(m, *observed.shape)``, noise of the observations
        included.
    :param observed: What was observed, of any shape.
    :param mask: True where it was observed, of the shape of ``observed`` or of all but its last
        dimension.
    :param bins: The curve has ``bins - 1`` points between its ends, and no more than m.
    :param level: The probability of the band.
    :param color: The colour of the curve, by default the next one that is not used yet.
    :param label: The name of the forecast in the legend; None for no entry.
    :param ax: Where to draw, by default a new figure.
    :returns: The matplotlib Axes.
    """
    check_levels([level])
    curve = calibration_curve(samples, observed, bins, mask)
    nominal, share = (np.r_[0.0, plain(part).numpy(), 1.0] for part in curve[:2])
    ax = new_axes("plot_calibration", ax, 4.4, 4.6)
    drawn = [line for line in ax.lines if line.get_gid() == "calibration"]
    if not drawn:
        half = noise_half_width(nominal, curve.count, level)
        name = f"{100 * level:g} % band, n = {curve.count}"
        ends = np.clip([nominal - half, nominal + half], 0.0, 1.0)
        ax.fill_between(nominal, *ends, color=MUTED, alpha=0.25, lw=0, label=name)
        ax.plot([0, 1], [0, 1], "--", color=INK, lw=0.9, label="calibrated")
    color = PALETTE[len(drawn) % len(PALETTE)] if color is None else color
    style = {"ms": 3.0, "lw": 1.3, "color": color, "gid": "calibration"}
    ax.plot(nominal, share, "o-", label=label, **style)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    return finish(ax, "probability of the quantile", "share of the observations below it")


def noise_half_width(nominal: np.ndarray, n: int, level: float) -> np.ndarray:
    """Half the width of the band that holds all shares of n observations with this probability.

    It is c standard deviations, sqrt(p (1 - p) / n), at every p. The one c is found by simulation,
    with a generator of its own.
    """
    counts = np.random.default_rng(0).multinomial(n, np.diff(nominal), SIMULATIONS)
    inner = nominal[1:-1]
    deviation = np.sqrt(inner * (1 - inner) / n)
    worst = (np.abs(counts.cumsum(1)[:, :-1] / n - inner) / deviation).max(1)
    return np.r_[0.0, np.quantile(worst, level) * deviation, 0.0]
