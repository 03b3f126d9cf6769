"""What others see of a guide that runs the model inside itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_subsample

__all__ = ["Rehearsal", "Veil", "is_recorded", "weighed"]


def is_recorded() -> bool:
    """Whether somebody outside traces us as an ordinary guide, as Predictive and Importance do.

    The ELBOs do not: they ask for both traces with ``get_traces``.
    """
    return any(isinstance(f, TraceMessenger) and not f.param_only for f in _PYRO_STACK)


class Veil(Messenger):
    """Shows the likelihood of the model's run without its density, which is not the guide's.

    Its plates stay visible. The guide's own trace, further inside, is written after this one
    has put the mask back.
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


class Rehearsal(Messenger):
    """Keeps outside traces from recording sites that the model's run will show once more.

    Auxiliary sites do not come again and are left alone.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["infer"].get("is_auxiliary"):
            msg["infer"].update(is_auxiliary=True, _do_not_trace=True)

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["infer"].pop("_do_not_trace", False):
            del msg["infer"]["is_auxiliary"]


def weighed(name: str, site: Any, model_trace: Trace, latents: Iterable[str]) -> dict:
    """A site that a guide has beside those of the model, with the scale and the mask of the
    latents it is drawn for: what stands around the model does not stand around the guide.

    :param latents: Whose draw it is, where its name does not tell.
    """
    nodes: dict[str, Any] = dict(model_trace.nodes)
    base = name.removesuffix("_unconstrained")
    found = [nodes[n] for n in ([base] if base in nodes else latents) if n in nodes]
    if not found or not all(_alike(s[k], found[0][k]) for s in found for k in ("scale", "mask")):
        return site
    return {**site, "scale": found[0]["scale"], "mask": found[0]["mask"]}


def _alike(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
