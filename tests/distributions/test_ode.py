"""Paths without noise."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, tolerance
from pyro_sde.distributions import ODEPath, SDEPath

TIMES = torch.linspace(0, 1, 11, dtype=torch.float64)


def start(loc=0.0, scale=1.0):
    return dist.Normal(torch.full((2,), float(loc)), scale).to_event(1)


def decay(t, z):
    return -z


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2)])
def test_order(method, order):
    errors = []
    for n in (20, 40):
        path = ODEPath(lambda t, z: t * z, torch.ones(1), torch.linspace(0, 1, n + 1), method)
        errors.append((path.sample()[-1] - math.exp(0.5)).abs())
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


def test_it_is_the_limit_of_an_sde():
    """Path by path from the same starts, at the rate at which the noise goes."""
    path = ODEPath(decay, torch.randn(50, 2), TIMES, "euler")
    gaps = []
    for g in (1e-2, 1e-4):
        sde = SDEPath(decay, lambda t, z, g=g: g, path.initial, TIMES)
        gaps.append(float((sde.sample() - path.sample()).abs().max()))
    assert gaps[0] < 0.05 and gaps[1] == pytest.approx(gaps[0] / 100, rel=0.5)


def test_density_is_that_of_the_start():
    path = ODEPath(decay, start(), TIMES).expand((3,))
    value = path.rsample((4,))
    assert value.shape == (4, 3, 11, 2)
    torch.testing.assert_close(path.log_prob(value), start().log_prob(value[..., 0, :]))
    with pytest.raises(ValueError, match="away from the solution"):
        path.log_prob(value + torch.linspace(0, 1, 11).unsqueeze(-1))


def test_gradients_reach_the_drift_and_the_start():
    a, m = torch.tensor(0.7, requires_grad=True), torch.ones(1, requires_grad=True)
    times = torch.linspace(0, 1, 401)
    end = ODEPath(lambda t, z: -a * z, m, times).rsample()[-1]
    by_a, by_m = torch.autograd.grad(end.sum(), (a, m))
    assert by_a.item() == pytest.approx(-math.exp(-0.7), abs=1e-5)
    assert by_m.item() == pytest.approx(math.exp(-0.7), abs=1e-5)


def model(y=None):
    z = pyro.sample("z", ODEPath(decay, start(), TIMES))
    pyro.sample("y", dist.Normal(z[..., -1, :], 0.3).to_event(1), obs=y)


@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
@pytest.mark.parametrize("ELBO", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
def test_posterior_of_the_start(ELBO, estimator):
    """Linear and Gaussian: the exact evidence is reached, as the posterior is a Normal start."""
    y = torch.tensor([0.5, -0.2])
    guide = AutoSDE(model).setup(y)
    factor = ODEPath(decay, torch.ones(2), TIMES).sample()[-1]
    precision = 1 + factor**2 / 0.09
    with torch.no_grad():
        shift, log_scale = factor * y / 0.09 / precision, -0.5 * precision.log()
        guide.paths.z.start.values.copy_(torch.cat([shift, log_scale, torch.zeros(1)]))
    evidence = dist.Normal(0.0, (factor**2 + 0.09).sqrt()).log_prob(y).sum()
    losses = torch.stack(
        [ELBO(path_estimator=estimator).differentiable_loss(model, guide, y) for _ in range(200)]
    )
    error = losses.std() / math.sqrt(200)
    assert (losses.mean() + evidence).abs() < 4 * error + 1e-9
    if estimator != "kl":  # the log ratio at the posterior is the evidence, whatever is drawn
        assert losses.std() < 1e-9


@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_the_flow_is_solved_once(estimator):
    """AutoSDE's path follows the model's own flow, which need not be solved again to see it."""
    calls = []

    def counted(y=None):
        flow = ODEPath(lambda t, z: calls.append(t) or -z, start(), TIMES)
        z = pyro.sample("z", flow)
        pyro.sample("y", dist.Normal(z[..., -1, :], 0.3).to_event(1), obs=y)

    guide = AutoSDE(counted).setup(torch.zeros(2))
    calls.clear()
    TraceSDE_ELBO(path_estimator=estimator).loss(counted, guide, torch.zeros(2))
    assert len(calls) == 2 * 10  # the midpoint rule, ten steps


def test_hand_written_guides():
    """The same flow from another start is one, a different flow is not."""

    def guide(y, drift=decay):
        pyro.sample("z", ODEPath(drift, start(0.3, 0.5), TIMES))

    y = torch.zeros(2)
    torch.manual_seed(0)
    here = TraceSDE_ELBO(path_estimator="full").differentiable_loss(model, guide, y)
    torch.manual_seed(0)
    torch.testing.assert_close(here, Trace_ELBO().differentiable_loss(model, guide, y))
    with pytest.raises(ValueError, match="the KL to another ODE infinite"):
        TraceSDE_ELBO().loss(model, lambda y: guide(y, lambda t, z: z), y)

    def noisy(y):
        pyro.sample("z", SDEPath(decay, lambda t, z: 0.1, start(), TIMES))

    with pytest.raises(ValueError, match=r"the KL is infinite\. Use the same kind of path"):
        TraceSDE_ELBO().loss(model, noisy, y)


def test_refusals():
    with pytest.raises(TypeError, match="drift must be a callable"):
        ODEPath(1.0, start(), TIMES)
    with pytest.raises(ValueError, match="found 'rk9'"):
        ODEPath(decay, start(), TIMES, "rk9")
    with pytest.raises(ValueError, match="non-finite state; bound it"):
        ODEPath(lambda t, z: z * 1e200, torch.ones(1), TIMES, validate_args=True).sample()
    with tolerance(1e-3), pytest.raises(NotImplementedError, match="give it a finer one"):
        ODEPath(decay, start(), TIMES).sample()
