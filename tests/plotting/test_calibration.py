"""The calibration plot: exact curves of forecasts right, too narrow and too wide; the band."""

import math

import matplotlib
import numpy as np
import pytest
import torch

from pyro_sde.plotting import plot_calibration
from pyro_sde.plotting.calibration import noise_half_width

matplotlib.use("Agg")

import matplotlib.pyplot as plt

NORMAL = torch.distributions.Normal(0.0, 1.0)
N = 2000
OBSERVED = NORMAL.icdf((torch.arange(N) + 0.5) / N)  # every quantile of the truth once
QUANTILES = NORMAL.icdf(torch.arange(1, 100) / 100).unsqueeze(-1)  # a forecast by 99 of its own


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def curve(ax, i=-1):
    return [torch.as_tensor(part, dtype=torch.float64) for part in ax.lines[i].get_data()]


@pytest.mark.parametrize("width, shift", [(1.0, 0.0), (0.5, 0.0), (2.0, 0.0), (1.0, -0.7)])
def test_the_curve_of_a_normal_forecast(width, shift):
    """The share below the quantile of level p is Phi(shift + width Phi^-1(p))."""
    ax = plot_calibration((shift + width * QUANTILES).expand(99, N), OBSERVED)
    nominal, share = curve(ax)
    torch.testing.assert_close(nominal, torch.linspace(0.0, 1.0, 21).double(), rtol=0, atol=1e-12)
    p = nominal[1:-1]
    expected = NORMAL.cdf(shift + width * NORMAL.icdf(p))
    # N observations are a step of 1 / N, and half of one at the middle.
    torch.testing.assert_close(share[1:-1], expected, rtol=0, atol=0.51 / N)
    early, late = share[1:6] - nominal[1:6], share[-6:-1] - nominal[-6:-1]
    if width < 1:  # too narrow
        assert (early > 0.05).all() and (late < -0.05).all()
    elif width > 1:  # too wide
        assert (early < -0.02).all() and (late > 0.02).all()
    elif shift:  # too low
        assert (early < -0.01).all() and (late < -0.01).all()
    assert share[0] == 0.0 and share[-1] == 1.0


def band(ax):
    outline = ax.collections[0].get_paths()[0].vertices
    p = np.unique(outline[:, 0])
    return p, *(np.array([end(outline[outline[:, 0] == q, 1]) for q in p]) for end in (min, max))


@pytest.mark.parametrize("n", [5, 60])
def test_the_band_holds_as_many_calibrated_curves_as_it_says(n):
    """Whole curves, of draws and observations of one law."""
    curves, m, level = 2000, 39, 0.8
    samples, observed = torch.randn(m, n), torch.randn(n)
    p, low, high = band(plot_calibration(samples, observed, level=level))
    inner = torch.as_tensor(p[1:-1])
    rank = torch.randint(m + 1, (curves, n))  # of an observation among its draws
    share = (rank.unsqueeze(-1) < inner * (m + 1) - 1e-9).double().mean(1)
    edge = 1e-9  # shares are discrete: one on the edge is inside
    inside = (share >= torch.as_tensor(low[1:-1]) - edge) & (
        share <= torch.as_tensor(high[1:-1]) + edge
    )
    found = inside.all(-1).double().mean().item()
    # At least the level, since shares are discrete; 4 standard errors of 2000 curves are 0.036.
    assert level - 0.036 < found < level + (0.1 if n < 10 else 0.05)
    assert (low >= 0).all() and (high <= 1).all()


def test_the_band_narrows_with_the_observations():
    p = np.linspace(0.0, 1.0, 21)
    few, many = noise_half_width(p, 100, 0.9), noise_half_width(p, 10_000, 0.9)
    np.testing.assert_allclose(few[1:-1] / many[1:-1], 10.0, rtol=0.1)
    assert 1.64 < many[10] / math.sqrt(0.25 / 10_000) < 3.5  # wider than at one p alone
    assert few[0] == few[-1] == 0.0
    state = np.random.get_state()[1].copy()
    torch_state = torch.get_rng_state()
    noise_half_width(p, 100, 0.9)
    assert (np.random.get_state()[1] == state).all() and torch.equal(
        torch.get_rng_state(), torch_state
    )


def test_masked_observations_do_not_count():
    samples, observed = torch.randn(39, 30, 2), torch.randn(30, 2)
    mask = torch.rand(30) < 0.5
    ax = plot_calibration(samples, observed, mask=mask)
    some = plot_calibration(samples[:, mask], observed[mask])
    torch.testing.assert_close(curve(ax)[1], curve(some)[1], rtol=0, atol=0)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == [f"90 % band, n = {2 * int(mask.sum())}", "calibrated", "forecast"]
    gradient = samples.requires_grad_()
    torch.testing.assert_close(curve(plot_calibration(gradient, observed, mask=mask)), curve(ax))


def test_forecasts_side_by_side():
    """One band and one diagonal, a colour and an entry for each forecast."""
    observed = torch.randn(50)
    ax = plot_calibration(torch.randn(99, 50), observed, label="one")
    assert plot_calibration(torch.randn(99, 50), observed, label="two", ax=ax) is ax
    plot_calibration(torch.randn(99, 50), observed, label=None, color="k", ax=ax)
    assert len(ax.collections) == 1 and len(ax.lines) == 4
    assert len({line.get_color() for line in ax.lines[1:]}) == 3
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["90 % band, n = 50", "calibrated", "one", "two"]
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"observed": torch.zeros(3)}, r"samples must have shape \(m, \*observed.shape\)"),
        ({"level": 1.0}, r"levels must lie between 0 and 1: found \[1.0\]"),
        ({"bins": 1}, r"bins must be at least 2: found 1"),
        ({"samples": torch.zeros(0, 5)}, r"samples has 0 draws: pass at least 1"),
        ({"mask": torch.zeros(5, dtype=torch.bool)}, r"no value was observed"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        plot_calibration(**{"samples": torch.zeros(9, 5), "observed": torch.zeros(5)} | options)
    assert not plt.get_fignums()
