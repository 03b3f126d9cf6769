"""A random ODE along a path that is refined: both are solved on the noise of the draw."""

import pyro
import torch

from pyro_sde import tolerance
from pyro_sde.distributions import BrownianMotion, ControlledPath
from pyro_sde.solvers.adaptive import integrate_adaptively

TIMES = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)


def contracted(t, z):
    """A control whose contraction is a matrix."""
    c = torch.tensor([[-0.7, 0.0], [0.9, -0.3]], dtype=z.dtype)
    return torch.sin(3 * z) + t, c.expand(*z.shape, 2)


def test_the_noise_of_a_path_with_contraction_is_that_of_its_draw():
    """dh = w dt along a Brownian motion, whose states between the times of the grid are known from
    the noise: h is their integral."""
    start = torch.tensor([0.3, -0.4], dtype=torch.float64)
    path = ControlledPath(BrownianMotion(0.8, TIMES, start), contracted, contraction=True)
    pyro.set_rng_seed(0)
    with tolerance(rtol=1e-3, atol=1e-3) as solved, torch.no_grad():
        value = path.rsample()
        noise = solved._refined[0].noise
        h = integrate_adaptively(lambda t, h, w: w, torch.zeros(2), value, solved)
    assert [s.kind for s in solved.solves] == ["path", "block"]
    n, total = 2**10, torch.zeros(2)
    for i, w in enumerate(noise):
        dt = TIMES[i + 1] - TIMES[i]
        ends = torch.stack([w(0.0, (k + 1) / n) for k in range(n)])
        # Over the whole interval the noise is what leads to the next state of the path.
        whole = (value[i + 1] - value[i]) / (0.8 * dt.sqrt())
        s = torch.arange(1, n + 1, dtype=torch.float64).unsqueeze(-1) / n
        states = value[i] + 0.8 * dt.sqrt() * (ends + s * (whole - ends[-1]))
        total = total + dt * (states.mean(0) + (value[i] - states[-1]) / (2 * n))
    torch.testing.assert_close(h, total, rtol=0, atol=3e-3)
