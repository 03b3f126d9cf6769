"""Autograd that keeps how a value was computed instead of what its gradient needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["MEMORY", "Replay", "capture", "check_memory", "watch"]

MEMORY = ("graph", "recompute", "reversible")


def check_memory(memory: str, allowed: tuple[str, ...] = MEMORY) -> str:
    if memory not in allowed:
        raise ValueError(f"memory must be one of {', '.join(allowed)}: found {memory!r}")
    return memory


class Replay:
    """Computations of which the graph keeps the inputs alone; the backward pass does each again.

    It is the graph of the computation itself that is kept, without its tensors: whatever else the
    computation depends on, parameters or latents that it closes over, gets its gradient as usual.
    The tensors of one computation at a time are brought back, so that memory does not grow with
    their number however they are differentiated. (``torch.utils.checkpoint`` does the same for
    one computation from its inputs, but keeps what a partial derivative left over, and cannot
    get an input from elsewhere, as a reversible solver does.)
    """

    def __init__(self) -> None:
        self._open: tuple[Any, list[Tensor]] | None = None

    def run(self, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        """``fn(*inputs)``, to be done again from the values of ``inputs``."""
        held = [(x.detach(), x.requires_grad) for x in inputs]
        unchanged = watch(inputs)

        def again() -> list[Tensor]:
            unchanged()
            return capture(fn, *(x.detach().requires_grad_(needs) for x, needs in held))[1]

        return self.record(fn, inputs, again)

    def record(
        self, fn: Callable[..., Any], inputs: tuple[Tensor, ...], again: Callable[[], list[Tensor]]
    ) -> Any:
        """``fn(*inputs)``; ``again`` gives the tensors that its gradient needs, in their order."""
        if not torch.is_grad_enabled():
            return fn(*inputs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                'memory="recompute" and "reversible" cannot be used inside torch.func.vmap or '
                "grad: put the vmap inside of the function that is recomputed"
            )
        key, shapes = object(), []

        def pack(x: Tensor) -> int:
            shapes.append(x.shape)
            return len(shapes) - 1

        def unpack(i: int) -> Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "gradients of gradients (create_graph=True) cannot be taken through what is "
                    'recomputed; use memory="graph"'
                )
            if self._open is None or self._open[0] is not key:
                self._open = None  # before the next is made, or two would be in memory
                tensors = again()
                if [x.shape for x in tensors] != shapes:
                    raise RuntimeError(
                        "a function gave another computation when it was done again for its "
                        'gradient: it must depend on its inputs alone, or use memory="graph"'
                    )
                self._open = key, tensors
            return self._open[1][i]

        before = torch.get_rng_state()
        with saved_tensors_hooks(pack, unpack):
            out = fn(*inputs)
        if not torch.equal(before, torch.get_rng_state()):
            raise RuntimeError(
                "a function that is recomputed draws random numbers (dropout, say), which would "
                'be others the second time; use memory="graph", or draw them before'
            )
        return out


def watch(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """A function that raises if one of ``tensors`` has been written to since."""
    held = [(x.detach(), x._version) for x in tensors]

    def check() -> None:
        if any(x._version != version for x, version in held):
            raise RuntimeError(
                "a state that the gradient is computed from has been changed by an in-place "
                "operation; write x = x + 1 for x += 1"
            )

    return check


def capture(fn: Callable[..., Any], *inputs: Tensor) -> tuple[Any, list[Tensor]]:
    """The value of ``fn(*inputs)`` and the tensors that its graph keeps, in their order."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> int:
        kept.append(x.detach())
        return len(kept) - 1

    with torch.enable_grad(), saved_tensors_hooks(pack, kept.__getitem__):
        out = fn(*inputs)
    return out, kept
