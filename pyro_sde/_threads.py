"""One thread at a time: the handlers and parameters of Pyro belong to the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK

__all__ = ["one_thread"]

REMEDY = (
    "Pyro keeps its handlers and parameters for the whole process, so that two threads would "
    "corrupt each other's. Let one wait for the other, or give each a process of its own "
    "(multiprocessing, joblib with its default backend, torchrun)"
)


@dataclass
class _Hold:
    """What a thread is doing that no other thread may do at the same time."""

    what: str
    ident: int = field(default_factory=threading.get_ident)
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    depth: int = 0
    intruder: str | None = None
    """A thread that was refused after it had put handlers of its own onto Pyro's stack."""
    handlers: list = field(default_factory=lambda: list(_PYRO_STACK))
    dims: list = field(default_factory=lambda: list(_DIM_ALLOCATOR._stack))

    def restore_handlers(self) -> None:
        """Put back what was on Pyro's stack when this thread began."""
        _PYRO_STACK[:], _DIM_ALLOCATOR._stack = self.handlers, self.dims


_held: dict[str, _Hold] = {}  # setdefault and pop are atomic; a lock would have to survive a fork


def _be_free() -> None:
    """In a process that was forked: the thread that forked it is the only one."""
    hold = _held.pop("hold", None)
    if hold is not None and hold.ident != threading.get_ident():
        hold.restore_handlers()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_be_free)


@contextmanager
def one_thread(what: str, with_handlers: bool = False) -> Iterator[None]:
    """A context, or a decorator, that refuses to be entered while another thread is inside of one.

    The thread that is inside may enter it again. If another thread has meanwhile come with handlers
    of its own, an error inside is due to them: it is explained, and Pyro's stack is as it was.

    :param what: What this thread does, for errors.
    :param with_handlers: Whether handlers of this call are on Pyro's stack already.
    """
    hold = _held.setdefault("hold", _Hold(what))
    if hold.ident != threading.get_ident():
        name = threading.current_thread().name
        if with_handlers:
            hold.intruder = f"thread {name!r}, which called {what}"
        raise RuntimeError(
            f"thread {name!r} called {what} while thread {hold.thread!r} is in {hold.what}. "
            + REMEDY
        )
    hold.depth += 1
    try:
        yield
    except Exception as e:
        if hold.intruder is None or hold.depth > 1:
            raise
        hold.restore_handlers()
        raise RuntimeError(
            f"{hold.what} was disturbed by {hold.intruder}, and failed: {e}. {REMEDY}"
        ) from e
    finally:
        hold.depth -= 1
        if not hold.depth:
            _held.pop("hold", None)
