"""Which observations an encoder reads: the model's arguments, and the rows of a mini-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro
import torch
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn

from ..distributions import PathDistribution
from ..distributions.wrapping import WrappedPath
from .encoders import Encoding, Observations, shaped

__all__ = [
    "EncodingCache",
    "amortised_sites",
    "arguments_of",
    "default_observations",
    "end_of_data",
    "read",
    "rows_of_batch",
    "times_of",
]


def arguments_of(model: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call of the model, by name, defaults included."""
    function = model.forward if isinstance(model, nn.Module) else model
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def times_of(model: Callable, args: tuple, kwargs: dict) -> Any:
    """The argument ``times`` of a call of the model; None if there is none."""
    try:
        return arguments_of(model, args, kwargs).get("times")
    except (TypeError, ValueError):
        return None  # a call that fails will say so itself


def default_observations(model: Callable) -> Callable[..., tuple]:
    """The model's own arguments times, values and, if there is one, mask."""

    def observations(*args: Any, **kwargs: Any) -> tuple:
        named = arguments_of(model, args, kwargs)
        if "times" not in named or "values" not in named:
            raise ValueError(
                "the encoder reads the model's arguments times, values and mask, but the model's "
                f"are called {list(named)}; say AutoSDE(..., observations=fn), fn(*args) returning "
                "(times, values, mask)"
            )
        return named["times"], named["values"], named.get("mask")

    return observations


def read(fn: Callable[..., Any], args: tuple, kwargs: dict) -> Observations:
    """What ``fn`` finds in the arguments of a call, for :func:`rows_of_batch`; not cleaned."""
    found = fn(*args, **kwargs)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise ValueError(
            f"observations must return (times, values, mask): found {type(found).__name__}"
        )
    if found[0] is None or found[1] is None:
        raise ValueError(
            "the encoder needs the observations, and times or values is None; call the guide with "
            "the data (forecast() does so)"
        )
    return shaped(*found)


class EncodingCache:
    """The encoding of observations that stay the same while a posterior is sampled."""

    def __init__(self) -> None:
        self._encoding: Encoding | None = None
        self._versions: list[int] = []

    def encode(self, encoder: nn.Module, observations: Observations) -> Encoding:
        """Computed once without gradients, and again when the encoder has changed."""
        if torch.is_grad_enabled():
            return encoder(*observations)
        versions = [p._version for p in encoder.parameters()]
        if self._encoding is None or versions != self._versions:
            self._encoding, self._versions = encoder(*observations), versions
        return self._encoding


def series_plate(frames: Iterable[Any]) -> Any:
    """The plate whose elements are the series, of those around a site; or None."""
    return next((frame for frame in frames if frame.dim == -1), None)


def serves(path: PathDistribution, size: int, frame: Any) -> bool:
    """Whether a path has one element for each of the ``size`` series that were observed."""
    if not path.batch_shape:
        return size == 1
    return size in (path.batch_shape[-1], None if frame is None else frame.full_size)


def amortised_sites(
    size: int, latents: Mapping[str, Any], paths: Mapping[str, WrappedPath]
) -> frozenset[str]:
    """The path sites that have one element for each of the ``size`` series that were observed."""
    found = frozenset(
        name
        for name, w in paths.items()
        if serves(w.path, size, series_plate(latents[name]["cond_indep_stack"]))
    )
    if not found:
        shapes = {name: tuple(w.path.batch_shape) for name, w in paths.items()}
        raise ValueError(
            f"{size} series were observed, but no path has as many elements along the plate of "
            f"dim -1: batch shapes {shapes}"
        )
    return found


def end_of_data(given: Observations, path: PathDistribution, is_amortised: bool) -> Tensor:
    """When the last observation of each series was made; for a path that the series share, the
    last of all."""
    if is_amortised:
        given = rows_of_batch(given, path)
    end = given.last()
    return end if path.batch_shape[-1:] == end.shape else end.max()


def rows_of_batch(observations: Observations, path: PathDistribution) -> Observations:
    """The rows of those series that the plate around the site has drawn."""
    frame, size = series_plate(get_plates()), len(observations.times)
    if frame is not None and frame.size != size == frame.full_size:

        def rows(x: Tensor) -> Tensor:
            return pyro.subsample(x, event_dim=x.dim() - 1)

        return Observations(*(rows(x) for x in observations))
    if not serves(path, size, None):
        raise ValueError(
            f"{size} series were observed, but the path has batch_shape "
            f"{tuple(path.batch_shape)}: give the encoder the series of the mini-batch, or all of "
            "them and let pyro.plate(..., subsample_size=) choose"
        )
    return observations
