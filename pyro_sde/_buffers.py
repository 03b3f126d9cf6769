"""Runs that leave no trace in a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyro.poutine as poutine
from torch import nn

__all__ = ["keep_buffers"]


@contextmanager
def keep_buffers(*functions: Callable) -> Iterator[None]:
    """Whatever is run inside, the buffers of those that are modules are as they were."""
    modules = [m for f in functions if isinstance(m := poutine.unwrap(f), nn.Module)]
    kept = [(buffer, buffer.clone()) for m in modules for buffer in m.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
