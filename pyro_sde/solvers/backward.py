"""The backward pass of a solution from its states, without its graph.

A graph of one node for every operation of every step would not only keep tensors: its small
nodes, left behind between large tensors that are freed, would fragment the heap until memory
grows with the steps as it does with the tensors. So the forward pass makes no graph at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lean", "leaves_of", "solve_leanly"]


class Lean:
    """How to solve without a graph and to go back. A subclass for each kind of method.

    :param field: dh/dt as a function of (t, h, w).
    :param times: The grid.
    """

    def __init__(self, field: Callable[[Tensor, Tensor, Any], Tensor], times: Tensor) -> None:
        self.field = field
        self.t, self.dt = times.unbind(0), times.diff().unbind(0)
        self.leaves: tuple[Tensor, ...] = ()

    def forward(self, h: Tensor, w: Any) -> tuple[Tensor, ...]:
        """The solution, and the tensors to go back from; ``w`` has one entry for each time."""
        raise NotImplementedError

    def backward(self, saved: tuple[Tensor, ...], w: Any, grad: Tensor, back: Back) -> Tensor:
        """The gradient by h; those by w and the leaves go to ``back``."""
        raise NotImplementedError


class Back:
    """Gradients by the path and by what the field closes over, as they come in."""

    def __init__(self, lean: Lean, path: Tensor | None) -> None:
        self.path = None if path is None else torch.zeros_like(path)
        self.leaves: list[Tensor | None] = [None] * len(lean.leaves)
        self.known = lean.leaves

    def vjp(
        self,
        fn: Callable[..., Tensor],
        h: Tensor,
        w: tuple[Any, ...],
        at: tuple[int, ...],
        grad: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The value of ``fn(h, *w)``, and the gradient by h, ``grad`` being the one by the value.

        :param at: The times to which the entries of ``w`` belong.
        """
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            if self.path is not None:
                w = tuple(x.detach().requires_grad_() for x in w)
            value = fn(h, *w)
        if not value.requires_grad:
            return value.detach(), torch.zeros_like(h)
        mine = [h, *w] if self.path is not None else [h]
        for leaf in leaves_of(value, mine):
            if all(leaf is not known for known in self.known):
                raise RuntimeError(
                    "the field depends on a parameter at one time that it does not depend on at "
                    'the first: pass a module as the field, or use memory="graph"'
                )
        # Kept, for the graph before the leaves' uses is shared by all the steps.
        by_h, *rest = torch.autograd.grad(
            value, [*mine, *self.known], grad, retain_graph=True, allow_unused=True
        )
        n = len(mine) - 1
        for i, g in zip(at, rest[:n], strict=False):
            if g is not None and self.path is not None:
                self.path.select(-2, i).add_(g)
        for k, g in enumerate(rest[n:]):
            if g is not None:
                old = self.leaves[k]
                self.leaves[k] = g if old is None else old + g
        return value.detach(), torch.zeros_like(h) if by_h is None else by_h


def leaves_of(value: Tensor, mine: list[Tensor]) -> list[Tensor]:
    """The leaves of the graph of ``value`` other than ``mine``."""
    seen: set[Any] = set()
    todo = [value.grad_fn]
    found: list[Tensor] = []
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            if all(variable is not x for x in mine):
                found.append(variable)
        else:
            todo.extend(n for n, _ in node.next_functions)
    return found


class _Solution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lean: Lean, h0: Tensor, path: Tensor | None, *leaves: Tensor) -> Tensor:
        h, *saved = lean.forward(h0, _split(path, lean))
        ctx.lean, ctx.has_path = lean, path is not None
        ctx.save_for_backward(*(() if path is None else (path,)), *saved)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (create_graph=True) cannot be taken through what is "
                'recomputed; use memory="graph"'
            )
        saved = list(ctx.saved_tensors)
        path = saved.pop(0) if ctx.has_path else None
        needs_path = ctx.needs_input_grad[2]
        back = Back(ctx.lean, path if needs_path else None)
        by_h = ctx.lean.backward(tuple(saved), _split(path, ctx.lean), grad, back)
        return None, by_h if ctx.needs_input_grad[1] else None, back.path, *back.leaves


def _split(path: Tensor | None, lean: Lean) -> Any:
    return [None] * len(lean.t) if path is None else path.unbind(-2)


def solve_leanly(lean: Lean, h0: Tensor, path: Tensor | None) -> Tensor:
    """The solution with the gradient of ``lean``: by h0, the path, and what the field closes over,
    as far as a first evaluation shows it."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            'memory="recompute" and "reversible" cannot be used inside torch.func.vmap or grad: '
            "put the vmap inside of the field"
        )
    if any(t.requires_grad for t in lean.t):
        raise ValueError('gradients with respect to times need memory="graph"')
    before = torch.get_rng_state()
    w = None if path is None else path.select(-2, 0).detach()
    with torch.enable_grad():
        first = lean.field(lean.t[0], h0.detach(), w)
    if not torch.equal(before, torch.get_rng_state()):
        raise RuntimeError(
            "the field draws random numbers (dropout, say), which would be others in the backward "
            'pass; use memory="graph", or draw them before'
        )
    lean.leaves = tuple(leaves_of(first, [])) if first.requires_grad else ()
    return _Solution.apply(lean, h0, path, *lean.leaves)
