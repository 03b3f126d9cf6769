"""Guides for models with path sites."""

from .auto_sde import AutoSDE
from .controls import MLPControl
from .encoders import GRUEncoder, SummaryEncoder

__all__ = ["AutoSDE", "GRUEncoder", "MLPControl", "SummaryEncoder"]
