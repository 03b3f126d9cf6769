"""Solving equations along a path that has been drawn."""

from .._errors import SolutionError
from .integrate import METHODS, evaluations, integrate

__all__ = ["METHODS", "SolutionError", "evaluations", "integrate"]
