"""Checks of what ``fit`` is given, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyro.optim import PyroOptim

from .._checks import check_whole
from ..infer import kl_weight

__all__ = ["check_numbers", "check_objects", "checked", "weight_of"]

LARGEST_SEED = 2**32 - 1
AT_LEAST = {
    "steps": 0,
    "epochs": 0,
    "batch_size": 1,
    "every": 1,
    "patience": 1,
    "validation_draws": 1,
    "keep": 1,
    "max_rejected": 0,
    "seed": 0,
}


def check_numbers(**values: Any) -> None:
    """Refuse numbers that are not whole where they count, or not positive; None is not looked at.

    Example::

        >>> check_numbers(steps=100, lr=0.01, patience=None)
        >>> check_numbers(steps=2.5)
        Traceback (most recent call last):
        ...
        ValueError: steps must be a whole number of at least 0: found 2.5

    :param values: Arguments of ``fit`` by name.
    """
    for name, value in values.items():
        if value is None:
            continue
        if name in AT_LEAST:
            check_whole(name, value, AT_LEAST[name])
        elif not (_is_real(value) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number: found {value!r}")
    if values.get("seed") is not None and values["seed"] > LARGEST_SEED:
        raise ValueError(f"seed must be at most {LARGEST_SEED}: found {values['seed']}")


def check_objects(model: Any, guide: Any, optim: Any, elbo: Any) -> None:
    """Refuse what is of the wrong kind.

    :param model: Must be callable, as ``guide``.
    :param guide: The guide.
    :param optim: None, or an optimiser of Pyro.
    :param elbo: None, or an ELBO.
    """
    for name, f in (("model", model), ("guide", guide)):
        if not callable(f):
            raise TypeError(f"{name} must be a function or a module: found {f!r}")
    if optim is not None and not isinstance(optim, PyroOptim):
        raise TypeError(
            f"optim must be an optimiser of Pyro, as pyro.optim.Adam({{'lr': 0.01}}): found "
            f"{optim!r}"
        )
    if isinstance(elbo, type) or not (elbo is None or hasattr(elbo, "loss_and_grads")):
        raise TypeError(f"elbo must be an ELBO, as TraceSDE_ELBO(): found {elbo!r}")


def weight_of(anneal: int | Callable[[int], float]) -> Callable[[int], float]:
    """The weight of the KL by step.

    :param anneal: The number of steps in which it rises to 1, or a function of the step.
    :returns: A function whose values are checked.
    """
    if not callable(anneal):
        check_whole("anneal", anneal, 0)
        return lambda step: kl_weight(step, anneal)
    return checked("anneal", anneal, "a number above 0, the weight of the KL", 0, False)


def checked(
    name: str, f: Callable[[int], Any], what: str, least: float, or_equal: bool
) -> Callable[[int], float]:
    """A function of the step, each value of which is checked when it is asked for.

    Example::

        >>> what = "a number of at least 0"
        >>> falling = checked("schedule", lambda step: 1.0 - step, what, 0, True)
        >>> falling(0), falling(1)
        (1.0, 0.0)
        >>> falling(2)
        Traceback (most recent call last):
        ...
        ValueError: schedule(2) must return a number of at least 0: found -1.0

    :param name: What the function is called.
    :param f: The function.
    :param what: What its values are.
    :param least: The limit of the values.
    :param or_equal: Whether they may be at the limit.
    :returns: The function, with values that are Python's numbers.
    """

    def at(step: int) -> float:
        value = f(step)
        if _is_real(value) and math.isfinite(value):
            number = float(value)
            if number > least or (or_equal and number == least):
                return number
        raise ValueError(f"{name}({step}) must return {what}: found {value!r}")

    return at


def _is_real(value: Any) -> bool:
    if isinstance(value, (str, bytes, bool, complex)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
