"""torchsde as a backend of a process that somebody wrote: noise that depends on the state."""

import itertools
import math

import pytest
import torch
import torchsde

from pyro_sde.distributions import (
    ControlledPath,
    GeometricBrownianMotion,
    PathDistribution,
    SDEPath,
)
from pyro_sde.interop.torchsde import sample
from pyro_sde.solvers import torchsde as former

TIMES = torch.linspace(0, 1, 3, dtype=torch.float64)
ITO = ("euler", "milstein", "srk")
STRATONOVICH = ("midpoint", "heun", "euler_heun", "reversible_heun")
A, S = 0.1, 0.8


class Growth(PathDistribution):
    """dz = a z dt + s z dB by Euler's steps, written as docs/tutorials/own_process.md says."""

    def __init__(self, a, s, times=TIMES, initial=1.0):
        self.a, self.s = torch.as_tensor(a), torch.as_tensor(s)
        super().__init__(times, initial)

    def transition(self, t, dt, z):
        f, g = self.coefficients(t, z)
        return z + f * dt, g * dt.sqrt()

    def coefficients(self, t, z):
        return self.a * z, self.s * z


class Learned(Growth):
    """dz = a z dt + s dB: what coefficients returns has a gradient, but not by the state."""

    def coefficients(self, t, z):
        return self.a * z, self.s.expand_as(z)


def noise(n, seed=3):
    return torchsde.BrownianInterval(
        0.0,
        1.0,
        size=(n, 1),
        dtype=torch.float64,
        entropy=seed,
        levy_area_approximation="space-time",
        halfway_tree=True,
        tol=1e-30,
    )


def rms(x):
    return x.detach().square().mean().sqrt().item()


@pytest.mark.parametrize("method", [None, *ITO, *STRATONOVICH])
def test_mean(method):
    """That of dz = s z dB is 1 at all times, and that with a drift grows as exp(a t)."""
    n = 2000
    for a in (0.0, 0.5):
        law = GeometricBrownianMotion(S, TIMES, 1.0, a)
        torch.manual_seed(0)
        with torch.no_grad():
            z = sample(Growth(a, S), (n,), method=method, dt=1 / 32)
        error = law.variance[1:].sqrt() / math.sqrt(n)
        # 4.5 standard errors, and a weak error of first order in steps of 1/32.
        assert ((z.mean(0) - law.mean)[1:].abs() < 4.5 * error + 0.02).all(), (z.mean(0), law.mean)


@pytest.mark.parametrize("method", [*ITO, *STRATONOVICH])
@pytest.mark.parametrize("gradient", ["none", "no_grad", "learned"])
def test_path(method, gradient):
    """On one Brownian path B the solution is exp((a - s^2 / 2) t + s B), and so is its gradient.

    Over 100 paths, in steps of 1/64, the error is below 0.01; Euler's, in steps of 1/512, 0.03.
    """
    n, b = 100, noise(100)
    a, s = (torch.tensor(x, requires_grad=gradient != "none") for x in (A, S))
    with torch.set_grad_enabled(gradient != "no_grad"):
        dt = 1 / 512 if method == "euler" else 1 / 64
        z = sample(Growth(a, s), (n,), method=method, dt=dt, brownian=b)[:, -1]
        end = b(0.0, 1.0)
        exact = ((a - s.square() / 2) + s * end).exp()
    assert rms(exact) > 1
    assert rms(z - exact) < 0.07, rms(z - exact)
    if gradient == "learned":
        found = torch.autograd.grad(z.mean(), (a, s))
        expected = torch.autograd.grad(exact.mean(), (a, s))
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("method", [*ITO, *STRATONOVICH])
@pytest.mark.parametrize("has_grad", [True, False])
def test_noise_that_is_learned_and_does_not_see_the_state(method, has_grad):
    """There is no correction: the mean of the solution is exp(a t), its slope by s is the noise's.

    dz = a z dt + s dB: z(1) = e^a + s int e^(a (1 - t)) dB, by a fine sum on the same path.
    """
    n, b, steps = 50, noise(50), 1024
    s = torch.tensor(S, requires_grad=True)
    with torch.set_grad_enabled(has_grad):
        z = sample(Learned(0.5, s), (n,), method=method, dt=1 / 64, brownian=b)[:, -1]
        grid = torch.linspace(0, 1, steps + 1).tolist()
        integral = sum(
            math.exp(0.5 * (1 - (x + y) / 2)) * b(x, y) for x, y in itertools.pairwise(grid)
        )
        exact = math.exp(0.5) + s * integral
    assert rms(z - exact) < 0.02, rms(z - exact)
    if has_grad:
        (slope,) = torch.autograd.grad(z.mean(), s)
        torch.testing.assert_close(slope, integral.mean(), rtol=0, atol=0.01)


@pytest.mark.parametrize("method", [*ITO, *STRATONOVICH])
def test_pushed_by_a_control(method):
    """A control of u = 1 adds s z to the drift: a geometric Brownian motion again."""
    n, b = 100, noise(100)
    pushed = ControlledPath(Growth(A, S), lambda t, z: torch.ones_like(z))
    dt = 1 / 512 if method == "euler" else 1 / 64
    z = sample(pushed, (n,), method=method, dt=dt, brownian=b)[:, -1]
    exact = ((A + S - S * S / 2) + S * b(0.0, 1.0)).exp()
    assert rms(z - exact) < 0.15, rms(z - exact)  # of numbers twice as large


class Volatile(PathDistribution):
    """dx = v dB_1, dv = v / 2 dt + 0.3 dB_2: noise that depends on the other entry."""

    def transition(self, t, dt, z):
        f, g = self.coefficients(t, z)
        return z + f * dt, g * dt.sqrt()

    def coefficients(self, t, z):
        x, v = z.unbind(-1)
        return torch.stack([0 * x, 0.5 * v], -1), torch.stack([v, 0.3 + 0 * v], -1)


@pytest.mark.parametrize("method", [*ITO, *STRATONOVICH])
@pytest.mark.parametrize("is_own", [True, False])
def test_noise_that_depends_on_another_entry(method, is_own):
    """Of Ito's correction each entry has g_i dg_i/dz_i alone: here there is none, E v = e^(t/2)."""
    n = 400
    path = Volatile(TIMES, torch.tensor([0.0, 1.0]))
    if not is_own:
        own = path.coefficients
        path = SDEPath(lambda t, z: own(t, z)[0], lambda t, z: own(t, z)[1], path.initial, TIMES)
    torch.manual_seed(0)
    with torch.no_grad():
        v = sample(path, (n,), method=method, dt=1 / 32)[:, -1, 1]
    # dv is linear with fixed noise: a variance of 0.3^2 (e - 1).
    error = 0.3 * math.sqrt((math.e - 1) / n)
    assert abs(v.mean() - math.exp(0.5)) < 4.5 * error + 0.02, v.mean()


def test_without_coefficients():
    """A process that has a transition alone does not say what SDE it is."""

    class Step(PathDistribution):
        def transition(self, t, dt, z):
            return z + 0.1 * z * dt, 0.8 * z * dt.sqrt()

    for method in (*ITO, *STRATONOVICH):
        with pytest.raises(NotImplementedError, match="does not say what SDE"):
            sample(Step(TIMES, 1.0), method=method)


def test_noise_that_is_not_diagonal_is_refused():
    class Correlated(PathDistribution):
        def coefficients(self, t, z):
            return -z, torch.ones(2, 2)

    path = Correlated(torch.linspace(0.0, 1.0, 3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"noise that is diagonal: found \[\(3, 2\), \(2, 2\)\]"):
        sample(path, (3,), method="euler")


def test_the_former_name_of_the_module():
    assert former.sample is sample
