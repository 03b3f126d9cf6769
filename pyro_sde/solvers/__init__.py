"""Solvers of random ordinary differential equations along a path."""

from .._errors import SolutionError
from .integrate import METHODS, evaluations, integrate

__all__ = ["METHODS", "SolutionError", "evaluations", "integrate"]
