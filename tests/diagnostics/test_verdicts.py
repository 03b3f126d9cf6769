"""A guide that is wrong is found out, and one that is right is not."""

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_value

from pyro_sde import AutoSDE, TraceSDE_ELBO, fit, time_grid
from pyro_sde.diagnostics import Estimate, SiteCheck, importance
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck


def train(model, guide, *args, steps=600):
    elbo = TraceSDE_ELBO(num_particles=16, vectorize_particles=True)
    fit(model, guide, args, steps=steps, elbo=elbo, lr=0.02, seed=0, progress=False)
    return guide


def end_point(upper=False):
    """The model of examples/multimodal.py; ``upper`` hides one of its two modes."""
    grid = time_grid(0.0, 3.0, dt=0.2)
    start = dist.Normal(0.0, 3.0)
    z = pyro.sample("z", OrnsteinUhlenbeck(0.1, 0.0, math.sqrt(2), grid, initial=start))
    end, y = z[..., -1, :], torch.tensor([5.0, -5.0])
    pyro.sample("y", dist.Cauchy(end.expand(*end.shape[:-1], 2), 1.0).to_event(1), obs=y)
    if upper:
        pyro.factor("half", torch.nn.functional.logsigmoid(10 * end[..., 0]))


@pytest.mark.parametrize("upper", [False, True])
def test_paths_to_two_modes(upper):
    found = importance(end_point, train(end_point, AutoSDE(end_point), upper))
    assert found.misses == upper and found.is_right == (not upper)
    value, error = found.missed
    if upper:  # at most all of the other mode; a few draws get there, with large weights
        assert 0.3 < value < math.log(2) + 4 * error
    else:
        assert abs(value) < 4 * error < 0.2
    assert ("misses a part" in found.line) == upper


def square(y):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    pyro.sample("y", dist.Normal(x**2, 0.5), obs=y)


def two_modes(y):
    modes = dist.Normal(torch.tensor([-2.0, 2.0]), 0.16)
    pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), modes))


def test_a_scalar_with_two_modes():
    y = torch.tensor(4.0)
    start = init_to_value(values={"x": torch.tensor(2.0)})
    one = importance(square, train(square, AutoNormal(square, init_loc_fn=start), y), y)
    assert one.effective > 900  # by its own draws nothing is wrong
    assert one.misses and not one.is_right and one.missed.value == pytest.approx(0.69, abs=0.15)
    both = importance(square, two_modes, y)
    assert both.is_right and both.verdict == "the posterior is right"


def test_a_small_mode_with_few_draws_of_the_prior_near_the_other():
    """The other is so much larger that a handful of draws near it are enough."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        near = dist.Normal(-3.0, 0.01).log_prob(x)
        pyro.factor("f", torch.logaddexp(near, dist.Normal(1.0, 0.1).log_prob(x) - 30))

    found = importance(model, lambda: pyro.sample("x", dist.Normal(0.99, 0.1)))
    assert found.misses and found.missed.value > 10


def pair(y):
    a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
    pyro.sample("y", dist.Normal(a + b, 0.2), obs=y)


@pytest.mark.parametrize("kind", [AutoNormal, AutoMultivariateNormal], ids=["mean-field", "joint"])
def test_a_mean_field_guide(kind):
    """Its standard deviations are 0.2, and those of the posterior 0.71."""
    y = torch.tensor(1.0)
    guide = kind(pair, init_scale=0.3)
    svi = SVI(pair, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO(8, vectorize_particles=True))
    for _ in range(1000):
        svi.step(y)
    found = importance(pair, guide, y)
    is_joint = kind is AutoMultivariateNormal
    assert found.is_right == is_joint
    if is_joint:
        assert found.worst is None
    else:
        assert "not to be trusted" in found.verdict
        assert found.sites[0].ratio > 1.2 and found.log_evidence.value - found.elbo.value > 0.3


def test_the_site_that_is_wrong_is_named():
    """One of two latents, and in the plate one of its elements, at its last time."""
    grid = torch.linspace(0.0, 1.0, 5)

    def model():
        pyro.sample("fine", dist.Normal(0.0, 1.0))
        with pyro.plate("series", 3):
            z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
            y = torch.tensor([0.0, 1.5, 0.0])
            pyro.sample("y", dist.Normal(z[..., -1, 0], 1.0), obs=y)

    found = importance(model, AutoSDE(model, other_guide=Prior))
    assert [site.name for site in found.sites] == ["z", "fine"]
    worst = found.worst
    assert worst.name == "z" and worst.shift_at == (1, 4, 0)
    # The posterior is Normal(y / 2, 1 / 2), and the guide still Normal(0, 1).
    assert worst.shift == pytest.approx(0.75, abs=0.2) and worst.ratio < 0.85
    assert "usable with reweight(), site z is off" in found.line
    assert re.search(r"\nz +\+0\.\d\d +\(1, 4, 0\) ", str(found)) and repr(found) == str(found)


class Prior(AutoNormal):
    """The prior of a standard normal latent."""

    def __init__(self, model):
        super().__init__(model, init_loc_fn=init_to_value(values={"fine": torch.tensor(0.0)}))
        self._init_scale = 1.0


def test_precise_data_leave_other_modes_unseen():
    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(20), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x, 0.1).to_event(1), obs=y)

    y = torch.linspace(-1, 1, 20)

    def exact(y):
        pyro.sample("x", dist.Normal(y / 1.01, (0.01 / 1.01) ** 0.5).to_event(1))

    found = importance(model, exact, y)
    assert found.missed is None and found.is_right
    assert "right where it draws (other modes were not looked for)" in found.verdict


def test_a_site_is_off_beyond_its_noise():
    assert not SiteCheck("x", 0.3, 1.0).is_off(100.0)  # a standard error is 0.1
    assert SiteCheck("x", -0.3, 1.0).is_off(1000.0)
    assert SiteCheck("x", 0.0, 0.7).is_off(1000.0) and not SiteCheck("x", 0.0, 1.2).is_off(1e6)
    assert str(Estimate(1.0, 0.25)) == "1.00 ± 0.25"
