"""Where a block leaves its solution to somebody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

__all__ = ["current_solver", "solve_elsewhere"]

Solver = Callable[[Any, Tensor], Tensor]

_current: ContextVar[Solver | None] = ContextVar("pyro_sde_block_solver", default=None)


@contextmanager
def solve_elsewhere(solver: Solver) -> Iterator[None]:
    """Inside, every block is solved by ``solver(block, h)``, its weights included."""
    token = _current.set(solver)
    try:
        yield
    finally:
        _current.reset(token)


def current_solver() -> Solver | None:
    return _current.get()
