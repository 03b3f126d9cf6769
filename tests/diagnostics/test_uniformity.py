"""Tests of uniform ranks against all that can happen, and their power."""

import itertools
import math

import numpy as np
import pytest
import torch

from pyro_sde.diagnostics import CalibrationCheck, RankCheck
from pyro_sde.diagnostics.calibration_check import CLAIMED, LEVEL
from pyro_sde.diagnostics.uniformity import ecdf_band, ecdf_p_value, normal_scores, sum_p_value

P_VALUES = {
    "shift": lambda ranks, draws: sum_p_value(ranks, draws, 1),
    "width": lambda ranks, draws: sum_p_value(ranks, draws, 2),
    "shape": ecdf_p_value,
}


def all_ranks(n, draws):
    return np.array(list(itertools.product(range(draws + 1), repeat=n)))


def ranks_of(n, number, shift=0.0, width=1.0, draws=99):
    """Ranks of Normal(shift, width) among draws from Normal(0, 1), of shape ``(number, n)``."""
    below = torch.special.ndtr(shift + width * torch.randn(number, n))
    return torch.binomial(torch.full_like(below, draws), below).long()


@pytest.mark.parametrize("n, draws", [(2, 9), (3, 4), (4, 3), (6, 1)])
@pytest.mark.parametrize("kind", P_VALUES)
def test_p_values_are_exact(kind, n, draws):
    """Each equals the probability of one as small; twice that of a side is not below it."""
    found = np.array([P_VALUES[kind](ranks, draws) for ranks in all_ranks(n, draws)])
    for p in np.unique(found.round(9)):
        share = (found < p + 1e-9).mean()
        if kind == "shape":
            assert share == pytest.approx(p, abs=1e-9)
        else:
            assert share <= p + 1e-9
    # The deviations that say most are all ranks at one end.
    least = found[[0, -1]] if kind != "width" else found.min()
    assert least == pytest.approx(found.min())


@pytest.mark.parametrize("kind", ["shift", "width"])
def test_one_sided_probabilities_of_sums(kind):
    """Against the sums of all ranks that there are, of scores as they are rounded."""
    n, draws, power = 4, 5, {"shift": 1, "width": 2}[kind]
    scores = np.rint((normal_scores(draws) ** power - (normal_scores(draws) ** power).min()) * 100)
    every = all_ranks(n, draws)
    sums = scores[every].sum(1)
    for ranks, total in zip(every[::37], sums[::37], strict=True):
        exact = 2 * min((sums <= total).mean(), (sums >= total).mean())
        assert P_VALUES[kind](ranks, draws) == pytest.approx(min(exact, 1.0), abs=1e-9)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("n, draws", [(2, 9), (4, 3), (5, 4)])
def test_the_band_holds_as_many_curves_as_it_says(n, draws, level):
    """All curves are counted. A curve leaves the band where its p-value is below 1 - level."""
    points, low, high = ecdf_band(n, draws, level)
    every = all_ranks(n, draws)
    below = np.stack([(every < k).mean(1) for k in np.rint(points * (draws + 1))], 1)
    inside = ((below >= low - 1e-9) & (below <= high + 1e-9)).all(1)
    assert inside.mean() >= level - 1e-9
    p = np.array([ecdf_p_value(ranks, draws) for ranks in every])
    np.testing.assert_array_equal(inside, p > 1 - level + 1e-9)


@pytest.mark.parametrize("n, draws", [(20, 99), (100, 99), (50, 9)])
def test_p_values_of_uniform_ranks_are_uniform(n, draws):
    number = 400
    ranks = torch.randint(draws + 1, (number, n)).numpy()
    for kind, p_value in P_VALUES.items():
        p = np.array([p_value(r, draws) for r in ranks])
        for level in (0.02, 0.1, 0.5, 0.9):
            error = math.sqrt(level * (1 - level) / number)
            share = (p <= level).mean()
            assert share < level + 4 * error, kind
            # The steps of a p-value: 0.05 is about that of a sum of few ranks.
            assert share > level - 4 * error - 0.05, kind


def test_a_check_of_exact_posteriors_finds_nothing_in_99_of_100():
    number, quantities = 300, 4
    wrong = 0
    for _ in range(number):
        ranks = {"x": torch.randint(100, (30, quantities))}
        check = CalibrationCheck(ranks, {"x": tuple((i,) for i in range(quantities))}, 99, 30)
        wrong += not check.is_right
        assert check.is_right == (check.p_values["x"].min() >= LEVEL / quantities)
    assert wrong < LEVEL * number + 4 * math.sqrt(LEVEL * number)


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize("kind", ["low", "high", "narrow"])
def test_the_power_that_the_verdict_claims(n, kind):
    number = 200
    check = CalibrationCheck({"x": torch.zeros(n, 1).long()}, {"x": ((),)}, 99, n)
    shift, factor = check.resolution
    wrong = {"low": (shift, 1.0), "high": (-shift, 1.0), "narrow": (0.0, factor)}[kind]
    found = [RankCheck("x", (), ranks, 99) for ranks in ranks_of(n, number, *wrong)]
    share = sum(q.deviation(check.level) == f"too {kind}" for q in found) / number
    error = math.sqrt(CLAIMED * (1 - CLAIMED) / number)
    assert CLAIMED - 4 * error < share < 0.97  # it would claim too little


@pytest.mark.parametrize(
    "shift, width, words",
    [
        (0.0, 1.7, "too narrow"),
        (0.0, 4.0, "too narrow"),
        (0.0, 0.5, "too wide"),
        (0.6, 1.0, "too low"),
        (-3.0, 1.0, "too high"),
        (0.8, 2.0, "too low and too narrow"),
        (-0.4, 0.4, "too high and too wide"),
    ],
)
def test_the_deviation_in_words(shift, width, words):
    found = RankCheck("x", (), ranks_of(300, 1, shift, width)[0], 99)
    assert found.deviation() == words and found.p_value < 1e-5


def test_another_shape():
    """Scores of a fair coin, -1 or 1, have the mean and the variance of a Normal."""
    level = torch.special.ndtr(torch.tensor([-1.0, 1.0])) * 100
    ranks = level.long().repeat(50)
    assert RankCheck("x", (), ranks, 99).deviation() == "of another shape"


@pytest.mark.parametrize("shift, width", [(0.0, 1.0), (0.5, 1.0), (0.0, 0.7), (-0.3, 1.3)])
def test_shift_and_ratio_are_estimated(shift, width):
    """Of 999 draws, which clip few scores, within four of the standard errors that are given."""
    found = RankCheck("x", (), ranks_of(1000, 1, shift, width, draws=999)[0], 999)
    assert abs(found.shift.value - shift) < 4 * found.shift.error
    assert found.shift.error == pytest.approx(width / math.sqrt(1000), rel=0.1)
    assert abs(found.ratio.value - width) < 4 * found.ratio.error
    assert found.ratio.error == pytest.approx(width / math.sqrt(2000), rel=0.1)


def test_the_table():
    ranks = {"rate": ranks_of(100, 1).T, "z": ranks_of(100, 25, width=2.0).T}
    entries = {"rate": ((),), "z": tuple((i, 0) for i in range(25))}
    check = CalibrationCheck(ranks, entries, 99, 103, {7: "diverged"})
    text = str(check).splitlines()
    assert text[0].startswith(
        "simulation-based calibration: 100 of 103 simulations (1 failed, 2 not made), 26 "
        "quantities: the posterior is not calibrated: z["
    )
    assert text[0].endswith(", 22 more are wrong") and repr(check) == str(check)
    assert text[1].split()[:2] == ["site", "entry"]
    assert text[3].startswith("z") and text[3].endswith("too narrow")
    assert len(text) == 3 + 20 + 1 and text[-1] == "... and 6 with larger p-values"
    assert check.p_values["z"].shape == (25,) and float(check.p_values["rate"]) > 0.001
