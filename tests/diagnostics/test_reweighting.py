"""Smoothed weights against ArviZ, and resampled draws against exact posteriors."""

import math

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

from pyro_sde import to_arviz
from pyro_sde.diagnostics import importance, reweight
from pyro_sde.diagnostics.reweighting import smooth_weights, tail_error


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("n", [50, 200, 1000])
def test_smoothing_is_that_of_arviz(spread, n):
    log_weights = spread * torch.randn(n).double().square() - 1000
    smoothed, k_hat = smooth_weights(log_weights)
    expected, k = arviz.psislw(log_weights.numpy())
    assert k_hat == pytest.approx(float(k), abs=1e-9)
    torch.testing.assert_close(smoothed, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_weights_without_a_tail():
    smoothed, k_hat = smooth_weights(torch.full((100,), -7.0))
    assert k_hat == -math.inf and torch.allclose(smoothed.exp(), torch.tensor(0.01).double())
    smoothed, k_hat = smooth_weights(torch.tensor([0.0] + [-math.inf] * 99))
    assert k_hat == math.inf and smoothed.exp().tolist() == [1.0] + [0.0] * 99


@pytest.mark.parametrize("k", [0.7, 0.8, 0.9])
def test_the_error_counts_the_tail_that_was_not_drawn(k):
    """Weights of a Pareto law, whose mean is known, in 200 repetitions."""
    torch.manual_seed(0)
    rows = torch.rand(200, 1000, dtype=torch.float64).pow(-k)  # 1 / k is the index of the tail
    exact = -math.log(1 - k)
    off, without = [], []
    for weights in rows:
        log_weights = weights.log()
        error = float(weights.std() / weights.mean() / math.sqrt(len(weights)))
        tail = tail_error(log_weights, smooth_weights(log_weights)[1])
        miss = abs(float(weights.mean().log()) - exact)
        without.append(miss > 3 * error)
        off.append(miss > 3 * math.hypot(error, tail))
    assert sum(off) < 0.2 * len(off) and sum(off) < 0.8 * sum(without), (sum(off), sum(without))


def test_the_error_of_light_and_of_hopeless_tails():
    log_weights = torch.randn(1000).double()
    assert tail_error(log_weights, 0.3) == 0.0 and tail_error(log_weights, -math.inf) == 0.0
    assert (
        tail_error(log_weights, 1.0) == math.inf and tail_error(log_weights, math.inf) == math.inf
    )


def model(y=None, n=3):
    with pyro.plate("rows", n):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def joint(y=None):
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(a.sum(-1), 0.5), obs=y)


def test_draws_of_a_wrong_guide_are_corrected():
    """A guide without the correlation of its posterior, and the exact one."""
    y = torch.tensor(1.0)
    precision = torch.eye(2) + 4.0
    cov = precision.inverse()
    mean = cov @ torch.full((2,), 4.0)
    pyro.set_rng_seed(0)

    def guide(y):
        pyro.sample("a", dist.Normal(mean + 0.1, 0.5).to_event(1))

    found = importance(joint, guide, y, num_samples=20_000)
    draws = reweight(found.draws, found.log_weights)
    a = draws["a"]
    assert a.shape == (20_000, 2)
    error = 4 / math.sqrt(found.effective)
    assert (a.mean(0) - mean).abs().max() < error * cov.diagonal().sqrt().max()
    assert (a.std(0) / cov.diagonal().sqrt() - 1).abs().max() < error
    assert a.T.corrcoef()[0, 1].item() == pytest.approx(-0.8, abs=error)
    assert abs(found.draws["a"].T.corrcoef()[0, 1]) < 0.05
    torch.testing.assert_close(reweight(found.draws, found)["a"].std(0), a.std(0), rtol=0.1, atol=0)


def test_elements_of_a_plate_are_resampled_apart():
    y = torch.tensor([2.0, -2.0, 0.0])

    def guide(y):
        with pyro.plate("rows", 3):
            pyro.sample("x", dist.Normal(0.4 * y, 0.9))

    found = importance(model, guide, y, num_samples=20_000)
    x = reweight(found.draws, found, num_samples=30_000)["x"]
    assert found.plate == "rows" and x.shape == (30_000, 3)
    error = 4 / math.sqrt(found.effective)
    assert (x.mean(0) - y / 2).abs().max() < error and (x.std(0) - 0.5**0.5).abs().max() < error
    with pytest.raises(ValueError, match=r"sites \['y'\], which the check did not draw"):
        reweight({**found.draws, "y": found.draws["x"]}, found)


def test_corrected_draws_go_on():
    y = torch.tensor([2.0, -2.0, 0.0])

    def guide(y):
        with pyro.plate("rows", 3):
            pyro.sample("x", dist.Normal(0.5 * y, 0.9))

    found = importance(model, guide, y, num_samples=1000)
    draws = reweight(found.draws, found)
    predicted = Predictive(model, posterior_samples=draws)()["y"]
    assert predicted.shape == (1000, 3)
    assert to_arviz(model, (y,), draws).posterior["x"].shape == (1, 1000, 3)


def test_systematic_resampling():
    """Every draw comes as often as its weight says, up to one."""
    log_weights = 0.3 * torch.randn(200)
    index = reweight({"i": torch.arange(200)}, log_weights, num_samples=1000)["i"]
    expected = 1000 * smooth_weights(log_weights)[0].exp()
    assert (torch.bincount(index, minlength=200) - expected).abs().max() < 1


def test_errors():
    draws = {"x": torch.zeros(10)}
    with pytest.raises(ValueError, match=r"draws\['x'\] has 10 samples, and there are 9 weights"):
        reweight(draws, torch.zeros(9))
    with pytest.raises(ValueError, match=r"found the shape \(10, 2\)"):
        reweight(draws, torch.zeros(10, 2))
    with pytest.raises(ValueError, match="num_samples must be at least 1: found 0"):
        reweight(draws, torch.zeros(10), num_samples=0)
    with pytest.raises(ValueError, match="no draw is possible"):
        reweight(draws, torch.full((10,), -math.inf))
