"""Random number generators that a model or guide has of its own."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from .state import keep_random_state

__all__ = [
    "check_generators",
    "generator_states",
    "keep_all_random_states",
    "own_generators",
    "set_generators",
]

FOREIGN = (np.random.Generator, np.random.RandomState, random.Random)


def own_generators(**functions: Callable) -> dict[str, Any]:
    """The generators in the attributes of modules, and those that functions have captured.

    :param functions: Model and guide, by their roles.
    :returns: The generators by name.
    """
    found: dict[str, Any] = {}
    for role, f in functions.items():
        for name, x in _captured(poutine.unwrap(f), role):
            if isinstance(x, (torch.Generator, *FOREIGN)) and x not in found.values():
                found[name] = x
    return found


def _captured(f: Any, role: str, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes of a module, or of the variables that a function uses.
    Functions among these are searched, too, down to ``depth``."""
    if isinstance(f, nn.Module):
        for prefix, module in f.named_modules(prefix=role):
            yield from ((f"{prefix}.{name}", x) for name, x in vars(module).items())
        f = type(f).forward
    f = getattr(f, "__func__", f)
    if not inspect.isfunction(f):
        return
    captured = inspect.getclosurevars(f)
    for name, x in {**captured.globals, **captured.nonlocals}.items():
        if isinstance(x, nn.Module) or inspect.isfunction(x):
            if depth:
                yield from _captured(x, f"{role}.{name}", depth - 1)
        else:
            yield f"{role}.{name}", x


def check_generators(**functions: Callable) -> None:
    """Refuse generators whose state a checkpoint cannot hold."""
    for name, x in own_generators(**functions).items():
        if not isinstance(x, torch.Generator):
            raise NotImplementedError(
                f"{name} is a {type(x).__name__} of its own, whose state no checkpoint holds, so a "
                "resumed training would draw other numbers. Use a torch.Generator, or the global "
                "random numbers of torch, NumPy or Python; or train without checkpoint"
            )


def generator_states(**functions: Callable) -> dict[str, Tensor]:
    """The states of all torch generators."""
    return {name: g.get_state() for name, g in own_generators(**functions).items()}


def set_generators(states: dict[str, Tensor], **functions: Callable) -> None:
    """Set the states that :func:`generator_states` returned."""
    for name, g in own_generators(**functions).items():
        if name in states:  # the first evaluation of a model may make others
            g.set_state(states[name])


@contextmanager
def keep_all_random_states(**functions: Callable) -> Iterator[None]:
    """A context that restores the global random state and that of all torch generators."""
    states = generator_states(**functions)
    try:
        with keep_random_state():
            yield
    finally:
        set_generators(states, **functions)
