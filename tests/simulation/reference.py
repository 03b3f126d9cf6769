"""Laws, controls and the reference that every simulator is held to: a loop over ``transition`` with
dense matrices, and densities from torch.distributions."""

import copy

import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_sde import MLPControl
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    OrnsteinUhlenbeck,
    PathDistribution,
    SDEPath,
    Stack,
)
from pyro_sde.guides.path_posterior import _Until
from pyro_sde.nn import NeuralDrift

from ..cases import Cubic, Net, OUWithJump, SDEWithHeun
from .fused_cases import ByStep, WithContext

GRID = torch.tensor([0.0, 0.1, 0.25, 0.6, 1.0], dtype=torch.float64)
D = 2


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


class Correlated(PathDistribution):
    """A process whose noise is correlated: its scale is a lower-triangular matrix."""

    def __init__(self, lower, initial, times, **options):
        self.lower = lower
        super().__init__(times, initial, **options)

    def transition(self, t, dt, z):
        diagonal = (0.6 + 0.1 * torch.sin(z)).diag_embed()
        scale = (diagonal + torch.tril(self.lower, -1)) * dt.sqrt().unsqueeze(-1)
        return z - z * dt, scale


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make()


# Parameters, tensors and modules, and what makes the process of them. The first is the start.
LAWS = {
    "ou": (
        [leaf(0.3, -0.2), leaf(1.3), leaf(0.7)],
        lambda z, r, s, **o: OrnsteinUhlenbeck(r, 0.2, s, GRID, z, **o),
    ),
    "brownian": (
        [leaf(0.3, -0.2), leaf(0.8), leaf(0.4, 0.1)],
        lambda z, s, f, **o: BrownianMotion(s, GRID, z, f, **o),
    ),
    "double well": (
        [leaf(0.3, -0.2), leaf(1.5)],
        lambda z, k, **o: SDEPath(
            lambda t, x: k * (x - x**3) + t, lambda t, x: 0.3 + 0.1 * k * x.square(), z, GRID, **o
        ),
    ),
    "learned": (
        [leaf(0.3, -0.2), seeded(lambda: NeuralDrift(D, (4,), time=True).double()), leaf(0.6)],
        lambda z, f, g, **o: SDEPath(f, g, z, GRID, **o),
    ),
    "own": ([leaf(0.3, -0.2), leaf(0.5)], lambda z, a, **o: Cubic(a, z, GRID, **o)),
    "child of OU": (
        [leaf(0.3, -0.2), leaf(1.3), leaf(0.7)],
        lambda z, r, s, **o: OUWithJump(r, 0.2, s, GRID, z, **o),
    ),
    "child of SDEPath": (
        [leaf(0.3, -0.2), leaf(1.5), seeded(lambda: NeuralDrift(D, (4,)).double())],
        lambda z, k, f, **o: SDEWithHeun(lambda t, x: f(t, x) * k, 0.5, z, GRID, **o),
    ),
    "correlated": (
        [leaf(0.3, -0.2), leaf([0.0, 0.0], [0.4, 0.0])],
        lambda z, m, **o: Correlated(m, z, GRID, **o),
    ),
    "stack": (
        [leaf(0.3, -0.2), leaf(1.3), leaf(0.8)],
        lambda z, r, s, **o: Stack(
            OrnsteinUhlenbeck(r, 0.2, 0.7, GRID, z[..., :1], **o),
            BrownianMotion(s, GRID, z[..., 1:], 0.3, **o),
        ),
    ),
    "pushed": (
        [leaf(0.3, -0.2), leaf(1.3)],
        lambda z, r, **o: ControlledPath(
            OrnsteinUhlenbeck(r, 0.2, 0.7, GRID, z), lambda t, x: torch.sin(3 * x) - t, **o
        ),
    ),
}


class Split(nn.Module):
    """A control with a contraction: the logarithms of a diagonal, or a triangular matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.net, self.matrix = Net(D, 1 + (D if matrix else 1)).double(), matrix

    def forward(self, t, z):
        out = self.net(t, z)
        u, c = out[..., :D], out[..., D:]
        return u, 0.5 * c.unflatten(-1, (D, D)).tril() if self.matrix else 0.5 * c


def mlp(dim=D, **options):
    control = MLPControl(dim, (5,), times=GRID, features=2, embedding=2, **options).double()
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return control


class Constant(nn.Module):
    """A control that does not see the state."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([0.4, -0.3], dtype=torch.float64))

    def forward(self, t, z):
        return self.value * torch.cos(t) * torch.ones_like(z)


END = torch.tensor(0.5, dtype=torch.float64)
CONTEXT = torch.tensor([0.7, -0.4, 1.1], dtype=torch.float64)

# A module, what makes the control of it, and the contraction of a ControlledPath.
CONTROLS = {
    "callable": (Net(D).double(), lambda m: m, None),
    "constant": (Constant(), lambda m: m, None),
    "diagonal": (Split(False), lambda m: m, True),
    "triangular": (Split(True), lambda m: m, True),
    "apart": (Net(D).double(), lambda m: m, lambda t, z: 0.2 * torch.sin(z + t)),
    "network": (mlp(), lambda m: m, None),
    "network, diagonal": (mlp(contraction=True), lambda m: m, True),
    "network, full": (mlp(contraction="full"), lambda m: m, True),
    "network with context, full": (
        mlp(contraction="full", context=3),
        lambda m: WithContext(m, CONTEXT),
        True,
    ),
    "network that ends": (mlp(), lambda m: _Until(m, END), None),
    "network that ends, diagonal": (mlp(contraction=True), lambda m: _Until(m, END), True),
    "network that ends, full": (mlp(contraction="full"), lambda m: _Until(m, END), True),
    "steps of a network": (mlp(), ByStep, None),
}

# The first triangular matrix whose rows and columns cannot be mistaken for one another.
LAWS_IN_3 = {
    "ou": (
        [leaf(0.3, -0.2, 0.1), leaf(1.3), leaf(0.7, 0.4, 0.9)],
        lambda z, r, s, **o: OrnsteinUhlenbeck(r, 0.2, s, GRID, z, **o),
    ),
    "double well": (
        [leaf(0.3, -0.2, 0.1), leaf(1.5)],
        lambda z, k, **o: SDEPath(
            lambda t, x: k * (x - x**3) + t, lambda t, x: 0.3 + 0.1 * k * x.square(), z, GRID, **o
        ),
    ),
    "learned": (
        [leaf(0.3, -0.2, 0.1), seeded(lambda: NeuralDrift(3, (4,)).double()), leaf(0.6, 0.5, 0.3)],
        lambda z, f, g, **o: SDEPath(f, g, z, GRID, **o),
    ),
}
CONTROLS_IN_3 = {
    "network, full": (mlp(3, contraction="full"), lambda m: m, True),
    "network that ends, full": (mlp(3, contraction="full"), lambda m: _Until(m, END), True),
    "steps of a network, full": (mlp(3, contraction="full"), ByStep, True),
}


def stop(module):
    """The same module, its parameters stopped."""
    return copy.deepcopy(module).requires_grad_(False)


def parameters(*things):
    return [p for x in things for p in (x.parameters() if isinstance(x, nn.Module) else [x])]


def as_matrix(x, z):
    return x if x.dim() > z.dim() else x.expand_as(z).diag_embed()


def as_contraction(c, z):
    """C itself, from what a control returns."""
    if c is None:
        return torch.eye(z.shape[-1]).expand(*z.shape, -1)
    if c.dim() == z.dim():
        return c.exp().diag_embed()
    return c.tril(-1) + c.diagonal(dim1=-2, dim2=-1).exp().diag_embed()


def step_laws(p, control, contraction, t, dt, z):
    """The Gaussian laws of a step under q and p."""
    mean, scale = p.transition(t, dt, z)
    scale = as_matrix(scale, z)
    out = control(t, z)
    u, c = out if contraction is True else (out, contraction and contraction(t, z))
    moved = mean + (scale @ (dt.sqrt() * u).unsqueeze(-1)).squeeze(-1)
    return (
        MultivariateNormal(moved, scale_tril=scale @ as_contraction(c, z)),
        MultivariateNormal(mean.expand_as(z), scale_tril=scale),
    )


def reference(law, control_case, noise):
    """The path and the three estimators, by their definitions: "stl" has the parameters of the
    control stopped in the densities."""
    values, make = law
    module, wrap, contraction = control_case
    p, control = make(*values), wrap(module)
    control_stopped = wrap(stop(module))
    z = values[0].expand(noise.shape[1:])
    states, kl, full, stl = [z], 0.0, 0.0, 0.0
    for i, eps in enumerate(noise):
        t, dt = GRID[i].reshape(1), (GRID[i + 1] - GRID[i]).reshape(1)
        q_step, p_step = step_laws(p, control, contraction, t, dt, z)
        after = q_step.loc + (q_step.scale_tril @ eps.unsqueeze(-1)).squeeze(-1)
        kl = kl + kl_divergence(q_step, p_step)
        full = full + q_step.log_prob(after) - p_step.log_prob(after)
        q_step, p_step = step_laws(p, control_stopped, contraction, t, dt, z)
        stl = stl + q_step.log_prob(after) - p_step.log_prob(after)
        z = after
        states.append(z)
    return torch.stack(states, -2), {"kl": kl, "full": full, "stl": stl}
