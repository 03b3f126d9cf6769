"""To other libraries."""

from .inference_data import to_arviz

__all__ = ["to_arviz"]
