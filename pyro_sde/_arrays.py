"""Numbers as users have them: arrays with a mask, columns of tables, lists. All become tensors, and
what is masked or missing becomes NaN."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "as_arguments",
    "as_mask",
    "as_numbers",
    "as_tensor",
    "as_tensors",
    "in_dtype",
    "label_of",
]

MISSING = ("nan", "None", "<NA>", "NaT")
DATES = (datetime.date, datetime.timedelta, np.datetime64, np.timedelta64)
FROM_DATES = (
    "subtract a first date and divide by a unit, as in "
    "(dates - dates.min()) / numpy.timedelta64(1, 'D')"
)


def as_tensor(x: Any, name: str = "the array") -> Any:
    """An array or a column of a table as a tensor, with floating point numbers in torch's default
    dtype, which is that of networks. Anything else is returned as it is."""
    is_column = hasattr(x, "to_numpy") and not hasattr(x, "columns")
    if not isinstance(x, np.ndarray) and not is_column:
        return x
    found = torch.from_numpy(_array(x, name))
    return in_dtype(found, torch.get_default_dtype(), name) if found.is_floating_point() else found


def as_arguments(data: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a model, from what ``fit`` calls its data.

    :param data: A tuple of positional arguments, a dict of named ones, or a single argument.
    :returns: Positional and named arguments, with NumPy arrays as tensors.
    """
    if isinstance(data, dict):
        return (), {name: as_tensor(x, label_of(name)) for name, x in data.items()}
    positional = data if isinstance(data, tuple) else (data,)
    return tuple(as_tensor(x, label_of(i)) for i, x in enumerate(positional)), {}


def as_tensors(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call of a model, with NumPy arrays and columns of tables as tensors."""
    return as_arguments(args)[0], as_arguments(kwargs)[1]


def label_of(name: Any) -> str:
    """What errors call an argument of a model, given by its number or its name."""
    return f"argument {name} of the data" if isinstance(name, int) else repr(name)


def as_numbers(x: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Real numbers as a tensor.

    :param x: A tensor, an array, a column of a table, a list or a number.
    :param name: What to call it in errors.
    :param dtype: By default that of ``x``, and torch's default dtype for a list of floats.
    """
    if isinstance(x, Tensor):
        found = x
    elif isinstance(x, (int, float)) and not isinstance(x, np.generic):
        found = torch.as_tensor(x)
    else:
        found = torch.from_numpy(_array(x, name))
        if dtype is None and found.is_floating_point() and _is_plain(x):
            dtype = torch.get_default_dtype()
    if found.is_complex():
        raise ValueError(_complex(name, found.dtype))
    return found if dtype is None else in_dtype(found, dtype, name)


def as_mask(mask: Any, zeros_and_ones: bool = False) -> Tensor:
    """A mask as a boolean tensor, True where a value was observed; what a NumPy array hides by a
    mask of its own was not.

    :param zeros_and_ones: Whether numbers 0 and 1 are taken, too.
    """
    if not isinstance(mask, Tensor):
        mask = torch.from_numpy(_array(np.ma.filled(mask, 0), "mask"))
    if mask.dtype == torch.bool:
        return mask
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel() or not zeros_and_ones:
        found = other[0].item() if zeros_and_ones else mask.dtype
        raise ValueError(f"mask must be boolean, True where observed: found {found}; pass mask > 0")
    return mask.to(torch.bool)


def in_dtype(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """``x`` in another dtype, unless that would overflow or, where ``x`` increases as times do,
    round it by a tenth of the mean distance of two entries."""
    found = x.to(dtype)
    if found.dtype == x.dtype or not x.numel() or not found.is_floating_point():
        return found
    large = found.isinf() & x.isfinite()
    if bool(large.any()):
        raise ValueError(
            f"{name} must be numbers that {dtype} can hold: found {x[large][0].item():.3g}; divide "
            "by a unit"
        )
    exact, rounded = (y.detach().double() for y in (x, found))
    if exact.dim() > 1 and exact.shape[-1] == 1:
        exact, rounded = exact.squeeze(-1), rounded.squeeze(-1)
    if not exact.dim() or exact.shape[-1] < 2 or not bool((exact.diff() >= 0).all()):
        return found
    distance = float((exact[..., -1] - exact[..., 0]).mean()) / (exact.shape[-1] - 1)
    error = float((exact - rounded).abs().max())
    noise = 1000 * torch.finfo(torch.float64).eps * float(exact.abs().max())
    if distance > noise and error >= 0.1 * distance:
        raise ValueError(
            f"{name} increases by {distance:.3g} on average, and {dtype} rounds it by up to "
            f"{error:.2g}: subtract the first entry, as from times since 1970, or call "
            "torch.set_default_dtype(torch.float64) and use that dtype throughout"
        )
    return found


def _array(x: Any, name: str) -> np.ndarray:
    """A writeable array of booleans, integers or floats of the machine, in which NaN is missing;
    or one of complex numbers."""
    try:
        both = np.ma.asarray(x)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(_ragged(x, name) or f"{name} must be numbers: {e}") from e
    array, hidden = both.data, np.ma.getmaskarray(both)
    if array.dtype.kind in "mM":
        raise ValueError(_date(name, array.dtype))
    if array.dtype.kind not in "biufc":
        array = array.astype(object)
        array[hidden] = None
        array = _floats(array, name)
    if array.dtype.kind == "c":
        return np.require(array, np.complex128, ["C", "W"])
    if hidden.any():
        array = np.where(hidden, np.nan, array)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64 if array.max(initial=0) < 2**63 else np.float64)
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    return np.require(array, array.dtype.newbyteorder("="), ["C", "W"])


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    """The numbers in an array of Python objects."""
    flat = array.ravel()
    for kind in {type(entry): entry for entry in flat}.values():
        if isinstance(kind, DATES) or hasattr(kind, "to_timestamp"):
            raise ValueError(_date(name, type(kind).__name__))
        if isinstance(kind, (complex, np.complexfloating)):
            raise ValueError(_complex(name, type(kind).__name__))
    found = np.full(flat.shape, np.nan)
    for i, entry in enumerate(flat):
        try:
            found[i] = np.nan if str(entry) in MISSING else float(entry)
        except (TypeError, ValueError) as e:
            shown = f"entry {i} is {entry!r}"
            if hasattr(entry, "__len__") and not isinstance(entry, str):
                raise ValueError(
                    f"{name} must be numbers: {shown}, a {type(entry).__name__} of length "
                    f"{len(entry)}; a column has one number in each row, so make several columns"
                ) from e
            if _is(datetime.date.fromisoformat, str(entry)[:10]):
                raise ValueError(
                    f"{name} must be numbers: {shown}, a date; read it by pandas.to_datetime, "
                    + FROM_DATES
                ) from e
            raise ValueError(
                f"{name} must be numbers: {shown}, a {type(entry).__name__}; give each word a "
                "number, and put NaN for what is missing"
            ) from e
    return found.reshape(array.shape)


def _is(read: Callable[[str], Any], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def _is_plain(x: Any) -> bool:
    """Whether the numbers are those of Python, which have no dtype."""
    while isinstance(x, (list, tuple)) and x:
        x = x[0]
    return not hasattr(x, "dtype")


def _ragged(x: Any, name: str) -> str | None:
    """What is wrong with rows of different lengths; None if they have one length."""
    if not isinstance(x, (list, tuple)):
        return None
    lengths = sorted({len(row) if hasattr(row, "__len__") else 1 for row in x})
    if len(lengths) < 2:
        return None
    return (
        f"{name} has rows of different lengths, {', '.join(map(str, lengths[:5]))}: all need the "
        "same; put NaN for what was not measured, or pass series of different lengths to pad_series"
    )


def _date(name: str, kind: Any) -> str:
    if "timedelta" in str(kind).lower():
        return f"{name} must be numbers: found {kind}; divide by a unit, numpy.timedelta64(1, 'D')"
    return f"{name} must be numbers: found {kind}; {FROM_DATES}"


def _complex(name: str, kind: Any) -> str:
    return (
        f"{name} must be real numbers: found {kind}; pass the real and the imaginary part as two "
        "columns"
    )
