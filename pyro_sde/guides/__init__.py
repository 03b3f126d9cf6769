"""Guides for models with path sites."""

from .auto_sde import AutoSDE
from .controls import MLPControl

__all__ = ["AutoSDE", "MLPControl"]
