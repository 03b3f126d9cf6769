"""Where a path may be drawn, and when its density is somebody else's to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.escape_messenger import EscapeMessenger
from pyro.poutine.runtime import _PYRO_STACK

__all__ = ["defer_scoring", "refuse_unsupported_inference", "scoring_is_deferred"]

_deferred: ContextVar[bool] = ContextVar("pyro_sde_scoring_deferred", default=False)


@contextmanager
def defer_scoring() -> Iterator[None]:
    """Inside, the log density of a path is zero: the caller computes it from the draw."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


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
