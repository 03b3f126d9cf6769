"""What is drawn: every line, band and bar against the numbers it stands for."""

import math
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch

from pyro_sde import Forecast, pad_series
from pyro_sde.metrics import ReliabilityCurve, ece, interval, reliability_curve
from pyro_sde.plotting import (
    plot_band,
    plot_forecast,
    plot_kl,
    plot_paths,
    plot_prior_posterior,
    plot_reliability,
    plot_training,
)
from pyro_sde.plotting.reliability import STRIP

matplotlib.use("Agg")

import matplotlib.pyplot as plt

T = 7
TIMES = torch.linspace(0.0, 2.0, T)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    return {line.get_label(): line.get_xydata().T for line in ax.lines}


def band(ax, i=0):
    """Times, lower and upper bounds of a band, from its outline."""
    outline = ax.collections[i].get_paths()[0].vertices
    t = np.unique(outline[:, 0])
    low = [outline[outline[:, 0] == s, 1].min() for s in t]
    high = [outline[outline[:, 0] == s, 1].max() for s in t]
    return t, np.array(low), np.array(high)


def entries(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


# shape of the paths, of the times, what is chosen, and the same as an index into the paths
SHAPES = {
    "no state": ((5, T), (T,), {}, np.s_[:, :]),
    "one state": ((5, T, 1), (T,), {}, np.s_[:, :, 0]),
    "one of three states": ((5, T, 3), (T,), {"dim": 2}, np.s_[:, :, 2]),
    "as many states as times": ((5, T, T), (T,), {"dim": 1}, np.s_[:, :, 1]),
    "vectorised particles": ((5, 1, T, 1), (T,), {}, np.s_[:, 0, :, 0]),
    "one of four series": ((5, 4, T, 2), (T,), {"dim": 0, "series": 3}, np.s_[:, 3, :, 0]),
    "grids of their own": ((5, 4, T, 1), (4, T), {"series": 1}, np.s_[:, 1, :, 0]),
    "no state, grids of their own": ((5, 4, T), (4, T), {"series": 1}, np.s_[:, 1, :]),
    "as many series as times": ((5, T, T), (T, T), {"series": 2}, np.s_[:, 2, :]),
    "two plates": ((5, 3, 2, T, 1), (T,), {"series": (2, 0)}, np.s_[:, 2, 0, :, 0]),
    "one series among plates": ((5, 1, 2, T, 1), (2, T), {"series": 1}, np.s_[:, 0, 1, :, 0]),
}


@pytest.mark.parametrize("shape, grid, which, index", SHAPES.values(), ids=SHAPES)
def test_lines_are_the_paths(shape, grid, which, index):
    paths, times = (
        torch.randn(shape),
        TIMES + torch.arange(float(np.prod(grid[:-1]))).reshape(grid[:-1] + (1,)),
    )
    times = times.reshape(grid)
    ax = plot_paths(times, paths, max_paths=3, label=None, **which)
    t = times[which["series"]] if len(grid) > 1 else times
    assert len(ax.lines) == 3
    for line, row in zip(ax.lines, paths.numpy()[index], strict=False):
        assert (line.get_xdata() == t.numpy()).all()
        assert (line.get_ydata() == row).all()


def test_a_band_has_the_quantiles():
    paths = torch.randn(101, T, 2)
    ax = plot_band(TIMES, paths, levels=(0.5, 0.9), dim=1)
    for i, level in enumerate((0.9, 0.5)):  # the widest is drawn first
        t, low, high = band(ax, i)
        expected = np.stack(interval(paths[..., 1], level))
        np.testing.assert_array_equal(t, TIMES)
        np.testing.assert_allclose([low, high], expected, rtol=0, atol=1e-12)
    median = lines(ax)["posterior, median"][1]
    np.testing.assert_allclose(median, paths[..., 1].median(0).values, rtol=0, atol=1e-12)
    assert entries(ax) == ["posterior, 90 %", "posterior, 50 %", "posterior, median"]
    few = plot_band(TIMES, paths[:5], levels=[0.9], dim=1)  # an interval would need 19
    extremes = paths[:5, :, 1].aminmax(dim=0)
    np.testing.assert_allclose(band(few)[1:], np.stack(extremes), rtol=0, atol=1e-12)


def test_any_tensor_is_drawn():
    """With a gradient, in half precision, or an array; and the caller's axes are used."""
    paths = torch.randn(5, T, requires_grad=True)
    _, ax = plt.subplots()
    assert plot_band(TIMES, paths * 2.0, ax=ax) is ax
    plot_paths(TIMES.numpy(), paths.to(torch.bfloat16), ax=ax)
    plot_paths(TIMES.tolist(), paths.detach().numpy(), ax=ax)
    assert len(plt.get_fignums()) == 1


def test_data_are_those_observed():
    series = pad_series([([0.0, 1.0, 2.0], [5.0, float("nan"), 7.0]), ([1.0], [4.0])])
    paths = torch.randn(5, 2, T, 1)
    for i, expected in enumerate([[[0.0, 2.0], [5.0, 7.0]], [[1.0], [4.0]]]):
        ax = plot_band(TIMES, paths, series=i, data=series)
        np.testing.assert_array_equal(lines(ax)["data"], expected)
    row_mask = (series.times, series.values, series.mask[..., 0])
    ax = plot_paths(TIMES, paths, series=0, data=row_mask)
    np.testing.assert_array_equal(lines(ax)["data"], [[0.0, 2.0], [5.0, 7.0]])
    # One column stands for any state, one series for any.
    values = torch.tensor([[3.0], [float("nan")]])
    ax = plot_band(TIMES, torch.randn(5, 4, T, 3), dim=2, series=3, data=([0.5, 1.5], values))
    np.testing.assert_array_equal(lines(ax)["data"], [[0.5], [3.0]])


def test_prior_and_posterior():
    prior, posterior = torch.randn(50, T, 1), 0.1 * torch.randn(50, T, 1)
    data = TIMES[:2], torch.zeros(2)
    ax = plot_prior_posterior(TIMES, prior, posterior, level=0.8, max_paths=2, data=data)
    for i, paths in enumerate([prior, posterior]):
        expected = np.stack(interval(paths[..., 0], 0.8))
        np.testing.assert_allclose(band(ax, i)[1:], expected, rtol=0, atol=1e-12)
        drawn = [
            line.get_ydata()
            for line in ax.lines
            if line.get_lw() < 1 and line.get_marker() == "None"
        ]
        np.testing.assert_array_equal(drawn[2 * i : 2 * i + 2], paths[:2, :, 0])
    assert entries(ax) == ["prior, 80 %", "posterior, 80 %", "posterior, median", "data"]


def test_forecast_in_any_order_of_times():
    order = torch.tensor([2, 0, 1])
    samples = torch.randn(40, 2, 3)  # of two series, without a dimension of states
    ahead = Forecast(TIMES[:3][order].expand(2, 3), samples, {})
    ax = plot_forecast(
        ahead, [0.9], series=1, data=([[0.0], [0.1]], [[1.0], [2.0]]), held_out=(TIMES[:1], [3.0])
    )
    t, low, high = band(ax)
    np.testing.assert_array_equal(t, TIMES[:3])
    expected = ahead.interval(0.9)
    np.testing.assert_allclose(low, expected[0][1][order.argsort()], rtol=0, atol=1e-12)
    np.testing.assert_allclose(high, expected[1][1][order.argsort()], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(lines(ax)["data"], [[0.1], [2.0]])
    np.testing.assert_array_equal(lines(ax)["held out"], [[0.0], [3.0]])
    assert ax.get_ylabel() == "observed"


def test_reliability_bars_are_the_curve():
    probs = torch.softmax(2 * torch.randn(300, 4), -1)
    labels = torch.randint(4, (300,))
    curve = reliability_curve(probs, labels, 10)
    ax = plot_reliability(curve)
    accuracy, gap, count = ax.containers
    full = curve.count > 0
    assert not full.all()  # of four classes none is predicted with less than a quarter
    for i in range(10):
        bars = accuracy[i], gap[i], count[i]
        assert all(
            bar.get_x() + bar.get_width() / 2 == pytest.approx((i + 0.5) / 10) for bar in bars
        )
        right, sure = (curve.accuracy[i], curve.confidence[i]) if full[i] else (0.0, 0.0)
        assert accuracy[i].get_height() == pytest.approx(float(right))
        assert gap[i].get_y() == pytest.approx(float(right))
        assert gap[i].get_y() + gap[i].get_height() == pytest.approx(float(sure))
        share = count[i].get_height() / STRIP[1]
        assert share == pytest.approx(float(curve.count[i] / curve.count.max()))
    assert f"gap (ECE {ece(probs, labels, 10):.3f})" in entries(ax)
    again = plot_reliability(probs, labels, bins=10)
    assert [bar.get_height() for bar in again.containers[0]] == [b.get_height() for b in accuracy]


HISTORY = {
    "step": [10, 20, 30, 40],
    "elbo": [-90.0, -8.0, -6.0, -5.0],
    "log_likelihood": [-80.0, -5.0, -4.0, -3.5],
    "kl": [10.0, 3.0, 2.0, 1.5],
    "lr": [0.1, 0.2, 0.1, 0.0],
    "validation": [(20, -9.0), (40, -6.0)],
    "kl_by_site": {"z": [8.0, 2.0, 1.5, 1.0], "rate": [2.0, 1.0, 0.5, 0.5]},
}


@pytest.mark.parametrize("history", [HISTORY, SimpleNamespace(**HISTORY)], ids=["dict", "object"])
def test_training_curves_are_the_history(history):
    ax = plot_training(history, rate=True)
    drawn, step = lines(ax), HISTORY["step"]
    np.testing.assert_array_equal(drawn["ELBO"], [step, HISTORY["elbo"]])
    np.testing.assert_array_equal(drawn["log likelihood"], [step, HISTORY["log_likelihood"]])
    np.testing.assert_array_equal(drawn["validation"].T, HISTORY["validation"])
    _, low, high = band(ax)
    np.testing.assert_allclose(high - low, HISTORY["kl"])
    (twin,) = (other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(twin.lines[0].get_xydata().T, [step, HISTORY["lr"]])
    drawn = lines(plot_kl(history))
    np.testing.assert_array_equal(drawn["KL"], [step, HISTORY["kl"]])
    for name, values in HISTORY["kl_by_site"].items():
        np.testing.assert_array_equal(drawn[name], [step, values])


def test_training_curves_smoothed_and_partial():
    ax = plot_training({"step": [1, 2, 3], "elbo": [-3.0, -2.0, -4.0]}, smooth=2)
    np.testing.assert_allclose(lines(ax)["ELBO"], [[1.5, 2.5], [-2.5, -3.0]])
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [-3.0, -2.0, -4.0])
    assert entries(ax) == ["ELBO"]
    ax = plot_kl({"step": [1, 2, 3], "kl": [1.0, 2.0, 6.0]}, smooth=100)
    np.testing.assert_allclose(lines(ax)["KL"], [[2.0], [3.0]])


def test_an_elbo_that_does_not_tell_its_parts():
    unknown = [math.nan, math.nan]
    history = {"step": [1, 2], "elbo": [-2.0, -1.0], "kl": unknown, "log_likelihood": unknown}
    assert entries(plot_training(history)) == ["ELBO"]
    with pytest.raises(ValueError, match="a step for every kl"):
        plot_kl(history)


def test_the_first_steps_do_not_hide_the_rest():
    n = 100
    elbo = np.r_[-1e6, np.linspace(-50.0, -10.0, n - 1)]
    ax = plot_training({"step": list(range(n)), "elbo": elbo.tolist()})
    bottom, top = ax.get_ylim()
    assert -60 < bottom < -40 and -10 < top < 0
    assert plot_training({"step": [1], "elbo": [3.0]}).get_ylim()[0] < 3.0  # one step, no range


def test_legends_cover_no_curve():
    """Above the axes, and no wider than they are, so that a layout does not shrink them."""
    ax = plot_band(TIMES, torch.randn(5, T), levels=(0.1, 0.2, 0.5, 0.9), label="a long name")
    narrow = plt.subplots(figsize=(3, 3))[1]
    plot_band(TIMES, torch.randn(5, T), levels=(0.1, 0.2, 0.5, 0.9), label="a long name", ax=narrow)
    for panel in (ax, narrow):
        panel.figure.draw_without_rendering()
        legend, frame = panel.get_legend().get_window_extent(), panel.get_window_extent()
        assert legend.y0 >= frame.y1
        assert legend.width <= 1.1 * frame.width


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plot_paths(TIMES, torch.randn(T)), r"paths must have shape .* found \(7,\)"),
        (lambda: plot_paths(TIMES, torch.randn(5, 4)), r"where times has T = 7: found \(5, 4\)"),
        (lambda: plot_band(TIMES, torch.randn(5, T, 3)), r"3 states: choose one by dim=0 to 2"),
        (lambda: plot_band(TIMES, torch.randn(5, T, 3), dim=3), r"3 states: .*found 3"),
        (lambda: plot_band(TIMES, torch.randn(5, 2, T, 1)), r"series of shape \(2,\): choose one"),
        (lambda: plot_band(TIMES, torch.randn(5, 2, T, 1), series=2), r"series=.* found 2"),
        (
            lambda: plot_band(TIMES, torch.randn(5, 2, 3, T, 1), series=1),
            r"with a number for each dimension, found 1",
        ),
        (lambda: plot_band(TIMES, torch.randn(5, T), [0.5, 1.0]), r"levels must lie between 0"),
        (lambda: plot_band(TIMES, torch.randn(5, T), []), r"levels must lie between 0"),
        (
            lambda: plot_band(TIMES, torch.randn(5, T), data=(TIMES,)),
            r"data must be \(times, values\) or .* found 1 entries",
        ),
        (lambda: plot_reliability(torch.ones(3, 1)), r"labels is missing"),
        (
            lambda: plot_reliability(reliability_curve(torch.eye(2), torch.tensor([0, 1])), TIMES),
            r"labels belong to probabilities",
        ),
        (
            lambda: plot_reliability(ReliabilityCurve(TIMES, TIMES, torch.zeros(T))),
            r"curve has no prediction in any bin",
        ),
        (lambda: plot_training({"step": [], "elbo": []}), r"found 0 steps and 0 ELBOs"),
        (lambda: plot_kl({"step": [1], "elbo": [1.0]}), r"found 1 steps and 0 KLs"),
        (lambda: plot_training({"step": [1], "elbo": [1.0]}, rate=True), r"rate=True needs"),
        (lambda: plot_training(HISTORY, smooth=0), r"smooth must be at least 1: found 0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert not plt.get_fignums()  # refused before a figure is made


def test_a_title_stands_above_the_legend(tmp_path):
    """Also one that is set later, when a second call has made the legend taller."""
    ax = plot_band(TIMES, torch.randn(9, T), label="one")
    plot_band(TIMES, torch.randn(9, T), label="two", ax=ax)
    ax.set_title("a title")
    ax.figure.savefig(tmp_path / "figure.png")
    renderer = ax.figure.canvas.get_renderer()
    legend = ax.get_legend().get_window_extent(renderer)
    assert ax.title.get_window_extent(renderer).ymin >= legend.ymax - 1  # a pixel
    assert len(ax.child_axes) == 1
