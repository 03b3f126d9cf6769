"""What the SDE-BNN is compared with: ordinary torch networks, and Pyro models with autoguides."""

from .build import NAMES, build
from .networks import network

__all__ = ["NAMES", "build", "network"]
