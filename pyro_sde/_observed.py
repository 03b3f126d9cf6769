"""Checks of the values that a site is observed at, which name the site, the series and the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from ._arrays import label_of
from ._checks import broadcast_shapes, broadcasts_to
from .times import PARTICLES

__all__ = ["check_observed", "naming_empty", "place_of", "takes_nan"]


def check_observed(msg: Any, times: Any = None) -> None:
    """Refuse data that are not a tensor, that are NaN, infinite or complex, or that would be
    expanded.

    :param msg: The message of the site.
    :param times: The times of the observations, of shape ``(n,)`` or ``(S, n)``, if they are known.
    """
    name, fn, value = msg["name"], msg["fn"], msg["value"]
    if not isinstance(fn, Distribution):
        return
    if not isinstance(value, Tensor):
        remedy = "pass a tensor, obs=torch.as_tensor(...)"
        if np.ma.isMaskedArray(value):
            remedy = "replace what it hides, values, mask = pyro_sde.fill_missing(values)"
        raise TypeError(f"site {name!r} is observed at a {type(value).__name__}: {remedy}")
    if value.is_complex():
        raise TypeError(
            f"site {name!r} is observed at complex numbers, {value.dtype}: observe value.real and "
            "value.imag"
        )
    shape = fn.batch_shape + fn.event_shape
    if not broadcasts_to(value.shape, shape) and _broadcast(value.shape, shape):
        raise ValueError(
            f"site {name!r} is observed at a value of shape {tuple(value.shape)}, and its "
            f"distribution has batch_shape {tuple(fn.batch_shape)} and event_shape "
            f"{tuple(fn.event_shape)}: both would be expanded to more numbers than were observed. "
            "Reshape one of them, by unsqueeze(-1) or [..., 0], say, or put the site into a plate"
        )
    if not value.is_floating_point():
        _check_integers(name, fn, value)
        return
    if takes_nan(fn):
        return
    remedy = (
        "values, mask = pyro_sde.fill_missing(values), and mask the likelihood, "
        "dist.Normal(...).mask(mask)"
    )
    for kind, bad in (("NaN", value.isnan()), ("infinite", value.isinf())):
        if bool(bad.any()):
            what = "replace them" if kind == "NaN" else "correct them, or make them NaN and replace"
            raise ValueError(
                f"site {name!r} is observed at {int(bad.sum())} values that are {kind}, the first "
                f"{place_of(msg, bad, times)}: {what}, {remedy}"
            )


def _check_integers(name: str, fn: Any, value: Tensor) -> None:
    """Refuse booleans and integers where a density needs floating point numbers, as that of a
    Bernoulli does."""
    try:
        fn.log_prob(value)
    except (RuntimeError, TypeError) as e:
        raise TypeError(
            f"site {name!r} is observed at {value.dtype}, which its {type(fn).__name__} does not "
            f"take: {e}; pass obs=y.to(torch.get_default_dtype())"
        ) from e
    except (ValueError, NotImplementedError):
        return  # for the ELBO, which knows more to say


def place_of(site: Any, bad: Tensor, times: Any = None) -> str:
    """Where the first entry of an observed value is that is bad: its index, the elements of the
    plates, and the time.

    :param site: The message or the node of the site.
    :param bad: True for a bad entry, of the shape of the value.
    """
    index = bad.nonzero()[0].tolist()
    found = [f"at {index} of the shape {tuple(bad.shape)}"] if index else ["and only one"]
    batch = bad.dim() - len(site["fn"].event_shape)
    for frame in site["cond_indep_stack"]:
        if frame.vectorized and batch + frame.dim >= 0 and frame.name not in PARTICLES:
            which = "the mini-batch of " * (frame.full_size not in (None, frame.size))
            found.append(f"element {index[batch + frame.dim]} of {which}the plate {frame.name!r}")
    time = _time_at(index, bad.shape, times)
    return ", ".join(found if time is None else [*found, f"at time {time:.6g}"])


def _time_at(index: list[int], shape: torch.Size, times: Any) -> float | None:
    """The time of an entry, where the times lie along one place of its dimensions only."""
    if not isinstance(times, Tensor) or not 1 <= times.dim() <= 2:
        return None
    n = times.dim()
    starts = [i for i in range(len(shape) - n + 1) if shape[i : i + n] == times.shape]
    if len(starts) != 1:
        return None
    return float(times[tuple(index[starts[0] : starts[0] + n])])


EMPTY = "the batch is empty"


@contextmanager
def naming_empty(args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
    """A context that says so, if a model fails because it was given an empty batch."""
    try:
        yield
    except Exception as e:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for name, x in named.items():
            if isinstance(x, Tensor) and not x.numel() and EMPTY not in str(e):
                raise ValueError(
                    f"{EMPTY}: {label_of(name)} has the shape {tuple(x.shape)}. Leave the batch "
                    f"out. The model fails: {e}"
                ) from e
        raise


def takes_nan(fn: Any) -> bool:
    """Whether a distribution accepts NaN, as PoissonProcess does for the padding of events."""
    while not getattr(fn, "takes_nan", False):
        if not hasattr(fn, "base_dist"):
            return False
        fn = fn.base_dist
    return True


def _broadcast(*shapes: torch.Size) -> bool:
    try:
        return bool(broadcast_shapes(*shapes))
    except RuntimeError:
        return False  # the density then raises its own error
