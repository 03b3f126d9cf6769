"""Paths that are one operation, and the same ones step by step."""

from typing import NamedTuple

import torch
from pyro.distributions import Normal
from torch import nn

from pyro_sde import MLPControl
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck, SDEPath
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.nn import NeuralDiffusion, NeuralDrift
from pyro_sde.simulation import Fused, Loop

GRID = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.6, 1.0], dtype=torch.float64)
ESTIMATORS = ("kl", "full", "stl")
CONTRACTIONS = (None, "diagonal", "full")
"""Those of a MLPControl."""


class Hidden(NamedTuple):
    """A control on a grid that does not show its layers."""

    known: tuple
    evaluate: object

    def __call__(self, z, *rows):
        return self.evaluate(z, *rows)


class ByStep:
    """The same control, of which a path does not know what it is made of."""

    def __init__(self, control):
        self.control = control

    def __call__(self, *args):
        return self.control(*args)

    def on_grid(self, t):
        grid = self.control.on_grid(t)
        return Hidden(grid.known, grid)


class WithContext:
    def __init__(self, control, context):
        self.control, self.context = control, context

    def __call__(self, t, z):
        return self.control(t, z, self.context)

    def on_grid(self, t):
        return self.control.on_grid(t, self.context)


def leaf(*shape):
    return (0.5 + torch.rand(shape)).requires_grad_()


def control_of(dim, **options):
    control = MLPControl(dim, options.pop("hidden", (5, 6)), times=GRID, **options)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return control


def ou(dim, batch=(), times=GRID):
    rate, loc, scale, start = leaf(*batch, 1), leaf(dim), leaf(*batch, dim), leaf(dim)
    return [rate, loc, scale, start], lambda: OrnsteinUhlenbeck(rate, loc, scale, times, start)


def ou_random_start(dim, batch=(), times=GRID):
    rate, loc, scale = leaf(), leaf(), leaf(dim)
    return [rate, loc, scale], lambda: OrnsteinUhlenbeck(rate, loc, scale, times).expand(batch)


def brownian(dim, batch=(), times=GRID):
    scale, drift, mean = leaf(), leaf(*batch, dim), leaf(dim)
    return [scale, drift, mean], lambda: BrownianMotion(
        scale, times, Normal(mean, 0.3).to_event(1), drift
    )


def neural(dim, batch=(), times=GRID, hidden=(4, 3), time=True, units=nn.Softplus):
    """A drift that is learned, with noise that is learned, the same in all states."""
    drift = NeuralDrift(dim, hidden, time=time, activation=units)
    diffusion, start = NeuralDiffusion(dim, 0), leaf(*batch, dim)
    inputs = [*drift.parameters(), *diffusion.parameters(), start]
    return inputs, lambda: SDEPath(drift, diffusion, start, times)


def neural_and_constant(dim, batch=(), times=GRID):
    drift, scale, start = NeuralDrift(dim, (4,), activation=nn.Tanh), leaf(*batch, dim), leaf(dim)
    return [*drift.parameters(), scale, start], lambda: SDEPath(drift, scale, start, times)


def loss_of(prior, control, contraction, estimator, shape):
    p = prior()
    q = ControlledPath(p, control, contraction=contraction is not None)
    torch.manual_seed(3)
    z = q.rsample(shape)
    term = path_divergence(q, p, z, estimator)
    weights = torch.linspace(1, 2, z[0].numel() if z.dim() > 2 else z.numel())
    return q, (z.sin() * weights.reshape(z.shape[-2:] if z.dim() < 3 else z.shape[1:])), term


def simulator_of(path):
    """The class of the simulator that drew a path of it last."""
    return type(path._record.last.simulator)


def check(prior, inputs, control, contraction, estimator, shape=()):
    found = []
    for c, kind in ((control, Fused), (ByStep(control), Loop)):
        q, z, term = loss_of(prior, c, contraction, estimator, shape)
        assert simulator_of(q) is kind
        loss = z.sum() + (term * torch.linspace(1, 3, term.numel()).reshape(term.shape)).sum()
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        found.append([z, term, *(torch.zeros(()) if g is None else g for g in grads)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert all(g.abs().max() > 0 for g in found[0][2:])
