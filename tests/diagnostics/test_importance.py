"""The evidence by importance sampling against closed forms, and what has none."""

import functools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Importance
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

from pyro_sde import AutoSDE, TraceSDE_ELBO, anneal_kl, fit, time_grid
from pyro_sde.diagnostics import importance
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck
from pyro_sde.guides import GRUEncoder

from ..guides.models import GRID, SERIES, T_OBS, Y, mixed, series, shaken, simple

STEPS = time_grid(0.0, 1.0, dt=0.25).double()


def log_normal(y, sd):
    return float(dist.Normal(0.0, sd).log_prob(torch.as_tensor(y)).sum())


def trained(model, *args, steps=150, **options):
    guide = AutoSDE(model, **options)
    elbo = TraceSDE_ELBO(num_particles=8, vectorize_particles=True)
    fit(model, guide, args, steps=steps, elbo=elbo, lr=0.02, progress=False)
    return guide


def assert_evidence(found, exact):
    """Within four standard errors, which are small; the bounds are below, and in order. The
    evidence is of smoothed weights, the bound of the weights as they are."""
    assert found.log_evidence.error < 0.2
    assert abs(found.log_evidence.value - exact) < 4 * found.log_evidence.error + 1e-9
    assert found.elbo.value <= found.bound.value + 1e-9
    assert found.bound.value < found.log_evidence.value + found.log_evidence.error
    assert found.elbo.value < exact + 4 * found.elbo.error


def test_ornstein_uhlenbeck_with_gaussian_observations():
    gaps = (T_OBS[:, None] - T_OBS).abs()
    start = OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID).variance[0, 0]
    decay = torch.exp(-torch.minimum(T_OBS[:, None], T_OBS) * 2)
    at = 0.49 / 2 * (1 - decay) + start * decay
    cov = at * torch.exp(-gaps) + 0.09 * torch.eye(3)
    exact = dist.MultivariateNormal(torch.zeros(3, dtype=Y.dtype), cov).log_prob(Y).item()
    guide = trained(simple, Y)
    for parallel in (True, False):
        found = importance(simple, guide, Y, num_samples=500, parallel=parallel)
        assert_evidence(found, exact)
        assert found.draws["z"].shape == (500, len(GRID), 1) and found.plate is None


def bridge(y):
    z = pyro.sample("z", BrownianMotion(1.0, STEPS, torch.zeros(1).double()))
    pyro.sample("y", dist.Normal(z[..., -1, 0], 0.5), obs=y)


@pytest.mark.parametrize("contraction", [False, True])
def test_brownian_bridge(contraction):
    y = torch.tensor(1.5).double()
    guide = trained(bridge, y, contraction=contraction)
    assert_evidence(importance(bridge, guide, y), log_normal(1.5, math.sqrt(1.25)))


def located(y):
    theta = pyro.sample("theta", dist.Normal(torch.tensor(0.0).double(), 1.0))
    z = pyro.sample("z", BrownianMotion(1.0, STEPS, torch.zeros(1).double()))
    pyro.sample("y", dist.Normal(theta + z[..., -1, 0], 1.0), obs=y)


def scaled(y):
    scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0).double(), 0.5))
    z = pyro.sample("z", BrownianMotion(scale.unsqueeze(-1), STEPS, torch.zeros(1).double()))
    pyro.sample("y", dist.Normal(z[..., -1, 0], 1.0), obs=y)


@pytest.mark.parametrize(
    "other", [AutoNormal, AutoMultivariateNormal], ids=["normal", "multivariate"]
)
@pytest.mark.parametrize("model", [located, scaled])
def test_other_latents(model, other):
    y = torch.tensor(1.0).double()
    exact = log_normal(1.0, math.sqrt(3.0))
    if model is scaled:
        x = torch.linspace(-4, 4, 4001).double()  # the logarithm of the scale, in units of 0.5
        sd = (torch.exp(x) + 1).sqrt()
        log_p = dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(0.0, sd).log_prob(y)
        exact = float(torch.trapezoid(log_p.exp(), x).log())
    guide = AutoSDE(model, other_guide=functools.partial(other, init_scale=0.7)).setup(y)
    found = importance(model, guide, y, num_samples=4000)
    assert_evidence(found, exact)
    assert {s.name for s in found.sites} == set(found.draws) == {"z", *guide.other_sites}


def in_plate(y, shared=False):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0)) if shared else torch.tensor(0.0)
    with pyro.plate("series", len(y)):
        z = pyro.sample("z", BrownianMotion(1.0, STEPS, torch.zeros(1).double()))
        pyro.sample("y", dist.Normal(z[..., -1, 0] + shift, 1.0), obs=y)


@pytest.mark.parametrize("shared", [False, True])
def test_plates(shared):
    """Elements of a plate are weighted apart, unless they share a latent."""
    y = torch.tensor([1.0, 2.0, -1.0, 0.5]).double()
    guide = trained(in_plate, y, shared, steps=300)
    found = importance(in_plate, guide, y, shared, num_samples=4000)
    cov = 2 * torch.eye(4).double() + float(shared)
    exact = dist.MultivariateNormal(torch.zeros(4).double(), cov).log_prob(y).item()
    assert_evidence(found, exact)
    assert found.plate == (None if shared else "series")
    assert found.element_log_weights.shape == (4000, 1 if shared else 4)
    assert found.log_weights.shape == (4000,)
    assert found.draws["z"].shape == (4000, 4, len(STEPS), 1)


def test_an_encoder():
    def model(times, values):
        with pyro.plate("series", len(times)):
            z = pyro.sample("z", BrownianMotion(1.0, STEPS, torch.zeros(1)))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 1.0), obs=values[:, 0, 0])

    y = torch.tensor([0.5, -0.5, 1.0])
    args = torch.ones(3, 1), y[:, None, None]
    guide = shaken(model, *args, encoder=GRUEncoder(1), name="encoded")
    found = importance(model, guide, *args, num_samples=4000)
    assert_evidence(found, log_normal(y, math.sqrt(2)))
    assert found.plate == "series"


def written(y):
    """A guide of one's own, with densities that stock Pyro evaluates."""
    prior = BrownianMotion(1.0, STEPS, torch.zeros(1).double())
    pyro.sample("theta", dist.Normal(torch.tensor(0.3).double(), 0.8))
    pyro.sample("z", ControlledPath(prior, lambda t, z: 0.5 - 0.3 * z))


@pytest.mark.parametrize("parallel", [False, True])
def test_weights_are_those_of_the_densities(parallel):
    y = torch.tensor(1.0).double()
    found = importance(located, written, y, num_samples=50, parallel=parallel)
    for i in range(50):
        data = {k: v[i] for k, v in found.draws.items()}
        log_p, log_q = (
            poutine.trace(poutine.condition(f, data)).get_trace(y).log_prob_sum()
            for f in (located, written)
        )
        assert found.log_weights[i].item() == pytest.approx((log_p - log_q).item(), abs=1e-9)


@pytest.mark.parametrize(("model", "y"), [(simple, Y), (mixed, Y), (series, SERIES)])
def test_weights_are_those_of_stock_importance(model, y):
    """A first draw shows the shapes; the others are the same."""
    guide = shaken(model, y)
    pyro.set_rng_seed(1)
    found = importance(model, guide, y, num_samples=50, parallel=False)
    stock = Importance(model, guide, num_samples=51).run(y)
    expected = torch.stack([torch.as_tensor(w) for w in stock.log_weights])[1:]
    torch.testing.assert_close(found.log_weights, expected.detach(), rtol=1e-9, atol=1e-9)


def test_a_model_that_cannot_be_vectorised_is_drawn_from_one_by_one():
    def model(y):
        z = pyro.sample("z", BrownianMotion(1.0, STEPS, torch.zeros(1).double()))
        pyro.sample("y", dist.Normal(z[-1, 0], 0.5), obs=y)  # the last path, in a batch

    y = torch.tensor(1.0).double()
    guide = shaken(model, y)
    assert_evidence(importance(model, guide, y), log_normal(1.0, math.sqrt(1.25)))
    with pytest.raises(ValueError, match="draws of the model cannot be vectorised"):
        importance(model, guide, y, parallel=True)


def test_nothing_is_changed():
    class Counting(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, y):
            self.calls += 1
            bridge(y)

    model, y = Counting(), torch.tensor(1.0).double()
    guide = AutoSDE(model).setup(y)
    pyro.set_rng_seed(2)
    before, calls = torch.get_rng_state(), model.calls.item()
    first = importance(model, guide, y, num_samples=100)
    assert torch.equal(before, torch.get_rng_state()) and model.calls.item() == calls
    assert not first.log_weights.requires_grad
    again = importance(model, guide, y, num_samples=100)
    assert torch.equal(first.log_weights, again.log_weights)


def test_what_has_no_evidence_is_refused():
    y = torch.tensor(1.0).double()
    half = poutine.scale(bridge, 0.5)
    with pytest.raises(ValueError, match=r"site 'z' has the scale 0.5"):
        importance(half, AutoSDE(half), y)
    pyro.clear_param_store()
    with anneal_kl(0.5), pytest.raises(ValueError, match=r"has the scale 0.5 .*anneal_kl"):
        importance(bridge, AutoSDE(bridge), y)
    with pytest.raises(ValueError, match=r"'series', which draws 2 of 4 elements"):
        importance(series, AutoSDE(series, name="series"), SERIES, 2)
    with pytest.raises(ValueError, match=r"a point at site 'theta'.*AutoDelta"):
        importance(located, AutoSDE(located, other_guide=AutoDelta, name="point"), y)
    with pytest.raises(ValueError, match="no latent site"):
        importance(lambda y: pyro.factor("f", y), lambda y: None, y)
    with pytest.raises(ValueError, match="num_samples must be at least 50: found 10"):
        importance(bridge, AutoSDE(bridge), y, num_samples=10)
    with pytest.raises(RuntimeError, match="draws took 0 seconds, and the check needs 50"):
        importance(bridge, AutoSDE(bridge, name="slow"), y, parallel=False, seconds=0.0)


def coin():
    pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("k", dist.Bernoulli(0.3))


@pytest.mark.filterwarnings("ignore:Found")
def test_guides_of_other_sites_are_refused():
    def half():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    def more():
        coin()
        pyro.sample("extra", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="site 'k' of the model has neither data nor a site"):
        importance(coin, half)
    with pytest.raises(ValueError, match="site 'extra' of the guide is not in the model"):
        importance(coin, more)
    assert importance(coin, coin).log_evidence.value == 0.0


def test_draws_without_a_weight():
    def model(gap):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("f", torch.where(x > gap, 0.0, -math.inf))

    def guide(gap):
        pyro.sample("x", dist.Normal(0.0, 1.0))

    half = importance(model, guide, 0.0, num_samples=4000)
    assert half.log_evidence.value == pytest.approx(math.log(0.5), abs=0.08)
    assert half.effective == pytest.approx(2000, rel=0.1)
    with pytest.raises(ValueError, match="none of the 4000 draws of the guide is possible"):
        importance(model, guide, 100.0)


@pytest.mark.filterwarnings("ignore:Encountered")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value):
    def guide():
        pyro.sample("x", dist.Normal(0.0, 1.0, validate_args=False))

    def model():
        guide()
        fn = dist.Unit(torch.tensor(value), validate_args=False)
        pyro.sample("f", fn, obs=torch.empty(0))

    with pytest.raises(ValueError, match="4000 of 4000 log weights are NaN or infinite"):
        importance(model, guide)


def test_training_closes_the_gap():
    y = torch.tensor(1.5).double()
    guide = AutoSDE(bridge)
    before = importance(bridge, guide, y)
    fit(bridge, guide, (y,), steps=150, progress=False)
    after = importance(bridge, guide, y)
    assert_evidence(after, log_normal(1.5, math.sqrt(1.25)))
    assert after.effective > before.effective
    assert after.log_evidence.value - after.elbo.value < before.log_evidence.value - (
        before.elbo.value
    )


def test_draws_of_the_prior_that_overflow_are_silent():
    """Of a wide prior some counts have no density; the warnings of the tests are errors."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 100.0))
        pyro.sample("y", dist.Poisson(x.exp()), obs=torch.tensor(3.0))

    def guide():
        pyro.sample("x", dist.Normal(1.1, 0.6))

    found = importance(model, guide, num_samples=500)
    assert (
        abs(found.log_evidence.value - math.log(1 / 3) + math.log(100.0 * (2 * math.pi) ** 0.5))
        < 0.1
    )
