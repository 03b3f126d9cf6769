"""The encoder of a guide, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyro.poutine.util import is_validation_enabled

from ..distributions import PathDistribution
from ..distributions.wrapping import WrappedPath
from ..series import check_series
from .amortisation import EncodingCache, amortised_sites, default_observations, read, rows_of_batch
from .encoders import Encoding, Observations, as_observations

__all__ = ["EncoderMixin"]


class EncoderMixin:
    """A mixin of :class:`~pyro_sde.AutoSDE`: what its encoder reads, and when."""

    model: Callable
    encoder: Any
    args_kwargs: Any
    _observations: Callable[..., Any] | None
    _encoding: Encoding | None
    _given: Observations | None
    _given_encoding: EncodingCache

    def _set_up_encoder(
        self, args: tuple, kwargs: dict, latents: dict[str, Any], paths: dict[str, WrappedPath]
    ) -> None:
        self._amortised: frozenset[str] = frozenset()
        if self.encoder is None:
            return
        observations = self._read(args, kwargs).clean()
        self._amortised = amortised_sites(len(observations.times), latents, paths)
        self.encoder.to(next(latents[name]["value"] for name in paths if name in self._amortised))
        self.encoder.take_units(observations)

    def _read(self, args: tuple, kwargs: dict) -> Observations:
        return read(self._observations or default_observations(self.model), args, kwargs)

    def _encode(self, path: PathDistribution) -> Encoding:
        if self._encoding is None:
            observations = self._given
            if observations is None:
                observations = self._read(*self.args_kwargs)
            rows = rows_of_batch(observations, path)
            clean = rows.clean()
            if is_validation_enabled():
                times = path.times
                check_series(*clean, start=float(times.min()), end=float(times.max()))
            reused = self._given_encoding if rows is self._given else EncodingCache()
            self._encoding = reused.encode(self.encoder, clean)
        return self._encoding

    @contextmanager
    def given(self, observations: tuple) -> Iterator[None]:
        """A context in which the posterior is that given these observations, whatever the guide
        is called with. After the last of them the prior takes over. Without gradients an encoder
        reads them once.

        :param observations: Times, values and a mask, as those that the encoder reads.
        """
        before = self._given, self._given_encoding
        self._given, self._given_encoding = as_observations(*observations), EncodingCache()
        try:
            yield
        finally:
            self._given, self._given_encoding = before
