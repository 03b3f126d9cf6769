"""Where training begins: draws of the prior that come near the data."""

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.nn import PyroModule

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.guides import near_data
from pyro_sde.guides.near_data import draws_near_data, medians
from pyro_sde.guides.visibility import without_handlers

TIMES = torch.linspace(0.0, 1.0, 5)


def model(y):
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0)).unsqueeze(-1)
    z = pyro.sample("z", OrnsteinUhlenbeck(1.0, loc, 1.0, TIMES))
    pyro.sample("y", dist.Normal(z[..., 0], 0.1).to_event(1), obs=y)


def near(model, *args):
    with torch.no_grad(), poutine.block():
        first = poutine.trace(model).get_trace(*args)
    latents = {
        k: s for k, s in first.nodes.items() if s["type"] == "sample" and not s["is_observed"]
    }
    return draws_near_data(model, args, {}, first, latents), latents


def test_draws_are_nearer_to_the_data_than_those_of_the_prior():
    draws, latents = near(model, torch.full((5,), 25.0))
    assert draws["loc"].shape == (near_data.KEPT,) and draws["z"].shape == (near_data.KEPT, 5, 1)
    found = medians(draws, latents)
    assert 18 < float(found["loc"]) < 32 and 18 < float(found["z"].mean()) < 32


@pytest.mark.parametrize("nesting", [0, 1, math.inf])
def test_draws_inside_of_an_elbo(nesting):
    """Its plate of particles is open when the guide is set up, unless it guesses the nesting."""
    y = torch.full((5,), 25.0)
    elbo = TraceSDE_ELBO(16, vectorize_particles=True, max_plate_nesting=nesting)
    guide = AutoSDE(model)
    elbo.loss(model, guide, y)
    assert 18 < float(guide.median(y)["loc"]) < 32
    with pyro.plate("free", 2) as here:  # names and dimensions are as before
        assert pyro.sample("x", dist.Normal(0.0, 1.0)).shape == here.shape


def test_handlers_are_put_back_after_an_error():
    with pyro.plate("outer", 3), poutine.trace() as outer:
        with pytest.raises(ZeroDivisionError), without_handlers():
            with pyro.plate("outer", 2, dim=-1):
                pyro.sample("inside", dist.Normal(0.0, 1.0))
            raise ZeroDivisionError
        pyro.sample("after", dist.Normal(0.0, 1.0))
    nodes = outer.trace.nodes
    assert "inside" not in nodes and nodes["after"]["value"].shape == (3,)


def test_weights_are_tempered_to_an_effective_number():
    torch.manual_seed(0)
    log_lik = -torch.rand(1000, dtype=torch.float64) * 1e4
    weights = near_data._temper(log_lik)
    assert 1 / float(weights.square().sum()) == pytest.approx(near_data.NEAR, rel=0.01)
    flat = torch.linspace(0.0, 0.5, 1000, dtype=torch.float64)
    torch.testing.assert_close(near_data._temper(flat), flat.softmax(0))  # a beta of 1
    some = log_lik.clone()
    some[:900] = -math.inf
    some[900] = math.nan
    assert float(near_data._temper(some)[:901].sum()) == 0.0


def test_draws_are_the_same_each_time_and_random_numbers_are_kept():
    found = []
    for seed in (1, 2):
        pyro.set_rng_seed(seed)
        first = poutine.trace(model).get_trace(torch.ones(5))
        latents = {k: first.nodes[k] for k in ("loc", "z")}
        state = torch.get_rng_state()
        found.append(draws_near_data(model, (torch.ones(5),), {}, first, latents))
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_a_model_that_observes_nothing():
    assert near(lambda: model(None))[0] is None


def test_a_model_for_one_draw_at_a_time():
    def one(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Normal(loc.reshape(1), 0.1).to_event(1), obs=y)

    assert near(one, torch.ones(1))[0] is None


def test_a_likelihood_that_is_another_one_for_draws_at_once():
    def wrong(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Normal(loc.mean().expand(loc.shape), 0.1), obs=y.expand(loc.shape))

    assert near(wrong, torch.tensor(1.0))[0] is None


def test_data_that_no_draw_makes_possible():
    def impossible(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("y", torch.full_like(x, -math.inf))

    assert near(impossible, torch.tensor(1.0))[0] is None


def test_buffers_are_kept():
    """The first run of the guide runs the model some times; those for many draws do not count."""

    class Counting(PyroModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, y):
            self.calls += 1
            model(y)

    counting = Counting()
    with torch.no_grad():
        draws, _ = near(counting, torch.ones(5))
    assert draws is not None and int(counting.calls) == 1  # by the run in near()


def test_the_guide_begins_there():
    guide = AutoSDE(model)
    guide(torch.full((5,), 25.0))
    with torch.no_grad(), pyro.plate("num_particles_vectorized", 1000, dim=-1):
        loc = guide(torch.full((5,), 25.0))["loc"]
    assert 18 < loc.mean() < 32
