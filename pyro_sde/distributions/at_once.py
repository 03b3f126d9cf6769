"""All steps of a Gaussian process that a network pushes, as one operation.

The process is linear, but for a drift that may be a network, too.

Autograd would keep a node for every operation of every step. Here a step leaves its state and its
activations in buffers, the backward pass walks along them with the closed form of each
derivative, and the gradient by a weight is one product over many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compiling import chunks, compiled
from .._operations import BLOCK, gradients_with_graph
from .at_once_inputs import (
    Inputs,
    Layout,
    Net,
    Outputs,
    Shape,
    add_product_,
    factors,
    halves,
    pieces,
)
from .at_once_vjp import Vjp
from .units import UNITS

__all__ = ["run_at_once"]

PATH = 2**21
"""How many numbers of a path the backward pass computes at once. It goes through a path once
whatever the block, but tensors above 32 MB are returned to the system, page by page, when freed."""

CHUNK = 25
"""How many steps are compiled as one: these are short, and a call of compiled code costs about as
much as ten of them."""

SMALL = 2**16
"""Up to so many numbers a step, all steps are summed in one operation."""

REMADE = 8
"""Outputs of up to so many units are made again in the backward pass: to keep them costs more."""


def run_at_once(eps: Tensor, inputs: Inputs, layout: Layout, compile: bool = False) -> Outputs:
    """The path from the noise ``eps``, and what its log ratio to the process is made of."""
    flat = inputs.flat()
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in flat)
    return Outputs(*_AtOnce.apply(eps, layout, keep, compile, *flat))


def _blocks(n: int, units: int, outputs: int) -> list[slice]:
    """The steps in runs, from the numbers of a hidden layer and of the outputs in one step."""
    size = max(1, min(BLOCK // units, PATH // outputs))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: Tensor, layout: Layout, keep: bool, compile: bool, *flat: Tensor
    ) -> Any:
        p = Inputs.of(flat, layout)
        # From few units to many outputs a product with the transpose in memory is much faster,
        # and so is to make that row by row.
        outputs, units = p.control.last.shape
        last_t = torch.stack(p.control.last.unbind(1)) if units < outputs else p.control.last.t()
        if compile:
            run = _in_chunks(eps, p, layout, last_t)
        else:
            run = _in_place(eps, p, layout, last_t, keep)
        ctx.blocks, states, out, hidden, sums = run
        units_of_all = (x for h in hidden for x in h)
        ctx.save_for_backward(eps, *flat, states, out, last_t, *units_of_all)
        ctx.inputs, ctx.layout, ctx.compile = len(flat), layout, compile
        ctx.set_materialize_grads(False)
        if sums is None:
            return Outputs(states, out, out.detach())
        return Outputs(states, None, None, *sums, sums[1].detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        eps, *saved = ctx.saved_tensors
        flat, (states, out, last_t, *rest) = saved[: ctx.inputs], saved[ctx.inputs :]
        needed, layout = ctx.needs_input_grad[4:], ctx.layout
        if torch.is_grad_enabled():
            plainly = lambda *x: _plainly(eps, x, layout)  # noqa: E731
            found = gradients_with_graph(plainly, flat, needed, grads)
            return None, None, None, None, *found
        k = len(ctx.blocks)
        hidden = [rest[i : i + k] for i in range(0, len(rest), k)]
        p = Inputs.of(flat, layout)
        vjp = Vjp(
            p, layout, ctx.blocks, eps, states, out, last_t, hidden, Outputs(*grads), ctx.compile
        )
        by = vjp.by_inputs(Inputs.of(needed, layout))
        return None, None, None, None, *by.flat()


Sums = tuple[Tensor, Tensor]
"""Over the state: of the squares of u, and of its products with the noise."""


def _sums(p: Inputs, out: Tensor, eps: Tensor) -> Sums | None:
    """None with contraction."""
    return None if p.contracts else (_sum(out, out), _sum(out, eps))


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """Without a temporary tensor as large as the path. A dot product would round more."""
    if x[0].numel() <= SMALL:
        return (x * y).sum(-1)
    return torch.stack([(a * b).sum(-1) for a, b in zip(x.unbind(0), y.unbind(0), strict=True)])


class _Steps(NamedTuple):
    blocks: list[slice]
    states: Tensor
    out: Any
    """None if it is not kept."""
    hidden: list[list[Tensor]]
    """The units of every layer in the blocks, those of the drift behind those of the control."""
    sums: Sums | None


class _Hidden:
    """The hidden layers of a network, computed in the place of their biases."""

    def __init__(self, net: Net, units: str, rows: int) -> None:
        unit = UNITS[units]
        self.net, self.rows = net, rows
        self.weights = [w.t() for w in net.weights]
        self.unit, self.factor = unit.in_place(net.last), unit.factor

    def rooms(self, at: slice) -> list[Tensor]:
        """The biases of a block of steps in one copy, which addmm would make for each."""
        biases = (b[at].expand(-1, self.rows, -1) for b in self.net.biases)
        rooms = [torch.mul(b, self.factor, out=b.new_empty(b.shape)) for b in biases]
        for room, weight in zip(rooms, self.net.reads, strict=False):
            for i, columns in pieces(self.net.known, weight):
                known, by = self.net.known[i][at].flatten(0, 1), weight[:, columns].t()
                room.flatten(0, 1).addmm_(known, by, alpha=self.factor)
        return rooms

    def __call__(self, h: Tensor, rooms: Sequence[Tensor]) -> Tensor:
        """The last layer at the states ``h``."""
        for weight_t, room in zip(self.weights, rooms, strict=True):
            h = self.unit(room.addmm_(h, weight_t, alpha=self.factor))
        return h


def _in_place(eps: Tensor, p: Inputs, layout: Layout, last_t: Tensor, keep: bool) -> _Steps:
    n, m, d = eps.shape
    outputs, last_units = p.control.last.shape
    states = eps.new_empty(n + 1, m, d)
    states[0] = p.z0
    z = states.unbind(0)
    is_kept = p.contracts or last_units > REMADE or outputs <= last_units
    kept = eps.new_empty(n, m, outputs) if is_kept else None
    squares, products = eps.new_empty(n, m), eps.new_empty(n, m)
    decay, gain = factors(p.decay), factors(p.gain)
    control, width = _Hidden(p.control, layout.control.units, m), p.control.width()
    nets, drift = [control], None
    if p.drift is not None and layout.drift is not None:
        drift, width = _Hidden(p.drift, layout.drift.units, m), max(width, p.drift.width())
        nets.append(drift)
        dt, drift_bias, drift_last_t = factors(p.dt), p.drift.last_bias, p.drift.last.t()
    blocks = _blocks(n, m * width, m * outputs)
    hidden: list[list[Tensor]] = [[] for net in nets for _ in net.weights]
    for at in blocks:
        steps = at.stop - at.start
        out = eps.new_empty(steps, m, outputs) if kept is None else kept[at]
        out.copy_(p.control.last_bias)
        u, log_c = halves(out, d)
        outs, us = out.unbind(0), u.unbind(0)
        if log_c is None:
            torch.addcmul(p.shift[at], p.scale[at], eps[at], out=states[1:][at])
        else:
            states[1:][at], noise = p.shift[at], (p.scale[at] * eps[at]).unbind(0)
        rooms = [room for net in nets for room in net.rooms(at)]
        if keep:
            for layer, room in zip(hidden, rooms, strict=True):
                layer.append(room)
        units = zip(*(room.unbind(0) for room in rooms), strict=True)
        for j, layers in enumerate(units):
            i = at.start + j
            outs[j].addmm_(control(z[i], layers[: layout.control.depth]), last_t)
            add_product_(add_product_(z[i + 1], decay[i], z[i]), gain[i], us[j])
            if log_c is not None:
                z[i + 1].addcmul_(noise[j], log_c[j].exp())
            if drift is not None:
                h = drift(z[i], layers[layout.control.depth :])
                add_product_(z[i + 1], dt[i], torch.addmm(drift_bias, h, drift_last_t))
        if kept is None:
            squares[at], products[at] = _sum(out, out), _sum(out, eps[at])
    sums = (squares, products) if kept is None else _sums(p, kept, eps)
    return _Steps(blocks, states, kept, hidden, sums)


def _in_chunks(eps: Tensor, p: Inputs, layout: Layout, last_t: Tensor) -> _Steps:
    p, last_t = Inputs.of([x.detach() for x in p.flat()], layout), last_t.detach()
    # A start that is expanded, say, would be compiled for apart.
    blocks, z = chunks(len(eps), CHUNK), p.z0.contiguous()
    states, outs, hidden = [z.unsqueeze(0)], [], []
    for at in blocks:
        zs, out, *hs = _compiled_steps(z, eps[at], p.at(at), last_t, layout)
        z = zs[-1]
        states.append(zs)
        outs.append(out)
        hidden.append(hs)
    layers, out = [list(h) for h in zip(*hidden, strict=True)], torch.cat(outs)
    return _Steps(blocks, torch.cat(states), out, layers, _sums(p, out, eps))


def _steps(z: Tensor, eps: Tensor, p: Inputs, last_t: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """The states after, the outputs and the hidden units of a few steps, in plain operations."""
    states, outs = [], []
    hidden: list[list[Tensor]] = []

    def last_units(net: Net, shape: Shape, i: int, first: int) -> Tensor:
        """The last hidden layer at the state, all of them being kept from number ``first`` on."""
        unit, h = UNITS[shape.units], z
        for k, weight in enumerate(net.weights):
            # A sum with a product would be compiled to addmm, which copies the bias first.
            h = (unit.compiled or unit.of)(torch.mm(h, weight.t()) - (-net.bias(k, i)))
            if i == 0:
                hidden.append([])
            hidden[first + k].append(h)
        return h

    for i, e in enumerate(eps.unbind(0)):
        h = last_units(p.control, layout.control, i, 0)
        outs.append(torch.mm(h, last_t) - (-p.control.last_bias))
        u, log_c = halves(outs[-1], z.shape[-1])
        noise = p.scale[i] * e if log_c is None else p.scale[i] * e * log_c.exp()
        after = p.shift[i] + p.decay[i] * z + p.gain[i] * u + noise
        if p.drift is not None and layout.drift is not None:
            h = last_units(p.drift, layout.drift, i, layout.control.depth)
            after = after + p.dt[i] * (torch.mm(h, p.drift.last.t()) - (-p.drift.last_bias))
        z = after
        states.append(z)
    return *(torch.stack(x) for x in (states, outs)), *(torch.stack(h) for h in hidden)


_compiled_steps = compiled(_steps)


def _plainly(eps: Tensor, flat: Sequence[Tensor], layout: Layout) -> Outputs:
    """All that :func:`run_at_once` returns, in plain operations."""
    p = Inputs.of(flat, layout)
    after, out, *_ = _steps(p.z0, eps, p, p.control.last.t(), layout)
    states = torch.cat([p.z0.unsqueeze(0), after])
    fixed = Inputs.of([x.detach() for x in flat], layout).control
    again = _network(fixed, layout.control, states[:-1])
    if p.contracts:
        return Outputs(states, out, again)
    sums = ((a * b).sum(-1) for a, b in ((out, out), (out, eps), (again, eps)))
    return Outputs(states, None, None, *sums)


def _network(net: Net, shape: Shape, states: Tensor) -> Tensor:
    """The outputs at states of all steps."""
    outs = []
    for i, h in enumerate(states.unbind(0)):
        for k, weight in enumerate(net.weights):
            h = UNITS[shape.units].of(h @ weight.t() + net.bias(k, i))
        outs.append(h @ net.last.t() + net.last_bias)
    return torch.stack(outs)
