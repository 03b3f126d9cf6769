"""Latents and data drawn from a model, and the arguments with which the model observes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import Unit
from pyro.params.param_store import normalize_param_name
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from .._observed import check_observed
from ..distributions.wrapping import unwrap
from ..training.batches import as_arguments

__all__ = ["Simulation", "simulate"]


@dataclass
class Simulation:
    """Latents that were drawn from a model, and data that were drawn given them."""

    latents: dict[str, Tensor]
    args: tuple
    """The arguments with which the model observes the data."""
    kwargs: dict[str, Any]
    observed: frozenset[str]
    """The names of the observed sites."""
    time_dims: dict[str, int]
    """The dimension of time of each latent that is a path, counted from the right."""

    def log_likelihood(self, model: Callable, latents: dict[str, Tensor]) -> float:
        """Of the data, given latents by site."""
        given = poutine.condition(model, data=latents)
        trace: Any = poutine.trace(given).get_trace(*self.args, **self.kwargs)
        trace.compute_log_prob(site_filter=lambda name, _: name in self.observed)
        return sum(float(trace.nodes[name]["log_prob_sum"]) for name in self.observed)


class _DrawObserved(Messenger):
    """Draws the observed sites, too, and keeps the values that they were observed at."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if not msg["is_observed"] or site_is_subsample(msg) or msg["infer"].get("_deterministic"):
            return
        if _is_factor(fn):
            raise ValueError(
                f"site {name!r} is a factor (pyro.factor), and data cannot be drawn from a density "
                "that is not normalised. Write it as a pyro.sample statement"
            )
        check_observed(msg)
        self.given[name] = msg["value"]
        msg["value"], msg["is_observed"] = None, False


@torch.no_grad()
def simulate(
    model: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    to_data: Callable[[dict[str, Tensor]], Any] | None,
    is_trained: bool,
) -> Simulation:
    """Draw all sites of a model, and put what was drawn for the observed ones into its arguments.

    The model is run on the arguments of the example, so that masks, plates and grids are those of
    the example. Run on the new arguments, it must have the same log density at every site. That is
    not so where the prior depends on the data, or an argument still holds the data of the example.

    :param args: Arguments of the model, with data as an example.
    :param kwargs: Its keyword arguments.
    :param to_data: From the values of the observed sites to the arguments, in the form that
        :func:`~pyro_sde.fit` has; None, to find the argument that holds the data.
    :param is_trained: Whether the parameters of the model would be trained.
    """
    with _DrawObserved() as drawing:
        trace = prune_subsample_sites(poutine.trace(model).get_trace(*args, **kwargs))
    if is_trained:
        _check_parameters(trace)
    sites: dict[str, Any] = {k: s for k, s in trace.nodes.items() if s["type"] == "sample"}
    for name, site in sites.items():
        _check_site(name, site)
    seen = {name: sites[name]["value"] for name in drawing.given}
    if not seen:
        raise ValueError("the model observes nothing with these data: pass the data that it has")
    for name, x in seen.items():
        _check_drawn(name, x, drawing.given[name])
    latents = {
        name: site["value"]
        for name, site in sites.items()
        if name not in seen and not site["infer"].get("_deterministic")
    }
    if not latents:
        raise ValueError("the model has no latent site: there is no posterior to check")
    for name in latents:
        _check_continuous(name, sites[name]["fn"])
    if to_data is None:
        new_args, new_kwargs = _replace(drawing.given, seen, args, kwargs)
    else:
        new_args, new_kwargs = as_arguments(to_data(dict(seen)))
    found = poutine.trace(poutine.condition(model, data=latents))
    again = prune_subsample_sites(found.get_trace(*new_args, **new_kwargs))
    _check_same_law(trace, again, seen)
    return Simulation(latents, new_args, new_kwargs, frozenset(seen), _time_dims(latents, sites))


def _is_factor(fn: Any) -> bool:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, Unit)


def _check_parameters(trace: Trace) -> None:
    nodes: Any = trace.nodes
    names = [normalize_param_name(k) for k, node in nodes.items() if node["type"] == "param"]
    if names:
        raise ValueError(
            f"the model has parameters ({', '.join(names[:3])}{', ...' * (len(names) > 3)}), and "
            "training would move them away from the values that the data were simulated with. Give "
            "them a prior, fix them by requires_grad_(False), or check a trained guide with steps=0"
        )


def _check_site(name: str, site: Any) -> None:
    for frame in site["cond_indep_stack"]:
        if frame.size != (frame.full_size or frame.size):
            raise ValueError(
                f"site {name!r} is in the plate {frame.name!r}, which draws {frame.size} of "
                f"{frame.full_size} elements: pass all of the data, and batch_size for mini-batches"
            )
    if bool((torch.as_tensor(site["scale"]) != 1).any()):
        raise ValueError(
            f"site {name!r} has the scale {site['scale']} (poutine.scale, anneal_kl): data cannot "
            "be drawn from a scaled density. Take the handler away"
        )


def _check_drawn(name: str, x: Tensor, given: Tensor) -> None:
    if x.numel() != given.numel() and not bool(given.isnan().any()):
        raise ValueError(
            f"site {name!r} is observed at {given.numel()} numbers, and its distribution draws "
            f"{x.numel()}: put it into a plate, or expand the distribution"
        )
    if x.is_floating_point() and not bool(x.isfinite().all() | given.isnan().any()):
        raise ArithmeticError(f"the data drawn for site {name!r} are not finite")


def _check_continuous(name: str, fn: Any) -> None:
    if getattr(fn.support, "is_discrete", False):
        raise NotImplementedError(
            f"latent {name!r} is discrete ({type(fn).__name__}), and its ranks would be ties: sum "
            "it out in the model"
        )


def _replace(
    given: dict[str, Tensor], seen: dict[str, Tensor], args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with the numbers that were drawn in the place of those that were given."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    new = dict(named)
    for name, x in given.items():
        key = _holder(name, x, named)
        old = named[key]
        if new[key] is not old:
            raise ValueError(
                f"site {name!r} and another observed site have their data from one argument. "
                f"{_remedy(name)}"
            )
        drawn = seen[name].to(old)
        if bool(x.isnan().any()):  # padding, of which new data have their own
            new[key] = drawn
        else:
            new[key] = torch.where(old.isnan(), old, drawn.reshape(old.shape))
    return tuple(new[i] for i in range(len(args))), {k: new[k] for k in kwargs}


def _holder(name: str, value: Tensor, named: dict[Any, Any]) -> Any:
    """The argument with the numbers that a site is observed at, some of which may be missing."""
    found = [k for k, x in named.items() if isinstance(x, Tensor) and _has_numbers_of(x, value)]
    if len(found) > 1:
        found = [k for k in found if named[k].data_ptr() == value.data_ptr()]
    if len(found) != 1:
        raise ValueError(
            f"no argument of the model holds the numbers that site {name!r} is observed at, and "
            "simulated ones cannot take their place. Make the observations an argument. If they "
            f"are one, in another form: {_remedy(name)}"
        )
    return found[0]


def _has_numbers_of(x: Tensor, value: Tensor) -> bool:
    if x.numel() != value.numel():
        return False
    x, value = x.reshape(-1), value.reshape(-1)
    missing = x.isnan()
    return not bool(missing.all()) and bool(((x == value) | missing).all())


def _remedy(name: str) -> str:
    return (
        "Say what the data are for simulated observations, "
        f"to_data=lambda seen: (times, seen[{name!r}]), say"
    )


def _check_same_law(drawn: Trace, again: Trace, seen: dict[str, Tensor]) -> None:
    """Both runs must have the same log density at every site."""
    before, after = _log_densities(drawn), _log_densities(again)
    if before.keys() != after.keys():
        names = sorted(before.keys() ^ after.keys())
        raise ValueError(f"the sites {names} depend on the data, and simulated data have others")
    for name, x in before.items():
        if math.isclose(x, after[name], rel_tol=1e-3, abs_tol=1e-3):
            continue
        if name in seen:
            raise ValueError(
                f"with the simulated data as arguments, site {name!r} is not observed at what was "
                f"drawn for it, or its distribution depends on the data. {_remedy(name)}. A model "
                "that reads earlier observations must take them from pyro.sample, not from its "
                "arguments"
            )
        raise ValueError(
            f"the prior of {name!r} depends on the data, so that simulated data have another prior "
            "than the one they were simulated from. Pass what it depends on as an argument of its "
            "own"
        )


def _log_densities(trace: Any) -> dict[str, float]:
    trace.compute_log_prob()
    nodes = trace.nodes.items()
    return {k: float(s["log_prob_sum"]) for k, s in nodes if s["type"] == "sample"}


def _time_dims(latents: dict[str, Tensor], sites: dict[str, Any]) -> dict[str, int]:
    wrapped = {name: unwrap(sites[name]["fn"]) for name in latents}
    return {name: -1 if w.is_scalar else -2 for name, w in wrapped.items() if w is not None}
