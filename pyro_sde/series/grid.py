"""Time grids of one length for many series."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._arrays import as_mask, as_numbers
from ..times import merged_grid, time_grid, tolerance_of
from .checks import check_finite, check_within, observed_rows

__all__ = ["series_grid"]


def series_grid(
    times: Tensor,
    mask: Tensor | None = None,
    *,
    dt: float,
    start: float | None = None,
    end: float | None = None,
) -> Tensor:
    """A time grid for each series, which contains its times and has steps of at most ``dt``.

    All grids have the same number of points: where a series needs fewer, its longest steps are
    halved. A path on these grids costs as much as one on the longest grid, whereas a common grid
    with the times of all series would grow with their number. Times are merged as in
    :func:`~pyro_sde.time_grid`. Masked times are on the grid, too, so that
    :func:`~pyro_sde.select` finds them, unless they are not finite or outside of ``[start, end]``.

    Example::

        >>> series_grid(torch.tensor([[0.0, 0.3, 0.7, 2.0], [0.0, 2.0, 2.0, 2.0]]), dt=1.0)
        tensor([[0.0000, 0.3000, 0.7000, 1.0000, 2.0000],
                [0.0000, 0.5000, 1.0000, 1.5000, 2.0000]])

    :param times: Times of shape ``(S, n)``, in any order, repeated or not.
    :param mask: True where a value was observed, of shape ``(S, n)`` or ``(S, n, D)``.
    :param dt: The longest step.
    :param start: The first time of every grid, by default the smallest of all times.
    :param end: The last time of every grid, by default the largest of all times.
    :returns: Grids of shape ``(S, T)``.
    """
    hidden = np.ma.getmask(times)
    times = as_numbers(times, "times")
    mask = torch.ones_like(times, dtype=torch.bool) if mask is None else as_mask(mask)
    rows = observed_rows(times, mask)
    if hidden is not np.ma.nomask:
        rows = rows & ~torch.from_numpy(hidden)
    check_finite(times, rows, None)
    known = times[torch.isfinite(times)]
    if not known.numel():
        raise ValueError("times has no finite entry: pass at least one observation")
    start = known.min().item() if start is None else float(start)
    end = known.max().item() if end is None else float(end)
    grid = time_grid(start, end, dt=dt, include=times.new_tensor([start, end]))
    tol = tolerance_of(grid)
    check_within(times, rows, start, end, tol, None)
    inside = (times >= start - tol) & (times <= end + tol)
    return _even_out(merged_grid(grid, times.masked_fill(~inside, torch.inf), tol))


def _even_out(grids: Tensor) -> Tensor:
    """Grids of one length, from rows that end in infinities: cut to the longest row, and shorter
    rows filled by halving steps."""
    T = int(torch.isfinite(grids).sum(-1).max())
    grids = grids[:, :T]
    last = grids.masked_fill(torch.isinf(grids), -torch.inf).amax(-1, keepdim=True)
    steps, left = grids.diff(dim=-1), grids[:, :-1]
    steps = steps.masked_fill(~torch.isfinite(steps), 0.0)  # 0: a place that is still free
    place = torch.arange(T - 1, device=grids.device)
    while True:
        steps, order = steps.sort(dim=-1, descending=True, stable=True)
        left = left.gather(-1, order)
        used = (steps > 0).sum(-1, keepdim=True)
        # Steps longer than half of the longest one are halved before any half made here.
        halved = (steps > steps[:, :1] / 2).sum(-1, keepdim=True).minimum(T - 1 - used)
        if not bool(halved.any()):
            return torch.cat([left, last], -1).sort(-1).values
        steps = torch.where(place < halved, steps / 2, steps)
        source = (place - used).clamp(min=0)
        new = (place >= used) & (place < used + halved)
        half = steps.gather(-1, source)
        left = torch.where(new, left.gather(-1, source) + half, left)
        steps = torch.where(new, half, steps)
