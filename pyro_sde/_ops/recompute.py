r"""Computations of many steps that leave no graph: each step is computed again going back.

Forward, a chain of steps :math:`x_{i+1} = \mathrm{step}_i(x_i; \theta)` runs without a graph. It
keeps its inputs and what the computation says it needs, the states, say. Backward, from the last
step to the first, step i is computed again with a graph of its own, and

.. math:: g_i = \Bigl(\frac{\partial x_{i+1}}{\partial x_i}\Bigr)^T g_{i+1}, \qquad
    \frac{\partial L}{\partial \theta} = \sum_i
    \Bigl(\frac{\partial x_{i+1}}{\partial \theta}\Bigr)^T g_{i+1}

where theta is whatever the steps close over, found by watching the forward pass.

A graph with one node for every operation of every step does not only keep tensors: its small
nodes, left behind between large tensors that are freed, fragment the heap, until memory grows
with the steps almost as it does with the tensors. So the forward pass makes none at all.
(``torch.utils.checkpoint`` of every step would.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .common import inside_func

__all__ = ["Grads", "LocalVjp", "Recomputed", "run_recomputed"]

Grads = Sequence[Tensor | None]


class Recomputed:
    """A computation and its backward pass; a subclass for each kind."""

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The outputs, and the tensors that the backward pass starts from."""
        raise NotImplementedError

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: LocalVjp
    ) -> Grads:
        """The gradients with respect to the inputs.

        :param saved: What ``forward`` returned beside the outputs.
        :param grads: The gradients with respect to the outputs; None is zero.
        """
        raise NotImplementedError


class LocalVjp:
    """Vector-Jacobian products of single steps. Those with respect to what the steps close over
    add up in ``grads``.

    :param others: The tensors, parameters and computed ones, that the steps close over.
    """

    def __init__(self, others: Sequence[Tensor]) -> None:
        self.others = others
        self.swap: Any = nullcontext()
        if _is_computed_from_another(others):
            # The gradient of a tensor would count that of the one computed from it twice.
            self.others = [x.detach().requires_grad_() for x in others]
            self.swap = _Swap(others, self.others)
        self.grads: list[Tensor | None] = [None] * len(others)
        self._is_checked = False

    def __call__(
        self,
        fn: Callable[..., tuple[Tensor, ...]],
        args: Sequence[Tensor],
        grads: Grads,
        grad_first_only: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The outputs of ``fn(*args)``, and the gradients with respect to ``args``.

        :param grads: The gradients with respect to each output.
        :param grad_first_only: The gradient with respect to one more output, the last, which is
            differentiated with respect to the first argument and to nothing else.
        """
        with torch.enable_grad(), self.swap:
            points = [x.detach().requires_grad_() for x in args]
            outputs = fn(*points)
        if not self._is_checked:  # one step stands for all: it costs as much as a small step
            self._check(outputs, points)
            self._is_checked = True
        total: list[Tensor | None] = [None] * len(points)
        if grad_first_only is not None and outputs[-1].requires_grad:
            (total[0],) = torch.autograd.grad(
                outputs[-1], points[0], grad_first_only, retain_graph=True, allow_unused=True
            )
        pairs = zip(outputs, grads, strict=False)
        live = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
        if live:
            n = len(points)
            wanted, (tensors, by) = [*points, *self.others], zip(*live, strict=True)
            found = torch.autograd.grad(tensors, wanted, by, allow_unused=True)
            total = [_plus(t, g) for t, g in zip(total, found[:n], strict=True)]
            for k, g in enumerate(found[n:]):
                if g is not None:
                    old = self.grads[k]
                    # A copy to add to: the gradients of a sum's two terms are one tensor.
                    self.grads[k] = g.clone() if old is None else old.add_(g)
        whole = [
            torch.zeros_like(x) if t is None else t for t, x in zip(total, points, strict=True)
        ]
        return tuple(o.detach() for o in outputs), whole

    def _check(self, outputs: Sequence[Tensor], points: list[Tensor]) -> None:
        """Refuse a graph that leads to a tensor which the forward pass did not see."""
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
    """Whether any of the tensors was computed from another one of them."""
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


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


class _Watch(TorchFunctionMode):
    """Finds the tensors that need a gradient in a computation without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self._look_at(args)
        if not kwargs:
            return func(*args)
        self._look_at(kwargs.values())
        return func(*args, **kwargs)

    def _look_at(self, values: Iterable[Any]) -> None:
        """torch.utils._pytree would take several times as long as the operation."""
        for x in values:
            if isinstance(x, Tensor):
                if x.requires_grad:
                    self.found[id(x)] = x
            elif isinstance(x, (list, tuple)):
                self._look_at(x)


class _Swap(TorchFunctionMode):
    """Replaces tensors that belong to another graph by leaves of a new one."""

    def __init__(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__()
        self.copies = {id(x): copy for x, copy in zip(tensors, copies, strict=True)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return func(*map(self._swap, args), **{k: self._swap(x) for k, x in (kwargs or {}).items()})

    def _swap(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return (list if isinstance(x, list) else tuple)(map(self._swap, x))
        return self.copies.get(id(x), x)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, computation: Recomputed, outputs: tuple, saved: tuple, n: int, *xs: Tensor
    ) -> Any:
        ctx.computation, ctx.n, ctx.m = computation, n, len(saved)
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
        vjp = LocalVjp(tensors[ctx.n : end])
        own = ctx.computation.backward(tensors[: ctx.n], tensors[end:], grads, vjp)
        return None, None, None, None, *own, *vjp.grads


def run_recomputed(computation: Recomputed, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of ``computation``, whose gradients, with respect to the inputs and to whatever
    its steps close over, come from its backward pass."""
    if not torch.is_grad_enabled():
        return computation.forward(*inputs)[0]
    if inside_func():
        raise RuntimeError(
            'memory="recompute" and "reversible" cannot be used inside torch.func.vmap or grad: '
            "put the vmap inside of the step"
        )
    before = torch.get_rng_state()
    with torch.no_grad(), _Watch() as watch:
        outputs, saved = computation.forward(*(x.detach() for x in inputs))
    if not torch.equal(before, torch.get_rng_state()):
        raise RuntimeError(
            "a step draws random numbers (dropout, say), which would be others in the backward "
            'pass; use memory="graph", or draw them before'
        )
    own = {id(x) for x in inputs}
    others = [x for k, x in watch.found.items() if k not in own]
    return _Run.apply(computation, outputs, saved, len(inputs), *inputs, *others)
