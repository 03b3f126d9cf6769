"""Checks of irregular time series, with errors that name the series."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._arrays import as_mask, as_numbers
from ..times import check_resolution, tolerance_of

__all__ = [
    "check_finite",
    "check_rounding",
    "check_series",
    "check_times",
    "check_values",
    "check_within",
    "observed_rows",
]


def check_series(
    times: Tensor,
    values: Tensor,
    mask: Tensor,
    start: float | None = None,
    end: float | None = None,
    names: Sequence | None = None,
) -> None:
    """Check irregular time series, and raise a ValueError that names the first faulty series.

    A series is faulty if its times are not finite, not in order, repeated or outside of ``[start,
    end]``, if an observed value is not finite, or if it has no observation. Rows that are masked as
    a whole are padding: neither these nor masked values are checked.

    Example::

        >>> import torch
        >>> times, values = torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(1, 3, 1)
        >>> check_series(times, values, mask=torch.tensor([[True, True, False]]))
        >>> try:
        ...     check_series(times, values, mask=torch.tensor([[True, True, True]]))
        ... except ValueError as e:
        ...     print(str(e).split(";")[0])
        series 0: times must increase, but times[2]=1 follows 2

    :param times: Times of shape ``(S, n)``.
    :param values: Values of shape ``(S, n, D)``.
    :param mask: True where a value was observed, of shape ``(S, n, D)`` or ``(S, n)``.
    :param start: The earliest time allowed.
    :param end: The latest time allowed.
    :param names: The name of each series in errors, by default its number.
    """
    times, values, mask = as_numbers(times, "times"), as_numbers(values, "values"), as_mask(mask)
    rows = observed_rows(times, mask)
    if values.dim() != 3 or values.shape[:2] != times.shape:
        raise ValueError(
            f"values must have shape (S, n, D) with the (S, n) of times, {tuple(times.shape)}: "
            f"found {tuple(values.shape)}"
        )
    mask = mask if mask.dim() == 3 else mask.unsqueeze(-1)
    if mask.shape[-1] not in (1, values.shape[-1]):
        raise ValueError(
            f"mask has {mask.shape[-1]} entries a row, values {values.shape[-1]}: pass one mask "
            "for each value, or one of shape (S, n)"
        )
    check_times(times, rows, start, end, names)
    check_values(values, mask.expand_as(values), names)


def observed_rows(times: Tensor, mask: Tensor) -> Tensor:
    """True where any value of a row was observed, of shape ``(S, n)``."""
    if times.dim() != 2 or not times.is_floating_point():
        raise ValueError(
            "times must be floating point of shape (S, n), a row for each series: found "
            f"{times.dtype} of shape {tuple(times.shape)}"
        )
    if mask.dim() not in (2, 3) or mask.shape[:2] != times.shape:
        raise ValueError(
            "mask must have shape (S, n) or (S, n, D) with the (S, n) of times, "
            f"{tuple(times.shape)}: found {tuple(mask.shape)}"
        )
    return mask if mask.dim() == 2 else mask.any(-1)


def check_times(
    times: Tensor, rows: Tensor, start: float | None, end: float | None, names: Sequence | None
) -> None:
    check_finite(times, rows, names)
    # Where times increase, the latest so far is the one before, masked rows left out.
    latest = times.masked_fill(~rows, -torch.inf).cummax(-1).values[:, :-1]
    late = rows[:, 1:] & (times[:, 1:] <= latest)
    if bool(late.any()):
        who, (s, i) = _first(late, names)
        t, before = times[s, i + 1].item(), latest[s, i].item()
        if t == before:
            raise ValueError(
                f"{who} has the time {t:.9g} twice: keep one of the rows, or, if they differ, "
                "subtract the first time while they are integers or float64, or pass a finer "
                f"dtype than {times.dtype}"
            )
        raise ValueError(
            f"{who}: times must increase, but times[{i + 1}]={t:.9g} follows {before:.9g}; sort "
            "the rows of each series by time"
        )
    check_resolution(times, "times", rows)
    if (start is None and end is None) or not bool(rows.any()):
        return
    seen = times[rows]
    start = seen.min().item() if start is None else float(start)
    end = seen.max().item() if end is None else float(end)
    check_within(times, rows, start, end, tolerance_of(times.new_tensor([start, end])), names)


def check_finite(times: Tensor, rows: Tensor, names: Sequence | None) -> None:
    bad = rows & ~torch.isfinite(times)
    if bool(bad.any()):
        who, (s, i) = _first(bad, names)
        raise ValueError(f"{who}: times[{i}] is {times[s, i].item()}; drop rows without a time")


def check_rounding(exact: Tensor, times: Tensor, lengths: Tensor, names: Sequence | None) -> None:
    """Refuse times whose dtype rounds them by a tenth of their mean distance, or more."""
    error, dtype = (exact - times).abs().amax(-1), times.dtype
    remedy = "subtract the first time, or pass dtype=torch.float64"
    if exact.dtype != torch.float64:  # nobody knows what they were before
        error, dtype = 0.5 * torch.finfo(exact.dtype).eps * exact.abs().amax(-1), exact.dtype
        remedy = "subtract the first time while they are integers or float64"
    distance = (exact[:, -1] - exact[:, 0]).abs() / (lengths - 1).clamp(min=1)
    bad = (distance > 0) & (error >= 0.1 * distance) & error.isfinite()
    if bool(bad.any()):
        who, (s,) = _first(bad, names)
        raise ValueError(
            f"{who}: {dtype} rounds its times by up to {error[s].item():.2g}, and they are "
            f"{distance[s].item():.3g} apart on average; {remedy}"
        )


def check_within(
    times: Tensor, rows: Tensor, start: float, end: float, tol: float, names: Sequence | None
) -> None:
    bad = rows & ((times < start - tol) | (times > end + tol))
    if bool(bad.any()):
        who, (s, i) = _first(bad, names)
        raise ValueError(
            f"{who}: times[{i}]={times[s, i].item():.9g} is outside [{start:.9g}, {end:.9g}]; "
            "widen start and end, or mask the row"
        )


def check_values(values: Tensor, mask: Tensor, names: Sequence | None) -> None:
    missing = ~mask.flatten(1).any(-1)
    if bool(missing.any()):
        who, _ = _first(missing, names)
        raise ValueError(f"{who} has no observed value: drop it")
    bad = mask & ~torch.isfinite(values)
    if bool(bad.any()):
        who, (s, i, d) = _first(bad, names)
        raise ValueError(
            f"{who}: values[{i}, {d}] is {values[s, i, d].item()}; mask it if it was not measured"
        )


def _first(bad: Tensor, names: Sequence | None) -> tuple[str, list[int]]:
    """A name for the series of the first bad entry, and the index of that entry."""
    place = bad.nonzero()[0].tolist()
    more = int(bad.flatten(1).any(-1).sum() if bad.dim() > 1 else bad.sum()) - 1
    name = place[0] if names is None else repr(names[place[0]])
    return f"series {name}" + (f" (and {more} more)" if more else ""), place
