"""What AutoSDE does where it is not told: contraction, the guide of the other latents, advice."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pyro.infer.autoguide import AutoContinuous, AutoNormal, init_to_value
from torch import Tensor, nn

from ..distributions import ODEPath
from ..distributions.wrapping import WrappedPath
from .controls import LARGE, MLPControl
from .correlated_normal import CorrelatedNormal, begin_at_median
from .visibility import alike

__all__ = ["contraction_of", "default_guide", "is_factory", "warn_of_several_paths"]

MAX_FULL = 16
"""Up to so many dimensions of the state the contraction is a matrix."""

MAX_CORRELATED = 128
"""Up to so many numbers the other latents have a correlated posterior."""


def is_factory(control: Any) -> bool:
    """Whether ``control`` makes a control, rather than being one."""
    return isinstance(_made_by(control), type) and issubclass(_made_by(control), nn.Module)


def _made_by(control: Any) -> Any:
    return control.func if isinstance(control, functools.partial) else control


def is_weights(site: Any, dim: int) -> bool:
    """Whether a path site holds the weights of a network: it says so, or is that large."""
    return bool(site["infer"].get("weights")) or dim > LARGE


def contraction_of(kind: str | bool | None, site: Any, dim: int, control: Any) -> str | None:
    """``"full"``, ``"diagonal"`` or None: the contraction of a path in R^dim.

    :param kind: One of these; or True, full up to 16 dimensions and diagonal beyond, and for a
        control that is not ``MLPControl``; or ``"auto"``, the same, but none for the weights of a
        network and for a control that is not ``MLPControl``.
    """
    if kind not in ("auto", "full", "diagonal", None, True, False):
        raise ValueError(f'contraction must be "auto", "full", "diagonal" or None: found {kind!r}')
    made_by = _made_by(control)
    is_mlp = is_factory(control) and getattr(made_by, "forward", None) is MLPControl.forward
    if kind == "auto":
        kind = is_mlp and not is_weights(site, dim)
    if kind is True:
        kind = "full" if is_mlp and dim <= MAX_FULL else "diagonal"
    return str(kind) if kind else None


def default_guide(
    latents: Mapping[str, Any], begin: Mapping[str, Tensor] | None = None
) -> Callable[..., Any]:
    """The autoguide of the latents that are no paths: correlated, where that is possible and they
    are few.

    :param begin: Values at which training begins; by default the medians of the priors.
    """
    sites = list(latents.values())
    frames = [frame for site in sites for frame in site["cond_indep_stack"]]
    # One law for all has one scale and one mask, for all elements of a plate.
    weights = [(site["scale"], site["mask"]) for site in sites]
    is_correlated = (
        sum(site["value"].numel() for site in sites) <= MAX_CORRELATED
        and all(frame.full_size in (None, frame.size) for frame in frames)
        and not any(isinstance(x, Tensor) and x.dim() for pair in weights for x in pair)
        and all(alike(a, b) for pair in weights for a, b in zip(pair, weights[0], strict=True))
    )
    if is_correlated:
        return functools.partial(CorrelatedNormal, begin=begin)
    if begin is None:
        return functools.partial(AutoNormal, init_loc_fn=begin_at_median)
    init = functools.partial(init_to_value, values=dict(begin), fallback=begin_at_median)
    return functools.partial(AutoNormal, init_loc_fn=init)


def joint_sizes(guide: Any, name: str) -> dict[str, int]:
    """How many numbers of the joint site ``name`` of an autoguide belong to which latent, in their
    order; empty if there is no such site."""
    if not isinstance(guide, AutoContinuous) or not name.endswith("_latent"):
        return {}
    return {latent: shape.numel() for latent, shape in guide._unconstrained_shapes.items()}


def warn_of_several_paths(latents: Mapping[str, Any], paths: Mapping[str, WrappedPath]) -> None:
    """Warn of path sites that could be one: on one grid, and in the same plates."""
    groups: dict[Any, list[str]] = {}
    for name, wrapped in paths.items():
        path, site = wrapped.path, latents[name]
        if isinstance(path, ODEPath) or is_weights(site, path.event_shape[-1]):
            continue
        plates = frozenset(frame.name for frame in site["cond_indep_stack"])
        key = plates, path.times.shape, tuple(path.times.flatten().tolist())
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        if len(names) > 1:
            warnings.warn(
                f"the paths {names} are on one grid and have controls of their own, each blind to "
                "the states of the others: where they are observed together, their posterior is "
                "too narrow. Make them one site: "
                "z = pyro.sample('z', pyro_sde.distributions.Stack(...)) and stack.split(z)",
                UserWarning,
                stacklevel=2,
            )
