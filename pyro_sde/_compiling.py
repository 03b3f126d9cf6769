"""Chunks of steps through torch.compile, where a compiler is at hand."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["chunks", "compiled"]

CHUNK = 10
"""How many steps are compiled as one: more take longer to compile and hardly less to run."""


def chunks(n: int, size: int | None = None) -> list[slice]:
    """``n`` steps in runs of about ``size``, by default ten, of at most two different lengths."""
    count = -(-n // (size or CHUNK))
    ends = [n * k // count for k in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class compiled:
    """A function of tensors, compiled for each combination of shapes when it is met first.

    Where that is impossible, for want of a C++ compiler say, the function is called as it is, and
    one warning says so.
    """

    broken = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    @functools.cached_property
    def _fast(self) -> Callable[..., Any]:
        # Not before it is needed: this imports the compiler.
        return torch.compile(self.fn, dynamic=False, options={"cpp_wrapper": True})

    def __call__(self, *args: Any) -> Any:
        if compiled.broken:
            return self.fn(*args)
        try:
            return self._fast(*args)
        except Exception as e:
            found = self.fn(*args)  # what is wrong with the arguments is said here
            compiled.broken = True
            reason = (str(e).strip() or repr(e)).splitlines()[0]
            warnings.warn(
                f"compile=True has no effect: torch.compile failed ({type(e).__name__}: {reason})",
                RuntimeWarning,
                stacklevel=2,
            )
            return found
