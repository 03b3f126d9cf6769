"""Padding: series of different lengths as tensors of one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._arrays import MISSING, as_mask, as_numbers, in_dtype
from .._checks import broadcasts_to
from .checks import check_rounding, check_times, check_values

__all__ = ["Series", "fill_missing", "pad_series"]


class Series(NamedTuple):
    """S series of at most n observations of D numbers, shorter ones padded.

    Example::

        >>> import torch
        >>> from pyro_sde import pad_series
        >>> batch = pad_series([([0.0, 0.5, 2.0], [1.0, 2.0, 3.0]), ([1.0], [4.0])])
        >>> batch.times.shape, batch.values.shape
        (torch.Size([2, 3]), torch.Size([2, 3, 1]))
        >>> batch.rows([1]).mask.flatten()
        tensor([ True, False, False])
    """

    times: Tensor
    """Times of shape ``(S, n)``; the padding repeats the last time of a series."""
    values: Tensor
    """Values of shape ``(S, n, D)``. Missing entries hold some observed value, at which any
    likelihood can be evaluated before the mask removes it."""
    mask: Tensor
    """True where a value was observed, of shape ``(S, n, D)``."""

    def rows(self, index: Any) -> Series:
        """Some of the series, such as the mini-batch that a subsampling plate chose.

        :param index: Numbers of series, a slice or a boolean mask.
        :returns: These series, with the same padding.
        """
        return Series(*(part[index] for part in self))


def pad_series(
    data: Any,
    *,
    series: str | None = None,
    time: str | None = None,
    values: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Series:
    """Pad series of different lengths to tensors of one shape, with a mask.

    Missing values (NaN, None, or hidden by the mask of a NumPy array) are masked. A row without any
    value is kept and masked, so :func:`series_grid` puts its time on the grid: add such rows to ask
    for predictions at their times. The times of a series must increase.

    Example::

        >>> batch = pad_series([([0.0, 0.5, 2.0], [1.0, float("nan"), 3.0]), ([1.0], [4.0])])
        >>> batch.times.tolist()
        [[0.0, 0.5, 2.0], [1.0, 1.0, 1.0]]
        >>> batch.mask[..., 0].tolist()
        [[True, False, True], [True, False, False]]
        >>> table = {"who": ["b", "a", "b"], "day": [0, 0, 3], "weight": [1.0, 2.0, 3.0]}
        >>> pad_series(table, series="who", time="day", values="weight").times.tolist()
        [[0.0, 3.0], [0.0, 0.0]]

    :param data: A list of ``(times, values)`` of shapes ``(n,)`` and ``(n,)`` or ``(n, D)``; or a
        long table with a row for each observation, a pandas DataFrame or anything else that gives
        a column as ``data[name]``. Series are numbered in the order in which they first appear,
        as in ``table[series].unique()``.
    :param series: The name of the column that says which series a row belongs to.
    :param time: The name of the column of times, as numbers: from dates subtract the first, and
        divide by a unit.
    :param values: The name of the column of values, or a list of D names.
    :param dtype: The dtype of times and values, by default torch's default dtype.
    :returns: A :class:`Series` of times ``(S, n)``, values ``(S, n, D)`` and mask ``(S, n, D)``.
    """
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be torch.float32 or torch.float64: found {dtype!r}")
    names: list | None = None
    if series is None and time is None and values is None:
        t, y, lengths = _from_pairs(data, dtype)
    elif series is None or time is None or values is None:
        raise ValueError(
            "a table needs all of series=, time= and values=: found "
            f"series={series!r}, time={time!r}, values={values!r}"
        )
    else:
        t, y, lengths, names = _from_table(data, series, time, values, dtype)
    lengths = lengths.to(y.device)
    place = torch.arange(int(lengths.max()), device=y.device)
    row = lengths.cumsum(0).unsqueeze(-1) - lengths.unsqueeze(-1)
    index = row + torch.minimum(place, lengths.unsqueeze(-1) - 1)
    present = place < lengths.unsqueeze(-1)
    exact = t.to(y.device)[index]
    times = exact.to(dtype)
    padded = y[index]
    mask = present.unsqueeze(-1) & ~padded.isnan()
    check_rounding(exact, times, lengths, names)
    check_times(times, present, None, None, names)
    check_values(padded, mask, names)
    return Series(times, *fill_missing(padded, mask))


def fill_missing(values: Any, mask: Tensor | None = None) -> tuple[Any, Any]:
    """Replace missing values, and return the mask of those that were observed.

    A NaN under a mask would still make the gradient NaN. So each missing value (NaN or masked) is
    replaced by a value that was observed in the same dimension (in another one, if there is none),
    which is in the support of the likelihood. In a model::

        values, mask = fill_missing(values, mask)
        pyro.sample("y", dist.Normal(mean, 0.1).mask(mask).to_event(2), obs=values)

    Example::

        >>> import torch
        >>> values, mask = fill_missing(torch.tensor([[1.0], [float("nan")], [3.0]]))
        >>> values.flatten(), mask.flatten()
        (tensor([1., 1., 3.]), tensor([ True, False,  True]))

    :param values: Values of shape ``(n,)`` or ``(..., n, D)``. What the mask of a NumPy array hides
        is missing. None, for a model that draws values, is returned as it is, with ``mask``, or
        with True where there is no mask.
    :param mask: True where a value was observed, of shape ``(..., n, D)`` or ``(..., n)``.
    :returns: Values without NaN, and a mask of their shape.
    """
    if values is None:
        return None, True if mask is None else mask
    given, values = values, as_numbers(values, "values")
    if not isinstance(given, Tensor) and values.is_floating_point():
        values = in_dtype(values, torch.get_default_dtype(), "values")
    if not values.dim():
        raise ValueError(f"values must have shape (..., n, D) or (n,): found the number {values}")
    seen = ~values.isnan()
    if mask is not None:
        mask = as_mask(mask, zeros_and_ones=True)
        mask = mask if mask.dim() == values.dim() else mask.unsqueeze(-1)
        if not broadcasts_to(mask.shape, values.shape):
            raise ValueError(
                f"mask must have the shape of values, {tuple(values.shape)}, or of all but the "
                f"last dimension: found {tuple(mask.shape)}"
            )
        seen = seen & mask
    if not values.numel():
        return values, seen
    flat, flat_seen = values.reshape(-1, values.shape[-1]), seen.reshape(-1, values.shape[-1])
    first = flat_seen.to(torch.uint8).argmax(0, keepdim=True)
    some, known = flat.gather(0, first).squeeze(0), flat_seen.any(0)
    other = torch.where(known.any(), some[known.to(torch.uint8).argmax()], 0.0)
    some = torch.where(known, some, other)
    return torch.where(seen, values, some), seen


def _from_pairs(data: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if hasattr(data, "columns") or isinstance(data, Mapping):
        raise ValueError(
            f"data is a table with columns {list(getattr(data, 'columns', data))}: name those of "
            "the series, the time and the values by series=, time= and values="
        )
    if not isinstance(data, Iterable) or isinstance(data, str):
        raise ValueError(f"data must be a list of pairs (times, values): found {data!r}")
    times: list[Tensor] = []
    values: list[Tensor] = []
    for i, pair in enumerate(data):
        parts = len(pair) if hasattr(pair, "__len__") else 1
        if parts != 2:
            raise ValueError(f"series {i} must be a pair (times, values): found {parts} parts")
        t = _times(pair[0], f"series {i}: times")
        y = as_numbers(pair[1], f"series {i}: values", dtype).detach()
        y = y.unsqueeze(-1) if y.dim() == 1 else y
        if t.dim() != 1 or y.dim() != 2 or len(t) != len(y):
            raise ValueError(
                f"series {i}: times must have shape (n,), values (n,) or (n, D): found "
                f"{tuple(t.shape)} and {tuple(y.shape)}"
            )
        if not len(t):
            raise ValueError(f"series {i} is empty: drop it")
        if values and y.shape[-1] != values[0].shape[-1]:
            raise ValueError(
                f"series {i} has {y.shape[-1]} values a row, series 0 has {values[0].shape[-1]}: "
                "all need the same; put NaN for what was not measured"
            )
        times.append(t)
        values.append(y)
    if not times:
        raise ValueError("data has no series: pass at least one")
    return torch.cat(times), torch.cat(values), torch.tensor([len(t) for t in times])


def _from_table(
    table: Any, series: str, time: str, values: str | Sequence[str], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list]:
    values = [values] if isinstance(values, str) else list(values)
    if not values:
        raise ValueError("values is empty: name at least one column")
    columns = _columns(table, [series, time, *values])
    number: dict = {}
    labels = np.array(columns[series], dtype=object)
    labels[np.ma.getmask(columns[series])] = None
    labels = labels.tolist()
    if not labels:
        raise ValueError("data has no rows: pass at least one series")
    try:
        codes = np.array([number.setdefault(label, len(number)) for label in labels])
    except TypeError as e:
        raise ValueError(f"column {series!r} must hold names or numbers of series: {e}") from e
    nameless = [k for k in number if not isinstance(k, str) and str(k) in MISSING]
    if nameless:
        count = np.isin(codes, [number[k] for k in nameless]).sum()
        raise ValueError(f"column {series!r} is missing in {count} rows: drop them, or fill it in")
    order = torch.from_numpy(codes.argsort(kind="stable"))
    t = _times(columns[time], f"column {time!r}")
    y = torch.stack([as_numbers(columns[v], f"column {v!r}", dtype) for v in values], -1)
    return t[order], y[order], torch.from_numpy(np.bincount(codes)), list(number)


def _columns(table: Any, names: Sequence[str]) -> dict[str, Any]:
    """The columns of these names, of one length."""
    columns: dict[str, Any] = {}
    for name in names:
        if name in columns:
            raise ValueError(f"column {name!r} is named twice: series, time and values are others")
        try:
            columns[name] = table[name]
        except (KeyError, IndexError, TypeError) as e:
            found = list(getattr(table, "columns", table))
            raise ValueError(f"data has no column {name!r}: found {found}") from e
        if hasattr(columns[name], "columns"):
            number = len(columns[name].columns)
            raise ValueError(f"data has {number} columns {name!r}: rename or drop all but one")
        if _is_nested(columns[name]):
            raise ValueError(
                f"column {name!r} has several numbers in a row: make a column of each, and name "
                "them all in values"
            )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of data must have one length: found {lengths}")
    return columns


def _is_nested(column: Any) -> bool:
    if hasattr(column, "ndim"):
        return column.ndim != 1
    return any(isinstance(entry, (list, tuple)) or np.ndim(entry) for entry in column)


def _times(data: Any, name: str) -> Tensor:
    """Times in float64, or in the coarser dtype that they were given in."""
    times = as_numbers(data, name, None if hasattr(data, "dtype") else torch.float64).detach()
    if times.dtype == torch.bool:
        raise ValueError(f"{name} must be numbers: found {times.dtype}; name another column")
    return times if times.is_floating_point() else times.double()
