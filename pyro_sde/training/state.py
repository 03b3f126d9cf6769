"""The state that training changes: parameters, buffers, optimiser, random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from pyro.optim import PyroOptim
from pyro.optim.optim import _load_state_dict
from torch import Tensor, nn

from .checkpoint import CheckpointError

__all__ = [
    "base_rate",
    "buffers_of",
    "check_same",
    "copy_into",
    "describe",
    "forget_parameters",
    "keep_random_state",
    "make_optimiser",
    "met_parameters",
    "needs_metric",
    "optimiser_name",
    "present_rate",
    "random_state",
    "restore_optimiser",
    "set_random_state",
    "tensors_in",
]


def random_state() -> dict[str, Any]:
    """The state of the random numbers of torch (on every device), NumPy and Python."""
    version, python, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": [version, torch.tensor(python), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, python, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    random.setstate((version, tuple(python.tolist()), gauss))
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def keep_random_state() -> Iterator[None]:
    """A context that restores the random state at its end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def met_parameters(capture: Any) -> dict[str, Tensor]:
    """The unconstrained parameters that a trace has met, in order."""
    nodes: dict[str, Any] = dict(capture.trace.nodes)
    return {name: site["value"].unconstrained() for name, site in nodes.items()}


def buffers_of(**modules: Callable) -> dict[str, Tensor]:
    """The buffers that belong to the state of those callables that are modules."""
    found = {}
    for role, fn in modules.items():
        inner = poutine.unwrap(fn)
        if isinstance(inner, nn.Module):
            learned = dict(inner.named_parameters(remove_duplicate=False))
            for name, value in inner.state_dict(keep_vars=True).items():
                if name not in learned and isinstance(value, Tensor):
                    found[f"{role}.{name}"] = value
    return found


def check_same(path: Any, what: str, found: dict[str, Tensor], mine: dict[str, Tensor]) -> None:
    """Refuse a file whose tensors are not those of this model and guide."""
    there, here = sorted(set(found) - set(mine)), sorted(set(mine) - set(found))
    if there or here:
        raise CheckpointError(
            f"{path} is of another model or guide: {what} only in the file: {there[:5]}, only in "
            f"this model and guide: {here[:5]}. Nothing was loaded; give another path to begin anew"
        )
    for name, x in mine.items():
        a, b = found[name], x
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise CheckpointError(
                f"{path} is of another model or guide: {name} is {describe(a)} in the file and "
                f"{describe(b)} here. Nothing was loaded; give another path to begin anew"
            )


def describe(x: Tensor) -> str:
    """Dtype and shape of a tensor."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


@torch.no_grad()
def copy_into(mine: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, x in found.items():
        mine[name].copy_(x)


def optimiser_name(optim: PyroOptim) -> str:
    """The names of the optimiser and its scheduler, which determine the form of their state."""
    makers = [optim.pt_optim_constructor, getattr(optim, "pt_scheduler_constructor", None)]
    return " ".join(getattr(m, "__name__", type(m).__name__) for m in makers if m is not None)


def needs_metric(optim: PyroOptim) -> bool:
    """Whether the learning rate scheduler looks at the loss of a validation."""
    made = getattr(optim, "pt_scheduler_constructor", None)
    return isinstance(made, type) and issubclass(made, torch.optim.lr_scheduler.ReduceLROnPlateau)


def present_rate(optim: PyroOptim) -> float:
    """The learning rate of the first parameter; NaN before the first step."""
    for optimiser in optim.optim_objs.values():
        return getattr(optimiser, "optimizer", optimiser).param_groups[0]["lr"]
    return math.nan


def base_rate(optim: PyroOptim) -> float | None:
    """The learning rate that an optimiser was made with; None if it is not one number."""
    options = optim.pt_optim_args
    rate = options.get("lr") if isinstance(options, dict) else None
    return float(rate) if isinstance(rate, Real) else None


def restore_optimiser(
    optim: PyroOptim,
    state: dict[str, Any],
    rate: float | None,
    lr: float | None,
    schedule: Callable[[int], float],
) -> None:
    """Give an optimiser the state of a checkpoint.

    :param rate: The learning rate that the optimiser of the checkpoint was made with.
    :param lr: The learning rate from now on, to be multiplied by the schedule; None leaves both
        to the optimiser.
    """
    now = base_rate(optim)
    factor = now / rate if now and rate else 1.0
    for entry in filter(None, state.values()):
        rates = entry.get("scheduler", {})
        groups = entry.get("optimizer", entry)["param_groups"]
        if lr is not None:
            groups[0]["initial_lr"], groups[0]["lr"] = lr, lr * schedule(rates["last_epoch"])
            rates["base_lrs"], rates["_last_lr"] = [lr], [groups[0]["lr"]]
        elif factor != 1.0:
            for x in (*groups, rates):
                for key in x.keys() & {"lr", "initial_lr", "base_lrs", "_last_lr"}:
                    x[key] = [factor * r for r in x[key]] if x is rates else factor * x[key]
    optim.optim_objs.clear()
    optim.grad_clip.clear()
    # Pyro gives each parameter's optimiser its state when it makes that optimiser.
    optim.set_state({name: entry for name, entry in state.items() if entry})


def make_optimiser(
    optim: PyroOptim, name: str, p: Tensor, missed: Sequence[tuple[float, ...]] = ()
) -> None:
    """Make the optimiser of a parameter with the state that waits for it, as Pyro does when it
    first meets the parameter.

    :param missed: The arguments of the steps that its learning rate scheduler has missed.
    """
    state = optim._state_waiting_to_be_consumed.pop(name, None)
    if state is None:
        return
    made = optim._get_optim(p)
    _load_state_dict(made, state)
    for args in missed:
        made.step(*args)
    optim.optim_objs[p] = made
    optim.grad_clip[p] = optim._get_grad_clip(p)  # type: ignore[arg-type]


def tensors_in(state: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all tensors in a nest of dicts and lists."""
    if isinstance(state, Tensor):
        yield where, state
    elif isinstance(state, dict):
        for k, v in state.items():
            yield from tensors_in(v, f"{where}[{k!r}]")
    elif isinstance(state, (list, tuple)):
        for i, v in enumerate(state):
            yield from tensors_in(v, f"{where}[{i}]")


def forget_parameters(names: set[str]) -> None:
    """Remove parameters from Pyro's param store."""
    store = pyro.get_param_store()
    for name in names & set(store.keys()):
        del store[name]
