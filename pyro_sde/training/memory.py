"""What becomes of memory between two gradients."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_memory"]

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Numbers of mallopt(3): how much may lie free at the end of the heap, and how many blocks may be
mapped, each alone, instead of being part of it."""


def keep_memory() -> bool:
    """Have the process keep the memory that it frees, for the next gradient to take.

    The allocator of Linux (glibc) maps tensors of more than 32 MB one by one and gives them back to
    the system when they are freed, also the end of a large heap; in every gradient the system then
    hands out the same pages again, cleared. That is a tenth to a third of the time of a model whose
    graph takes hundreds of megabytes, and makes it grow faster than the model does. After this call
    the process stays as large as it once was. Call it first thing, as the whole process is
    concerned.

    Example::

        >>> from pyro_sde.training import keep_memory
        >>> is_kept = keep_memory()

    :returns: Whether the system has that switch; if not, nothing has changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    # -1 switches it off: the end of the heap is never given back.
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
