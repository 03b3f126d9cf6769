"""Checks of the arguments of processes: parameters, grids and initial states."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.weak import WeakIdKeyDictionary

from .._arrays import as_numbers, in_dtype
from .._checks import broadcast_shapes
from ..times import check_resolution

__all__ = [
    "as_parameters",
    "check_times",
    "expand_initial",
    "initial_shape",
    "phi",
    "validates",
    "with_time",
]


def validates(validate_args: bool | None) -> bool:
    """Whether to check arguments: as the caller says, and by default as Pyro's setting says.

    NUTS switches Pyro's setting off, because its first steps may overflow, which it handles as
    divergences.
    """
    return bool(Distribution._validate_args if validate_args is None else validate_args)


def as_parameters(
    validate_args: bool | None, **values: Tensor | float
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Check the parameters of a process.

    :returns: The parameters as tensors of one dtype, not expanded, and the shape that they
        broadcast to.
    """
    tensors = {k: as_numbers(v, k) for k, v in values.items()}
    given = [v.dtype for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = reduce(torch.promote_types, given) if given else torch.get_default_dtype()
    try:
        shape = broadcast_shapes(*(v.shape for v in tensors.values()))
    except RuntimeError as e:
        found = {k: tuple(v.shape) for k, v in tensors.items()}
        raise ValueError(
            f"parameters must broadcast to batch_shape + (D,): found shapes {found}"
        ) from e
    checked = tensors if validates(validate_args) else {}
    for name, v in checked.items():
        x = values[name]
        if isinstance(x, float) and math.isfinite(x) and (x > 0 or name != "scale"):
            continue  # no tensor operation is needed
        # A sum is finite only if all its terms are, and it is cheaper than isfinite().all().
        if not (math.isfinite(v.detach().sum()) or bool(torch.isfinite(v).all())):
            raise ValueError(f"{name} must be finite: found {v[~torch.isfinite(v)].tolist()}")
        if name == "scale" and not bool((v > 0).all()):
            raise ValueError(
                f"scale must be positive: found {float(v.detach().min()):g}; a learned scale "
                "needs constraint=constraints.positive"
            )
    return [v.to(dtype) for v in tensors.values()], tuple(shape)


def phi(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x, with accurate values and derivatives near zero.

    Below 1e-2 the derivative of the quotient suffers from cancellation; there seven terms of the
    series have an error below 1e-18.
    """
    small, one = x.abs() < 1e-2, torch.ones_like(x)
    y = torch.where(small, one, x)
    w = torch.where(small, x, torch.zeros_like(x))
    series = one
    for k in range(7, 1, -1):
        series = torch.addcmul(one, w, series, value=-1 / k)
    return torch.where(small, series, -torch.expm1(-y) / y)


def with_time(x: Tensor) -> Tensor:
    """A parameter of shape (..., D) as (..., 1, D), which broadcasts against a whole path."""
    return x.unsqueeze(-2) if x.dim() else x


# Models use the same grid in every step. A grid is checked once, unless it is written to.
_checked = WeakIdKeyDictionary()


def check_times(times: Tensor) -> Tensor:
    times = as_numbers(times, "times")
    if _checked.get(times) == times._version:
        return times
    if not times.is_floating_point():
        times = in_dtype(times, torch.get_default_dtype(), "times")
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
    check_resolution(times, "times")
    _checked[times] = times._version
    return times


def initial_shape(initial: Tensor | float | Distribution) -> tuple[int, ...]:
    if not isinstance(initial, Distribution):
        return tuple(as_numbers(initial, "initial").shape) or (1,)
    if not initial.has_rsample:
        raise ValueError(
            f"initial must be a distribution that can be reparametrised: found {initial}, which "
            "has no rsample"
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
        value = as_numbers(initial, "initial")
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
