"""Chunks of steps through torch.compile, where a compiler is at hand."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution

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
        self.fn, self.full = fn, False

    @functools.cached_property
    def _fast(self) -> Callable[..., Any]:
        # Not before it is needed: this imports the compiler. Of half a graph the rest would be
        # slower than the function as it is.
        return torch.compile(self.fn, dynamic=False, fullgraph=True, options={"cpp_wrapper": True})

    def __call__(self, *args: Any) -> Any:
        if compiled.broken:
            return self.fn(*args)
        validates = Distribution._validate_args
        try:
            return self._fast(*args)
        except Exception as e:
            found = self.fn(*args)  # what is wrong with the arguments is said here
            if type(e).__name__ == "FailOnRecompileLimitHit":
                self._warn_of_shapes()
                return found
            compiled.broken = True
            reason = (str(e).strip() or repr(e)).splitlines()[0]
            warnings.warn(
                f"compile=True has no effect: torch.compile failed ({type(e).__name__}: {reason})",
                RuntimeWarning,
                stacklevel=2,
            )
            return found
        finally:
            # The compiler switches the validation of arguments off for the whole process. (To set
            # an attribute of a class costs its method caches.)
            if Distribution._validate_args is not validates:
                Distribution.set_default_validate_args(validates)

    def _warn_of_shapes(self) -> None:
        if not self.full:
            self.full = True
            warnings.warn(
                "compile=True: torch compiles for no more than eight combinations of shapes, and "
                "this is another one, which takes ordinary steps; keep the size of mini-batches",
                RuntimeWarning,
                stacklevel=3,
            )
