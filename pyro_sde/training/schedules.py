"""Learning rate schedules, as factors of the largest learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from .arguments import checked

__all__ = ["make_schedule"]

Schedule = Callable[[int], float]


def _cosine(x: float) -> float:
    """Falls from 1 at x = 0 to 0 at x = 1."""
    return 0.5 * (1 + math.cos(math.pi * x))


def _one_cycle(x: float, rise: float = 0.3, first: float = 0.04, last: float = 1e-4) -> float:
    if x < rise:
        return 1 - (1 - first) * _cosine(x / rise)
    return last + (1 - last) * _cosine((x - rise) / (1 - rise))


_NAMED: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
}


def make_schedule(schedule: str | Schedule | None, steps: int) -> Schedule:
    """A schedule: a function from the number of a step, from 0, to a factor of the learning rate.

    Example::

        >>> rise_and_fall = make_schedule("one_cycle", 11)
        >>> [round(rise_and_fall(i), 3) for i in (0, 3, 10)]
        [0.04, 1.0, 0.0]

    :param schedule: ``"constant"``, ``"cosine"`` (also None; from 1 down to 0), ``"one_cycle"``
        (from 0.04 up to 1 within the first three tenths, then down to 1e-4) or a function, whose
        values are then checked.
    :param steps: The number of steps.
    :returns: The function.
    """
    if callable(schedule):
        what = "a number of at least 0, by which the learning rate is multiplied"
        return checked("schedule", schedule, what, 0, True)
    shape = _NAMED.get(schedule or "cosine")
    if shape is None:
        raise ValueError(
            f"schedule must be one of {', '.join(_NAMED)}, or a function from the step to a "
            f"factor: found {schedule!r}"
        )
    return lambda step: shape(min(step / max(steps - 1, 1), 1.0))
