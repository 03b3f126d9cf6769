"""One network for each data set, open at its residual stages."""

import math
from collections.abc import Callable

from pyro.nn import PyroModule
from torch import nn

Stage = Callable[[nn.Module], nn.Module]


def field(channels: int, hidden: int, gain: float = 1.0) -> nn.Module:
    """Two convolutions with weights gain * N(0, 1 / fan in) and biases of zero."""
    net = nn.Sequential(
        nn.Conv2d(channels, hidden, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(hidden, channels, 3, padding=1),
    )
    for layer in (net[0], net[2]):
        nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.weight[0].numel()))
        nn.init.zeros_(layer.bias)
    return net


def network(name: str, stage: Stage, gain: float = 1.0) -> nn.Module:
    """A stem, stages, and a linear head; squeezing between two scales loses nothing.

    :param name: ``"MNIST"`` (one stage of 7 x 7 x 32) or ``"CIFAR10"`` (16 x 16 x 24, then
        8 x 8 x 96).
    :param stage: From a field to a module that keeps the shape of its input.
    :param gain: Of the fields' first weights.
    """
    if name == "MNIST":
        layers = [
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            stage(field(32, 32, gain)),
            nn.Flatten(-3),
            nn.Linear(7 * 7 * 32, 10),
        ]
    else:
        layers = [
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            stage(field(24, 24, gain)),
            nn.PixelUnshuffle(2),
            stage(field(96, 48, gain)),
            nn.Flatten(-3),
            nn.Linear(8 * 8 * 96, 10),
        ]
    return PyroModule[nn.Sequential](*layers)
