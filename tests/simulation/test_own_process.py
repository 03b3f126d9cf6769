"""tolerance() on a process that somebody wrote: strong order 1, as an SDEPath has it.

The error of a step of length h is of order h^(3/2) with Milstein's correction and of order h
without. It is kept below tol sqrt(h): steps in proportion to 1/tol, or to 1/tol^2 without.
"""

import pyro
import pytest
import torch

from pyro_sde import AutoSDE, tolerance
from pyro_sde.distributions import BrownianMotion, ControlledPath, PathDistribution, SDEPath

TIMES = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
A, S = 0.5, 0.8
N = 64


class Growth(PathDistribution):
    """dz = a z dt + s z dB by Euler's steps, written as docs/tutorials/own_process.md says."""

    def transition(self, t, dt, z):
        return z + A * z * dt, S * z * dt.sqrt()

    def coefficients(self, t, z):
        return A * z, S * z


class Step(PathDistribution):
    """The same, and not a word of the SDE."""

    def transition(self, t, dt, z):
        return z + A * z * dt, S * z * dt.sqrt()


class BetterStep(PathDistribution):
    """A step whose mean is exact: it is no Euler step of any SDE."""

    def transition(self, t, dt, z):
        return z * (A * dt).exp(), S * z * dt.sqrt()


class Sine(PathDistribution):
    """dX = -a^2 X / 2 dt + a sqrt(1 - X^2) dB is solved by X = sin(a B)."""

    def transition(self, t, dt, z):
        noise = 0.5 * (1 - z.square()).clamp(min=1e-12).sqrt()
        return z - 0.125 * z * dt, noise * dt.sqrt()


def pushed():
    """A control of u = 1 adds s z to the drift."""
    return ControlledPath(Growth(TIMES, torch.ones(1)), lambda t, z: torch.ones_like(z))


def growth(drift):
    return lambda t, b: ((drift - S * S / 2) * t + S * b).exp()


CASES = {
    "transition and coefficients": (lambda: Growth(TIMES, torch.ones(1)), growth(A), 3e-3),
    "transition alone": (lambda: Step(TIMES, torch.ones(1)), growth(A), 3e-3),
    "a better step": (lambda: BetterStep(TIMES, torch.ones(1)), growth(A), 3e-3),
    "a diffusion that is not linear": (
        lambda: Sine(TIMES, torch.zeros(1)),
        lambda t, b: torch.sin(0.5 * b),
        1e-3,
    ),
    "pushed by a control": (pushed, growth(A + S), 3e-3),
}


def reference():
    return SDEPath(lambda t, z: A * z, lambda t, z: S * z, torch.ones(1), TIMES)


def solve(make, tol):
    """Paths, and the number of steps. The seed decides the noise, whatever the process."""
    pyro.set_rng_seed(0)
    with tolerance(rtol=tol, atol=tol) as solved:
        value = make().sample((N,))
    (found,) = solved.solves
    return value, found.steps


@pytest.mark.parametrize("case", CASES)
def test_strong_order(case):
    """The tolerance is met, against the closed form on the very Brownian path, and a tenth of it
    takes ten times the steps, not a hundred times."""
    make, exact, finest = CASES[case]
    counts = []
    for tol in (10 * finest, finest):
        b = solve(lambda: BrownianMotion(1.0, TIMES, torch.zeros(1)), tol)[0]
        value, steps = solve(make, tol)
        error = (value - exact(TIMES.unsqueeze(-1), b)).square().mean().sqrt().item()
        assert error < 10 * tol, (tol, error)
        counts.append(steps)
    assert counts[1] < 30 * counts[0], counts


@pytest.mark.parametrize("make", [Growth, Step])
def test_the_path_is_that_of_an_sde_path(make):
    """Path by path and step by step: the noise is linear, so Milstein's step is one formula."""
    for tol in (1e-1, 1e-2):
        value, steps = solve(lambda: make(TIMES, torch.ones(1)), tol)
        expected, expected_steps = solve(reference, tol)
        assert steps == expected_steps, (tol, steps, expected_steps)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [Growth, Step])
def test_in_a_guide(make):
    """The posterior of AutoSDE, untrained, is the process itself."""
    values = []
    for path in (make(TIMES, torch.ones(1)), reference()):
        guide = AutoSDE(lambda path=path: pyro.sample("z", path), name=type(path).__name__).setup()
        pyro.set_rng_seed(0)
        with tolerance(rtol=1e-2):
            values.append(guide()["z"])
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-9)


def test_gradients():
    """By the start z is linear in it; by s, z = exp(s B - s^2 t / 2): dz/ds = z (B - s t)."""

    class Learned(PathDistribution):
        def __init__(self, s, initial):
            self.s = s
            super().__init__(TIMES, initial)

        def transition(self, t, dt, z):
            return z, self.s * z * dt.sqrt()

    s, start = torch.tensor(S, requires_grad=True), torch.ones(1, requires_grad=True)
    b = solve(lambda: BrownianMotion(1.0, TIMES, torch.zeros(1)), 3e-3)[0]
    pyro.set_rng_seed(0)
    with tolerance(rtol=3e-3, atol=3e-3) as solved:
        value = Learned(s, start).rsample((N,))
    by_s, by_start = torch.autograd.grad(value.mean(0).sum(), (s, start))
    t = TIMES.unsqueeze(-1)
    exact = (S * b - S * S * t / 2).exp()
    torch.testing.assert_close(by_start.squeeze(), exact.mean(0).sum(), rtol=0, atol=0.02)
    torch.testing.assert_close(by_s, (exact * (b - S * t)).mean(0).sum(), rtol=0, atol=0.05)
    assert solved.solves[0].steps < 1000, solved.solves  # strong order 1/2 takes thousands
