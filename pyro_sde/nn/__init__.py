"""Neural networks whose weights are a process over depth, and those that drive a process."""

from .block import SDEBlock
from .fields import ConvField
from .layers import ConcatConv2d, ConcatConvTranspose2d, ConcatLinear
from .priors import NeuralDiffusion, NeuralDrift

__all__ = [
    "ConcatConv2d",
    "ConcatConvTranspose2d",
    "ConcatLinear",
    "ConvField",
    "NeuralDiffusion",
    "NeuralDrift",
    "SDEBlock",
]
