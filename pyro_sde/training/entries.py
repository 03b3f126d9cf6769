"""The entries that the checkpoint of a training must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint import CheckpointError
from .state import describe

__all__ = ["check_entries"]


@dataclass(frozen=True)
class Maybe:
    """None, or this form."""

    form: Any


TENSORS = {str: Tensor}
COLUMN = torch.float64
RANDOM: dict[str, Any] = {
    "torch": torch.uint8,
    "cuda": [torch.uint8],
    "numpy": (str, torch.int64, int, int, float),
    "python": (int, torch.int64, Maybe(float)),
    "generators": {str: torch.uint8},
}
FORM: dict[str, Any] = {
    "step": int,
    "parameters": TENSORS,
    "buffers": TENSORS,
    "late": [str],
    "gradients": [str],
    "optimiser": {str: dict},
    "lr": Maybe(float),
    "random": RANDOM,
    "random_of_other_ranks": [RANDOM],
    "history": {
        "step": COLUMN,
        "elbo": COLUMN,
        "kl": COLUMN,
        "log_likelihood": COLUMN,
        "lr": COLUMN,
        "kl_by_site": {str: COLUMN},
        "validation": [(int, float)],
        "rejected": int,
    },
    "best": Maybe({"step": int, "parameters": TENSORS, "buffers": TENSORS}),
    "settings": {
        "optim": str,
        "batch_size": Maybe(int),
        "rows": Maybe(int),
        "seed": int,
        "processes": int,
    },
    "data": str,
    "is_good": bool,
}
"""A type; the dtype of a vector; a list of one form; a tuple of forms, for a list or tuple; a dict
of names and their forms, or of the form of all values."""


def check_entries(path: Any, state: dict[str, Any]) -> None:
    """Refuse a state in which an entry is missing or has another form.

    :param path: The file that holds it, for messages.
    :param state: The state.
    """
    problem = _compare(state, FORM, "")
    if problem is None:
        problem = _lengths(state["history"], state["step"]) or _relations(state)
    if problem is not None:
        raise CheckpointError(
            f"{path} is not the checkpoint of a training: {problem}. Nothing was loaded; use the "
            "pyro_sde that wrote it, or begin anew with another path"
        )


def _compare(x: Any, form: Any, where: str) -> str | None:
    """What is wrong with an entry; None if nothing is."""
    if isinstance(form, Maybe):
        return None if x is None else _compare(x, form.form, where)
    if isinstance(form, torch.dtype):
        if not isinstance(x, Tensor) or x.dtype != form or x.dim() != 1:
            found = describe(x) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            return f"entry {where} is {found}, not a vector of {str(form).removeprefix('torch.')}"
        return None
    kind: Any = form if isinstance(form, type) else type(form)
    kinds: Any = (list, tuple) if kind is tuple else kind
    if not isinstance(x, kinds) or (kind is int and isinstance(x, bool)):
        return f"entry {where or 'state'} is a {type(x).__name__}, not a {kind.__name__}"
    children: list[tuple[Any, Any, str]] = []
    if isinstance(form, tuple):
        if len(x) != len(form):
            return f"entry {where} has {len(x)} elements, not {len(form)}"
        children = [(v, f, f"{where}[{i}]") for i, (v, f) in enumerate(zip(x, form, strict=True))]
    elif isinstance(form, list):
        children = [(v, form[0], f"{where}[{i}]") for i, v in enumerate(x)]
    elif isinstance(form, dict) and str in form:
        wrong = [k for k in x if not isinstance(k, str)]
        if wrong:
            return f"entry {where} has the key {wrong[0]!r}, which is not a string"
        children = [(v, form[str], f"{where}[{k!r}]") for k, v in x.items()]
    elif isinstance(form, dict):
        missing = [k for k in form if k not in x]
        if missing:
            return f"entry {where + '.' if where else ''}{missing[0]} is missing"
        children = [(x[k], f, f"{where}.{k}" if where else k) for k, f in form.items()]
    return next((p for p in (_compare(*child) for child in children) if p is not None), None)


def _lengths(history: dict[str, Any], step: int) -> str | None:
    columns = {k: x for k, x in history.items() if isinstance(x, Tensor)}
    columns |= {f"kl_by_site[{k!r}]": x for k, x in history["kl_by_site"].items()}
    for name, x in columns.items():
        if len(x) != step:
            return f"entry history.{name} has {len(x)} elements after {step} steps"
    return None


def _relations(state: dict[str, Any]) -> str | None:
    for entry in ("late", "gradients"):
        unknown = set(state[entry]) - state["parameters"].keys()
        if unknown:
            return f"entry {entry} has {min(unknown)!r}, which is not in the entry parameters"
    if (state["best"] is None) != (not state["history"]["validation"]):
        return "only one of the entries best and history.validation has something"
    return None
