"""Interoperability with other libraries: ArviZ and torchsde."""

from .inference_data import to_arviz

__all__ = ["to_arviz"]
