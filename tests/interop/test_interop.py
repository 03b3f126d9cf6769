"""Samples in ArviZ: coordinates, names of dimensions, and every value where it belongs."""

import math
import subprocess
import sys

import arviz as az
import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, Predictive

from pyro_sde import AutoSDE, fill_missing, pad_series, select, series_grid, time_grid, to_arviz
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck

matplotlib.use("Agg")

import matplotlib.pyplot as plt

T_OBS = torch.tensor([0.3, 0.5, 1.4])
GRID = time_grid(0.0, 2.0, dt=0.5, include=T_OBS)
Y = torch.tensor([0.4, 0.1, -0.5])


def model(y=None):
    scale = pyro.sample("scale", dist.Uniform(0.5, 2.0))
    z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, scale.unsqueeze(-1), GRID))
    pyro.deterministic("last", z[..., -1, 0], event_dim=0)
    with pyro.plate("obs", len(T_OBS)):
        pyro.sample("y", dist.Normal(select(z, GRID, T_OBS, plate_dim=-1)[..., 0], 0.2), obs=y)


def draws(parallel, n=30):
    guide = AutoSDE(model).setup(Y)
    sites = ["scale", "z", "last", "y"]
    return Predictive(model, guide=guide, num_samples=n, parallel=parallel, return_sites=sites)()


@pytest.mark.parametrize("parallel", [False, True])
def test_values_and_coordinates(parallel):
    found = draws(parallel)
    data = to_arviz(model, (Y,), found, coords={"obs": T_OBS})
    assert data.groups() == ["posterior", "posterior_predictive", "observed_data"]
    z = data.posterior["z"]
    assert z.dims == ("chain", "draw", "z_time", "z_state")
    np.testing.assert_array_equal(z["z_time"], GRID)
    np.testing.assert_array_equal(z[0, :, :, 0], found["z"].reshape(30, -1))
    at = z.sel(z_time=0.5, z_state=0)[0]
    where = int((GRID == 0.5).nonzero())
    np.testing.assert_array_equal(at, found["z"].reshape(30, -1)[:, where])
    np.testing.assert_array_equal(data.posterior["scale"][0], found["scale"].flatten())
    np.testing.assert_array_equal(data.posterior["last"][0], z[0, :, -1, 0])
    assert "y" not in data.posterior
    y = data.posterior_predictive["y"]
    assert y.dims == ("chain", "draw", "obs")
    np.testing.assert_array_equal(y[0], found["y"].reshape(30, 3))
    np.testing.assert_array_equal(y["obs"], T_OBS)
    np.testing.assert_array_equal(data.observed_data["y"].sel(obs=1.4), -0.5)


def test_the_data_are_no_prediction():
    found = Predictive(AutoSDE(model).setup(Y), num_samples=5)(Y)
    assert (found["y"] == Y).all()
    data = to_arviz(model, (Y,), found)
    assert data.groups() == ["posterior", "observed_data"]
    assert set(data.posterior.data_vars) == {"scale", "z", "last"}


def test_prior_and_log_likelihood():
    found, before = draws(True), Predictive(model, num_samples=11, parallel=True)()
    state = torch.get_rng_state()
    data = to_arviz(model, {"y": Y}, found, prior=before, log_likelihood=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(data.prior["z"].sizes) == {
        "chain": 1,
        "draw": 11,
        "z_time": len(GRID),
        "z_state": 1,
    }
    np.testing.assert_array_equal(data.prior_predictive["y"][0], before["y"])
    z = select(found["z"].reshape(30, -1, 1), GRID, T_OBS)[..., 0]
    expected = dist.Normal(z, 0.2).log_prob(Y)
    assert data.log_likelihood["y"].dims == ("chain", "draw", "obs")
    np.testing.assert_allclose(data.log_likelihood["y"][0], expected, rtol=1e-12)


@pytest.mark.filterwarnings("ignore::matplotlib.MatplotlibDeprecationWarning")  # of ArviZ's own
def test_arviz_works_with_it(tmp_path):
    data = to_arviz(model, (Y,), draws(True, 60), prior=Predictive(model, num_samples=20)())
    summary = az.summary(data, var_names=["scale", "z"], kind="stats")
    row = summary.loc["z[0.5, 0]", "mean"]
    assert row == pytest.approx(float(data.posterior["z"].sel(z_time=0.5).mean()), abs=1e-3)
    az.plot_ppc(data)
    az.plot_posterior(data, var_names=["scale"])
    az.plot_forest(data, var_names=["z"], combined=True)
    az.plot_hdi(GRID.numpy(), data.posterior["z"].isel(z_state=0), smooth=False)
    plt.close("all")
    file = data.to_netcdf(str(tmp_path / "found.nc"))
    again = az.from_netcdf(file)
    np.testing.assert_array_equal(again.posterior["z"], data.posterior["z"])
    np.testing.assert_array_equal(again.posterior["z_time"], GRID)


def test_chains_of_nuts():
    mcmc = MCMC(NUTS(model), num_samples=6, warmup_steps=4, num_chains=1, disable_progbar=True)
    mcmc.run(Y)
    samples = mcmc.get_samples()
    predicted = Predictive(model, samples)()
    data = to_arviz(model, (Y,), mcmc, posterior_predictive=predicted, log_likelihood=True)
    assert dict(data.posterior["z"].sizes)["draw"] == 6
    np.testing.assert_array_equal(data.posterior["z"][0], samples["z"])
    np.testing.assert_array_equal(data.posterior_predictive["y"][0], predicted["y"])
    # Two chains by hand: what is flat follows them.
    chains = {k: torch.stack([v, v.flip(0)]) for k, v in samples.items()}
    flat = {k: v.flatten(0, 1) for k, v in chains.items()}
    predicted = Predictive(model, flat)()
    data = to_arviz(
        model,
        (Y,),
        chains,
        posterior_predictive=predicted,
        group_by_chain=True,
        log_likelihood=True,
    )
    assert data.posterior["z"].shape[:2] == data.log_likelihood["y"].shape[:2] == (2, 6)
    np.testing.assert_array_equal(data.posterior["scale"][1], samples["scale"].flip(0))
    np.testing.assert_array_equal(data.posterior_predictive["y"][1], predicted["y"][6:])
    same = data.log_likelihood["y"]
    np.testing.assert_allclose(same[1], same[0, ::-1], rtol=1e-12)


def test_a_grid_for_each_series():
    """Times that differ between series are a coordinate of two dimensions."""
    batch = pad_series([([0.0, 0.7, 2.0], [1.0, float("nan"), 3.0]), ([0.0, 2.0], [4.0, 5.0])])
    grids = series_grid(batch.times, dt=1.0)

    def panel(times, values=None, mask=None):
        values, mask = (None, True) if values is None else fill_missing(values, mask)
        with pyro.plate("patient", len(times)):
            z = pyro.sample("z", BrownianMotion(1.0, grids, torch.zeros(2)))
            y = select(z, grids, times)[..., :1]
            pyro.sample("y", dist.Normal(y, 0.3).mask(mask).to_event(2), obs=values)

    guide = AutoSDE(panel).setup(*batch)
    found = Predictive(panel, guide=guide, num_samples=7)(batch.times)
    data = to_arviz(panel, tuple(batch), found, dims={"y": ["visit", "what"]})
    z = data.posterior["z"]
    assert z.dims == ("chain", "draw", "patient", "z_step", "z_state")
    assert z["z_time"].dims == ("patient", "z_step")
    np.testing.assert_array_equal(z["z_time"], grids)
    np.testing.assert_array_equal(z[0], found["z"])
    after = z.where(z["z_time"] >= 1.5, drop=True)
    assert float(after["z_time"].min()) >= 1.5
    assert data.posterior_predictive["y"].dims == ("chain", "draw", "patient", "visit", "what")
    seen = data.observed_data["y"][..., 0]  # masked: a missing value, and the padding
    np.testing.assert_array_equal(seen, [[1.0, math.nan, 3.0], [4.0, 5.0, math.nan]])
    assert len(az.summary(data, var_names=["z"], kind="stats")) == 2 * grids.shape[1] * 2


def test_masks_of_counts_and_of_handlers():
    mask = torch.tensor([True, False, True])

    def counts(y):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("n", 3), pyro.poutine.mask(mask=mask):
            pyro.sample("y", dist.Poisson(rate), obs=y)
        pyro.sample("vector", dist.Normal(rate, torch.ones(2)).to_event(1), obs=torch.zeros(2))

    found = {"rate": torch.ones(4), "unknown": torch.ones(4)}
    data = to_arviz(counts, (torch.tensor([2, 3, 4]),), found)
    np.testing.assert_array_equal(data.observed_data["y"], [2.0, math.nan, 4.0])
    assert data.observed_data["vector"].dims == ("vector_dim_0",)
    assert list(data.posterior.data_vars) == ["rate"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"posterior": {"w": torch.zeros(3)}}, r"posterior has the sites \['w'\], none of which"),
        ({"posterior": {"z": torch.zeros(3, 9, 1)}}, r"posterior\['z'\] has shape \(3, 9, 1\)"),
        ({"posterior": {"scale": torch.zeros(2, 3)}}, r"group_by_chain=True if chains come first"),
        ({"posterior_predictive": {"y": torch.zeros(4, 3)}}, r"4 samples, the posterior 1 chains"),
        ({"log_likelihood": True}, r"posterior lacks \['z'\]"),
        ({"dims": {"x": ["a"]}}, r"dims names \['x'\]: the model has the sites"),
        ({"dims": {"y": ["a"]}}, r"dims\['y'\] has 1 names: .* the dimensions \[\] have none yet"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        to_arviz(model, (Y,), **{"posterior": {"scale": torch.ones(3)}, **options})


def test_a_plate_that_subsamples_is_refused():
    def some():
        with pyro.plate("data", 10, subsample_size=4):
            pyro.sample("x", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"plate 'data', which draws 4 of 10 elements"):
        to_arviz(some, (), {"x": torch.zeros(3, 4)})


def test_arviz_is_imported_late():
    code = """
import sys, pyro_sde
assert not {"arviz", "xarray", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
