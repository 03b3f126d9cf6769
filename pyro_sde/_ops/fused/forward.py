"""The forward pass of the fused path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compiling import chunks, compiled
from ..common import BLOCK, gradients_with_graph
from .backward import FusedBackward
from .contraction import Triangle, contracted, split_outputs
from .inputs import Inputs, Layout, Net, NetLayout, Outputs
from .layers import ACTIVATIONS, HiddenLayers, add_product_, per_step_factors

__all__ = ["FusedPath", "fused_path", "plain_path"]

MAX_PATH_ELEMENTS = 2**21
"""How many numbers of a path the backward pass computes at once. It goes through a path once
whatever the block, but tensors above 32 MB are returned to the system, page by page, when freed."""

COMPILED_STEPS = 25
"""How many steps are compiled as one: these are short, and a call of compiled code costs about as
much as ten of them."""

MAX_FUSED_SUM = 2**16
"""Up to so many numbers a step, all steps are summed in one operation."""

MAX_RECOMPUTED_WIDTH = 8
"""Outputs of up to so many units are computed again in the backward pass, which costs less than to
keep them."""


def fused_path(eps: Tensor, inputs: Inputs, layout: Layout, compile: bool = False) -> Outputs:
    """The path from the noise ``eps``, and what its log ratio to the process is made of."""
    flat = inputs.flat()
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in flat)
    return Outputs(*FusedPath.apply(eps, inputs.mask, layout, keep, compile, *flat))


def _blocks(n: int, units: int, outputs: int) -> list[slice]:
    """The steps in blocks, from the numbers of a hidden layer and of the outputs in one step."""
    size = max(1, min(BLOCK // units, MAX_PATH_ELEMENTS // outputs))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class FusedPath(torch.autograd.Function):
    """See :mod:`pyro_sde._ops.fused` for the formulas."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: Tensor,
        mask: Tensor | None,
        layout: Layout,
        keep: bool,
        compile: bool,
        *flat: Tensor,
    ) -> Any:
        p = Inputs.of(flat, layout, mask)
        # From few units to many outputs a product with the transpose in memory is much faster,
        # and so is to make that row by row.
        outputs, units = p.control.last.shape
        last_t = torch.stack(p.control.last.unbind(1)) if units < outputs else p.control.last.t()
        if compile:
            run = _run_compiled(eps, p, layout, last_t)
        else:
            run = _run_in_place(eps, p, layout, last_t, keep)
        ctx.blocks, states, out, hidden, sums = run
        all_units = (x for h in hidden for x in h)
        ctx.save_for_backward(eps, mask, *flat, states, out, last_t, *all_units)
        ctx.inputs, ctx.layout, ctx.compile = len(flat), layout, compile
        ctx.set_materialize_grads(False)
        if sums is None:
            return Outputs(states, out, out.detach())
        return Outputs(states, None, None, *sums, sums[1].detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        eps, mask, *saved = ctx.saved_tensors
        flat, (states, out, last_t, *rest) = saved[: ctx.inputs], saved[ctx.inputs :]
        needed, layout = ctx.needs_input_grad[5:], ctx.layout
        if torch.is_grad_enabled():
            plain = lambda *x: plain_path(eps, Inputs.of(x, layout, mask), layout)  # noqa: E731
            return *(None,) * 5, *gradients_with_graph(plain, flat, needed, grads)
        k = len(ctx.blocks)
        hidden = [rest[i : i + k] for i in range(0, len(rest), k)]
        backward = FusedBackward(
            Inputs.of(flat, layout, mask),
            layout,
            ctx.blocks,
            eps,
            states,
            out,
            last_t,
            hidden,
            Outputs(*grads),
            ctx.compile,
        )
        return *(None,) * 5, *backward.gradients(Inputs.of(needed, layout))


Sums = tuple[Tensor, Tensor]
"""Over the state: of the squares of u, and of its products with the noise."""


def _sums(p: Inputs, out: Tensor, eps: Tensor) -> Sums | None:
    """None with contraction."""
    return None if p.contracts else (_sum(out, out), _sum(out, eps))


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """Without a temporary tensor as large as the path. A dot product would round more."""
    if x[0].numel() <= MAX_FUSED_SUM:
        return (x * y).sum(-1)
    return torch.stack([(a * b).sum(-1) for a, b in zip(x.unbind(0), y.unbind(0), strict=True)])


class _Run(NamedTuple):
    blocks: list[slice]
    states: Tensor
    out: Any
    """The outputs of the control; None if they are not kept."""
    hidden: list[list[Tensor]]
    """The values of every hidden layer in every block, those of the drift after the control's."""
    sums: Sums | None


def _run_in_place(eps: Tensor, p: Inputs, layout: Layout, last_t: Tensor, keep: bool) -> _Run:
    n, m, d = eps.shape
    outputs, last_units = p.control.last.shape
    states = eps.new_empty(n + 1, m, d)
    states[0] = p.z0
    z = states.unbind(0)
    is_kept = p.contracts or last_units > MAX_RECOMPUTED_WIDTH or outputs <= last_units
    kept = eps.new_empty(n, m, outputs) if is_kept else None
    squares, products = eps.new_empty(n, m), eps.new_empty(n, m)
    decay, gain = per_step_factors(p.decay), per_step_factors(p.gain)
    triangle = Triangle.of(p.z0, outputs)
    mask = None if p.mask is None else p.mask.unbind(0)
    control, width = HiddenLayers(p.control, layout.control.activation, m), p.control.width()
    nets, drift = [control], None
    if p.drift is not None and layout.drift is not None:
        drift = HiddenLayers(p.drift, layout.drift.activation, m)
        width = max(width, p.drift.width())
        nets.append(drift)
        dt, drift_bias, drift_last_t = per_step_factors(p.dt), p.drift.last_bias, p.drift.last.t()
    blocks = _blocks(n, m * width, m * outputs)
    hidden: list[list[Tensor]] = [[] for net in nets for _ in net.weights]
    for at in blocks:
        steps = at.stop - at.start
        out = eps.new_empty(steps, m, outputs) if kept is None else kept[at]
        out.copy_(p.control.last_bias)
        u, log_c, below = split_outputs(out, d)
        outs, us = out.unbind(0), u.unbind(0)
        if log_c is None:
            torch.addcmul(p.shift[at], p.scale[at], eps[at], out=states[1:][at])
        else:
            states[1:][at], noise = p.shift[at], (p.scale[at] * eps[at]).unbind(0)
            log_cs = log_c.unbind(0)
        if triangle is not None and below is not None:
            belows = below.unbind(0)
            noise_below = triangle.noise(p.scale[at], eps[at]).unbind(0)
        buffers = [buffer for net in nets for buffer in net.buffers(at)]
        if keep:
            for layer, buffer in zip(hidden, buffers, strict=True):
                layer.append(buffer)
        by_step = zip(*(buffer.unbind(0) for buffer in buffers), strict=True)
        for j, layers in enumerate(by_step):
            i = at.start + j
            outs[j].addmm_(control(z[i], layers[: layout.control.depth]), last_t)
            if mask is not None:
                outs[j].mul_(mask[i])
            add_product_(add_product_(z[i + 1], decay[i], z[i]), gain[i], us[j])
            if log_c is not None:
                z[i + 1].addcmul_(noise[j], log_cs[j].exp())
            if triangle is not None:
                z[i + 1].addmm_(belows[j] * noise_below[j], triangle.sums)
            if drift is not None:
                h = drift(z[i], layers[layout.control.depth :])
                add_product_(z[i + 1], dt[i], torch.addmm(drift_bias, h, drift_last_t))
        if kept is None:
            squares[at], products[at] = _sum(out, out), _sum(out, eps[at])
    sums = (squares, products) if kept is None else _sums(p, kept, eps)
    return _Run(blocks, states, kept, hidden, sums)


def _run_compiled(eps: Tensor, p: Inputs, layout: Layout, last_t: Tensor) -> _Run:
    p, last_t = Inputs.of([x.detach() for x in p.flat()], layout, p.mask), last_t.detach()
    # A start that is expanded, say, would be compiled for apart.
    blocks, z = chunks(len(eps), COMPILED_STEPS), p.z0.contiguous()
    triangle = Triangle.of(z, len(p.control.last))
    states, outs, hidden = [z.unsqueeze(0)], [], []
    for at in blocks:
        zs, out, *hs = _compiled_steps(z, eps[at], p.at(at), last_t, layout, triangle)
        z = zs[-1]
        states.append(zs)
        outs.append(out)
        hidden.append(hs)
    layers, out = [list(h) for h in zip(*hidden, strict=True)], torch.cat(outs)
    return _Run(blocks, torch.cat(states), out, layers, _sums(p, out, eps))


def _plain_steps(
    z: Tensor, eps: Tensor, p: Inputs, last_t: Tensor, layout: Layout, triangle: Triangle | None
) -> tuple[Tensor, ...]:
    """The states after, the outputs and the hidden layers of a few steps, in plain operations."""
    states, outs = [], []
    hidden: list[list[Tensor]] = []

    def last_layer(net: Net, shape: NetLayout, i: int, first: int) -> Tensor:
        """The last hidden layer at the state; all are kept, from number ``first`` on."""
        f, h = ACTIVATIONS[shape.activation], z
        for k, weight in enumerate(net.weights):
            # A sum with a product would be compiled to addmm, which copies the bias first.
            h = (f.compiled or f.function)(torch.mm(h, weight.t()) - (-net.bias(k, i)))
            if i == 0:
                hidden.append([])
            hidden[first + k].append(h)
        return h

    for i, e in enumerate(eps.unbind(0)):
        h = last_layer(p.control, layout.control, i, 0)
        out = torch.mm(h, last_t) - (-p.control.last_bias)
        outs.append(out if p.mask is None else out * p.mask[i])
        u, noise = outs[-1][..., : z.shape[-1]], p.scale[i] * contracted(outs[-1], e, triangle)
        after = p.shift[i] + p.decay[i] * z + p.gain[i] * u + noise
        if p.drift is not None and layout.drift is not None:
            h = last_layer(p.drift, layout.drift, i, layout.control.depth)
            after = after + p.dt[i] * (torch.mm(h, p.drift.last.t()) - (-p.drift.last_bias))
        z = after
        states.append(z)
    return *(torch.stack(x) for x in (states, outs)), *(torch.stack(h) for h in hidden)


_compiled_steps = compiled(_plain_steps)


def plain_path(eps: Tensor, p: Inputs, layout: Layout) -> Outputs:
    """All that :func:`fused_path` returns, in plain operations, to be differentiated twice."""
    triangle = Triangle.of(p.z0, len(p.control.last))
    after, out, *_ = _plain_steps(p.z0, eps, p, p.control.last.t(), layout, triangle)
    states = torch.cat([p.z0.unsqueeze(0), after])
    fixed = Inputs.of([x.detach() for x in p.flat()], layout).control
    again = _plain_network(fixed, layout.control, states[:-1], p.mask)
    if p.contracts:
        return Outputs(states, out, again)
    sums = ((a * b).sum(-1) for a, b in ((out, out), (out, eps), (again, eps)))
    return Outputs(states, None, None, *sums)


def _plain_network(net: Net, shape: NetLayout, states: Tensor, mask: Tensor | None) -> Tensor:
    """The outputs at the states of all steps."""
    outs = []
    for i, h in enumerate(states.unbind(0)):
        for k, weight in enumerate(net.weights):
            h = ACTIVATIONS[shape.activation].function(h @ weight.t() + net.bias(k, i))
        outs.append(h @ net.last.t() + net.last_bias)
    out = torch.stack(outs)
    return out if mask is None else out * mask
