"""Where a path may be drawn, and when its density is somebody else's to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.escape_messenger import EscapeMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from typing_extensions import Self

__all__ = [
    "defer_scoring",
    "refuse_unsupported_inference",
    "score_as_usual",
    "scoring_is_deferred",
]

_deferred: ContextVar[bool] = ContextVar("pyro_sde_scoring_deferred", default=False)


@contextmanager
def defer_scoring() -> Iterator[None]:
    """Inside, the log density of a path is zero: the caller computes it from the draw.

    Models and guides that run inside are wrapped in :class:`score_as_usual`, so that it is only
    the traces' scoring that is deferred, never a density that the user asks for.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


class score_as_usual(Messenger):
    """Ends :func:`defer_scoring` while a model or guide runs. A messenger, for Pyro to look
    through when it asks what kind of guide it has."""

    def __enter__(self) -> Self:
        self._token = _deferred.set(False)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        _deferred.reset(self._token)
        super().__exit__(*args)


def scoring_is_deferred() -> bool:
    return _deferred.get()


def refuse_unsupported_inference() -> None:
    """Raise where Pyro would silently ignore the path estimators.

    An enumerating ELBO is told from MCMC, which also enumerates, by its queue of guide traces.
    """
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "a path site cannot be drawn under torch.jit.trace, as the Jit ELBOs do: the path "
            "estimators would be ignored. Use TraceSDE_ELBO or TraceMeanFieldSDE_ELBO"
        )
    kinds = {type(frame) for frame in _PYRO_STACK}
    if EnumMessenger in kinds and EscapeMessenger in kinds:
        raise NotImplementedError(
            "a path site cannot be drawn in TraceEnum_ELBO or TraceTMC_ELBO: the path estimators "
            "would be ignored. Use TraceSDE_ELBO, and sum discrete latents out by hand or leave "
            "them to the likelihood (dist.MixtureSameFamily, for one)"
        )
