"""Subclasses that override ``transition``, and a test of what drew a path."""

import math

import torch

from pyro_sde import MLPControl
from pyro_sde.distributions import (
    BrownianMotion,
    OrnsteinUhlenbeck,
    PathDistribution,
    SDEPath,
)
from pyro_sde.nn import NeuralDrift
from pyro_sde.simulation.base import LinearSteps

TIMES = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.6, 1.0], dtype=torch.float64)
START = torch.tensor([0.3, -0.2], dtype=torch.float64)
A, S = 0.5, 0.8
N = 5000


class Bend:
    """Another mean, and noise that depends on the state: a mixin."""

    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * scale


class Growth:
    """dz = a z dt + s z dB, whatever process this is mixed into."""

    def transition(self, t, dt, z):
        return z + A * z * dt, S * z * dt.sqrt()


class Damp:
    """A pull to the origin besides; the noise is as before, for the KL to be finite."""

    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean - 3 * z * dt, scale


def mixed(mixin, parent):
    return type(f"Mixed{parent.__name__}", (mixin, parent), {})


class OwnOU(OrnsteinUhlenbeck):
    """The same as with the mixin, in the class itself."""

    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * scale


class OwnMotion(BrownianMotion):
    def transition(self, t, dt, z):
        return z + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * dt.sqrt()


class OwnSDE(SDEPath):
    def transition(self, t, dt, z):
        return z + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * dt.sqrt()


class Heir(OwnOU):
    """Its transition is its parent's, and so not its grandparent's."""


class Decay(PathDistribution):
    """A process with all three hooks."""

    def transition(self, t, dt, z):
        return (1 - dt) * z, 0.5 * dt.sqrt().expand_as(z)

    def coefficients(self, t, z):
        return -z, torch.full_like(z, 0.5)

    def linear_steps(self):
        _, dt = self.step_times(0)
        return LinearSteps(1 - dt, torch.zeros_like(dt), 0.5 * dt.sqrt())


class Faster(Decay):
    """It says what SDE it is, too."""

    def transition(self, t, dt, z):
        return (1 - 2 * dt) * z, 0.9 * dt.sqrt().expand_as(z)

    def coefficients(self, t, z):
        return -2 * z, torch.full_like(z, 0.9)


def neural_drift():
    torch.manual_seed(5)
    return NeuralDrift(2, (4,), time=True).requires_grad_(False)


MixedOU, MixedMotion, MixedSDE = (
    mixed(Bend, c) for c in (OrnsteinUhlenbeck, BrownianMotion, SDEPath)
)
PATHS = {
    "OU": lambda **m: OwnOU(1.3, 0.2, 0.7, TIMES, START, **m),
    "OU, mixin": lambda **m: MixedOU(1.3, 0.2, 0.7, TIMES, START, **m),
    "OU, heir": lambda **m: Heir(1.3, 0.2, 0.7, TIMES, START, **m),
    "OU, stationary start": lambda **m: OwnOU(1.3, torch.zeros(2), 0.7, TIMES, **m),
    "Brownian motion": lambda **m: OwnMotion(0.7, TIMES, START, 0.4, **m),
    "Brownian motion, mixin": lambda **m: MixedMotion(0.7, TIMES, START, 0.4, **m),
    "SDEPath": lambda **m: OwnSDE(lambda t, z: -z, lambda t, z: 0.5 + z * z, START, TIMES, **m),
    "SDEPath, network": lambda **m: OwnSDE(neural_drift(), 0.6, START, TIMES, **m),
    "SDEPath, mixin": lambda **m: MixedSDE(neural_drift(), 0.6, START, TIMES, **m),
    "own process": lambda **m: mixed(Bend, Decay)(TIMES, START, **m),
    "own process, SDE": lambda **m: Faster(TIMES, START, **m),
}
MEMORY = ("graph", "recompute")


def control_of(contraction=False):
    """An MLPControl, not at zero."""
    torch.manual_seed(1)
    control = MLPControl(2, (4,), times=TIMES, features=2, embedding=2, contraction=contraction)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return control


def assert_drawn(transition, z):
    """That ``z`` was drawn by this transition."""
    z = z.detach().movedim(-2, 0)
    t, dt = (x.reshape((-1,) + (1,) * (z.dim() - 1)) for x in (TIMES[:-1], TIMES.diff()))
    with torch.no_grad():
        mean, scale = transition(t, dt, z[:-1])
    for r in ((z[1:] - mean) / scale).unbind(0):  # of each step
        n = r.numel()
        assert abs(r.mean()) < 5 / math.sqrt(n), r.mean()
        assert abs(r.var() - 1) < 5 * math.sqrt(2 / n), r.var()


def pushed(path, control):
    """The transition of a path that a control pushes, from that of the path."""

    def transition(t, dt, z):
        mean, scale = path.transition(t, dt, z)
        out = control(t, z)
        u, log_c = out if isinstance(out, tuple) else (out, torch.zeros_like(out))
        return mean + scale * dt.sqrt() * u, scale * log_c.exp()

    return transition
