"""The figure of simulation-based calibration: exact curves, the band, and names."""

import matplotlib
import numpy as np
import pytest
import torch

from pyro_sde.diagnostics import CalibrationCheck
from pyro_sde.diagnostics.uniformity import ecdf_band
from pyro_sde.plotting import plot_sbc
from pyro_sde.plotting.style import ACCENT, POSTERIOR

matplotlib.use("Agg")

import matplotlib.pyplot as plt

EVEN = torch.arange(100)  # every rank once
NARROW = torch.cat([torch.arange(50) // 10, 99 - torch.arange(50) // 10])


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def check_of(**ranks):
    columns = {name: x.reshape(100, -1) for name, x in ranks.items()}
    entries = {
        name: ((),) if x.shape[1] == 1 else tuple((i,) for i in range(x.shape[1]))
        for name, x in columns.items()
    }
    return CalibrationCheck(columns, entries, 99, 100)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_curves_of_known_ranks():
    even, narrow = plot_sbc(check_of(even=EVEN, narrow=NARROW))
    (share, difference), color = even.lines[-1].get_data(), even.lines[-1].get_color()
    np.testing.assert_allclose(share, np.linspace(0, 1, 101))
    np.testing.assert_allclose(difference, 0, atol=1e-12)
    assert color == POSTERIOR and legend(even) == ["95 % band, n = 100", "even"]
    share, difference = narrow.lines[-1].get_data()
    below = np.minimum(0.1 * np.arange(101), 0.5)  # ten of each rank up to 4
    expected = np.where(np.arange(101) <= 95, below, 0.1 * (np.arange(101) - 90))
    np.testing.assert_allclose(difference, expected - share, atol=1e-12)
    assert narrow.lines[-1].get_color() == ACCENT
    assert legend(narrow)[1] == "narrow: too narrow"
    assert narrow.get_ylabel() == "" and even.get_ylabel() == "ECDF - uniform"


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_the_band(level):
    """Its outline is that of the exact band, which the tests of ecdf_band check."""
    (ax,) = plot_sbc(check_of(even=EVEN), level=level)
    outline = ax.collections[0].get_paths()[0].vertices
    points, low, high = ecdf_band(100, 99, level)
    for p, a, b in zip(points[::7], low[::7], high[::7], strict=True):
        y = outline[np.isclose(outline[:, 0], p), 1]
        np.testing.assert_allclose([y.min(), y.max()], [a - p, b - p], atol=1e-12)
    assert legend(ax)[0] == f"{100 * level:g} % band, n = 100"


def test_the_worst_six_of_many():
    many = EVEN[:, None].repeat(1, 9)
    many[:, 7] = NARROW
    check = check_of(z=many, rate=EVEN)
    axes = plot_sbc(check)
    assert len(axes) == 6 and len(axes[0].figure.axes) == 6
    assert "z[7]: too narrow" in [legend(ax)[1] for ax in axes]
    assert [legend(ax)[1] for ax in plot_sbc(check, ["rate", "z[2]"])] == ["z[2]", "rate"]
    assert len(plot_sbc(check, ["z"])) == 9
    with pytest.raises(ValueError, match=r"show has \['w'\], and the check has"):
        plot_sbc(check, ["w"])


def test_axes_of_the_user():
    _, given = plt.subplots(1, 3)
    assert plot_sbc(check_of(even=EVEN, narrow=NARROW), ax=given) == list(given[:2])
    assert plot_sbc(check_of(even=EVEN), ax=given[2]) == [given[2]]
    with pytest.raises(ValueError, match="ax has 1 Axes, and 2 numbers are to be drawn"):
        plot_sbc(check_of(even=EVEN, narrow=NARROW), ax=given[0])
    with pytest.raises(ValueError, match="levels must lie between 0 and 1"):
        plot_sbc(check_of(even=EVEN), level=1.0)
