"""Neural networks whose weights are a process over depth."""

from .block import SDEBlock
from .fields import ConvField
from .layers import ConcatConv2d, ConcatConvTranspose2d, ConcatLinear

__all__ = ["ConcatConv2d", "ConcatConvTranspose2d", "ConcatLinear", "ConvField", "SDEBlock"]
