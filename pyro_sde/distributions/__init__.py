"""Distributions over paths, as Pyro distributions."""

from ..simulation.base import Solve, tolerance
from .brownian import BrownianMotion, GeometricBrownianMotion
from .controlled import ControlledPath
from .ode import ODEPath
from .ornstein_uhlenbeck import OrnsteinUhlenbeck
from .path import PathDistribution
from .poisson_process import PoissonProcess
from .scalar import ScalarPath
from .sde import SDEPath
from .stack import Stack

__all__ = [
    "BrownianMotion",
    "ControlledPath",
    "GeometricBrownianMotion",
    "ODEPath",
    "OrnsteinUhlenbeck",
    "PathDistribution",
    "PoissonProcess",
    "SDEPath",
    "ScalarPath",
    "Solve",
    "Stack",
    "tolerance",
]
