"""Stochastic differential equations as ordinary Pyro sample sites."""

from . import diagnostics, distributions, guides, infer, nn, solvers
from .distributions import tolerance
from .guides import AutoSDE, MLPControl
from .infer import TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, girsanov
from .series import Series, check_series, pad_series, series_grid
from .times import select, time_grid

__version__ = "0.1.0"

__all__ = [
    "AutoSDE",
    "MLPControl",
    "Series",
    "TraceMeanFieldSDE_ELBO",
    "TraceSDE_ELBO",
    "check_series",
    "diagnostics",
    "distributions",
    "girsanov",
    "guides",
    "infer",
    "nn",
    "pad_series",
    "select",
    "series_grid",
    "solvers",
    "time_grid",
    "tolerance",
]
