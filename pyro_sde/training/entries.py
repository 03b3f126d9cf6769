"""The entries that the checkpoint of a training must have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checkpoint import CheckpointError

__all__ = ["check_entries"]

TENSORS = {str: Tensor}
RANDOM: dict[str, Any] = {
    "torch": Tensor,
    "cuda": [Tensor],
    "numpy": [object],
    "python": [object],
    "generators": TENSORS,
}
FORM: dict[str, Any] = {
    "step": int,
    "parameters": TENSORS,
    "buffers": TENSORS,
    "late": [str],
    "gradients": [str],
    "optimiser": {str: dict},
    "random": RANDOM,
    "random_of_other_ranks": [RANDOM],
    "history": {
        "step": Tensor,
        "elbo": Tensor,
        "kl": Tensor,
        "log_likelihood": Tensor,
        "lr": Tensor,
        "kl_by_site": TENSORS,
        "validation": [object],
        "rejected": int,
    },
    "best": (None, {"step": int, "parameters": TENSORS, "buffers": TENSORS}),
    "settings": {
        "optim": str,
        "batch_size": (None, int),
        "rows": (None, int),
        "seed": int,
        "processes": int,
    },
    "data": str,
    "is_good": bool,
}
"""A type, a list of one form, a dict of names and their forms or of one type of key, or a tuple of
alternatives."""


def check_entries(path: Any, state: dict[str, Any]) -> None:
    """Refuse a state in which an entry is missing or has another form.

    :param path: The file that holds it, for messages.
    :param state: The state.
    """
    problem = _compare(state, FORM, "")
    if problem is None:
        problem = _lengths(state["history"], state["step"])
    if problem is not None:
        raise CheckpointError(
            f"{path} is not the checkpoint of a training: {problem}. Nothing was loaded; use the "
            "pyro_sde that wrote it, or begin anew with another path"
        )


def _compare(x: Any, form: Any, where: str) -> str | None:
    """What is wrong with an entry; None if nothing is."""
    if isinstance(form, tuple):
        if x is None:
            return None
        return _compare(x, form[1], where)
    kind: Any = form if isinstance(form, type) else type(form)
    if not isinstance(x, kind) or (kind is int and isinstance(x, bool)):
        return f"entry {where or 'state'} is a {type(x).__name__}, not a {kind.__name__}"
    children: list[tuple[Any, Any, str]] = []
    if isinstance(form, list):
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
        if x.dim() != 1 or len(x) != step or x.dtype != torch.float64:
            return f"entry history.{name} is {x.dtype} {tuple(x.shape)} after {step} steps"
    return None
