"""Bayesian networks of infinite depth (SDE-BNNs), and learned drifts and diffusions."""

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
