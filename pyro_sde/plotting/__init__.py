"""Figures of paths, forecasts, calibration and training, with matplotlib."""

from .calibration import plot_calibration
from .paths import plot_band, plot_forecast, plot_paths, plot_prior_posterior
from .ranks import plot_sbc
from .reliability import plot_reliability
from .training import plot_kl, plot_training

__all__ = [
    "plot_band",
    "plot_calibration",
    "plot_forecast",
    "plot_kl",
    "plot_paths",
    "plot_prior_posterior",
    "plot_reliability",
    "plot_sbc",
    "plot_training",
]
