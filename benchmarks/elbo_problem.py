"""The ELBO that the programs of elbo_step.py compute: a latent SDE and its control network."""

import dataclasses
import math
from collections.abc import Callable

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pyro_sde import MLPControl

__all__ = ["NOISE", "RATE", "SCALE", "Control", "Problem", "Y"]

RATE, SCALE, NOISE, Y = 1.0, 0.7, 0.2, 0.8


@dataclasses.dataclass(frozen=True)
class Problem:
    """A latent SDE over [0, 1]: an OU prior from zero, a control 2+dim - width - width - dim that
    reads (sin pi t, cos pi t, z), Gaussian observations of the state.

    :param particles: Paths of one series, over which the loss is a mean.
    :param series: Series in a plate, over which it is a sum.
    :param everywhere: Whether every step ends at an observation, or the last one alone.
    :param control: "mlp", our default control; or "callable", any module u(t, z).
    """

    particles: int = 1
    series: int = 1
    dim: int = 1
    steps: int = 100
    width: int = 64
    everywhere: bool = False
    control: str = "mlp"

    @property
    def batch(self) -> int:
        return self.particles * self.series

    def times(self) -> Tensor:
        return torch.linspace(0.0, 1.0, self.steps + 1)

    def loss(self, kl: Tensor, z: Tensor) -> Tensor:
        """From the sum of all KL terms and the states at the observations."""
        log_likelihood = dist.Normal(z, NOISE).log_prob(torch.tensor(Y)).sum()
        return (kl - log_likelihood) / self.particles


class Control(nn.Module):
    """The control as anybody would write it."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(2 + dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
            nn.Linear(width, dim),
        )

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        angle = math.pi * t.reshape(t.shape or (1,))
        features = torch.cat([angle.sin(), angle.cos()], -1).expand(*z.shape[:-1], 2)
        return self.net(torch.cat([features, z], -1))

    def by_step(self, t: Tensor) -> Callable[[int, Tensor], Tensor]:
        """A function of the step's number: what time adds to the first layer is known ahead."""
        first, second, last = self.net[0], self.net[2], self.net[4]
        features = torch.stack([(math.pi * t).sin(), (math.pi * t).cos()], -1)
        biases = linear(features, first.weight[:, :2], first.bias).unbind(0)
        weight = first.weight[:, 2:]

        def at(i: int, z: Tensor) -> Tensor:
            return last(second(linear(z, weight, biases[i]).tanh()).tanh())

        return at

    @torch.no_grad()
    def as_mlp(self, times: Tensor) -> MLPControl:
        """The same function as our default control, which has more features of time than it needs:
        their weights are zero here, but it pays for them."""
        first, second, last = self.net[0], self.net[2], self.net[4]
        mlp = MLPControl(last.out_features, (first.out_features,) * 2, times=times)
        features = len(mlp.frequencies)
        for bias, layer in zip(mlp.biases, (first, second), strict=True):
            bias.weight.zero_()
            bias.bias.copy_(layer.bias)
        mlp.biases[0].weight[:, [1, 1 + features]] = first.weight[:, :2]
        mlp.layers[0].weight.copy_(first.weight[:, 2:])
        mlp.layers[1].weight.copy_(second.weight)
        mlp.last.load_state_dict(last.state_dict())
        return mlp
