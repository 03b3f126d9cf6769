"""Stochastic differential equations as ordinary Pyro sample sites."""

from . import diagnostics, distributions, guides, infer, nn, solvers
from .distributions import tolerance
from .guides import AutoSDE, MLPControl
from .infer import TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, girsanov
from .times import select, time_grid

__version__ = "0.1.0"

__all__ = [
    "AutoSDE",
    "MLPControl",
    "TraceMeanFieldSDE_ELBO",
    "TraceSDE_ELBO",
    "diagnostics",
    "distributions",
    "girsanov",
    "guides",
    "infer",
    "nn",
    "select",
    "solvers",
    "time_grid",
    "tolerance",
]
