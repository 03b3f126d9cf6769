"""Gradients of the fused path that add up from block to block of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import Inputs, Net, context_columns

__all__ = ["InputGradients"]


class MatmulAccumulator:
    """The sum of the products a' b over all steps and rows."""

    def __init__(self, needed: bool) -> None:
        self.needed = needed
        self.sum: Tensor | None = None
        self.swapped = False

    def add(self, a: Tensor, b: Tensor) -> None:
        if not self.needed:
            return
        a, b = a.flatten(0, 1), b.flatten(0, 1)
        # A product with few columns may take five times as long as its transpose.
        self.swapped = b.shape[1] < a.shape[1]
        a, b = (b, a) if self.swapped else (a, b)
        self.sum = a.t() @ b if self.sum is None else self.sum.addmm_(a.t(), b)

    def total(self) -> Tensor | None:
        if self.sum is None or not self.swapped:
            return self.sum
        return self.sum.t().contiguous()


class PerStepGradient:
    """The gradient with respect to an input that has a value for every step."""

    def __init__(self, x: Tensor, needed: bool) -> None:
        self.x, self.needed = x, needed
        self.total: Tensor | None = None

    def add(self, at: slice, grad: Tensor, factor: Tensor | None = None) -> None:
        """Add the gradient of a block of steps.

        :param grad: The gradient with respect to the sum that the input is a term of.
        :param factor: What the input is multiplied by in that sum.
        """
        if self.needed:
            grad = grad if factor is None else grad * factor
            if self.total is None:
                self.total = torch.empty(self.x.shape, dtype=grad.dtype, device=grad.device)
            self.total[at] = grad.sum_to_size(self.x[at].shape)


class NetworkGradients:
    """The gradients with respect to the tensors of a network."""

    def __init__(self, net: Net, needed: Net) -> None:
        self.net, self.needed = net, needed
        self.weights = [MatmulAccumulator(need) for need in (*needed.weights, needed.last)]
        self.context_weights = [
            [MatmulAccumulator(need) for _ in net.context] for need in needed.context_weights
        ]
        self.biases = [PerStepGradient(*b) for b in zip(net.biases, needed.biases, strict=True)]
        self.last_bias: Tensor | None = None
        self.context = [PerStepGradient(*x) for x in zip(net.context, needed.context, strict=True)]

    def add(
        self, at: slice, units: Sequence[Tensor], deltas: Sequence[Tensor], grad_out: Tensor
    ) -> None:
        """Add the gradients of a block of steps.

        :param units: The states, and the values of every hidden layer.
        :param deltas: The gradients with respect to the arguments of the activations.
        :param grad_out: The gradient with respect to the linear output, before its mask.
        """
        for total, delta, h in zip(self.weights, [*deltas, grad_out], units, strict=True):
            total.add(delta, h)
        for bias, delta in zip(self.biases, deltas, strict=True):
            bias.add(at, delta)
        if self.needed.last_bias:
            part = grad_out.sum((0, 1))
            self.last_bias = part if self.last_bias is None else self.last_bias.add_(part)
        self._add_context(at, deltas)

    def _add_context(self, at: slice, deltas: Sequence[Tensor]) -> None:
        """Add the gradients with respect to the context and to its weights."""
        net = self.net
        found: list[Tensor | None] = [None] * len(net.context)
        for sums, weight, delta in zip(
            self.context_weights, net.context_weights, deltas, strict=False
        ):
            for i, columns in context_columns(net.context, weight):
                sums[i].add(delta, net.context[i][at])
                if self.context[i].needed:
                    grad, old = delta @ weight[:, columns], found[i]
                    found[i] = grad if old is None else old.add_(grad)
        for total, part in zip(self.context, found, strict=True):
            if part is not None:
                total.add(at, part)

    def total(self) -> Net:
        *weights, last = (s.total() for s in self.weights)
        return Net(
            last,
            self.last_bias,
            tuple(weights),
            tuple(x.total for x in self.biases),
            tuple(x.total for x in self.context),
            tuple(
                self._context_weight(sums, w)
                for sums, w in zip(self.context_weights, self.net.context_weights, strict=True)
            ),
        )

    def _context_weight(self, sums: Sequence[MatmulAccumulator], weight: Tensor) -> Tensor | None:
        found = [sums[i].total() for i, _ in context_columns(self.net.context, weight)]
        parts = [x for x in found if x is not None]
        return torch.cat(parts, 1) if parts else None


class InputGradients:
    """The gradients with respect to all inputs but the start."""

    def __init__(self, p: Inputs, needed: Inputs) -> None:
        self.needed = needed
        self.decay = PerStepGradient(p.decay, needed.decay)
        self.shift = PerStepGradient(p.shift, needed.shift)
        self.gain = PerStepGradient(p.gain, needed.gain)
        self.scale = PerStepGradient(p.scale, needed.scale)
        self.control = NetworkGradients(p.control, needed.control)
        self.dt = PerStepGradient(p.dt, needed.dt)
        self.drift = NetworkGradients(p.drift, needed.drift) if p.drift and needed.drift else None

    def total(self, grad_z0: Tensor) -> tuple[Tensor | None, ...]:
        """All gradients in the order of ``Inputs.flat``, None where they are not needed."""
        return Inputs(
            grad_z0 if self.needed.z0 else None,
            self.decay.total,
            self.shift.total,
            self.gain.total,
            self.scale.total,
            self.control.total(),
            self.dt.total,
            None if self.drift is None else self.drift.total(),
        ).flat()
