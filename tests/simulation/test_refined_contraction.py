"""Paths with contraction inside of a tolerance: control and contraction act on the noise of the
grid's intervals, and between the times of the grid the noise is a Brownian bridge."""

import pyro
import pytest
import torch

from pyro_sde import AutoSDE, tolerance
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck, SDEPath

from .reference import CONTROLS, CONTROLS_IN_3, GRID, as_contraction

ROWS = 4
CASES = {
    "diagonal": CONTROLS["diagonal"],
    "triangular": CONTROLS["triangular"],
    "apart": CONTROLS["apart"],
    "network, full": CONTROLS["network, full"],
    "network that ends, full": CONTROLS_IN_3["network that ends, full"],
}


def dim_of(name):
    return 3 if "ends" in name else 2


def push(prior, name):
    module, wrap, contraction = CASES[name]
    return list(module.parameters()), ControlledPath(prior, wrap(module), contraction=contraction)


def solve(path, tol, seed=0):
    """A path, and the Brownian paths of the intervals that it was made from."""
    pyro.set_rng_seed(seed)
    with tolerance(rtol=tol, atol=tol) as solved:
        value = path.rsample((ROWS,))
        return value, solved._refined[0].noise


def shift(path, i, z, eps):
    """w + C eps - eps, from the control as it is called, with dense matrices."""
    t, dt = GRID[i].reshape(1), (GRID[i + 1] - GRID[i]).reshape(1)
    u, c = path.evaluate(t, z)
    contracted = (as_contraction(c, z) @ eps.unsqueeze(-1)).squeeze(-1)
    return dt.sqrt() * u + contracted - eps


@pytest.mark.parametrize("name", CASES)
def test_a_brownian_motion_is_the_same_on_any_grid(name):
    """Its steps are exact, so at the times of the grid refining changes nothing, gradients
    included."""
    scale = torch.tensor(0.7, requires_grad=True)
    start = torch.linspace(-0.5, 0.5, dim_of(name))
    inputs, path = push(BrownianMotion(scale, GRID, start), name)
    fine, noise = solve(path, 1e-2)
    coarse = path.draw(start.expand(ROWS, -1), torch.stack([w(0.0, 1.0) for w in noise])).value
    torch.testing.assert_close(fine, coarse, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(x.sin().sum(), [scale, *inputs], allow_unused=True)
        for x in (fine, coarse)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert all(g is not None and g.abs().max() > 0 for g in grads[0])


@pytest.mark.parametrize("diffusion", ["constant", "of the state"])
@pytest.mark.parametrize("name", ["diagonal", "triangular", "network that ends, full"])
def test_it_converges_to_the_prior_along_the_displaced_noise(name, diffusion):
    """Against 2^9 steps of Milstein in every interval, on the noise by its definition."""
    start = torch.linspace(-0.5, 0.5, dim_of(name))
    slope = 0.0 if diffusion == "constant" else 0.4
    drift = lambda t, z: 2 * (z - z**3)  # noqa: E731
    prior = SDEPath(drift, lambda t, z: 0.6 + slope * torch.sin(z), start, GRID)
    path = push(prior, name)[1]
    n, errors = 2**9, []
    with torch.no_grad():
        for tol in (3e-2, 3e-3):
            value, noise = solve(path, tol)
            z, expected = start.expand(ROWS, -1), [start.expand(ROWS, -1)]
            for i, w in enumerate(noise):
                dt = GRID[i + 1] - GRID[i]
                d = shift(path, i, z, w(0.0, 1.0)) / n
                for k in range(n):
                    move = dt.sqrt() * (w(k / n, (k + 1) / n) + d)
                    g, change = 0.6 + slope * z.sin(), slope * z.cos()
                    ito = 0.5 * g * change * (move.square() - dt / n)
                    z = z + drift(0, z) * dt / n + g * move + ito
                expected.append(z)
            errors.append((value - torch.stack(expected, -2)).square().mean().sqrt())
    assert errors[0] < 3e-1 and errors[1] < 3e-2 and errors[1] < errors[0] / 2, errors


def test_a_trained_guide_is_refined():
    """The control is evaluated once in every interval, and the count says so."""

    times = torch.linspace(0.0, 1.0, 5)

    def model():
        pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.5, times, torch.ones(2)))

    pyro.set_rng_seed(0)
    guide = AutoSDE(model, contraction=True).setup()
    with tolerance(rtol=1e3) as solved, torch.no_grad():
        assert guide()["z"].shape == (5, 2)
    assert solved.evaluations == (1 + 3) * 4
