"""Forecasts of models that interpolate their path, or find what is missing themselves."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

from pyro_sde import AutoSDE, fill_missing, forecast, select
from pyro_sde.distributions import BrownianMotion


def test_path_between_the_times_of_its_grid():
    """Observed halfway, a path has no state at the times of the forecast: it is left out."""

    def model(times, values=None):
        grid = torch.arange(float(times.max().floor()) + 2)
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
        left = times.floor().long()
        mean = torch.lerp(z[..., left, :], z[..., left + 1, :], (times - left).unsqueeze(-1))
        pyro.sample("y", dist.Normal(mean, 1e-3).to_event(2), obs=values)

    known = (torch.tensor([0.5, 1.5]), torch.zeros(2, 1))
    guide = AutoSDE(model, control=lambda t, z: torch.zeros_like(z))
    ahead = forecast(model, guide, known, torch.tensor([0.5, 2.5]), 4000, parallel=True)
    assert ahead.paths == {} and ahead.samples.shape == (4000, 2, 1)
    # Var (z_0 + z_1) / 2 = 1/4 and Var (z_2 + z_3) / 2 = 9/4; of a sample variance s^2 sqrt(2/m).
    var = ahead.samples.var(0).flatten()
    exact = torch.tensor([0.25, 2.25])
    assert bool(((var - exact).abs() < 5 * exact * (2 / 4000) ** 0.5).all())
    on_grid = forecast(model, guide, known, torch.tensor([2.0]), 3, parallel=True)
    assert on_grid.paths["z"].shape == (3, 1, 1)


def test_missing_values_without_a_mask():
    """NaN alone says what is missing: the model runs, finite, and without values draws them all."""

    def model(times, values=None):
        values, mask = fill_missing(values)
        grid = torch.arange(float(times.max()) + 1)
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
        likelihood = dist.Normal(select(z, grid, times), 0.1).mask(mask).to_event(2)
        pyro.sample("y", likelihood, obs=values)

    known = (torch.tensor([1.0, 2.0]), torch.tensor([[0.5], [torch.nan]]))
    trace = poutine.trace(model).get_trace(*known)
    z = trace.nodes["z"]["value"]
    exact = dist.Normal(z[1, 0], 0.1).log_prob(torch.tensor(0.5))
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["y"]["log_prob_sum"], exact)
    for parallel in (False, True):
        ahead = forecast(model, AutoSDE(model), known, torch.tensor([3.0]), 5, parallel=parallel)
        assert ahead.samples.shape == (5, 1, 1) and bool(ahead.samples.isfinite().all())
        pyro.clear_param_store()
