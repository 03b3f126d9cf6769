"""One network for each data set, open at its residual stages."""

import math
from collections.abc import Callable

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

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


class DistanceHead(nn.Module):
    """Logits that fall with the squared distance from a centre for each class, to a floor.

    Far from all centres the classes are equally likely: a linear head would be the surer of a
    letter the bolder it is written.

    :param inputs: Features to start from; distances are measured in ``dim`` linear ones of them.
    :param floor: The lowest logit. A class cannot have more than 1 / (1 + 9 exp(floor)), so that
        -11 leaves 0.015 % for the other nine.
    """

    def __init__(self, inputs: int, dim: int = 32, floor: float = -11.0) -> None:
        super().__init__()
        self.features = nn.Linear(inputs, dim)
        # Near enough for every class to be above the floor at first: below it nothing is learned.
        self.centres = nn.Parameter(0.3 * torch.randn(10, dim))
        self.register_buffer("floor", torch.tensor(floor))

    def forward(self, h: Tensor) -> Tensor:
        squares = (self.features(h).unsqueeze(-2) - self.centres).square().sum(-1)
        return torch.logaddexp(-0.5 * squares, self.floor)


def network(
    name: str, stage: Stage, gain: float = 1.0, head: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """A stem, stages, and a head; squeezing between two scales loses nothing.

    :param name: ``"MNIST"`` (one stage of 7 x 7 x 32) or ``"CIFAR10"`` (16 x 16 x 24, then
        8 x 8 x 96).
    :param stage: From a field to a module that keeps the shape of its input.
    :param gain: Of the fields' first weights.
    :param head: From a number of features to a module; linear by default.
    """
    head = head or (lambda inputs: nn.Linear(inputs, 10))
    if name == "MNIST":
        layers = [
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            stage(field(32, 32, gain)),
            nn.Flatten(-3),
            head(7 * 7 * 32),
        ]
    else:
        layers = [
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            stage(field(24, 24, gain)),
            nn.PixelUnshuffle(2),
            stage(field(96, 48, gain)),
            nn.Flatten(-3),
            head(8 * 8 * 96),
        ]
    return PyroModule[nn.Sequential](*layers)
