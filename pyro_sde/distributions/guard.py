"""Refusal of unsupported inference, and log densities of paths that an ELBO skips."""

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
    """A context in which ``log_prob`` of a path is zero, because the ELBO computes the log ratio
    from the draw.

    Models and guides that run inside are wrapped in :class:`restore_path_log_prob`. So only the
    densities that the traces compute are skipped, and never one that the user asks for.
    """
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


class restore_path_log_prob(Messenger):
    """A messenger that suspends :func:`skip_path_log_prob` while a model or guide runs. Pyro can
    unwrap a messenger when it looks for the kind of a guide."""

    def __enter__(self) -> Self:
        self._token = _skipped.set(False)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        _skipped.reset(self._token)
        super().__exit__(*args)


def path_log_prob_is_skipped() -> bool:
    return _skipped.get()


def refuse_unsupported_inference() -> None:
    """Raise an error where Pyro would silently ignore the path estimators.

    MCMC enumerates, too: an enumerating ELBO is recognised by its queue of guide traces.
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
            "would be ignored. Use TraceSDE_ELBO, and sum discrete latents out by hand or in the "
            "likelihood (dist.MixtureSameFamily, for one)"
        )
