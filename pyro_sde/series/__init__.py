"""Irregular series as people have them: padded, checked, and a time grid for each."""

from .checks import check_series
from .grid import series_grid
from .padding import Series, fill_missing, pad_series

__all__ = ["Series", "check_series", "fill_missing", "pad_series", "series_grid"]
