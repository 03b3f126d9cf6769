"""Solving equations along a path that has been drawn."""

from .integrate import METHODS, evaluations, integrate

__all__ = ["METHODS", "evaluations", "integrate"]
