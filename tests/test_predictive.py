"""Predictive: the law of Pyro's, in plain shapes, at once where that is the same."""

import pyro
import pyro.distributions as dist
import pyro.infer
import pytest
import torch

from pyro_sde import AutoSDE, Predictive, forecast
from pyro_sde.distributions import BrownianMotion

T = torch.linspace(0.0, 1.0, 6)


def model(y=None):
    shift = pyro.sample("shift", dist.Normal(3.0, 1.0))
    path = BrownianMotion.scalar(1.0, T, shift)
    z = pyro.sample("z", path)
    with pyro.plate("observations", 3):
        return pyro.sample("y", dist.Normal(path.at(z, T[3:]), 0.1), obs=y)


@pytest.mark.parametrize("parallel", [None, True, False])
def test_shapes_are_those_of_one_draw(parallel):
    guide = AutoSDE(model).setup(torch.zeros(3))
    draws = Predictive(model, guide=guide, num_samples=20, parallel=parallel)()
    assert {k: tuple(x.shape) for k, x in draws.items() if k in ("shift", "z", "y")} == {
        "shift": (20,),
        "z": (20, 6),
        "y": (20, 3),
    }
    prior = Predictive(model, num_samples=20, parallel=parallel)()
    assert prior["y"].shape == (20, 3) and prior["shift"].shape == (20,)
    one = {"shift": draws["shift"], "z": draws["z"]}
    again = Predictive(model, one, parallel=parallel)()
    assert set(again) == {"y"} and (again["y"] - draws["z"][:, 3:]).abs().max() < 1.0


@pytest.mark.parametrize("return_sites", [None, (), ("y",), ("y", "z")])
def test_it_returns_what_pyros_does(return_sites):
    guide = AutoSDE(model).setup(torch.zeros(3))
    for options in ({"guide": guide, "num_samples": 4}, {"num_samples": 4}):
        ours = Predictive(model, return_sites=return_sites, **options)()
        theirs = pyro.infer.Predictive(model, return_sites=return_sites, **options)()
        assert set(ours) == set(theirs)


def test_draws_at_once_are_pyros():
    found = []
    for cls, parallel in ((Predictive, None), (pyro.infer.Predictive, True)):
        torch.manual_seed(0)
        found.append(cls(model, num_samples=7, parallel=parallel)())
    for name in ("shift", "z", "y"):
        assert torch.equal(found[0][name], found[1][name].reshape(found[0][name].shape))


def test_moments():
    draws = Predictive(model, num_samples=20_000)()
    error = (3.0 / 20_000) ** 0.5  # of a mean, the variance of y at the end being about 2
    assert draws["y"][:, -1].mean() == pytest.approx(3.0, abs=5 * error)
    assert draws["y"][:, -1].var() == pytest.approx(2.01, rel=0.05)


@pytest.mark.parametrize("mixes", [True, False])
def test_a_model_that_mixes_draws_is_run_draw_by_draw(mixes):
    runs = []

    def f():
        runs.append(0)
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x.mean().expand(x.shape) if mixes else x, 0.01))

    draws = Predictive(f, num_samples=300)()
    assert (len(runs) > 300) is mixes
    assert (draws["x"] - draws["y"]).abs().max() < 0.1


def test_large_draws_are_made_one_by_one(monkeypatch):
    monkeypatch.setattr("pyro_sde.predictive.MAX_ELEMENTS", 10)
    runs = []

    def f():
        runs.append(0)
        pyro.sample("x", dist.Normal(0.0, 1.0))

    assert Predictive(f, num_samples=11)()["x"].shape == (11,) and len(runs) > 11


def test_medians_and_forecasts_are_plain():
    def timed(times, values=None):
        path = BrownianMotion.scalar(1.0, torch.linspace(0.0, 2.0, 11), 0.0)
        z = pyro.sample("z", path)
        with pyro.plate("observations", len(times)):
            pyro.sample("y", dist.Normal(path.at(z, times), 0.1), obs=values)

    guide, data = AutoSDE(timed), (torch.tensor([0.2, 0.4]), torch.zeros(2))
    assert guide.median(*data, num_samples=10)["z"].shape == (11,)
    assert guide.quantiles([0.1, 0.9], *data, num_samples=10)["z"].shape == (2, 11)
    ahead = forecast(timed, guide, data, torch.tensor([1.0, 1.2, 2.0]), num_samples=10)
    assert ahead.samples.shape == (10, 3) and ahead.mean.shape == (3,)
    assert ahead.paths["z"].shape == (10, 3)
