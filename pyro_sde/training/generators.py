"""Random number generators that a model or guide has of its own."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType
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
LIBRARIES = {"builtins", "numpy", "pyro", "pyro_sde", "torch"}
GLOBAL: tuple[Any, ...] = (
    random.random.__self__,  # type: ignore[attr-defined]
    np.random.get_state.__self__,  # type: ignore[attr-defined]
    torch.default_generator,
)
"""Those that every checkpoint holds."""
EMPTY_MODULE = vars(nn.Module()).keys()
DEPTH, LENGTH = 6, 100
"""How many objects lead from a model to a generator that is found, and the longest container."""


def own_generators(**functions: Callable) -> dict[str, Any]:
    """The generators that functions, modules and other objects hold or have captured.

    :param functions: Model and guide, by their roles.
    :returns: The generators by name.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue = [(role, poutine.unwrap(f), DEPTH) for role, f in functions.items()]
    while queue:
        name, x, depth = queue.pop(0)
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (torch.Generator, *FOREIGN)):
            if not any(x is y for y in GLOBAL):
                found[name] = x
        elif depth:
            queue += [(f"{name}.{key}", y, depth - 1) for key, y in _parts(x) if _may_hold(y)]
    return found


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, or a function has captured, by name."""
    if isinstance(x, nn.Module):
        for prefix, module in x.named_modules():
            own = vars(module).keys() - EMPTY_MODULE
            yield from ((f"{prefix}.{key}".strip("."), vars(module)[key]) for key in sorted(own))
            yield f"{prefix}.forward".strip("."), type(module).forward
    elif isinstance(x, dict):
        yield from ((str(key), y) for key, y in x.items())
    elif isinstance(x, (list, tuple)):
        yield from ((str(i), y) for i, y in enumerate(x))
    elif isinstance(x, functools.partial):
        yield from {"func": x.func, "args": x.args, "keywords": x.keywords}.items()
    elif inspect.ismethod(x):
        yield from (("self", x.__self__), ("function", x.__func__))
    elif inspect.isfunction(x):
        yield from _captured(x)
        yield from (("defaults", x.__defaults__ or ()), ("defaults", x.__kwdefaults__ or {}))
    else:
        yield from getattr(x, "__dict__", {}).items()
        if callable(x):
            yield "call", type(x).__call__


def _captured(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function uses, and those of functions around it. This is much
    faster than inspect.getclosurevars."""
    codes = [f.__code__]
    while codes:
        code = codes.pop()
        yield from ((n, f.__globals__[n]) for n in code.co_names if n in f.__globals__)
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def _may_hold(x: Any) -> bool:
    """Whether to look for generators in an object: not in classes, modules and tensors, and not in
    what torch, Pyro or this package define, except for modules and guides, which hold others."""
    if isinstance(x, (dict, list, tuple)):
        return len(x) <= LENGTH
    if isinstance(x, (torch.Generator, nn.Module, functools.partial, *FOREIGN)):
        return True
    if isinstance(x, type) or inspect.ismodule(x) or inspect.isbuiltin(x):
        return False
    home = getattr(x if inspect.isroutine(x) else type(x), "__module__", None) or ""
    is_known = home.split(".")[0] in LIBRARIES
    return not is_known and (inspect.isroutine(x) or hasattr(x, "__dict__"))


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
