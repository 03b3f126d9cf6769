"""Scalar processes: the laws of those in R^1, without a dimension for the state."""

import pickle

import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch
from pyro.infer import NUTS, Trace_ELBO
from torch import nn

from pyro_sde import AutoSDE, Predictive, TraceSDE_ELBO, fit, girsanov, to_arviz
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    ODEPath,
    OrnsteinUhlenbeck,
    PathDistribution,
    ScalarPath,
    SDEPath,
    Stack,
)

T = torch.linspace(0.0, 2.0, 9, dtype=torch.float64)
RATE = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)  # (3, 1): a batch
ONE = torch.ones((), dtype=torch.float64)


class DoubleWell(PathDistribution):
    def __init__(self, strength, times, initial):
        self.strength = torch.as_tensor(strength)
        super().__init__(times, initial, param_shape=self.strength.shape)

    def transition(self, t, dt, z):
        return z + self.strength * (z - z**3) * dt, 0.3 * dt.sqrt().expand_as(z)


def pairs():
    """The same process as a scalar one and in R^1."""
    rate = RATE.unsqueeze(-1)
    normal, in_r1 = dist.Normal(RATE, 1.0), dist.Normal(rate, 1.0).to_event(1)
    yield "OU", OrnsteinUhlenbeck.scalar(RATE, 0.0, 0.5, T), OrnsteinUhlenbeck(rate, 0.0, 0.5, T)
    yield "Brownian", BrownianMotion.scalar(RATE, T, normal), BrownianMotion(rate, T, in_r1)
    yield (
        "geometric",
        GeometricBrownianMotion.scalar(RATE, T, 2.0),
        GeometricBrownianMotion(rate, T, 2.0),
    )
    yield (
        "SDE",
        SDEPath.scalar(lambda t, z: -RATE * z + t.sin(), lambda t, z: 0.3 + z.cos() / 9, RATE, T),
        SDEPath(lambda t, z: -rate * z + t.sin(), lambda t, z: 0.3 + z.cos() / 9, rate, T),
    )
    yield "own", DoubleWell.scalar(RATE, T, 0.5 * ONE), DoubleWell(rate, T, 0.5 * ONE)
    prior = OrnsteinUhlenbeck(rate, 0.0, 0.5, T)
    yield (
        "controlled",
        ControlledPath.scalar(ScalarPath(prior), lambda t, z: RATE - z * t),
        ControlledPath(prior, lambda t, z: rate - z * t),
    )


@pytest.mark.parametrize(("name", "scalar", "path"), [*pairs()], ids=[x[0] for x in pairs()])
def test_the_same_law(name, scalar, path):
    assert scalar.batch_shape == path.batch_shape == (3, 1)
    assert scalar.event_shape == (9,) and path.event_shape == (9, 1)
    torch.manual_seed(0)
    x = scalar.rsample((4,))
    torch.manual_seed(0)
    y = path.rsample((4,))
    torch.testing.assert_close(x, y.squeeze(-1))
    torch.testing.assert_close(scalar.log_prob(x), path.log_prob(y))
    assert x.shape == (4, 3, 1, 9) and torch.equal(scalar.times, T)
    torch.testing.assert_close(scalar.at(x, T[[7, 2]]), x[..., [7, 2]])
    torch.testing.assert_close(path.at(y, T[[7, 2]]), y[..., [7, 2], :])
    wide = scalar.expand([5, 3, 1])
    assert isinstance(wide, ScalarPath) and wide.sample().shape == (5, 3, 1, 9)
    assert scalar.support.check(x).all()
    if name in ("OU", "Brownian", "geometric"):
        torch.testing.assert_close(scalar.mean, path.mean.squeeze(-1))
        torch.testing.assert_close(scalar.variance, path.variance.squeeze(-1))


def test_an_ode_and_a_module():
    flow = ODEPath.scalar(lambda t, z: -z, dist.Normal(0.0, 1.0), T.float())
    z = flow.sample((2,))
    step = 1 - 0.25 + 0.25**2 / 2  # of the midpoint rule
    torch.testing.assert_close(z[:, -1], z[:, 0] * step**8)

    class Drift(nn.Module):
        def forward(self, t, z):
            assert z.shape[-1] == 1
            return -z

    assert SDEPath.scalar(Drift(), 0.5, 0.0, T.float()).sample((3,)).shape == (3, 9)


def test_a_guide_of_ones_own_has_girsanovs_terms():
    p = OrnsteinUhlenbeck.scalar(ONE, 0.0, 0.5, T)
    q = ControlledPath.scalar(p, lambda t, z: t.sin() - z)
    z = q.sample((5,))
    terms = girsanov(q, p, z)
    torch.testing.assert_close(terms.quadratic + terms.martingale, q.log_prob(z) - p.log_prob(z))


TIMES, AT = T.float(), T[2:].float()


def model(y=None):
    rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    prior = OrnsteinUhlenbeck.scalar(rate, 0.0, 1.0, TIMES)
    z = pyro.sample("z", prior)
    with pyro.plate("observations", len(AT)):
        pyro.sample("y", dist.Normal(prior.at(z, AT), noise), obs=y)


Y = torch.tensor([0.5, 0.2, -0.3, 0.1, 0.9, 1.0, 0.4])


def shaken(model, *args):
    guide = AutoSDE(model)
    guide.setup(*args)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return guide


@pytest.mark.parametrize("vectorised", [False, True])
def test_full_is_trace_elbo(vectorised):
    """Law 1, value and every gradient, latents passed as they were drawn."""
    guide, found = shaken(model, Y), []
    options = {"num_particles": 3, "vectorize_particles": vectorised, "max_plate_nesting": 1}
    for elbo in (TraceSDE_ELBO(path_estimator="full", **options), Trace_ELBO(**options)):
        torch.manual_seed(2)
        guide.zero_grad()
        loss = elbo.loss_and_grads(model, guide, Y)
        gradients = [p.grad.clone() for p in guide.parameters() if p.grad is not None]
        found.append((loss, gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert len(found[0][1]) == len(found[1][1]) > 10
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_the_elbo_is_that_of_the_process_in_r1():
    """One guide with one start of its networks, and one seed."""

    def in_r1(y):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5)).unsqueeze(-1)
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        prior = OrnsteinUhlenbeck(rate, 0.0, 1.0, T.float())
        z = pyro.sample("z", prior)
        with pyro.plate("observations", 7):
            pyro.sample("y", dist.Normal(prior.at(z, T[2:].float())[..., 0], noise), obs=y)

    losses = []
    for f in (model, in_r1):
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        guide = shaken(f, Y)
        elbo = TraceSDE_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
        torch.manual_seed(3)
        losses.append(elbo.loss(f, guide, Y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_plates_of_series_and_a_stack():
    def several(y):
        with pyro.plate("series", 3, dim=-2):
            rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5))
            trend = BrownianMotion.scalar(0.3, T.float(), dist.Normal(0.0, 1.0))
            cycle = OrnsteinUhlenbeck.scalar(rate, 0.0, 1.0, T.float())
            stack = Stack(trend, cycle)
            slow, fast = stack.split(pyro.sample("z", stack))
            with pyro.plate("observations", 7, dim=-1):
                at = T[2:].float()
                mean = trend.at(slow, at) + cycle.at(fast, at)
                pyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    guide = shaken(several, Y.expand(3, 7))
    elbo = TraceSDE_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=2)
    assert elbo.loss(several, guide, Y.expand(3, 7)) > 0
    state = torch.randn(3, 1, 9, 2)
    stack = Stack(BrownianMotion.scalar(1.0, T.float(), 0.0), BrownianMotion(1.0, T.float(), 0.0))
    assert [x.shape for x in stack.split(state)] == [(3, 1, 9), (3, 1, 9, 1)]


def test_what_else_meets_a_site():
    guide = AutoSDE(model)
    fit(model, guide, Y, steps=3, progress=False)
    pickle.loads(pickle.dumps(OrnsteinUhlenbeck.scalar(1.0, 0.0, 1.0, T)))
    assert guide.summary().sites[2].event == (9,)
    for predictive in (Predictive, pyro.infer.Predictive):
        draws = predictive(model, guide=guide, num_samples=5, parallel=True)()
        posterior = to_arviz(model, (Y,), draws).posterior
        assert posterior["z"].dims == ("chain", "draw", "z_time")
    kernel = NUTS(model)
    kernel.setup(1, Y)
    assert kernel.initial_params["z"].shape == (9,)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ScalarPath(BrownianMotion(1.0, T, torch.zeros(2))), ValueError, "one state"),
        (lambda: ScalarPath(dist.Normal(0.0, 1.0)), TypeError, "found Normal"),
        (lambda: ScalarPath(BrownianMotion.scalar(1.0, T, 0.0)), TypeError, "found ScalarPath"),
        (
            lambda: BrownianMotion.scalar(1.0, T, 0.0).at(torch.zeros(4), T[:1]),
            ValueError,
            r"of shape \(\.\.\., 9\): found \(4,\)",
        ),
        (
            lambda: SDEPath.scalar(lambda t, z: z.unsqueeze(-1), 1.0, RATE, T).sample(),
            ValueError,
            r"drift\(t, z\) returned shape \(3, 1, 1\)",
        ),
        (
            lambda: BrownianMotion.scalar(
                1.0, T, dist.MultivariateNormal(ONE.expand(2), torch.eye(2).double())
            ),
            ValueError,
            "has one state, and BrownianMotion has 2",
        ),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
