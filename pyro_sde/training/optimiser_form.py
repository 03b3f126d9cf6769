"""The form of an optimiser's state, from an optimiser that has made one step."""

from __future__ import annotations

from numbers import Real
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.optim import _get_state_dict
from torch import Tensor

from .checkpoint import CheckpointError
from .state import describe, keep_random_state

__all__ = ["check_optimiser"]


def check_optimiser(path: Any, optim: PyroOptim, state: dict[str, Any]) -> None:
    """Refuse states that this optimiser could not have: torch verifies neither their names nor
    their types, and would fail in the first step, or compute something else.

    :param path: The file that holds the states, for messages.
    :param optim: The optimiser.
    :param state: The state of a training; that of the optimiser of a parameter is empty before its
        first step.
    """
    parameters, states = state["parameters"], state["optimiser"]
    problem: str | None = None
    for name in parameters.keys() ^ states.keys():
        problem = f"{name!r} is in only one of the entries parameters and optimiser"
    for name, p in parameters.items():
        if problem is None and states[name]:
            form = _form(optim, name, p)
            if form is not None and name not in state["gradients"]:
                form = _without_step(states[name], form)
            problem = None if form is None else _compare(states[name], form, f"optimiser[{name!r}]")
    if problem:
        raise CheckpointError(
            f"{path} is not the checkpoint of such a training: {problem}. Nothing was loaded; use "
            "the optimiser of that training, and the versions of torch and pyro_sde that wrote "
            "the file, or begin anew with another path"
        )


def _form(optim: PyroOptim, name: str, p: Tensor) -> dict[str, Any] | None:
    """The state of an optimiser of a parameter like this one, None if it cannot make a step."""
    like = torch.zeros_like(p, requires_grad=True)
    like.grad = torch.zeros_like(p)
    names = pyro.get_param_store()._param_to_name  # settings may depend on the name
    names[like] = name
    try:
        with keep_random_state():
            made = optim._get_optim(like)
            getattr(made, "optimizer", made).step()
        return _get_state_dict(made)
    except Exception:
        return None
    finally:
        del names[like]


def _without_step(x: Any, form: Any) -> Any:
    """The form for a parameter that has had no gradient yet, if it has no state."""
    if not isinstance(x, dict) or not isinstance(form, dict):
        return form
    return {
        k: {} if k == "state" and x.get(k) == {} else _without_step(x.get(k), v)
        for k, v in form.items()
    }


def _compare(x: Any, form: Any, where: str) -> str | None:
    """What is wrong with an entry; None if nothing is."""
    if isinstance(form, Tensor) and isinstance(x, Tensor):
        if (x.shape, x.dtype) != (form.shape, form.dtype):
            return f"entry {where} is {describe(x)}, not {describe(form)}"
        return None
    if _is_number(form) and _is_number(x):
        is_usable = x == form or abs(x) < 2**63
        return None if is_usable else f"entry {where} is {x!r}"
    kind = dict if isinstance(form, dict) else type(form)
    if not isinstance(x, kind):
        return f"entry {where} is a {type(x).__name__}, not a {kind.__name__}"
    if isinstance(form, dict):
        for k in form.keys() ^ x.keys():
            return f"entry {where}[{k!r}] is {'missing' if k in form else 'not of this optimiser'}"
        children = [(x[k], form[k], f"{where}[{k!r}]") for k in form]
    elif isinstance(form, (list, tuple)):
        if len(x) != len(form):
            return f"entry {where} has {len(x)} elements, not {len(form)}"
        children = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(x, form, strict=True))]
    else:
        return None
    return next((p for p in (_compare(*child) for child in children) if p is not None), None)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
