"""Padding: series of different lengths as tensors of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._checks import as_tensor
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

    Missing values (NaN, None) are masked. A row without any value is kept and masked, so
    :func:`series_grid` puts its time on the grid: add such rows to ask for predictions at their
    times. The times of a series must increase.

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
    :param time: The name of the column of times, as numbers.
    :param values: The name of the column of values, or a list of D names.
    :param dtype: The dtype of times and values, by default torch's default dtype.
    :returns: A :class:`Series` of times ``(S, n)``, values ``(S, n, D)`` and mask ``(S, n, D)``.
    """
    dtype = dtype or torch.get_default_dtype()
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
    check_times(times, present, None, None, names)
    check_rounding(exact, times, lengths, names)
    check_values(padded, mask, names)
    return Series(times, *fill_missing(padded, mask))


def fill_missing(values: Any, mask: Tensor | None = None) -> tuple[Any, Any]:
    """Replace missing values, and return the mask of those that were observed.

    A NaN under a mask would still make the gradient NaN. So each missing value (NaN or masked) is
    replaced by a value that was observed in the same dimension, which is in the support of the
    likelihood. In a model::

        values, mask = fill_missing(values, mask)
        pyro.sample("y", dist.Normal(mean, 0.1).mask(mask).to_event(2), obs=values)

    Example::

        >>> import torch
        >>> values, mask = fill_missing(torch.tensor([[1.0], [float("nan")], [3.0]]))
        >>> values.flatten(), mask.flatten()
        (tensor([1., 1., 3.]), tensor([ True, False,  True]))

    :param values: Values of shape ``(..., n, D)``. None, for a model that draws values, is returned
        as it is, with ``mask``, or with True where there is no mask.
    :param mask: True where a value was observed, of shape ``(..., n, D)`` or ``(..., n)``.
    :returns: Values without NaN, and a mask of their shape.
    """
    if values is None:
        return None, True if mask is None else mask
    values, mask = as_tensor(values), as_tensor(mask)
    seen = ~values.isnan()
    if mask is not None:
        mask = mask.to(torch.bool)
        seen = seen & (mask if mask.dim() == values.dim() else mask.unsqueeze(-1))
    flat, flat_seen = values.reshape(-1, values.shape[-1]), seen.reshape(-1, values.shape[-1])
    first = flat_seen.to(torch.uint8).argmax(0, keepdim=True)
    some = torch.where(flat_seen.any(0), flat.gather(0, first).squeeze(0), 0.0)
    return torch.where(seen, values, some), seen


def _from_pairs(data: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if hasattr(data, "columns"):
        raise ValueError(
            f"data is a table with columns {list(data.columns)}: name those of the series, the "
            "time and the values by series=, time= and values="
        )
    times: list[Tensor] = []
    values: list[Tensor] = []
    for i, pair in enumerate(data):
        if len(pair) != 2:
            raise ValueError(f"series {i} must be a pair (times, values): found {len(pair)} parts")
        t = _numbers(pair[0], f"series {i}: times", torch.float64)
        y = _numbers(pair[1], f"series {i}: values", dtype)
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
    columns = {}
    for name in (series, time, *values):
        try:
            columns[name] = table[name]
        except (KeyError, IndexError, TypeError) as e:
            found = list(getattr(table, "columns", table))
            raise ValueError(f"data has no column {name!r}: found {found}") from e
    number: dict = {}
    labels = np.asarray(columns[series], dtype=object).tolist()
    if not labels:
        raise ValueError("data has no rows: pass at least one series")
    codes = np.array([number.setdefault(label, len(number)) for label in labels])
    nameless = [k for k in number if not isinstance(k, str) and str(k) in _MISSING]
    if nameless:
        count = np.isin(codes, [number[k] for k in nameless]).sum()
        raise ValueError(f"column {series!r} is missing in {count} rows: drop them, or fill it in")
    order = torch.from_numpy(codes.argsort(kind="stable"))
    t = _numbers(columns[time], f"column {time!r}", torch.float64)
    y = torch.stack([_numbers(columns[v], f"column {v!r}", dtype) for v in values], -1)
    return t[order], y[order], torch.from_numpy(np.bincount(codes)), list(number)


_MISSING = ("nan", "None", "<NA>", "NaT")


def _numbers(data: Any, what: str, dtype: torch.dtype) -> Tensor:
    if isinstance(data, Tensor):
        return data.detach().to(dtype)
    array = np.asarray(data)
    if array.dtype.kind in "mM":
        raise ValueError(
            f"{what} must be numbers: found {array.dtype}; subtract a first date and divide by a "
            "unit, as in (dates - dates.min()) / numpy.timedelta64(1, 'D')"
        )
    try:
        # From the data itself, not from array: a column with gaps knows how to become NaN.
        return torch.from_numpy(np.array(data, dtype=np.float64)).to(dtype)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{what} must be numbers: {e}") from e
