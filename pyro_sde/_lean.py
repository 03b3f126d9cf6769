"""Computations of many steps that leave no graph, and are done again, step by step, going back.

A graph with one node for every operation of every step does not only keep tensors: its small
nodes, left behind between large tensors that are freed, fragment the heap, until memory grows
with the steps almost as it does with the tensors. So the forward pass makes none at all.
(``torch.utils.checkpoint`` of every step would.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ._operations import inside_of_func

__all__ = ["Lean", "Vjp", "check_memory", "run_leanly"]

Grads = Sequence[Tensor | None]


def check_memory(memory: str, *allowed: str) -> str:
    if memory not in allowed:
        raise ValueError(f"memory must be one of {', '.join(allowed)}: found {memory!r}")
    return memory


class Lean:
    """A computation and its backward pass; a subclass for each kind."""

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The outputs, and what to go back from."""
        raise NotImplementedError

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: Vjp
    ) -> Grads:
        """The gradients by the inputs, from those by the outputs (None is zero)."""
        raise NotImplementedError


class Vjp:
    """Local vector-Jacobian products; those by what a step closes over add up in ``grads``.

    :param others: The tensors, parameters and computed ones, that the steps close over.
    """

    def __init__(self, others: Sequence[Tensor]) -> None:
        self.others = others
        self.swap: Any = nullcontext()
        if _is_computed_from_another(others):
            # The gradient of the latter would count that of the former, too, and so does autograd.
            self.others = [x.detach().requires_grad_() for x in others]
            self.swap = _Swap(others, self.others)
        self.grads: list[Tensor | None] = [None] * len(others)

    def __call__(
        self,
        fn: Callable[..., tuple[Tensor, ...]],
        args: Sequence[Tensor],
        grads: Grads,
        by_first_only: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The outputs of ``fn(*args)``, and the gradients by ``args``.

        :param grads: By each output.
        :param by_first_only: By one more output, the last, which is differentiated by the first
            argument and by nothing else.
        """
        with torch.enable_grad(), self.swap:
            points = [x.detach().requires_grad_() for x in args]
            outputs = fn(*points)
        self._check(outputs, points)
        total = [torch.zeros_like(x) for x in points]
        if by_first_only is not None and outputs[-1].requires_grad:
            (last,) = torch.autograd.grad(
                outputs[-1], points[0], by_first_only, retain_graph=True, allow_unused=True
            )
            total[0] = total[0] if last is None else total[0] + last
        live = [
            (o, g)
            for o, g in zip(outputs, grads, strict=False)
            if g is not None and o.requires_grad
        ]
        if live:
            found = torch.autograd.grad(
                [o for o, _ in live],
                [*points, *self.others],
                [g for _, g in live],
                allow_unused=True,
            )
            n = len(points)
            total = [t if g is None else t + g for t, g in zip(total, found[:n], strict=True)]
            for k, g in enumerate(found[n:]):
                if g is not None:
                    old = self.grads[k]
                    # A copy to add to: the gradients of a sum's two terms are one tensor.
                    self.grads[k] = g.clone() if old is None else old.add_(g)
        return tuple(o.detach() for o in outputs), total

    def _check(self, outputs: Sequence[Tensor], points: list[Tensor]) -> None:
        """That every path of the graph ends in something known."""
        known = {id(x) for x in [*points, *self.others]}
        borders = {x.grad_fn for x in self.others if x.grad_fn is not None}
        seen: set[Any] = set()
        todo: list[Any] = [o.grad_fn for o in outputs]
        while todo:
            node = todo.pop()
            if node is None or node in seen or node in borders:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and id(variable) not in known:
                raise RuntimeError(
                    "a step depends on a parameter that it was not seen to use in the forward "
                    'pass, inside of a torch.autograd.Function perhaps; use memory="graph"'
                )
            todo.extend(n for n, _ in node.next_functions)


def _is_computed_from_another(tensors: Sequence[Tensor]) -> bool:
    """Whether any of them was."""
    nodes = {x.grad_fn for x in tensors if x.grad_fn is not None}
    leaves = {id(x) for x in tensors if x.grad_fn is None}
    seen: set[Any] = set()
    todo: list[Any] = [n for node in nodes for n, _ in node.next_functions]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node in nodes or id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        todo.extend(n for n, _ in node.next_functions)
    return False


class _Watch(TorchFunctionMode):
    """Finds what is used that needs a gradient, in a computation that makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad:
                self.found[id(x)] = x
        return func(*args, **(kwargs or {}))


class _Swap(TorchFunctionMode):
    """Puts leaves of a new graph in the place of tensors that belong to another."""

    def __init__(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__()
        self.copies = {id(x): copy for x, copy in zip(tensors, copies, strict=True)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        copies = self.copies
        args, kwargs = tree_map_only(Tensor, lambda x: copies.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lean: Lean, outputs: tuple, saved: tuple, n: int, *xs: Tensor) -> Any:
        ctx.lean, ctx.n, ctx.m = lean, n, len(saved)
        ctx.save_for_backward(*xs, *saved)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (create_graph=True) cannot be taken through what is "
                'recomputed; use memory="graph"'
            )
        tensors = ctx.saved_tensors
        end = len(tensors) - ctx.m
        vjp = Vjp(tensors[ctx.n : end])
        mine = ctx.lean.backward(tensors[: ctx.n], tensors[end:], grads, vjp)
        return None, None, None, None, *mine, *vjp.grads


def run_leanly(lean: Lean, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of ``lean``, with the gradients of its backward pass: by the inputs and by
    whatever its steps close over."""
    if not torch.is_grad_enabled():
        return lean.forward(*inputs)[0]
    if inside_of_func():
        raise RuntimeError(
            'memory="recompute" and "reversible" cannot be used inside torch.func.vmap or grad: '
            "put the vmap inside of the step"
        )
    before = torch.get_rng_state()
    with torch.no_grad(), _Watch() as watch:
        outputs, saved = lean.forward(*(x.detach() for x in inputs))
    if not torch.equal(before, torch.get_rng_state()):
        raise RuntimeError(
            "a step draws random numbers (dropout, say), which would be others in the backward "
            'pass; use memory="graph", or draw them before'
        )
    mine = {id(x) for x in inputs}
    others = [x for k, x in watch.found.items() if k not in mine]
    return _Run.apply(lean, outputs, saved, len(inputs), *inputs, *others)
