"""Ctrl-C and SIGTERM that take effect between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """A context in which the first SIGINT or SIGTERM sets ``came``, and a second one has its usual
    effect.

    Only the main thread receives signals. A process that ignores a signal (SIGINT under nohup, say)
    continues to ignore it.
    """

    came = False

    def __enter__(self) -> Interrupt:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(number, self._before[number])

    def __exit__(self, *args: Any) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
