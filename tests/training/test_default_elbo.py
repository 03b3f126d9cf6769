"""The ELBO of fit where none is given: vectorised particles where a model allows them."""

import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fit, select, series_grid
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck
from pyro_sde.training import default_elbo as defaults

from .models import DATA, assert_identical, make, values

FIT = sys.modules["pyro_sde.training.fit"]  # the package has a function of that name
TIMES = torch.linspace(0.0, 1.0, 5)
Y = torch.tensor([0.5, 1.5])


def model(y):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    path = BrownianMotion.scalar(1.0, TIMES, shift)
    z = pyro.sample("z", path)
    with pyro.plate("observations", 2):
        pyro.sample("y", dist.Normal(path.at(z, TIMES[3:]), 0.5), obs=y)


def one_by_one(y):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    path = BrownianMotion.scalar(1.0, TIMES, shift.mean())
    z = pyro.sample("z", path)
    pyro.sample("y", dist.Normal(z[3:].reshape(2), 0.5).to_event(1), obs=y)


def test_a_small_model_has_particles():
    elbo = defaults.default_elbo(model, AutoSDE(model), (Y,), {})
    assert elbo.num_particles == 16 and elbo.vectorize_particles
    assert elbo.max_plate_nesting == 2  # Pyro counts the particles, too


@pytest.mark.parametrize(
    ("f", "make_guide", "most"),
    [(one_by_one, AutoSDE, 2048), (model, AutoNormal, 2048), (model, AutoSDE, 5)],
    ids=["mixes draws", "another guide", "large"],
)
def test_others_have_one(f, make_guide, most, monkeypatch):
    monkeypatch.setattr(defaults, "MAX_ELEMENTS", most)
    state = torch.get_rng_state()
    elbo = defaults.default_elbo(f, make_guide(f), (Y,), {})
    assert elbo.num_particles == 1 and torch.equal(torch.get_rng_state(), state)


def test_fit_takes_it():
    found = []
    given = TraceSDE_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=1)
    for elbo in (None, given):
        pyro.clear_param_store()
        fit(model, AutoSDE(model), (Y,), steps=20, elbo=elbo, seed=0, progress=False)
        found.append(values())
    assert_identical(*found)


def test_an_encoder_keeps_the_units_of_the_data():
    times, values = torch.linspace(0.1, 1.0, 4).expand(6, 4), 5.0 + torch.randn(6, 4, 1)

    def series(times, values):
        grid = series_grid(times, dt=0.25, start=0.0, end=1.0)
        with pyro.plate("series", 6):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid))
            law = dist.Normal(select(z, grid, times), 0.2).to_event(2)
            pyro.sample("y", law, obs=values)

    guide = AutoSDE(series, encoder=GRUEncoder(1, hidden=4, context=2))
    fit(series, guide, (times, values), steps=1, match=False, progress=False)
    torch.testing.assert_close(guide.encoder.loc, values.mean((0, 1)))


def test_an_error_of_the_model_is_that_of_the_first_step():
    with pytest.raises(ValueError, match="1 values that are NaN"):
        fit(model, AutoSDE(model), (Y / Y.new_tensor([0.0, 1.0]) * 0.0,), steps=2, progress=False)


def test_mini_batches_have_one_particle(monkeypatch):
    monkeypatch.setattr(FIT, "default_elbo", lambda *_: pytest.fail("called"))
    functional, guide, _ = make("functional")
    assert len(fit(functional, guide, DATA, steps=2, batch_size=3, progress=False).step) == 2


def test_a_number_of_steps_is_given(monkeypatch):
    monkeypatch.setattr(FIT, "STEPS", 4)
    assert fit(model, AutoSDE(model), (Y,), progress=False).step == [1, 2, 3, 4]
