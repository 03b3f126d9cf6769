"""The line at the end of a training that says how right its posterior is."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_sde import fit
from pyro_sde.training import run

from .models import DATA, assert_identical, make, values


@pytest.mark.parametrize("kind", ["functional", "modular"])
def test_a_check_at_the_end_that_changes_nothing(kind, capsys, monkeypatch):
    monkeypatch.setattr(run, "CHECK_SECONDS", 1e6)
    monkeypatch.setattr(run, "CHECK_SAMPLES", 100)
    model, guide, elbo = make(kind)
    fit(model, guide, DATA, steps=3, elbo=elbo, seed=1, progress=False)
    expected, state = values(model), torch.get_rng_state()
    assert "importance" not in capsys.readouterr().err
    model, guide, elbo = make(kind)
    history = fit(model, guide, DATA, steps=3, elbo=elbo, seed=1)
    assert_identical(values(model), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert history.importance.line in capsys.readouterr().err
    assert history.importance.num_samples == 100


def test_mini_batches_are_not_checked(capsys):
    model, guide, elbo = make("functional")
    history = fit(model, guide, DATA, steps=2, elbo=elbo, batch_size=3)
    assert history.importance is None
    assert "not made, because the evidence of a mini-batch" in capsys.readouterr().err


def test_a_check_that_fails_is_said(capsys):
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    history = fit(model, AutoDelta(model), steps=1, elbo=Trace_ELBO())
    assert history.importance is None
    assert "not made, because the guide has a point at site 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "message"),
    [(KeyboardInterrupt(), "KeyboardInterrupt"), (IndexError("no row 7"), "no row 7")],
)
def test_whatever_is_raised_the_history_is_returned(problem, message, capsys, monkeypatch):
    model, guide, elbo = make("functional")

    def fail(*_):
        raise problem

    monkeypatch.setattr("pyro_sde.diagnostics.weighted_draws.Problem.of", fail)
    assert fit(model, guide, DATA, steps=2, elbo=elbo).step == [1, 2]
    assert f"importance check: not made, because {message}" in capsys.readouterr().err


def test_draws_that_are_too_large_are_not_kept(capsys):
    def model():
        pyro.sample("x", dist.Normal(torch.zeros(20_000), 1.0).to_event(1))

    history = fit(model, AutoNormal(model), steps=1, elbo=Trace_ELBO())
    assert history.importance is None
    assert "1000 draws of 20,000 numbers are more than fit keeps" in capsys.readouterr().err


def test_a_model_that_is_slow_is_not_waited_for(capsys, monkeypatch):
    monkeypatch.setattr(run, "CHECK_SECONDS", 0.0)
    model, guide, elbo = make("modular")  # its buffer counts, so that draws are made one by one
    assert fit(model, guide, DATA, steps=1, elbo=elbo).importance is None
    assert "draws took 0 seconds" in capsys.readouterr().err
