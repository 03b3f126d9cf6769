"""Gradients of :mod:`~pyro_sde.distributions.at_once` that add up from block to block of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .at_once_inputs import Inputs, Net, pieces

__all__ = ["OfInputs"]


class _Sum:
    """The sum of products a' b over all steps and rows."""

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


class _OnGrid:
    """The gradient by an input that has a value for every step."""

    def __init__(self, x: Tensor, needed: bool) -> None:
        self.x, self.needed = x, needed
        self.total: Tensor | None = None

    def add(self, at: slice, by: Tensor, factor: Tensor | None = None) -> None:
        """That of a block.

        :param by: The gradients by what the input is added to.
        :param factor: What it is multiplied by.
        """
        if self.needed:
            by = by if factor is None else by * factor
            if self.total is None:
                self.total = torch.empty(self.x.shape, dtype=by.dtype, device=by.device)
            self.total[at] = by.sum_to_size(self.x[at].shape)


class _OfNet:
    """The gradients by a network."""

    def __init__(self, net: Net, needed: Net) -> None:
        self.net, self.needed = net, needed
        self.weights = [_Sum(need) for need in (*needed.weights, needed.last)]
        self.reads = [[_Sum(need) for _ in net.known] for need in needed.reads]
        self.biases = [_OnGrid(*b) for b in zip(net.biases, needed.biases, strict=True)]
        self.last_bias: Tensor | None = None
        self.known = [_OnGrid(*x) for x in zip(net.known, needed.known, strict=True)]

    def add(
        self, at: slice, units: Sequence[Tensor], deltas: Sequence[Tensor], by_out: Tensor
    ) -> None:
        """Those of a block.

        :param units: The states, and the units of every layer.
        :param deltas: The gradients by what these units are functions of.
        :param by_out: The gradients by the outputs.
        """
        for total, delta, h in zip(self.weights, [*deltas, by_out], units, strict=True):
            total.add(delta, h)
        for bias, delta in zip(self.biases, deltas, strict=True):
            bias.add(at, delta)
        if self.needed.last_bias:
            part = by_out.sum((0, 1))
            self.last_bias = part if self.last_bias is None else self.last_bias.add_(part)
        self._add_known(at, deltas)

    def _add_known(self, at: slice, deltas: Sequence[Tensor]) -> None:
        """Those of what the layers read, and of what they read it by."""
        net = self.net
        found: list[Tensor | None] = [None] * len(net.known)
        for sums, weight, delta in zip(self.reads, net.reads, deltas, strict=False):
            for i, columns in pieces(net.known, weight):
                sums[i].add(delta, net.known[i][at])
                if self.known[i].needed:
                    by, old = delta @ weight[:, columns], found[i]
                    found[i] = by if old is None else old.add_(by)
        for total, part in zip(self.known, found, strict=True):
            if part is not None:
                total.add(at, part)

    def whole(self) -> Net:
        *weights, last = (s.total() for s in self.weights)
        return Net(
            last,
            self.last_bias,
            tuple(weights),
            tuple(x.total for x in self.biases),
            tuple(x.total for x in self.known),
            tuple(
                self._by_read(sums, w) for sums, w in zip(self.reads, self.net.reads, strict=True)
            ),
        )

    def _by_read(self, sums: Sequence[_Sum], weight: Tensor) -> Tensor | None:
        found = [sums[i].total() for i, _ in pieces(self.net.known, weight)]
        parts = [x for x in found if x is not None]
        return torch.cat(parts, 1) if parts else None


class OfInputs:
    """The gradients by all inputs but the start."""

    def __init__(self, p: Inputs, needed: Inputs) -> None:
        self.needed = needed
        self.decay, self.shift = _OnGrid(p.decay, needed.decay), _OnGrid(p.shift, needed.shift)
        self.gain, self.scale = _OnGrid(p.gain, needed.gain), _OnGrid(p.scale, needed.scale)
        self.control = _OfNet(p.control, needed.control)
        self.dt = _OnGrid(p.dt, needed.dt)
        self.drift = _OfNet(p.drift, needed.drift) if p.drift and needed.drift else None

    def whole(self, by_z0: Tensor) -> Inputs:
        return Inputs(
            by_z0 if self.needed.z0 else None,
            self.decay.total,
            self.shift.total,
            self.gain.total,
            self.scale.total,
            self.control.whole(),
            self.dt.total,
            None if self.drift is None else self.drift.whole(),
        )
