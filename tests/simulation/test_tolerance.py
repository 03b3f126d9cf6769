"""Error control along a Brownian path: what the tolerance promises, path by path."""

import math

import pyro
import pytest
import torch

from pyro_sde import AutoSDE, TraceSDE_ELBO, tolerance
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.distributions.path import PathDistribution

from ..cases import PROCESSES

TIMES = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4)
N = 64


def growth():
    return SDEPath(lambda t, z: 0.5 * z, lambda t, z: 0.8 * z, torch.ones(1), TIMES)


def sine():
    """dX = -a^2 X / 2 dt + a sqrt(1 - X^2) dB is solved by X = sin(a B)."""
    a = 0.5
    return SDEPath(
        lambda t, z: -0.5 * a * a * z,
        lambda t, z: a * (1 - z.square()).clamp(min=1e-12).sqrt(),
        torch.zeros(1),
        TIMES,
    )


def pushed():
    """A control of -2 sin(t) z on a Brownian motion: dz = -s 2 sin(t) z dt + s dB, linear."""
    motion = BrownianMotion(0.7, TIMES, torch.ones(1))
    return ControlledPath(motion, lambda t, z: -2 * torch.sin(t) * z)


EXACT = {
    growth: lambda b: torch.exp((0.5 - 0.32) + 0.8 * b),
    sine: lambda b: torch.sin(0.5 * b),
}


def solve(make, tol, seed=0):
    pyro.set_rng_seed(seed)
    with tolerance(rtol=tol, atol=tol) as solved:
        value = make().sample((N,))
        noise = solved._refined[0].noise
        lengths = TIMES.diff().sqrt().tolist()
        end = sum(b(0.0, 1.0) * s for b, s in zip(noise, lengths, strict=True))
    return value, end, solved


@pytest.mark.parametrize("make", EXACT)
def test_the_error_follows_the_tolerance(make):
    """Root mean square over 64 paths, against the closed form on the very Brownian path."""
    counts = []
    for tol in TOLERANCES:
        value, b, solved = solve(make, tol)
        error = (value[:, -1] - EXACT[make](b)).square().mean().sqrt().item()
        assert tol / 10 < error < 10 * tol, (tol, error)
        counts.append(solved.evaluations)
    assert counts == sorted(counts) and counts[-1] > 10 * counts[0]


def test_convergence_where_there_is_no_closed_form():
    """Against a far tighter tolerance on the same seed, at every time of the grid."""
    reference = solve(pushed, 1e-4)[0]
    for tol in TOLERANCES[:3]:
        error = (solve(pushed, tol)[0] - reference).square().mean().sqrt().item()
        assert tol / 30 < error < 10 * tol, (tol, error)
    other = solve(pushed, 1e-2, seed=1)[0]
    assert (other - reference).square().mean().sqrt() > 0.1


@pytest.mark.parametrize("name", PROCESSES)
def test_every_process(name):
    """Shapes, and a path that starts where it should and agrees between two tolerances."""
    values = []
    for tol in (1e-2, 1e-3):
        pyro.set_rng_seed(0)
        with tolerance(rtol=tol):
            path = PROCESSES[name]()
            values.append(path.sample((5,)))
    assert values[0].shape == (5, *path.event_shape)
    assert torch.equal(values[0][..., 0, :], values[1][..., 0, :])
    assert (values[0] - values[1]).abs().max() < 0.15


def test_the_law_is_the_process():
    """Mean and variance of OU at every time of a coarse grid."""
    n = 4000
    path = OrnsteinUhlenbeck(1.3, 0.2, 0.7, TIMES, torch.ones(1))
    pyro.set_rng_seed(0)
    with tolerance(rtol=1e-2, atol=1e-2):
        z = path.sample((n,))
    error = path.variance[1:].sqrt() / math.sqrt(n)
    assert ((z.mean(0) - path.mean)[1:].abs() < 4.5 * error + 0.01).all()
    assert ((z.var(0)[1:] / path.variance[1:] - 1).abs() < 4.5 * math.sqrt(2 / n) + 0.02).all()


def test_grids_of_their_own():
    """Each row of times has its steps; a row alone on its noise is the same path."""
    times = torch.stack([TIMES, 2 * TIMES])
    path = OrnsteinUhlenbeck(1.0, 0.0, 0.5, times, torch.ones(1))
    pyro.set_rng_seed(0)
    with tolerance(rtol=1e-3) as solved:
        z = path.sample()
        noise = solved._refined[0].noise
    assert z.shape == (2, 3, 1)
    fine = torch.ones(2, 1)
    for i, b in enumerate(noise):
        dt = times.diff()[:, i : i + 1] / 1024
        for k in range(1024):
            fine = fine * (1 - dt) + 0.5 * (dt * 1024).sqrt() * b(k / 1024, (k + 1) / 1024)
    torch.testing.assert_close(z[:, -1], fine, rtol=0, atol=5e-3)


def test_what_it_cost():
    with tolerance(rtol=1e-2) as solved:
        growth().sample()
        growth().sample((2,))
    first, second = solved.solves
    assert solved.evaluations == first.evaluations + second.evaluations
    assert first.steps >= 4 and first.evaluations >= first.steps
    assert 0 < first.shortest <= 0.35
    # A piece costs its step unless that is known as the first half of a rejected one, and two.
    pieces = first.steps // 2 + first.rejected
    assert first.evaluations == 3 * pieces - first.rejected


def test_outside_nothing_is_changed():
    path = growth()
    torch.manual_seed(0)
    before = path.sample((3,))
    with tolerance(rtol=0.1):
        path.sample()
    torch.manual_seed(0)
    assert torch.equal(path.sample((3,)), before)


def test_gradients_flow():
    scale = torch.tensor(0.5, requires_grad=True)
    with tolerance(rtol=1e-2):
        value = GeometricBrownianMotion(scale, TIMES, 1.0).rsample((3,))
    (found,) = torch.autograd.grad(value.sum(), scale)
    # x = exp(s B - s^2 t / 2): dx/ds = x (B - s t), with B from x itself.
    x, s, t = value.detach(), scale.detach(), TIMES.unsqueeze(-1)
    torch.testing.assert_close(found, (x * (x.log() / s - s * t / 2)).sum())


def test_errors_say_where():
    def path(drift):
        return SDEPath(drift, lambda t, z: 1e-3, torch.ones(1), TIMES)

    blow_up = r"(underflows|evaluations).* at t=0\.(49|50)\d* with a step of .*state is"
    with tolerance(rtol=1e-2, max_evaluations=2000):
        # dz/dt = 2 z^2 from 1 is infinite at t = 1/2.
        with pytest.raises(RuntimeError, match=blow_up):
            path(lambda t, z: 2 * z * z).sample()
        with pytest.raises(RuntimeError, match=r"underflows, at t=0\.5[56]"):
            path(lambda t, z: torch.where(t > 0.55, float("nan"), z)).sample()
    with (
        tolerance(rtol=1e-3, max_evaluations=200),
        pytest.raises(RuntimeError, match=r"took 20\d evaluations, the bound of tolerance\(rtol=0"),
    ):
        path(lambda t, z: -1000 * (z - torch.sin(50 * t))).sample()


def test_an_easy_interval_after_a_hard_one():
    """The steps are short where they must be, and long again after."""

    def diffusion(t, z):
        return 1e-6 * torch.ones_like(z)

    path = SDEPath(
        lambda t, z: torch.where(t < 0.29, -300 * z, 0 * z), diffusion, torch.ones(1), TIMES
    )
    with tolerance(rtol=1e-2) as solved:
        path.sample()
    (solve,) = solved.solves
    assert solve.shortest < 0.3 / 100 and solve.evaluations < 3000


def test_arguments():
    for options, message in (
        ({"rtol": -1.0}, "rtol must be a number of at least 0: found -1.0"),
        ({"atol": float("nan")}, "atol must be"),
        ({"rtol": 0.0, "atol": 0.0}, "cannot both be 0"),
        ({"max_evaluations": 0}, "max_evaluations must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tolerance(**options)
    assert tolerance(1e-2).atol == pytest.approx(1e-3)


def test_not_for_training():
    def model():
        pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.5, TIMES, torch.ones(1)))

    guide = AutoSDE(model)
    with tolerance(), pytest.raises(RuntimeError, match="Train outside"):
        TraceSDE_ELBO().loss(model, guide)


def test_coefficients_are_the_limit_of_the_transition():
    t, dt = torch.tensor([0.3]), torch.tensor([1e-7])
    for name, make in PROCESSES.items():
        path = make()
        z = torch.randn(4, path.event_shape[-1])
        if name.startswith("child"):  # what the parent says is not true of another transition
            with pytest.raises(NotImplementedError, match="does not say what SDE"):
                path.coefficients(t, z)
            continue
        f, g = path.coefficients(t, z)
        mean, scale = path.transition(t, dt, z)
        assert f.shape == g.shape == z.shape
        torch.testing.assert_close((mean - z) / dt, f, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((scale / dt.sqrt()).expand_as(z), g, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="does not say what SDE"):
        PathDistribution(TIMES, 0.0).coefficients(t, t)
