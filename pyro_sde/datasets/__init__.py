"""Small data sets for examples and first models, installed with the package.

``nile``
    ``year``, ``flow_1e8_m3``: annual flow of the Nile at Aswan, 1871 to 1970, in 10⁸ m³. As
    distributed with statsmodels; public domain.

``co2_weekly``
    ``date``, ``t_year``, ``co2_ppmv``: weekly means of atmospheric CO2 at Mauna Loa, March 1958 to
    December 2001, in ppm, of which 59 are missing. C. D. Keeling and T. P. Whorf, Scripps
    Institution of Oceanography, as distributed with statsmodels; public domain.

``coal_disasters``
    ``t_year``: dates, in years, of the 191 explosions in British coal mines that killed ten or
    more, March 1851 to March 1962. R. G. Jarrett (1979), A note on the intervals between
    coal-mining disasters, Biometrika 66; the data set ``coal`` of the R package boot.

``hudson_bay_lynx_hare``
    ``year``, ``lynx_thousands``, ``hare_thousands``: pelts of lynx and snowshoe hare collected by
    the Hudson's Bay Company, 1900 to 1920. As in knitr/lotka-volterra of the example models of
    Stan; BSD licence.

``irregular``
    ``t``, ``value``, ``count``, ``category``: 24 irregular times in two clusters, at which one
    latent Ornstein-Uhlenbeck path is seen as a heavy-tailed value, a count and a category.
    Simulated by ``examples/data/make_irregular.py``.
"""

from __future__ import annotations

import csv
import pathlib
from datetime import date

import torch
from torch import Tensor

__all__ = ["load", "names", "path"]

HERE = pathlib.Path(__file__).parent


def load(name: str) -> dict[str, Tensor]:
    """A data set as tensors, one for each column.

    All columns have torch's default dtype. A blank is NaN. A column called ``date`` counts the days
    since its first row, so that it is exact in single precision. Other columns are as in the file:
    dates in years, such as ``t_year``, are rounded to about an hour in single precision.

    Example::

        >>> nile = load("nile")
        >>> {column: tuple(values.shape) for column, values in nile.items()}
        {'year': (100,), 'flow_1e8_m3': (100,)}
        >>> nile["flow_1e8_m3"][:3]
        tensor([1120., 1160.,  963.])
        >>> co2 = load("co2_weekly")
        >>> co2["date"][:3], co2["co2_ppmv"].isnan().sum()
        (tensor([ 0.,  7., 14.]), tensor(59))

    :param name: One of :func:`names`.
    :returns: From the name of a column to its values, of shape ``(rows,)``, in the order of the
        file.
    """
    with open(path(name), newline="") as file:
        header, *rows = csv.reader(file)
    columns = zip(*rows, strict=True)
    return {column: _values(column, texts) for column, texts in zip(header, columns, strict=True)}


def names() -> tuple[str, ...]:
    """The data sets, in alphabetical order.

    Example::

        >>> names()
        ('co2_weekly', 'coal_disasters', 'hudson_bay_lynx_hare', 'irregular', 'nile')

    :returns: What :func:`load` and :func:`path` take.
    """
    return tuple(sorted(file.stem for file in HERE.glob("*.csv")))


def path(name: str) -> pathlib.Path:
    """The CSV file of a data set, inside of the installed package.

    Example::

        >>> path("nile").read_text().splitlines()[:2]
        ['year,flow_1e8_m3', '1871,1120']

    :param name: One of :func:`names`.
    :returns: The file, whose first row names the columns.
    """
    if name not in names():
        raise ValueError(f"name must be one of {', '.join(names())}: found {name!r}")
    return HERE / f"{name}.csv"


def _values(column: str, texts: tuple[str, ...]) -> Tensor:
    if column == "date":
        days = [date.fromisoformat(text).toordinal() for text in texts]
        return torch.tensor([float(day - days[0]) for day in days])
    return torch.tensor([float(text or "nan") for text in texts])
