"""The processes and likelihoods that every law is tested on: add one here and it inherits all."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    OrnsteinUhlenbeck,
    PathDistribution,
    SDEPath,
    Stack,
)
from pyro_sde.nn import NeuralDrift

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))), reason="there is no C++ compiler"
)
TIMES = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.6, 1.0], dtype=torch.float64)


def normal(loc: float, scale: float, dim: int) -> dist.Distribution:
    return dist.Normal(torch.full((dim,), loc), torch.full((dim,), scale)).to_event(1)


def positive(name: str, value: float) -> Tensor:
    return pyro.param(name, torch.tensor(value), constraint=dist.constraints.positive)


def ou() -> PathDistribution:
    return OrnsteinUhlenbeck(positive("rate", 1.3), 0.2, positive("scale", 0.7), TIMES)


def ou_2d_fixed_start() -> PathDistribution:
    rate = positive("rate", 0.8) * torch.tensor([1.0, 2.0])
    start = pyro.param("start", torch.tensor([0.5, -0.3]))
    return OrnsteinUhlenbeck(rate, 0.0, 0.9, TIMES, initial=start)


def brownian() -> PathDistribution:
    return BrownianMotion(positive("scale", 0.8), TIMES, normal(0.1, 0.5, 2), drift=0.4)


def double_well() -> PathDistribution:
    k = positive("k", 1.5)
    return SDEPath(
        lambda t, z: k * (z - z**3) + t,
        lambda t, z: 0.3 + 0.1 * z.square(),
        normal(0.0, 0.6, 1),
        TIMES,
    )


def van_der_pol() -> PathDistribution:
    """Two dimensions that push each other, a diffusion that does not see the state."""

    def drift(t: Tensor, z: Tensor) -> Tensor:
        x, v = z.unbind(-1)
        return torch.stack([v, (1 - x.square()) * v - x], -1)

    g = positive("g", 0.5)
    return SDEPath(drift, lambda t, z: g, torch.tensor([0.3, 0.1]), TIMES)


def learned() -> PathDistribution:
    """A drift that is a network, and noise that is the same everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        drift = NeuralDrift(2, (4,), time=True).double().requires_grad_(False)
    start = pyro.param("start", torch.tensor([0.3, 0.1]))
    return SDEPath(drift, positive("g", 0.6), start, TIMES)


def pushed_ou() -> PathDistribution:
    """A controlled path is a process too."""
    return ControlledPath(ou(), lambda t, z: torch.sin(3 * z) - t)


class Cubic(PathDistribution):
    """A user's own process, with noise that depends on the state."""

    def __init__(self, a: Tensor, initial, times: Tensor, **options) -> None:
        self.a = a
        super().__init__(times, initial, **options)

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        mean = z + (self.a * z - z**3 / (1 + z * z)) * dt + 0.1 * t * dt
        return mean, (0.5 + 0.2 * self.a * torch.sin(z)) * dt.sqrt()

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        drift = self.a * z - z**3 / (1 + z * z) + 0.1 * t
        return drift, 0.5 + 0.2 * self.a * torch.sin(z)


class OUWithJump(OrnsteinUhlenbeck):
    """A subclass of OU with a transition of its own."""

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = super().transition(t, dt, z)
        return mean + 0.5 * torch.tanh(z) * dt, scale * (1.2 + 0.1 * torch.cos(z))


class SDEWithHeun(SDEPath):
    """A subclass of SDEPath whose mean is a step of Heun's."""

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = super().transition(t, dt, z)
        return 0.5 * (z + mean + self.drift(t + dt, mean) * dt), scale


def own_process() -> PathDistribution:
    return Cubic(positive("a", 0.5), normal(0.1, 0.5, 1), TIMES)


def child_of_ou() -> PathDistribution:
    return OUWithJump(positive("rate", 1.3), 0.2, positive("scale", 0.7), TIMES)


def child_of_sde() -> PathDistribution:
    k = positive("k", 1.5)
    return SDEWithHeun(lambda t, z: k * (z - z**3) + t, 0.4, normal(0.0, 0.6, 2), TIMES)


def stack() -> PathDistribution:
    """A linear process beside one that is not, all starts drawn."""
    return Stack(ou(), double_well())


def stack_fixed_start() -> PathDistribution:
    """Linear processes of different dimensions from points."""
    start = pyro.param("other_start", torch.tensor([0.4]))
    return Stack(ou_2d_fixed_start(), BrownianMotion(positive("width", 0.6), TIMES, start))


PROCESSES: dict[str, Callable[[], PathDistribution]] = {
    f.__name__: f
    for f in (
        ou,
        ou_2d_fixed_start,
        brownian,
        double_well,
        van_der_pol,
        learned,
        pushed_ou,
        own_process,
        child_of_ou,
        child_of_sde,
        stack,
        stack_fixed_start,
    )
}


def _poisson(z: Tensor) -> dist.Distribution:
    return dist.Poisson(z.exp())


def _categorical(z: Tensor) -> dist.Distribution:
    return dist.Categorical(logits=torch.stack([z, 0.5 * z.square(), -z], -1))


LIKELIHOODS: dict[str, tuple[Callable[[Tensor], dist.Distribution], list[float]]] = {
    "normal": (lambda z: dist.Normal(z, 0.3), [0.4, -0.2, 1.1]),
    "cauchy": (lambda z: dist.Cauchy(z, 0.3), [0.4, -0.2, 1.1]),
    "poisson": (_poisson, [1.0, 0.0, 3.0]),
    "categorical": (_categorical, [0, 2, 1]),
}


class Net(nn.Module):
    """A small control, not at zero."""

    def __init__(self, dim: int, outputs: int = 1) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(nn.Linear(dim + 1, 7), nn.Tanh(), nn.Linear(7, outputs * dim))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(torch.cat([t.expand(z.shape[:-1] + (1,)), z], -1))


def loss_and_gradients(elbo, model, guide, *args, seed: int = 7):
    """Loss and the gradient of every parameter that the ELBO met."""
    pyro.set_rng_seed(seed)
    with pyro.poutine.trace(param_only=True) as capture:
        loss = elbo.differentiable_loss(model, guide, *args)
    params = {k: site["value"].unconstrained() for k, site in capture.trace.nodes.items()}
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss.item(), {
        k: torch.zeros_like(p) if g is None else g
        for (k, p), g in zip(params.items(), grads, strict=True)
    }


def assert_same(a, b, tol: float = 1e-9) -> None:
    """Equal losses and gradients; 1e-9 absolute is some 1e6 roundings of numbers of order 1."""
    assert abs(a[0] - b[0]) < tol * max(1.0, abs(a[0])), (a[0], b[0])
    assert set(a[1]) == set(b[1])
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=tol, atol=tol, msg=name)
