"""Where a path may be drawn, and when an ELBO computes its density in another way."""

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
    "path_log_prob_is_skipped",
    "refuse_unsupported_inference",
    "restore_path_log_prob",
    "skip_path_log_prob",
]

_skipped: ContextVar[bool] = ContextVar("pyro_sde_skip_path_log_prob", default=False)


@contextmanager
def skip_path_log_prob() -> Iterator[None]:
    """Inside, ``log_prob`` of a path is zero: the ELBO computes the log ratio from the draw.

    Models and guides that run inside are wrapped in :class:`restore_path_log_prob`, so that a
    density that the user asks for is never skipped, only the one that the traces would compute.
    """
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


class restore_path_log_prob(Messenger):
    """Ends :func:`skip_path_log_prob` while a model or guide runs. It is a messenger so that Pyro
    can unwrap it when it asks what kind of guide it has."""

    def __enter__(self) -> Self:
        self._token = _skipped.set(False)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        _skipped.reset(self._token)
        super().__exit__(*args)


def path_log_prob_is_skipped() -> bool:
    return _skipped.get()


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
