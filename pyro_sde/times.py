"""Time grids, and the states of a path at given times."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.poutine.runtime import get_plates
from torch import Tensor

from ._arrays import as_numbers

__all__ = ["check_resolution", "contains", "merged_grid", "select", "time_grid", "tolerance_of"]

PARTICLES = ("num_particles_vectorized", "_num_predictive_samples")
"""The plates that Pyro itself puts around a model."""

FEW = 7
"""So many draws at once show whether a model allows any number of them. Where its shapes do not
allow for a dimension of draws, every draw is combined with every other one, and many would fill the
memory."""


def tolerance_of(times: Tensor) -> float:
    """The distance below which two times are one: a millionth of the span, or 8 units of rounding.

    Example::

        >>> import torch
        >>> f"{tolerance_of(torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)):.0e}"
        '5e-06'

    :param times: Times of any shape.
    :returns: The distance, in units of time.
    """
    span = float(times.max() - times.min())
    return max(1e-6 * span, 8 * torch.finfo(times.dtype).eps * float(times.abs().max()))


def time_grid(
    start: float, end: float, *, dt: float, include: Tensor | list[float] | None = None
) -> Tensor:
    """An increasing grid from ``start`` to ``end`` that contains the times ``include`` exactly.

    The other times make equal steps of at most ``dt``, to rounding. Times closer than a millionth
    of ``end - start`` (or 8 units of rounding, if that is more) are merged: an included time
    replaces a grid point, and the first of several included times stands for all. Steps shorter
    than 16 units of rounding are refused: seconds since 1970 need float64.

    Example::

        >>> time_grid(0.0, 1.0, dt=0.5, include=[0.7])
        tensor([0.0000, 0.5000, 0.7000, 1.0000])

    :param start: The first time.
    :param end: The last time.
    :param dt: The longest step.
    :param include: Times that the grid must contain, in any order, repeated or not.
    :returns: The grid, of shape ``(T,)``, in the dtype of ``include``.
    """
    start, end, dt = _real("start", start), _real("end", end), _real("dt", dt)
    wanted = as_numbers([] if include is None else include, "include").flatten()
    if not wanted.is_floating_point() or not wanted.numel():
        wanted = wanted.to(torch.get_default_dtype())
    dtype = wanted.dtype
    if math.isfinite(dt) and dt > 0 and start <= end < math.inf:
        _check_resolution(start, end, dt if start == end else min(dt, end - start), dtype)
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise ValueError(f"start must be below end, both finite: found {start:g} and {end:g}")
    if not (math.isfinite(dt) and dt > 0):
        raise ValueError(f"dt must be positive: found {dt:g}")
    if not bool(torch.isfinite(wanted).all()):
        raise ValueError("include must be finite: drop the missing observation times first")
    tol = tolerance_of(torch.tensor([start, end], dtype=dtype))
    # An end that was rounded up must not add a step, which would move all points off include.
    steps = max(1, math.ceil((end - start - tol) / dt))
    grid = torch.linspace(start, end, steps + 1, dtype=torch.float64, device=wanted.device)
    outside = wanted[(wanted < start - tol) | (wanted > end + tol)]
    if outside.numel():
        raise ValueError(
            f"include has {outside.numel()} times outside [{start:g}, {end:g}], the first "
            f"{outside[0].item():g}; widen the grid or drop them"
        )
    row = merged_grid(grid, wanted, tol)
    return row[torch.isfinite(row)]


def _real(name: str, value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"{name} must be a number: found {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"{name} must be a number: found {value!r}; from dates subtract the first, and divide "
            "by a unit"
        ) from e


def _check_resolution(start: float, end: float, step: float, dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps * max(abs(start), abs(end))
    if step < 16 * unit:
        raise ValueError(
            f"{dtype} cannot hold a grid from {start:.10g} to {end:.10g} with steps of {step:g}: "
            f"its numbers there are up to {unit:.2g} apart. Subtract the first time from all times "
            "(start, end and include), or pass include as a float64 tensor"
        )


def check_resolution(times: Tensor, name: str, rows: Tensor | None = None) -> None:
    """Refuse increasing times that are hardly apart in their dtype, so that rounding has moved them
    by a tenth of their mean distance or more.

    Example::

        >>> import torch
        >>> check_resolution(torch.tensor([0.0, 60.0, 120.0]), "times")
        >>> try:
        ...     check_resolution(torch.tensor([1.7e9, 1.7e9 + 128.0, 1.7e9 + 256.0]), "times")
        ... except ValueError as e:
        ...     print(str(e).split(":")[0])
        times are 128 apart on average, and torch.float32 rounds them by up to 1e+02

    :param times: Times of shape ``(..., T)``.
    :param name: What to call them in errors.
    :param rows: True where a time counts, of the shape of ``times``.
    """
    if rows is None:
        steps: Any = times.shape[-1] - 1
        first, last = times[..., 0], times[..., -1]
    else:
        first = times.masked_fill(~rows, torch.inf).amin(-1)
        last = times.masked_fill(~rows, -torch.inf).amax(-1)
        steps = (rows.sum(-1) - 1).clamp(min=1)
    distance = (last - first) / steps
    error = 0.5 * torch.finfo(times.dtype).eps * torch.maximum(first.abs(), last.abs())
    bad = (distance > 0) & (distance <= 10 * error)
    if bool(bad.any()):
        raise ValueError(
            f"{name} are {distance[bad][0].item():.3g} apart on average, and {times.dtype} rounds "
            f"them by up to {error[bad][0].item():.1g}: subtract the first time while they are "
            "integers or float64, or keep them in float64"
        )


def merged_grid(grid: Tensor, wanted: Tensor, tol: float) -> Tensor:
    """Rows of the times ``wanted`` and those of ``grid`` not within ``tol`` of them, then infinity.

    Example::

        >>> import torch
        >>> wanted = torch.tensor([[0.5, 0.51], [0.2, 0.7]])
        >>> merged_grid(torch.tensor([0.0, 0.5, 1.0]), wanted, tol=0.05)
        tensor([[0.0000, 0.5000, 1.0000,    inf,    inf],
                [0.0000, 0.2000, 0.5000, 0.7000, 1.0000]])

    :param grid: An increasing grid of shape ``(T,)``, finite.
    :param wanted: Times of shape ``(..., n)`` in any order; infinite ones are left out.
    :param tol: How close two times must be to be one.
    :returns: Times of shape ``(..., T + n)``, in the dtype of ``wanted``.
    """
    wanted = _merge(wanted.sort(-1).values, tol).sort(-1).values
    rows = grid.expand(wanted.shape[:-1] + grid.shape)
    if wanted.shape[-1]:
        apart, kept = rows.double().contiguous(), wanted.detach().double().contiguous()
        after = torch.searchsorted(kept, apart).clamp(max=kept.shape[-1] - 1)
        before = (after - 1).clamp(min=0)
        near = [(kept.gather(-1, i) - apart).abs() <= tol for i in (before, after)]
        rows = rows.masked_fill(near[0] | near[1], torch.inf)
    return torch.cat([rows.to(wanted.dtype), wanted], -1).sort(-1).values


def _merge(times: Tensor, tol: float) -> Tensor:
    """Sorted times, where of several times within ``tol`` all but the first become infinity."""
    kept = times.new_full(times.shape[:-1], -torch.inf)
    columns = []
    for t in times.unbind(-1):
        fresh = t - kept > tol
        kept = torch.where(fresh, t, kept)
        columns.append(t.masked_fill(~fresh, torch.inf))
    return torch.stack(columns, -1) if columns else times


def select(path: Tensor, times: Tensor, at: Tensor, *, plate_dim: int | None = None) -> Tensor:
    """The states of ``path`` at the times ``at``, all of which must be on the grid ``times``.

    Example::

        >>> import torch
        >>> path = torch.tensor([[0.0], [1.0], [4.0]])
        >>> select(path, torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 0.0])).flatten()
        tensor([4., 0.])

    :param path: Values of shape ``(..., T, D)``.
    :param times: The grid of the path, of shape ``(T,)`` or ``(..., T)``.
    :param at: Times of shape ``(n,)`` or ``(..., n)``, matched within the tolerance of
        :func:`time_grid`.
    :param plate_dim: Where each time is an element of a ``pyro.plate`` and the path was drawn
        outside of it: the dim of that plate (a negative number). The times are then moved into
        that batch dimension, in place of the 1 that Pyro leaves there for vectorised particles.
        Inside of such a plate of n > 1 elements that is done without saying so; call ``select``
        outside of it where the times are not its elements.
    :returns: Values of shape ``(..., n, D)``.
    """
    times = as_numbers(times, "times")
    if not times.is_floating_point():
        times = times.to(torch.get_default_dtype())
    at = as_numbers(at, "at").to(times)
    if path.shape[-2] != times.shape[-1]:
        raise ValueError(
            f"path has {path.shape[-2]} states, times {times.shape[-1]}: pass the grid that the "
            "path was drawn on"
        )
    index = _locate(times, at)
    if index.dim() == 1:
        values = path.index_select(-2, index)
    else:
        index = index.unsqueeze(-1)  # both get dimensions in front until they have the same
        ndim = max(path.dim(), index.dim())
        path, index = (x.reshape((1,) * (ndim - x.dim()) + x.shape) for x in (path, index))
        values = torch.take_along_dim(path, index, dim=-2)
    if plate_dim is None:
        plate_dim = _plate_of_times(values)
    if plate_dim is None:
        return values
    if plate_dim >= 0:
        raise ValueError(f"plate_dim counts from the right and must be negative: found {plate_dim}")
    if values.dim() - 2 >= -plate_dim and values.shape[plate_dim - 2] == 1:
        values = values.squeeze(plate_dim - 2)
    missing = -plate_dim - 1 - (values.dim() - 2)
    values = values.reshape((1,) * max(missing, 0) + values.shape)
    return values.movedim(-2, plate_dim - 1)


def _plate_of_times(values: Tensor) -> int | None:
    """The dim of the plate that the times of ``values`` are the elements of, if there is one: an
    active plate of their number that the path is not in."""
    n, batch = values.shape[-2], values.shape[:-2]
    found = {
        frame.name: frame.dim
        for frame in (get_plates() if n > 1 else ())
        if frame.dim is not None
        and frame.size == n
        and frame.name not in PARTICLES
        and (len(batch) < -frame.dim or batch[frame.dim] == 1)
    }
    if len(found) > 1:
        raise ValueError(
            f"at has {n} times, and that many elements have the plates {sorted(found)}, which the "
            "path is not in: say with plate_dim= which of them the times are, or call select "
            "outside of them"
        )
    return next(iter(found.values()), None)


def contains(times: Tensor, at: Tensor) -> bool:
    """Whether all of the times ``at`` are on the grid ``times``, as :func:`select` needs.

    Example::

        >>> import torch
        >>> grid = torch.tensor([0.0, 0.5, 1.0])
        >>> contains(grid, torch.tensor([0.5])), contains(grid, torch.tensor([0.5, 0.7]))
        (True, False)

    :param times: The grid, of shape ``(T,)`` or ``(..., T)``.
    :param at: Times of shape ``(n,)`` or ``(..., n)``.
    :returns: True if all of them are on the grid.
    """
    return not bool(_nearest(times, at)[1].any())


def _locate(times: Tensor, at: Tensor) -> Tensor:
    index, off = _nearest(times, at)
    if bool(off.any()):
        raise ValueError(
            f"at has {int(off.sum())} times that are not on the grid, the first "
            f"{at.expand_as(off)[off][0].item():g}; build the grid with time_grid(..., include=at)"
        )
    return index


def _nearest(times: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the grid time nearest to each of ``at``, and True where it is not that time."""
    times, at = times.detach().contiguous(), at.detach().contiguous()
    if times.dim() > 1 or at.dim() > 1:
        batch = torch.broadcast_shapes(times.shape[:-1], at.shape[:-1])
        times = times.expand(batch + times.shape[-1:]).contiguous()
        at = at.expand(batch + at.shape[-1:]).contiguous()
    right = torch.searchsorted(times, at).clamp(1, times.shape[-1] - 1)
    after, before = times.gather(-1, right), times.gather(-1, right - 1)
    index = torch.where((at - before).abs() <= (after - at).abs(), right - 1, right)
    off = ~((times.gather(-1, index) - at).abs() <= tolerance_of(times))
    return index, off
