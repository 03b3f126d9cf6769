"""Settings that hold inside of a context, and in the thread or task that entered it only."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

__all__ = ["Scope"]

T = TypeVar("T")


class Scope(Generic[T]):
    """The contexts of one kind that are open in this thread.

    A context removes itself and no other when it ends. So contexts that end in another order than
    the reverse of their beginnings, as those of two generators may, leave nothing behind.

    Example::

        >>> scope = Scope("example")
        >>> scope.enter("a"), scope.enter("b"), scope.leave("a"), scope.current
        (None, None, None, 'b')

    :param name: The name of the variable.
    """

    def __init__(self, name: str) -> None:
        self._open: ContextVar[tuple[T, ...]] = ContextVar(name, default=())

    @property
    def current(self) -> T | None:
        """What was entered last, of what was not left; None outside of all contexts."""
        found = self._open.get()
        return found[-1] if found else None

    def enter(self, x: T) -> None:
        self._open.set((*self._open.get(), x))

    def leave(self, x: T) -> None:
        found = list(self._open.get())
        for i in reversed(range(len(found))):
            if found[i] is x:
                del found[i]
                break
        self._open.set(tuple(found))
