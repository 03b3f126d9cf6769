"""Solving equations along a path that has been drawn."""

from .integrate import METHODS, integrate

__all__ = ["METHODS", "integrate"]
