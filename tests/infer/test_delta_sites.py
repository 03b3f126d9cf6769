"""A Delta of the guide counts with its log_density in the mean-field ELBO."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from pyro.infer.autoguide.initialization import init_to_mean
from torch.distributions import ExpTransform

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from pyro_sde.distributions import BrownianMotion
from pyro_sde.infer import record_parts

GRID = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
Y = torch.tensor(1.0, dtype=torch.float64)
COUNTS = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
SHAPE, RATE = (torch.tensor(x, dtype=torch.float64) for x in (2.0, 20.0))


def model():
    """A path that is seen at its end, and counts whose intensities are latent."""
    z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1, dtype=torch.float64)))
    pyro.sample("y", dist.Normal(z[..., -1, 0], 0.5), obs=Y)
    with pyro.plate("counts", 3, dim=-1):
        x = pyro.sample("x", dist.Gamma(SHAPE, RATE))
        pyro.sample("n", dist.Poisson(x), obs=COUNTS)


def log_evidence():
    """y ~ N(0, 1 + 1/4), and a Poisson count with a Gamma intensity is negative binomial."""
    path = dist.Normal(0.0, math.sqrt(1.25)).log_prob(Y)
    counts = dist.GammaPoisson(SHAPE, RATE).log_prob(COUNTS).sum()
    return float(path + counts)


def mean_elbo(elbo, guide, repeats=100):
    values = torch.tensor([-float(elbo.loss(model, guide)) for _ in range(repeats)])
    return values.mean().item(), values.std().item() / math.sqrt(repeats)


def test_the_mean_field_elbo_is_below_the_evidence():
    """Without the Jacobian of x it is above by -log x: 2.3 nat for each count."""
    pyro.set_rng_seed(0)
    near = functools.partial(AutoNormal, init_loc_fn=init_to_mean, init_scale=0.7)
    guide = AutoSDE(model, other_guide=near)
    options = {"num_particles": 50, "vectorize_particles": True}
    found, error = mean_elbo(TraceMeanFieldSDE_ELBO(**options), guide)
    assert found < log_evidence()
    other, other_error = mean_elbo(TraceSDE_ELBO(**options), guide)
    assert abs(found - other) < 4 * math.hypot(error, other_error)


def test_the_exact_posterior_reaches_the_evidence():
    """The intensities are drawn as log x, and a Delta with the Jacobian carries them over."""

    def exact():
        z = model_path()
        with pyro.plate("counts", 3, dim=-1):
            gamma = dist.Gamma(SHAPE + COUNTS, RATE + 1)
            log_x = dist.TransformedDistribution(gamma, [ExpTransform().inv])
            u = pyro.sample("u", log_x, infer={"is_auxiliary": True})
            pyro.sample("x", dist.Delta(u.exp(), log_density=-u))
        return z

    def model_path():
        return pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1, dtype=torch.float64)))

    def counts_only():
        model_path()
        with pyro.plate("counts", 3, dim=-1):
            x = pyro.sample("x", dist.Gamma(SHAPE, RATE))
            pyro.sample("n", dist.Poisson(x), obs=COUNTS)

    pyro.set_rng_seed(0)
    expected = dist.GammaPoisson(SHAPE, RATE).log_prob(COUNTS).sum()
    with record_parts() as parts:
        loss = TraceMeanFieldSDE_ELBO().loss(counts_only, exact)
    assert loss == pytest.approx(-float(expected), rel=1e-10)
    assert parts.elbo == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("other", [AutoNormal, AutoMultivariateNormal, AutoDelta])
@pytest.mark.parametrize("particles", [1, 3])
def test_equals_the_sampled_elbo_on_one_draw(other, particles):
    """All that such guides draw is auxiliary or a Delta: there is no analytic KL to take."""
    guide = AutoSDE(model, other_guide=other).setup()
    results = []
    for kind in (TraceMeanFieldSDE_ELBO, TraceSDE_ELBO):
        pyro.set_rng_seed(1)
        elbo = kind(num_particles=particles, path_estimator="full")
        guide.zero_grad()
        with record_parts() as parts:
            loss = elbo.loss_and_grads(model, guide)
        gradients = [p.grad.clone() for p in guide.parameters()]
        assert parts.elbo == pytest.approx(-loss, rel=1e-10)
        results.append((loss, parts.kl, gradients))
    (loss, kl, found), (other_loss, other_kl, expected) = results
    assert loss == pytest.approx(other_loss, rel=1e-10)
    assert kl == pytest.approx(other_kl, rel=1e-10)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wrap", ["independent", "masked"])
def test_a_wrapped_delta_keeps_its_density(wrap):
    density = torch.tensor([0.7, 0.2])
    delta = dist.Delta(torch.tensor([0.1, 0.3]), log_density=density)
    normal = dist.Normal(torch.zeros(2), 1.0)
    keep = torch.tensor([True, False])
    change = {"independent": lambda d: d.to_event(1), "masked": lambda d: d.mask(keep)}[wrap]

    def sample(d):
        with pyro.plate("two", 2) if wrap == "masked" else pyro.plate("one", 1, dim=-1):
            pyro.sample("x", change(d))

    kept = keep if wrap == "masked" else torch.ones(2)
    expected = ((density - normal.log_prob(delta.v)) * kept).sum()
    found = TraceMeanFieldSDE_ELBO().loss(lambda: sample(normal), lambda: sample(delta))
    assert found == pytest.approx(float(expected), rel=1e-6)
