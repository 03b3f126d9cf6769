"""Selection of one series and one state, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._arrays import as_mask, as_numbers

__all__ = ["chosen", "chosen_data", "plain"]


def chosen(
    times: Any,
    paths: Any,
    dim: int | None,
    series: int | tuple[int, ...] | None,
    name: str = "paths",
) -> tuple[np.ndarray, np.ndarray]:
    """Increasing times of shape ``(T,)`` and values ``(samples, T)`` of one series and state.

    With a single state ``dim`` is ignored, and with a single series ``series``, because
    ``Predictive(parallel=True)`` leaves dimensions of size 1 where there are no series.
    """
    times, paths = plain(times, "times"), plain(paths, name)
    T = times.shape[-1] if times.dim() else 0
    if paths.dim() < 2 or T not in paths.shape[max(1, paths.dim() - 2) :]:
        raise ValueError(
            f"{name} must have shape (samples, T), (samples, T, D) or (samples, series, T, D), "
            f"where times has T = {T}: found {tuple(paths.shape)}"
        )
    has_states = paths.dim() > 2 and paths.shape[-2] == T
    if has_states and paths.shape[-1] == T and paths.dim() == times.dim() + 1:
        has_states = False  # as many series as times, and each has times of its own
    if has_states:
        D = paths.shape[-1]
        if D > 1 and (dim is None or not -D <= dim < D):
            raise ValueError(f"{name} has {D} states: choose one by dim=0 to {D - 1}, found {dim}")
        paths = paths[..., 0 if D == 1 else dim]
    batch = paths.shape[1:-1]
    times = times.expand(batch + (T,))
    single = [i for i, size in enumerate(batch) if size == 1]
    paths, times = paths.squeeze([1 + i for i in single]), times.squeeze(single)
    batch = paths.shape[1:-1]
    if batch:
        index = (series,) if series is None or isinstance(series, int) else tuple(series)
        if len(index) != len(batch) or not all(
            i is not None and -n <= i < n for i, n in zip(index, batch, strict=True)
        ):
            raise ValueError(
                f"{name} has series of shape {tuple(batch)}: choose one by series=, with a number "
                f"for each dimension, found {series}"
            )
        paths, times = paths[(slice(None),) + index], times[index]
    t, order = times.sort(stable=True)
    return t.numpy(), paths[:, order].numpy()


def chosen_data(
    data: Sequence[Any] | None,
    dim: int | None,
    series: int | tuple[int, ...] | None,
    name: str = "data",
) -> tuple[np.ndarray, np.ndarray] | None:
    """Times and values of shape ``(n,)`` of one series and state, without missing values."""
    if data is None:
        return None
    if len(data) not in (2, 3):
        raise ValueError(
            f"{name} must be (times, values) or (times, values, mask): found {len(data)} entries"
        )
    times, values = plain(data[0], f"the times of {name}"), plain(data[1], f"the values of {name}")
    if len(data) == 3:
        mask = as_mask(data[2], zeros_and_ones=True).cpu()
        mask = mask if mask.dim() == values.dim() else mask.unsqueeze(-1)
        values = values.masked_fill(~mask, torch.nan)
    t, y = chosen(times, values.unsqueeze(0), dim, series, name)
    kept = np.isfinite(y[0])
    return t[kept], y[0, kept]


def plain(values: Any, name: str = "the argument") -> Tensor:
    """``values`` on the CPU, in float64, without a graph."""
    return as_numbers(values, name).detach().cpu().double()
