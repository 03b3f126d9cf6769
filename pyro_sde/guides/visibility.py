"""What outer handlers see of a guide that runs the model inside itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample

__all__ = [
    "HideFromOuterTrace",
    "MaskObserved",
    "alike",
    "inside_trace",
    "with_latent_scale",
    "without_handlers",
]


def inside_trace() -> bool:
    """Whether an outer handler traces the guide, as Predictive and Importance do.

    The ELBOs do not: they ask for both traces with ``get_traces``.
    """
    return any(isinstance(f, TraceMessenger) and not f.param_only for f in _PYRO_STACK)


@contextmanager
def without_handlers() -> Iterator[None]:
    """Runs its body as if no handler were around it.

    ``poutine.block`` hides the sites of its body from outer handlers, but an outer plate, such as
    that of an ELBO's vectorised particles, keeps its name and its dimension.
    """
    handlers, dims = list(_PYRO_STACK), _DIM_ALLOCATOR._stack
    _PYRO_STACK.clear()
    _DIM_ALLOCATOR._stack = []
    try:
        yield
    finally:
        _PYRO_STACK[:] = handlers
        _DIM_ALLOCATOR._stack = dims


class MaskObserved(Messenger):
    """Masks the observed sites of the model's run in an outer trace: their density is not the
    guide's.

    Plates stay visible. The guide's own trace, further inside, is written after the mask has been
    put back.
    """

    def __init__(self, is_latent: Callable[[str], bool]) -> None:
        super().__init__()
        self.is_latent = is_latent
        self.masks: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if not self.is_latent(msg["name"]) and not site_is_subsample(msg):
            self.masks[msg["name"]] = msg["mask"]
            msg["mask"] = False

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.masks:
            msg["mask"] = self.masks.pop(msg["name"])


class HideFromOuterTrace(Messenger):
    """Keeps outer traces from recording sites that the run of the model will show once more.

    Auxiliary sites do not come again and stay visible.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["infer"].get("is_auxiliary"):
            msg["infer"].update(is_auxiliary=True, _do_not_trace=True)

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["infer"].pop("_do_not_trace", False):
            del msg["infer"]["is_auxiliary"]


def with_latent_scale(name: str, site: Any, model_trace: Trace, latents: Iterable[str]) -> dict:
    """An auxiliary site of a guide, with the scale and the mask of the latents that it is drawn
    for: handlers around the model are not around the guide.

    :param latents: The latents that it is drawn for, where its name does not tell.
    """
    nodes: dict[str, Any] = dict(model_trace.nodes)
    base = name.removesuffix("_unconstrained")
    found = [nodes[n] for n in ([base] if base in nodes else latents) if n in nodes]
    if not found or not all(alike(s[k], found[0][k]) for s in found for k in ("scale", "mask")):
        return site
    return {**site, "scale": found[0]["scale"], "mask": found[0]["mask"]}


def alike(a: Any, b: Any) -> bool:
    """Whether two scales, or two masks, are the same."""
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
