"""Figures of sampled paths, bands of quantiles, forecasts and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..forecasting import Forecast
from .choose import chosen, chosen_data
from .draw import check_levels, draw_band, draw_paths, draw_points
from .style import ACCENT, MUTED, POSTERIOR, finish, new_axes

__all__ = ["plot_band", "plot_forecast", "plot_paths", "plot_prior_posterior"]

Index = int | tuple[int, ...] | None


def plot_paths(
    times: Tensor,
    paths: Tensor,
    *,
    dim: int | None = None,
    series: Index = None,
    max_paths: int = 50,
    data: Sequence[Any] | None = None,
    color: Any = POSTERIOR,
    label: str | None = "paths",
    ax: Any = None,
) -> Any:
    """Draw sampled paths as thin lines.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> from pyro_sde.distributions import BrownianMotion
        >>> times = torch.linspace(0.0, 1.0, 11)
        >>> paths = BrownianMotion(1.0, times, torch.zeros(2)).sample((30,))
        >>> ax = plot_paths(times, paths, dim=1, max_paths=20)
        >>> len(ax.lines), bool((ax.lines[0].get_ydata() == paths[0, :, 1].numpy()).all())
        (20, True)
        >>> plt.close(ax.figure)

    :param times: The grid, of shape ``(T,)`` or ``(series, T)``.
    :param paths: Samples of shape ``(samples, T)``, ``(samples, T, D)`` or ``(samples, series, T,
        D)``, on any device, with a gradient or without.
    :param dim: Which of the D states to draw, if there are several.
    :param series: Which series to draw, if there are several: a number, or a tuple of one for
        each batch dimension.
    :param max_paths: The number of samples to draw, from the first one on.
    :param data: The observations: ``(times, values)``, or ``(times, values, mask)`` as
        :func:`~pyro_sde.pad_series` gives it; NaN is left out.
    :param color: The colour of the paths.
    :param label: The name of the paths in the legend; None for no entry.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    t, x = chosen(times, paths, dim, series)
    points = chosen_data(data, dim, series)
    ax = new_axes("plot_paths", ax)
    draw_paths(ax, t, x[:max_paths], color, label)
    draw_points(ax, points, "data")
    return finish(ax, "time", "state")


def plot_band(
    times: Tensor,
    paths: Tensor,
    levels: Sequence[float] = (0.5, 0.9),
    *,
    dim: int | None = None,
    series: Index = None,
    data: Sequence[Any] | None = None,
    median: bool = True,
    color: Any = POSTERIOR,
    label: str | None = "posterior",
    ax: Any = None,
) -> Any:
    """Draw central intervals of the samples at each time as bands, the median, and the data.

    The ends of a band are those of :func:`~pyro_sde.metrics.interval`, or the smallest and the
    largest sample where there are too few samples for that.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> times = torch.tensor([0.0, 1.0, 2.0])
        >>> paths = torch.linspace(-0.9, 0.9, 19).unsqueeze(-1) * times  # fan out from 0
        >>> ax = plot_band(times, paths, levels=[0.9], data=(times, times))
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['posterior, 90 %', 'posterior, median', 'data']
        >>> band = ax.collections[0].get_paths()[0].vertices
        >>> sorted({f"{y:.1f}" for t, y in band if t == 1.0})  # the outermost of 19
        ['-0.9', '0.9']
        >>> plt.close(ax.figure)

    :param times: The grid, of shape ``(T,)`` or ``(series, T)``.
    :param paths: Samples of shape ``(samples, T)``, ``(samples, T, D)`` or ``(samples, series, T,
        D)``, on any device, with a gradient or without.
    :param levels: The probabilities of the intervals, each between 0 and 1.
    :param dim: Which of the D states to draw, if there are several.
    :param series: Which series to draw, if there are several: a number, or a tuple of one for
        each batch dimension.
    :param data: The observations: ``(times, values)``, or ``(times, values, mask)`` as
        :func:`~pyro_sde.pad_series` gives it; NaN is left out.
    :param median: Whether to draw the median.
    :param color: The colour of bands and median.
    :param label: The name of the samples in the legend; None for no entries.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    t, x = chosen(times, paths, dim, series)
    check_levels(levels)
    points = chosen_data(data, dim, series)
    ax = new_axes("plot_band", ax)
    draw_band(ax, t, x, levels, color, label, median)
    draw_points(ax, points, "data")
    return finish(ax, "time", "state")


def plot_prior_posterior(
    times: Tensor,
    prior: Tensor,
    posterior: Tensor,
    *,
    level: float = 0.9,
    max_paths: int = 5,
    dim: int | None = None,
    series: Index = None,
    data: Sequence[Any] | None = None,
    ax: Any = None,
) -> Any:
    """Draw prior (in grey) and posterior (in colour), each as a band and some paths.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> from pyro_sde.distributions import BrownianMotion
        >>> times = torch.linspace(0.0, 1.0, 11)
        >>> prior = BrownianMotion(1.0, times, 0.0).sample((100,))
        >>> bridge = prior - times.unsqueeze(-1) * prior[:, -1:]  # given that it returns to 0
        >>> data = [0.0, 1.0], [0.0, 0.0]
        >>> ax = plot_prior_posterior(times, prior, bridge, data=data)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['prior, 90 %', 'posterior, 90 %', 'posterior, median', 'data']
        >>> plt.close(ax.figure)

    :param times: The grid of both, of shape ``(T,)`` or ``(series, T)``.
    :param prior: Samples of the prior, of shape ``(samples, T)``, ``(samples, T, D)`` or
        ``(samples, series, T, D)``.
    :param posterior: Samples of the posterior, in a shape of this kind.
    :param level: The probability of the bands.
    :param max_paths: The number of samples of each to draw as paths, from the first one on.
    :param dim: Which of the D states to draw, if there are several.
    :param series: Which series to draw, if there are several: a number, or a tuple of one for
        each batch dimension.
    :param data: The observations: ``(times, values)``, or ``(times, values, mask)``; NaN is left
        out.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    before = chosen(times, prior, dim, series, "prior")
    after = chosen(times, posterior, dim, series, "posterior")
    check_levels([level])
    points = chosen_data(data, dim, series)
    ax = new_axes("plot_prior_posterior", ax)
    for (t, x), color, name in ((before, MUTED, "prior"), (after, POSTERIOR, "posterior")):
        draw_band(ax, t, x, [level], color, name, median=name == "posterior")
        draw_paths(ax, t, x[:max_paths], color, None)
    draw_points(ax, points, "data")
    return finish(ax, "time", "state")


def plot_forecast(
    forecast: Forecast,
    levels: Sequence[float] = (0.5, 0.9),
    *,
    data: Sequence[Any] | None = None,
    held_out: Sequence[Any] | None = None,
    dim: int | None = None,
    series: Index = None,
    color: Any = POSTERIOR,
    label: str | None = "forecast",
    ax: Any = None,
) -> Any:
    """Draw a forecast as bands, with the data that it was made from and with held-out data.

    Example::

        >>> import torch
        >>> import matplotlib.pyplot as plt
        >>> from pyro_sde import Forecast
        >>> times = torch.linspace(2.0, 3.0, 5)
        >>> ahead = Forecast(times, torch.randn(100, 5, 1), {})
        >>> ax = plot_forecast(ahead, data=([0.0, 1.0, 2.0], [0.1, -0.2, 0.1]))
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['forecast, 90 %', 'forecast, 50 %', 'forecast, median', 'data']
        >>> plt.close(ax.figure)

    :param forecast: The result of :func:`pyro_sde.forecast`.
    :param levels: The probabilities of the intervals, each between 0 and 1.
    :param data: The data that the forecast was made from: ``(times, values)``, or ``(times, values,
        mask)``; NaN is left out.
    :param held_out: Data that the forecast has not seen, in the same form.
    :param dim: Which of the D observed numbers to draw, if there are several.
    :param series: Which series to draw, if there are several.
    :param color: The colour of the bands.
    :param label: The name of the forecast in the legend; None for no entries.
    :param ax: The Axes to draw on, by default those of a new figure.
    :returns: The matplotlib Axes.
    """
    t, x = chosen(forecast.times, forecast.samples, dim, series, "forecast.samples")
    check_levels(levels)
    known = chosen_data(data, dim, series)
    later = chosen_data(held_out, dim, series, "held_out")
    ax = new_axes("plot_forecast", ax)
    draw_band(ax, t, x, levels, color, label)
    draw_points(ax, known, "data")
    draw_points(ax, later, "held out", ACCENT)
    return finish(ax, "time", "observed")
