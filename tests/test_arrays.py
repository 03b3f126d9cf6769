"""Data in the forms that people have them: taken for what they are, or refused by name."""

import datetime
import math
import warnings

import numpy as np
import pytest
import torch

import pyro_sde
from pyro_sde import check_series, fill_missing, pad_series, select, series_grid, time_grid
from pyro_sde._arrays import as_mask, as_numbers, as_tensor
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.guides.encoders import as_observations
from pyro_sde.metrics import crps

T = np.array([0.0, 1.0, 2.0])
GAP = np.array([1.0, np.nan, 3.0])
DAYS = np.array(["2020-01-01", "2020-01-02", "2020-01-03"], dtype="M8[D]")
REMEDY = r"dates - dates.min\(\)\) / numpy.timedelta64"


def hidden(values, where=(0, 1, 0)):
    """An array with a mask, whose data where it hides are those of another world."""
    return np.ma.masked_array(values, mask=np.broadcast_to(where, np.shape(values)))


def alike(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


FLOATS, COUNTS = hidden([1.0, 999.0, 3.0]), hidden([1, 999, 3])


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")
@pytest.mark.parametrize("values", [FLOATS, COUNTS, [1.0, np.ma.masked, 3.0]])
def test_what_a_mask_hides_is_missing(values):
    expected = pad_series([(T, GAP)])
    alike(pad_series([(T, values)]), expected)
    table = {"who": ["a"] * 3, "t": T, "y": values}
    if not isinstance(values, list):  # a list is no column
        alike(pad_series(table, series="who", time="t", values="y"), expected)
    alike(fill_missing(np.ma.asarray(values)[:, None]), fill_missing(GAP[:, None]))
    found = as_observations(T, np.ma.asarray(values))
    alike(found, as_observations(T, GAP))


def test_all_hidden_or_nothing():
    with pytest.raises(ValueError, match=r"series 0 has no observed value"):
        pad_series([(T, np.ma.masked_all(3))])
    alike(pad_series([(T, np.ma.masked_array(T))]), pad_series([(T, T)]))
    assert as_tensor(np.ma.masked_array([1, 2])).dtype == torch.int64  # nothing is hidden


def test_a_mask_of_times():
    late = hidden([[0.0, 1.0, 99.0]], (0, 0, 1))
    assert torch.equal(series_grid(late, dt=0.5), series_grid(T[None, :2], dt=0.5))
    with pytest.raises(ValueError, match=r"series 0: times\[2\] is nan; drop rows"):
        pad_series([(late[0], T)])
    with pytest.raises(ValueError, match=r"include must be finite"):
        time_grid(0.0, 2.0, dt=1.0, include=late[0])
    with pytest.raises(ValueError, match=r"at has 1 times that are not on the grid"):
        select(torch.zeros(3, 1), T, late[0])
    with pytest.raises(ValueError, match=r"times must be finite"):
        OrnsteinUhlenbeck(1.0, 0.0, 1.0, late[0])


def test_a_mask_of_a_mask():
    mask = hidden([True, True, True])
    alike(fill_missing(T[:, None], mask), fill_missing(T[:, None], np.array([True, False, True])))
    assert as_mask(mask).tolist() == [True, False, True]


def test_labels_of_series_that_are_hidden():
    table = {"who": hidden([1, 1, 2]), "t": T, "y": T}
    with pytest.raises(ValueError, match=r"'who' is missing in 1 rows"):
        pad_series(table, series="who", time="t", values="y")


def test_a_score_does_not_read_what_is_hidden():
    draws = torch.randn(10, 3)
    with pytest.raises(ValueError, match=r"observed has 1 of 3 entries not finite"):
        crps(draws, FLOATS)
    mask = ~np.ma.getmaskarray(FLOATS)
    assert crps(draws, FLOATS, mask) == crps(draws[:, mask], torch.tensor([1.0, 3.0]))


def moments():
    pandas = pytest.importorskip("pandas")
    zoned = pandas.date_range("2020-01-01", periods=3, tz="Europe/Paris")
    return [
        DAYS,
        pandas.Series(DAYS),
        zoned,
        pandas.Series(zoned),
        pandas.Series(list(zoned), dtype=object),
        [datetime.date(2020, 1, k) for k in (1, 2, 3)],
        pandas.Series(pandas.DatetimeIndex(["2020-01-01", None, "2020-01-03"])),
        pandas.period_range("2020-01", periods=3, freq="M"),
        ["2020-01-01", "2020-01-02", "2020-01-03"],
    ]


@pytest.mark.parametrize("kind", range(9))
def test_dates_are_no_numbers(kind):
    when = moments()[kind]
    with pytest.raises(ValueError, match=rf"series 0: times must be numbers: .*{REMEDY}"):
        pad_series([(when, T)])
    table = {"who": ["a"] * 3, "t": when, "y": T}
    with pytest.raises(ValueError, match=rf"column 't' must be numbers: .*{REMEDY}"):
        pad_series(table, series="who", time="t", values="y")
    with pytest.raises(ValueError, match=rf"include must be numbers: .*{REMEDY}"):
        time_grid(0.0, 1.0, dt=0.5, include=when)
    with pytest.raises(ValueError, match=rf"column 'y' must be numbers: .*{REMEDY}"):
        pad_series(table | {"t": T, "y": when}, series="who", time="t", values="y")


def test_the_remedy_for_dates_is_one():
    pandas = pytest.importorskip("pandas")
    for zone in (None, "Europe/Paris"):  # no change of clocks between the two
        dates = pandas.Series(pandas.date_range("2020-01-01", periods=3, tz=zone))
        days = (dates - dates.min()) / np.timedelta64(1, "D")
        assert pad_series([(days, T)]).times.tolist() == [[0.0, 1.0, 2.0]]
    with pytest.raises(
        ValueError, match=r"found timedelta64.*; divide by a unit, numpy.timedelta64"
    ):
        pad_series([(DAYS - DAYS[0], T)])
    with pytest.raises(TypeError, match=r"start must be a number: .*from dates subtract the first"):
        time_grid(DAYS[0].item(), DAYS[1].item(), dt=1.0)


@pytest.mark.parametrize(
    "values", [T + 1j, torch.from_numpy(T + 1j), [1j, 2.0, 3.0], np.array([1j, 2, 3], object)]
)
def test_complex_numbers(values):
    remedy = "must be real numbers.*the real and the imaginary part as two columns"
    with pytest.raises(ValueError, match=f"series 0: values {remedy}"):
        pad_series([(T, values)])
    with pytest.raises(ValueError, match=f"series 0: times {remedy}"):
        pad_series([(values, T)])
    with pytest.raises(ValueError, match=f"values {remedy}"):
        fill_missing(values)
    with pytest.raises(ValueError, match=f"column 'y' {remedy}"):
        pad_series({"s": [0] * 3, "t": T, "y": values}, series="s", time="t", values="y")


def test_rows_of_different_lengths():
    with pytest.raises(ValueError, match=r"values has rows of different lengths, 1, 2: .*put NaN"):
        pad_series([(T, [[1.0], [1.0, 2.0], [3.0]])])
    with pytest.raises(
        ValueError, match=r"times has rows of different lengths, 1, 2: .*pad_series"
    ):
        series_grid([[0.0, 1.0], [0.0]], dt=0.5)
    table = {"who": ["a"] * 3, "t": T, "y": [[1.0], [1.0, 2.0], [3.0]]}
    with pytest.raises(
        ValueError, match=r"'y' has several numbers in a row: make a column of each"
    ):
        pad_series(table, series="who", time="t", values="y")
    objects = np.empty(3, dtype=object)
    objects[:] = table["y"]
    with pytest.raises(ValueError, match=r"'y' must be numbers: entry 0 is \[1.0\], a list of len"):
        pad_series(table | {"y": objects}, series="who", time="t", values="y")


def test_columns():
    names = {"series": "s", "time": "t", "values": "y"}
    table = {"s": [0, 0, 0], "t": T, "y": T}
    with pytest.raises(ValueError, match=r"'y' is named twice"):
        pad_series(table, **names | {"values": ["y", "y"]})
    with pytest.raises(ValueError, match=r"one length: found \{'s': 3, 't': 3, 'y': 4\}"):
        pad_series(table | {"y": np.zeros(4)}, **names)
    with pytest.raises(ValueError, match=r"'y' has several numbers in a row"):
        pad_series(table | {"y": np.zeros((3, 2))}, **names)
    with pytest.raises(ValueError, match=r"'t' must be numbers: found torch.bool"):
        pad_series(table | {"t": np.array([False, True, True])}, **names)
    with pytest.raises(
        ValueError, match=r"'y' must be numbers: entry 1 is 'low', a str; give each"
    ):
        pad_series(table | {"y": ["1", "low", "3"]}, **names)
    assert pad_series(table | {"y": ["1", "2", "nan"]}, **names).mask.sum() == 2
    with pytest.raises(ValueError, match=r"table with columns \['s', 't', 'y'\]: name those"):
        pad_series(table)
    for nothing in (None, 3.0, "abc"):
        with pytest.raises(ValueError, match=r"data must be a list of pairs \(times, values\): f"):
            pad_series(nothing)
    for dtype in (torch.int64, "float64"):
        with pytest.raises(
            ValueError, match=r"dtype must be torch.float32 or torch.float64: found"
        ):
            pad_series([(T, T)], dtype=dtype)


def test_a_table_with_two_columns_of_a_name():
    pandas = pytest.importorskip("pandas")
    for twice in "sty":
        table = pandas.DataFrame({"s": [0, 0, 0], "t": T, "y": T})
        table = pandas.concat([table, table[[twice]]], axis=1)
        with pytest.raises(ValueError, match=f"data has 2 columns '{twice}': rename or drop all"):
            pad_series(table, series="s", time="t", values="y")


def test_columns_of_pandas():
    pandas = pytest.importorskip("pandas")
    expected = pad_series([(T, GAP)])
    for y in (
        pandas.Series([1, None, 3], dtype="Int64"),
        pandas.Series([1.0, None, "3"], dtype=object),
        pandas.Series([1.0, pandas.NA, 3.0], dtype=object),
    ):
        alike(pad_series([(T, y)]), expected)
        alike([as_tensor(y).nan_to_num(0.5)], [torch.tensor([1.0, 0.5, 3.0])])
    late = pandas.Series(T[1:], index=[7, 8])
    assert torch.equal(
        select(torch.arange(3.0)[:, None], T, late).flatten(), torch.tensor([1.0, 2.0])
    )


def test_arrays_that_torch_does_not_take():
    frozen = T.copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (T.astype(">f8"), T[::-1][::-1], T.astype(np.longdouble), frozen, T.astype("u2")):
            assert torch.equal(as_tensor(x).double(), torch.from_numpy(T))
            alike(pad_series([(x, x)]), pad_series([(T, T)]))
    assert torch.equal(as_tensor(T[::-1]), torch.tensor([2.0, 1.0, 0.0]))
    assert as_tensor(np.array([True, False])).dtype == torch.bool


class TestSinglePrecision:
    """Times that float32 cannot tell apart, such as seconds since 1970."""

    @pytest.fixture(autouse=True)
    def single(self):
        torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize(
        "base, step", [(1e9, 1.0), (1.7e9, 60.0), (1.7e9, 200.0), (1.5e18, 1e9)]
    )
    def test_they_are_refused(self, base, step):
        exact = base + step * np.arange(5)
        single = exact.astype(np.float32)
        for times in (exact, exact.tolist()):
            with pytest.raises(
                ValueError, match=r"torch.float32 rounds its times by .*subtract the"
            ):
                pad_series([(times, np.zeros(5))])
            assert pad_series([(times, np.zeros(5))], dtype=torch.float64).times.tolist() == [
                exact.tolist()
            ]
        for times in (single, torch.from_numpy(single)):
            for dtype in (None, torch.float64):
                with pytest.raises(ValueError, match=r"subtract the first time while they are int"):
                    pad_series([(times, np.zeros(5))], dtype=dtype)
        with pytest.raises(ValueError, match=r"subtract the first time while they are integers"):
            check_series(single[None], np.zeros((1, 5, 1)), np.ones((1, 5), bool))
        with pytest.raises(ValueError, match=r"Subtract the first time from all"):
            series_grid(single[None], dt=step)
        with pytest.raises(
            ValueError, match=r"argument 0 of the data increases by .*subtract the f"
        ):
            pyro_sde.fit(lambda t: None, lambda t: None, exact, steps=1)
        if len(set(single.tolist())) == 5:
            with pytest.raises(
                ValueError, match=r"times are .* apart on average.*subtract the first"
            ):
                OrnsteinUhlenbeck(1.0, 0.0, 1.0, single)

    def test_the_remedies_are_ones(self):
        exact = 1.7e9 + 60.0 * np.arange(5)
        since = exact - exact[0]
        expected = torch.from_numpy(since)
        assert torch.equal(pad_series([(since, since)]).times[0].double(), expected)
        assert torch.equal(as_tensor(since).double(), expected)
        assert torch.equal(OrnsteinUhlenbeck(1.0, 0.0, 1.0, exact).times, torch.from_numpy(exact))
        assert torch.equal(
            OrnsteinUhlenbeck(1.0, 0.0, 1.0, as_tensor(since)).times.double(), expected
        )

    def test_integers_become_times(self):
        with pytest.raises(ValueError, match=r"times increases by 1 on average, and torch.float32"):
            OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.arange(1_700_000_000, 1_700_000_005))
        found = OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.arange(5)).times
        assert found.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]

    def test_what_single_precision_holds_is_taken(self):
        rng = np.random.default_rng(0)
        for x in (
            np.linspace(0, 1, 100_001),
            1871.0 + np.arange(1200) / 12,
            1.7e9 + 86_400.0 * np.arange(30),
            np.sort(rng.normal(size=10_000)),
            rng.normal(size=(10_000, 2)),
            np.sort(rng.normal(size=(10_000, 2)), -1),
            np.array([0.3, 0.1 + 0.2]),  # the same but for rounding
            np.full(5, 0.1),
            np.array([0.1]),
            np.array([np.nan, 1e9, 1e9 + 1]),
            np.zeros(0),
        ):
            assert torch.equal(as_tensor(x).nan_to_num(), torch.from_numpy(x).float().nan_to_num())

    def test_numbers_beyond_its_range(self):
        with pytest.raises(ValueError, match=r"values must be .*torch.float32 can hold: .*1e\+300"):
            pad_series([(T, [1.0, 1e300, 2.0])])
        with pytest.raises(ValueError, match=r"values\[1, 0\] is inf; mask it"):
            pad_series([(T, [1.0, math.inf, 2.0])])


def test_masks_are_boolean():
    y = torch.ones(3, 1)
    ones = fill_missing(y, torch.tensor([1.0, 0.0, 1.0]))[1]
    assert ones.flatten().tolist() == [True, False, True]
    for weight in (0.5, math.nan):
        with pytest.raises(
            ValueError, match=f"mask must be boolean.*: found {weight}; pass mask > 0"
        ):
            fill_missing(y, torch.tensor([weight, 0.0, 1.0]))
    with pytest.raises(ValueError, match=r"mask must have the shape of values, \(3, 1\)"):
        fill_missing(y, torch.tensor([True, False]))


def test_a_missing_value_is_replaced_by_one_that_was_observed():
    """Whatever the shape: 0 would not be in the support of a LogNormal."""
    values, mask = fill_missing(torch.tensor([math.nan, 2.0, 3.0]))
    assert values.tolist() == [2.0, 2.0, 3.0] and mask.tolist() == [False, True, True]
    values, _ = fill_missing(torch.tensor([[math.nan, 2.0], [math.nan, 3.0]]))
    assert values.tolist() == [[2.0, 2.0], [2.0, 3.0]]
    assert fill_missing(torch.tensor([math.nan]))[0].tolist() == [0.0]
    assert fill_missing(torch.zeros(0, 1))[0].shape == (0, 1)
    with pytest.raises(ValueError, match=r"values must have shape \(..., n, D\)"):
        fill_missing(torch.tensor(1.0))


def test_numbers_keep_their_dtype():
    torch.set_default_dtype(torch.float32)
    assert as_numbers([0.5, 1], "x").dtype == torch.float32
    assert as_numbers([np.float64(0.5)], "x").dtype == torch.float64
    assert as_numbers(T, "x").dtype == torch.float64
    assert as_numbers(T, "x", torch.float32).dtype == torch.float32
    assert as_numbers(torch.ones(2, dtype=torch.int32), "x").dtype == torch.int32
    x = torch.ones(2, requires_grad=True)
    assert as_numbers(x, "x") is x
    assert as_tensor(x) is x and as_tensor("text") == "text"
