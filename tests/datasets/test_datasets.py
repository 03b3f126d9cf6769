"""The data sets of the package: what is read is what is in the files."""

import csv
from datetime import date

import pytest
import torch

from pyro_sde import datasets

ROWS = {
    "co2_weekly": 2284,
    "coal_disasters": 191,
    "hudson_bay_lynx_hare": 21,
    "irregular": 24,
    "nile": 100,
}


def test_names_are_those_of_the_files():
    assert datasets.names() == tuple(sorted(ROWS))
    assert all(datasets.path(name).is_file() for name in ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_every_number_is_that_of_the_file(name):
    with open(datasets.path(name)) as file:
        table = list(csv.DictReader(file))
    data = datasets.load(name)
    assert list(data) == list(table[0])
    for column, values in data.items():
        assert values.shape == (ROWS[name],) and values.dtype == torch.get_default_dtype()
        for row, value in zip(table, values.tolist(), strict=True):
            if column == "date":
                days = date.fromisoformat(row["date"]) - date.fromisoformat(table[0]["date"])
                assert value == days.days
            elif row[column]:
                assert value == float(row[column])
            else:
                assert value != value


def test_what_is_known_of_the_data():
    """By other sources: the mean of the Nile's flow, the gaps in CO2, the peak of the lynx."""
    nile = datasets.load("nile")
    assert torch.equal(nile["year"], torch.arange(1871.0, 1971.0))
    assert nile["flow_1e8_m3"].mean() == pytest.approx(919.35)  # as R's mean(Nile)
    co2 = datasets.load("co2_weekly")
    assert int(co2["co2_ppmv"].isnan().sum()) == 59
    assert (co2["date"].diff() == 7).all()
    pelts = datasets.load("hudson_bay_lynx_hare")
    assert pelts["year"][pelts["lynx_thousands"].argmax()] == 1904


def test_dates_are_exact_in_single_precision():
    exact = datasets.load("co2_weekly")["date"]
    torch.set_default_dtype(torch.float32)
    rounded = datasets.load("co2_weekly")["date"]
    assert rounded.dtype == torch.float32 and torch.equal(rounded.double(), exact)


@pytest.mark.parametrize("function", [datasets.load, datasets.path])
@pytest.mark.parametrize("name", ["Nile", "nile.csv", "../datasets/nile", ""])
def test_an_unknown_name_lists_the_names(function, name):
    with pytest.raises(ValueError, match=r"co2_weekly, .*irregular, nile: found ") as caught:
        function(name)
    assert repr(name) in str(caught.value)
