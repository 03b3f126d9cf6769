"""Stochastic differential equations as ordinary Pyro sample sites."""

from . import (
    datasets,
    diagnostics,
    distributed,
    distributions,
    guides,
    infer,
    metrics,
    nn,
    plotting,
    solvers,
    training,
)
from .distributions import tolerance
from .forecasting import Forecast, forecast
from .guides import AutoSDE, GRUEncoder, MLPControl
from .infer import TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, anneal_kl, girsanov, kl_weight
from .interop import to_arviz
from .predictive import Predictive
from .series import Series, check_series, fill_missing, pad_series, series_grid
from .times import select, time_grid
from .training import History, fit

__version__ = "0.2.0"

__all__ = [
    "AutoSDE",
    "Forecast",
    "GRUEncoder",
    "History",
    "MLPControl",
    "Predictive",
    "Series",
    "TraceMeanFieldSDE_ELBO",
    "TraceSDE_ELBO",
    "anneal_kl",
    "check_series",
    "datasets",
    "diagnostics",
    "distributed",
    "distributions",
    "fill_missing",
    "fit",
    "forecast",
    "girsanov",
    "guides",
    "infer",
    "kl_weight",
    "metrics",
    "nn",
    "pad_series",
    "plotting",
    "select",
    "series_grid",
    "solvers",
    "time_grid",
    "to_arviz",
    "tolerance",
    "training",
]
