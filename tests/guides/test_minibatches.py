"""An encoder and a plate that subsamples: the posterior of a series is its own, in any batch."""

import gc

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fill_missing, forecast, select, series_grid
from pyro_sde.distributions import OrnsteinUhlenbeck

S, N = 6, 4
CHOSEN = torch.tensor([4, 1])


def model(times, values, mask=None, index=None):
    grid = series_grid(times, dt=0.5, start=0.0, end=2.0)
    with pyro.plate("series", S, subsample=index) as i:
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid[i]))
        y, seen = fill_missing(values, mask)
        x = select(z, grid[i], times[i])
        pyro.sample("y", dist.Normal(x, 0.3).mask(seen[i]).to_event(2), obs=y[i])


@pytest.fixture
def data():
    """With a missing value in a series that is chosen, and one in another."""
    values = torch.randn(S, N, 1)
    values[4, 2] = values[3, 0] = torch.nan
    return (2 * torch.rand(S, N)).sort(-1).values, values


@pytest.fixture
def guide(data):
    guide = AutoSDE(model, contraction=None, encoder=GRUEncoder(1, hidden=8, context=3)).setup(
        *data
    )
    for p in guide.parameters():
        p.data.normal_()
    return guide


def posterior(guide, *args, **kwargs):
    q = poutine.trace(guide).get_trace(*args, **kwargs).nodes["z"]["fn"]
    t = q.times[..., 1:2]
    return q.initial.mean, q.initial.stddev, q.control(t, torch.ones(len(t), 1))


def test_of_a_series_in_a_batch(data, guide):
    alone = [x[CHOSEN] for x in posterior(guide, *data)]
    for found, expected in zip(posterior(guide, *data, index=CHOSEN), alone, strict=True):
        torch.testing.assert_close(found, expected)
    assert not torch.allclose(alone[0][0], alone[0][1])


def test_nan_is_what_a_mask_removes(data, guide):
    times, values = data
    mask = ~values.isnan()
    filled = torch.where(mask, values, 7.0)
    for index in (None, CHOSEN):
        expected = posterior(guide, times, values, index=index)
        for found, q in zip(posterior(guide, times, filled, mask, index), expected, strict=True):
            torch.testing.assert_close(found, q)


def test_a_forecast_is_of_all_series(data):
    """A plate that subsamples without values, too, would answer for some series, and not say."""

    def model(times, values=None, all_of_them=False):
        grid = series_grid(times, dt=0.5, start=0.0, end=2.0)
        size = S if all_of_them and values is None else 2
        with pyro.plate("series", S, subsample_size=size) as i:
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid[i]))
            x = dist.Normal(select(z, grid[i], times[i]), 0.3).to_event(2)
            pyro.sample("y", x, obs=None if values is None else values[i])

    data_without_nan = (data[0], data[1].nan_to_num())
    guide = AutoSDE(model, contraction=None, encoder=GRUEncoder(1, hidden=8, context=3))
    new = torch.tensor([1.0, 2.0])
    predicted = forecast(model, guide, (*data_without_nan, True), new, 3)
    assert predicted.samples.shape == (3, S, 2, 1)
    with pytest.raises(ValueError, match="must keep all series"):
        forecast(model, guide, data_without_nan, new, 3)


def test_the_control_ends_with_the_observations(data, guide):
    """And is the same function of a time as of the number of a step."""
    times, values = data
    early = torch.where((times < 1.0).unsqueeze(-1), values, torch.nan)
    early[:, 0] = 1.0
    with guide.given((times, early)):
        q = poutine.trace(guide).get_trace(*data).nodes["z"]["fn"]
    t, _ = q.step_times()
    z, step = torch.randn(S, 1), q.control.on_grid(t)
    last = torch.where(early.isnan()[..., 0], -torch.inf, times).amax(-1, keepdim=True)
    for i in range(len(t)):
        u = q.control(t[i], z)
        torch.testing.assert_close(step.at(i, z), u, rtol=1e-12, atol=1e-12)
        assert torch.equal(u != 0, t[i] < last)


def test_steps_leave_nothing_behind(data, guide):
    """After a few steps there are as many tensors as after one."""

    def alive():
        TraceSDE_ELBO().loss_and_grads(model, guide, *data, index=CHOSEN)
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    first = alive()
    for _ in range(3):
        last = alive()
    assert last <= first
