"""Irregular time series: padding, checks, and a time grid for each series."""

from .checks import check_series
from .grid import series_grid
from .padding import Series, fill_missing, pad_series

__all__ = ["Series", "check_series", "fill_missing", "pad_series", "series_grid"]
