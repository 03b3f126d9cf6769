"""What the operations with a backward pass written by hand have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["BLOCK", "fits_cpu", "gradients_with_graph", "has_hooks", "inside_func"]

BLOCK = 2**18
"""How many numbers of a layer are computed at once: enough to make an operation worth its call, few
enough for a cache."""


def fits_cpu(*tensors: Tensor) -> bool:
    """Whether an operation written for the CPU and for one dtype may take the tensors."""
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and all(x.dtype == first.dtype and x.device == first.device for x in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def inside_func(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func is active, or any of the tensors is batched by vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None or any(
        torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors
    )


def has_hooks(*modules: nn.Module) -> bool:
    """Whether a call of any of the modules does more than their ``forward``."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def gradients_with_graph(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``fn`` by ordinary autograd, with a graph if grad mode is on."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) for x in inputs]
        outputs = fn(*aliases)
    live = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [x for x, need in zip(aliases, needed, strict=True) if need]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in live],
            wanted,
            [g for _, g in live],
            create_graph=again,
            allow_unused=True,
        )
    )
    return [next(found) if need else None for need in needed]
