"""Ctrl-C that takes effect between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """A context in which the first SIGINT sets ``came``, and a second one interrupts as usual.

    Only the main thread receives signals. A process that ignores SIGINT (under nohup, say)
    continues to ignore it.
    """

    came = False

    def __enter__(self) -> Interrupt:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.SIG_IGN:
            self._before = None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(signal.SIGINT, self._before)

    def __exit__(self, *args: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
