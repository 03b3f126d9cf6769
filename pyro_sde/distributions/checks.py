"""Refusing bad input: grids and starts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.weak import WeakIdKeyDictionary

from .._shapes import broadcast_shapes

__all__ = ["check_times", "expand_initial", "initial_shape"]


# A model is built on one grid again and again: by identity, and as long as it is not written to.
_checked = WeakIdKeyDictionary()


def check_times(times: Tensor) -> Tensor:
    times = torch.as_tensor(times)
    if _checked.get(times) == times._version:
        return times
    if not times.is_floating_point():
        times = times.to(torch.get_default_dtype())
    if times.dim() == 0 or times.shape[-1] < 2:
        raise ValueError(
            f"times needs at least two points, a start and an end: found shape "
            f"{tuple(times.shape)}; build it with time_grid()"
        )
    if not bool(torch.isfinite(times).all()):
        raise ValueError(f"times must be finite: found {times[~torch.isfinite(times)].tolist()}")
    late = times[..., 1:] <= times[..., :-1]
    if bool(late.any()):
        *b, i = late.nonzero()[0].tolist()
        row = times[tuple(b)]
        at = "".join(f"{k}, " for k in b)
        raise ValueError(
            f"times must increase strictly: times[{at}{i + 1}]={row[i + 1].item():g} follows "
            f"times[{at}{i}]={row[i].item():g}; sort them, or build them with time_grid()"
        )
    _checked[times] = times._version
    return times


def initial_shape(initial: Tensor | float | Distribution) -> tuple[int, ...]:
    if not isinstance(initial, Distribution):
        return tuple(torch.as_tensor(initial).shape) or (1,)
    if not initial.has_rsample:
        raise ValueError(
            f"initial must be a distribution that can be reparametrised, {initial} cannot "
            "(it has no rsample)"
        )
    if len(initial.event_shape) == 1:
        return tuple(initial.batch_shape + initial.event_shape)
    if initial.batch_shape or initial.event_shape:
        raise ValueError(
            "initial must be a distribution over R^D, of event_shape (D,): found batch_shape "
            f"{tuple(initial.batch_shape)} and event_shape {tuple(initial.event_shape)}; "
            "use .to_event(1) to make the last batch dimension the state's"
        )
    return (1,)


def expand_initial(
    initial: Tensor | float | Distribution, shape: tuple[int, ...]
) -> Tensor | Distribution:
    if not isinstance(initial, Distribution):
        value = torch.as_tensor(initial)
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        return value.expand(broadcast_shapes(value.shape, shape[-1:]))
    if not initial.event_shape:
        return initial.expand(shape[-1:]).to_event(1)
    if initial.event_shape != shape[-1:]:
        raise ValueError(
            f"initial is a distribution over R^{initial.event_shape[0]}, but the parameters are "
            f"of a process in R^{shape[-1]}"
        )
    return initial
