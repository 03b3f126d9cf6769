"""Series of different lengths: padding, checks, and a grid for each."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sde import (
    AutoSDE,
    Series,
    TraceSDE_ELBO,
    check_series,
    pad_series,
    select,
    series_grid,
    time_grid,
)
from pyro_sde.distributions import OrnsteinUhlenbeck

NAN = math.nan


def random_series(lengths, D=2, dtype=torch.float64, span=3.0):
    """Some values missing, but never the first."""
    data = []
    for n in lengths:
        values = torch.randn(n, D)
        values[1:][torch.rand(n - 1, D) < 0.3] = NAN
        data.append((torch.rand(n).sort().values * span, values))
    return data, pad_series(data, dtype=dtype)


def test_pad_series():
    data, batch = random_series([3, 1, 7, 4])
    assert isinstance(batch, Series)
    assert batch.times.shape == (4, 7)
    assert batch.values.shape == batch.mask.shape == (4, 7, 2) and batch.mask.dtype == torch.bool
    for s, (t, y) in enumerate(data):
        n = len(t)
        assert torch.equal(batch.times[s, :n], t)
        assert (batch.times[s, n:] == t[-1]).all()
        assert torch.equal(batch.mask[s, :n], ~y.isnan())
        assert torch.equal(batch.values[s, :n][batch.mask[s, :n]], y[~y.isnan()])
        assert not batch.mask[s, n:].any()
    # Missing values are one that was observed: in the support of any likelihood.
    for d in range(2):
        value, mask = batch.values[..., d], batch.mask[..., d]
        assert (value[~mask] == value[mask][0]).all()


def test_every_kind_of_array():
    """Lists with None, numpy of any dtype, tensors: the same series, in the dtype asked for."""
    times, values = [0, 1, 3], [1.5, None, 2.5]
    floats = np.array(values, dtype=float)
    pairs = [
        (times, values),
        (np.array(times, dtype=np.int32), floats),
        (torch.tensor(times), torch.tensor(floats).float()),
        (tuple(times), floats[:, None]),
    ]
    batch = pad_series(pairs)
    assert batch.times.dtype == batch.values.dtype == torch.get_default_dtype()
    for part in batch:
        assert (part == part[:1]).all()
    assert batch.values[0, :, 0].tolist() == [1.5, 1.5, 2.5]
    assert pad_series(pairs, dtype=torch.float32).values.dtype == torch.float32
    floats[0] = 7.0
    assert batch.values[1, 0, 0] == 1.5  # a copy


def test_a_long_table():
    """Rows of the series mixed; numbered as they first appear, order of the rows kept."""
    table = {
        "who": ["b", "a", "b", "c", "a", "b"],
        "t": np.array([0, 1, 2, 0, 3, 4]),
        "x": [1.0, 2.0, NAN, 4.0, 5.0, 6.0],
        "y": np.array([10.0, 20, 30, 40, NAN, 60]),
    }
    batch = pad_series(table, series="who", time="t", values=["x", "y"])
    pairs = [
        ([0, 2, 4], [[1.0, 10.0], [NAN, 30.0], [6.0, 60.0]]),
        ([1, 3], [[2.0, 20.0], [5.0, NAN]]),
        ([0], [[4.0, 40.0]]),
    ]
    for found, expected in zip(batch, pad_series(pairs), strict=True):
        assert torch.equal(found, expected)
    one = pad_series(table, series="who", time="t", values="y")
    assert torch.equal(one.values, batch.values[..., 1:])


def test_a_pandas_table():
    pandas = pytest.importorskip("pandas")
    columns = {"who": ["b", "a", "b"], "t": [0.0, 1.0, 2.0], "x": [1.0, None, 3.0], "y": [1, 2, 3]}
    table = pandas.DataFrame(columns).convert_dtypes()  # those with a missing value of their own
    table.index = [5, 5, 1]
    args = {"series": "who", "time": "t", "values": ["x", "y"]}
    for found, expected in zip(pad_series(table, **args), pad_series(columns, **args), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"no column 'z': found \['who', 't', 'x', 'y'\]"):
        pad_series(table, series="who", time="t", values="z")
    with pytest.raises(ValueError, match=r"is a table with columns.*series=, time= and values="):
        pad_series(table)
    table["t"] = pandas.to_datetime(["2020-01-01"] * 3)
    with pytest.raises(ValueError, match="column 't' must be numbers: found datetime64"):
        pad_series(table, **args)
    table.loc[1, "who"] = pandas.NA
    with pytest.raises(ValueError, match="column 'who' is missing in"):
        pad_series(table, **args)


def test_a_row_without_values_is_kept():
    batch = pad_series([([0.0, 1.0, 2.0], [[NAN, NAN], [1.0, NAN], [NAN, NAN]]), ([5.0], [[1, 2]])])
    assert batch.times[0].tolist() == [0, 1, 2]
    assert batch.mask[0].tolist() == [[False, False], [True, False], [False, False]]
    grid = series_grid(batch.times, batch.mask, dt=10.0)
    assert grid.tolist()[0] == [0, 1, 2, 5]  # a prediction can be asked for there


def test_rows():
    _, batch = random_series([2, 5, 3])
    for index in (torch.tensor([2, 0]), slice(1, 3), torch.tensor([True, False, True])):
        some = batch.rows(index)
        assert isinstance(some, Series)
        assert all(torch.equal(a, b[index]) for a, b in zip(some, batch, strict=True))


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "no series"),
        ([([0.0], [1.0]), ([], [])], "series 1 is empty"),
        ([([0.0, 1.0], [1.0])], r"series 0: .* found \(2,\) and \(1, 1\)"),
        ([([0.0], [1.0]), ([0.0], [[1.0, 2.0]])], "series 1 has 2 values a row, series 0 has 1"),
        ([([0.0], [1.0], [2.0])], "series 0 must be a pair"),
        ([([0.0, 1.0], ["a", "b"])], "series 0: values must be numbers"),
        ([([0.0], [1.0]), ([0.0, NAN], [1.0, NAN])], r"series 1: times\[1\] is nan"),
        ([([0.0], [1.0]), ([0.0, 2.0, 1.0], [1.0, NAN, 1.0])], "series 1: .*=1 follows 2; sort"),
        ([([0.0, 1.0, 1.0], [1.0, NAN, 1.0])], "series 0 has the time 1 twice"),
        ([([0.0, 1.0], [1.0, -math.inf])], r"series 0: values\[1, 0\] is -inf"),
        ([([0.0], [1.0]), ([0.0], [NAN]), ([0.0], [NAN])], r"series 1 \(and 1 more\) has no obs"),
    ],
)
def test_what_cannot_be_padded(data, message):
    with pytest.raises(ValueError, match=message):
        pad_series(data)


def test_errors_of_a_table_use_its_labels():
    table = {"who": ["x7", "x9", "x7"], "t": [1.0, 0.0, 0.5], "y": [1.0, 2.0, 3.0]}
    args = {"series": "who", "time": "t", "values": "y"}
    with pytest.raises(ValueError, match=r"series 'x7': times must increase.*=0.5 follows 1;"):
        pad_series(table, **args)
    with pytest.raises(ValueError, match="series 'x9' has no observed"):
        pad_series(table | {"t": [0.0, 0.0, 1.0], "y": [1.0, NAN, 3.0]}, **args)
    with pytest.raises(ValueError, match=r"no column 'z': found \['who', 't', 'y'\]"):
        pad_series(table, **args | {"time": "z"})
    with pytest.raises(ValueError, match=r"all of series=, time= and values=.*time=None"):
        pad_series(table, series="who", values="y")
    with pytest.raises(ValueError, match="'who' is missing in 2 rows"):
        pad_series(table | {"who": [NAN, "a", float("nan")]}, **args)
    with pytest.raises(ValueError, match="data has no rows"):
        pad_series({"who": [], "t": [], "y": []}, **args)
    with pytest.raises(ValueError, match=r"column 't' must be numbers: found datetime64.*subtract"):
        pad_series(table | {"t": np.array(["2020-01-01"] * 3, dtype="M8[D]")}, **args)


def test_two_times_that_single_precision_cannot_tell_apart():
    data = [([1e9, 1e9 + 1], [1.0, 2.0])]
    with pytest.raises(ValueError, match=r"rounds its times by up to 1, .*dtype=torch.float64"):
        pad_series(data, dtype=torch.float32)
    rounded = [(torch.tensor(data[0][0], dtype=torch.float32), data[0][1])]
    with pytest.raises(ValueError, match=r"twice: .*subtract the first time while they are int"):
        pad_series(rounded, dtype=torch.float64)
    assert pad_series(data, dtype=torch.float64).times.diff().item() == 1


def good():
    return random_series([5, 3, 8])[1]


@pytest.mark.parametrize("flat", [False, True])
def test_padding_is_not_looked_at(flat):
    times, values, mask = good()
    mask[2, 3] = False
    padding = ~mask.any(-1)
    times[padding], values[padding] = NAN, math.inf
    values[~mask] = NAN
    check_series(times, values, mask, 0.0, 3.0)
    times[padding] = 7.0  # that of row 3 is before other rows
    if flat:
        mask = mask.any(-1)
        values = values.nan_to_num(0.0)
    check_series(times, values, mask, 0.0, 3.0)


@pytest.mark.parametrize("names, who", [(None, "series 2"), (["a", "b", "c"], "series 'c'")])
def test_check_series_names_the_series(names, who):
    def broken(message, start=0.0, end=3.0, **at):
        batch = {k: v.clone() for k, v in good()._asdict().items()}
        batch["mask"][2, :4] = True
        for part, (place, value) in at.items():
            batch[part][(2, *place)] = value
        with pytest.raises(ValueError, match=f"^{who}.*{message}"):
            check_series(**batch, start=start, end=end, names=names)

    broken(r"times\[1\] is nan", times=((1,), NAN))
    broken(r"times\[1\] is inf", times=((1,), math.inf))
    broken(r"times\[3\]=-1 follows .*; sort", start=-2.0, times=((3,), -1.0))
    broken("has the time 0 twice", times=((slice(0, 2),), 0.0))
    broken(r"times\[0\]=-1 is outside \[0, 3\]", times=((0,), -1.0))
    broken(r"values\[2, 1\] is inf", values=((2, 1), math.inf))
    broken(r"values\[2, 1\] is nan", values=((2, 1), NAN))
    broken("no observed value", mask=((), False))


def test_a_time_outside_by_rounding_is_inside():
    times = torch.tensor([[0.1, 0.7]], dtype=torch.float32)
    values, mask = torch.ones(1, 2, 1), torch.ones(1, 2, dtype=torch.bool)
    check_series(times, values, mask, start=float(times[0, 0]) + 1e-9, end=0.7 - 1e-9)
    for bound in ({"start": 0.2}, {"end": 0.6}):
        with pytest.raises(ValueError, match=r"series 0: times.* is outside"):
            check_series(times, values, mask, **bound)


def test_shapes_are_checked():
    times, values, mask = good()
    for args, message in [
        ((times[0], values, mask), "times must be floating point of shape"),
        ((times.long(), values, mask), "found torch.int64"),
        ((times, values[:2], mask), "values must have shape"),
        ((times, values, mask.double()), "mask must be boolean"),
        ((times, values, mask[:, :2]), "mask must have shape"),
        ((times, values, mask.repeat(1, 1, 2)), "mask has 4 entries a row, values 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_series(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dt", [0.01, 0.2, 10.0])
def test_grids_contain_the_times_of_their_series(dtype, dt):
    _, batch = random_series([1, 20, 3, 60, 2], dtype=dtype)
    grid = series_grid(batch.times, batch.mask, dt=dt, start=-0.5, end=4.0)
    assert grid.dtype == dtype and grid.shape[0] == 5
    for row, times in zip(grid, batch.times, strict=True):
        assert torch.isin(times, row).all()
        own = time_grid(-0.5, 4.0, dt=dt, include=times)
        assert torch.isin(own, row).all()  # what time_grid gives, and more points between
    steps = grid.diff(dim=-1)
    assert (steps > 0).all() and steps.max() <= dt + 1e-6
    assert (grid[:, 0] == -0.5).all() and (grid[:, -1] == 4.0).all()
    # As many points as the longest needs.
    assert grid.shape[1] == max(
        len(time_grid(-0.5, 4.0, dt=dt, include=times)) for times in batch.times
    )


def halve_the_longest(row, T):
    steps = row.diff().tolist()
    while len(steps) < T - 1:
        half = max(steps) / 2
        steps.remove(2 * half)
        steps += [half, half]
    return torch.tensor(sorted(steps))


def test_the_longest_steps_are_halved():
    """One at a time, in plain Python, leaves the same steps (of equal ones, any may be halved)."""
    times = torch.rand(6, 40).sort(-1).values
    lengths = [40, 1, 3, 11, 25, 0]
    for row, n in zip(times, lengths, strict=True):
        row[n:] = row[n - 1] if n else 0.0
    grid = series_grid(times, dt=0.3, start=0.0, end=1.0)
    for row, t in zip(grid, times, strict=True):
        own = time_grid(0.0, 1.0, dt=0.3, include=t)
        assert torch.isin(own, row).all()
        expected = halve_the_longest(own, grid.shape[1])
        torch.testing.assert_close(row.diff().sort().values, expected, rtol=0, atol=1e-15)


def test_bounds_and_masked_times():
    times = torch.tensor([[1.0, 2.0, NAN], [1.5, 4.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    grid = series_grid(times, mask, dt=100.0)
    assert grid[:, 0].tolist() == [1, 1] and grid[:, -1].tolist() == [9, 9]
    grid = series_grid(times, mask, dt=100.0, end=5.0)
    assert grid[:, -1].tolist() == [5, 5] and 9.0 not in grid
    mask[1, 2] = True
    with pytest.raises(ValueError, match=r"series 1: times\[2\]=9 is outside \[1, 5\]"):
        series_grid(times, mask, dt=1.0, end=5.0)
    mask[0, 2] = True
    with pytest.raises(ValueError, match=r"series 0: times\[2\] is nan"):
        series_grid(times, mask, dt=1.0)
    with pytest.raises(ValueError, match="no finite entry"):
        series_grid(torch.full((2, 1), NAN), mask[:, 2:] & False, dt=1.0)
    with pytest.raises(ValueError, match="dt must be positive"):
        series_grid(times[:, :2], dt=0.0)


def test_near_duplicates_are_merged_as_in_time_grid():
    times = torch.tensor([[0.5, 0.5 + 4e-7, 0.5 + 8e-7, 0.5 + 1.2e-6, 0.25 + 4e-7, 1.0 - 1e-8]])
    grid = series_grid(times, dt=0.25, start=0.0, end=1.0)
    assert torch.equal(grid[0], time_grid(0.0, 1.0, dt=0.25, include=times[0]))
    assert grid[0].tolist() == [0, 0.25 + 4e-7, 0.5, 0.5 + 1.2e-6, 0.75, 1 - 1e-8]
    select(grid.unsqueeze(-1), grid, times)


def test_series_in_a_plate():
    """One grid a series: the law at its own times is that of the process, and a guide trains."""
    data, batch = random_series([4, 9, 1, 6], D=1)
    grid = series_grid(batch.times, batch.mask, dt=0.2)
    process = {"rate": 1.3, "loc": 0.4, "scale": 0.8}

    def model(batch, y=None):
        with pyro.plate("series", len(batch.times)):
            z = pyro.sample("z", OrnsteinUhlenbeck(**process, times=grid))
            loc = select(z, grid, batch.times)
            noisy = dist.Normal(loc, 0.1).mask(batch.mask).to_event(2)
            return pyro.sample("y", noisy, obs=y)

    trace = pyro.poutine.trace(model).get_trace(batch, batch.values)
    z = trace.nodes["z"]["value"]
    log_prob = trace.nodes["y"]["fn"].log_prob(batch.values)
    for s, (t, y) in enumerate(data):
        at = torch.isin(grid[s], t)
        seen = ~y[:, 0].isnan()
        expected = dist.Normal(z[s, at][seen], 0.1).log_prob(y[seen]).sum()
        torch.testing.assert_close(log_prob[s], expected)
    # A path on the grid of one series, alone, has the density it has in the plate.
    for s in range(4):
        alone = OrnsteinUhlenbeck(**process, times=grid[s]).log_prob(z[s])
        torch.testing.assert_close(alone, trace.nodes["z"]["fn"].log_prob(z)[s])
    svi = SVI(model, AutoSDE(model), pyro.optim.Adam({"lr": 1e-2}), TraceSDE_ELBO())
    assert all(math.isfinite(svi.step(batch, batch.values)) for _ in range(3))
