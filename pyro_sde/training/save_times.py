"""When a training saves a checkpoint."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from numbers import Integral

__all__ = ["SaveTimes"]

STEPS = 100
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class SaveTimes:
    """Every so many steps, or after so much time.

    Example::

        >>> [step for step in range(7) if SaveTimes(3).is_due(step)]
        [3, 6]
        >>> SaveTimes("0 s").is_due(2)
        Traceback (most recent call last):
        ...
        ValueError: save_every must be a positive number of steps, or a time as "30 s", "5 min", ...

    :param every: A number of steps (100 for None), or a time: ``"30 s"``, ``"5 min"``, ``"1 h"`` or
        a ``timedelta``.
    """

    def __init__(self, every: int | str | timedelta | None) -> None:
        self.steps: int | None = None
        self.seconds = 0.0
        found = (
            re.fullmatch(r"\s*([0-9.]+)\s*(s|min|h)\s*", every) if isinstance(every, str) else None
        )
        if every is None:
            self.steps = STEPS
        elif isinstance(every, Integral) and not isinstance(every, bool):
            self.steps = int(every)
        elif isinstance(every, timedelta):
            self.seconds = every.total_seconds()
        elif found is not None and found[1].count(".") < 2:
            self.seconds = float(found[1]) * UNITS[found[2]]
        if not (self.steps or self.seconds) > 0:
            raise ValueError(
                'save_every must be a positive number of steps, or a time as "30 s", "5 min", '
                f'"1 h" or a timedelta: found {every!r}'
            )
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether to save the state after so many steps.

        :param step: The number of steps.
        :returns: True if it is time; the time then begins anew.
        """
        if self.steps is not None:
            return step > 0 and step % self.steps == 0
        now = time.monotonic()
        if step == 0 or now - self._last < self.seconds:
            return False
        self._last = now
        return True
