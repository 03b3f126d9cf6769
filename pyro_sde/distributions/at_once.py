"""All steps of a linear Gaussian process that a tanh network pushes, as one operation.

Autograd would keep a node for every operation of every step. Here a step leaves its state and its
activations in buffers, the backward pass walks along them with the closed form of each
derivative, and the gradient by a weight is one product over many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compiling import chunks, compiled
from .at_once_inputs import Inputs, add_product_, factors, halves
from .at_once_vjp import Vjp

__all__ = ["run_at_once"]

BLOCK, PATH = 2**18, 2**22
"""How many numbers of a hidden layer, and of a path, the backward pass computes at once. A quarter
of a million are many for one operation, and few enough for a cache; a path goes through it once
whatever the block, but tensors above 32 MB are returned to the system, page by page, when freed."""

CHUNK = 25
"""How many steps are compiled as one: these are short, and a call of compiled code costs about as
much as ten of them."""


def run_at_once(
    eps: Tensor, inputs: Inputs, compile: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The states; the outputs of the network at all but the last; and the outputs once more, as
    functions of the states alone: gradients by these do not reach the network's parameters."""
    flat = inputs.flat()
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in flat)
    return _AtOnce.apply(eps, keep, compile, *flat)


def _blocks(n: int, units: int, outputs: int) -> list[slice]:
    """The steps in runs, from the numbers of a hidden layer and of the outputs in one step."""
    size = max(1, min(BLOCK // units, PATH // outputs))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: Tensor, keep: bool, compile: bool, *flat: Tensor) -> Any:
        p = Inputs.of(flat)
        # From few units to many outputs a product with the transpose in memory is much faster,
        # and so is to make that row by row.
        units, outputs = p.last.shape[1], p.last.shape[0]
        last_t = torch.stack(p.last.unbind(1)) if units < outputs else p.last.t()
        run = _in_chunks if compile else _in_place
        ctx.blocks, states, out, hidden = run(eps, p, last_t, keep)
        ctx.save_for_backward(eps, *flat, states, out, last_t, *(x for h in hidden for x in h))
        ctx.inputs, ctx.compile = len(flat), compile
        ctx.set_materialize_grads(False)
        return states, out, out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        eps, *saved = ctx.saved_tensors
        flat, (states, out, last_t, *rest) = saved[: ctx.inputs], saved[ctx.inputs :]
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *_with_graph(eps, flat, needed, grads)
        k = len(ctx.blocks)
        hidden = [rest[i : i + k] for i in range(0, len(rest), k)]
        vjp = Vjp(Inputs.of(flat), eps, states, out, last_t, hidden, grads, ctx.compile)
        return None, None, None, *vjp.by_inputs(ctx.blocks, Inputs.of(needed)).flat()


CONTIGUOUS = torch.contiguous_format
Run = tuple[list[slice], Tensor, Tensor, list[list[Tensor]]]
"""Blocks of steps, states, outputs, and the units of every layer in these blocks."""


def _in_place(eps: Tensor, p: Inputs, last_t: Tensor, keep: bool) -> Run:
    n, m, d = eps.shape
    states, out = eps.new_empty(n + 1, m, d), eps.new_empty(n, m, len(p.last))
    u, log_c = halves(out, d)
    states[0] = p.z0
    z, outs = states.unbind(0), out.unbind(0)
    us = outs if log_c is None else u.unbind(0)
    decay, gain = factors(p.decay), factors(p.gain)
    weights = [w.t() for w in p.weights]
    blocks = _blocks(n, m * max(len(w) for w in p.weights), m * len(p.last))
    hidden: list[list[Tensor]] = [[] for _ in weights]
    for at in blocks:
        # The biases of many steps in one copy, which addmm would make for each; so the noise.
        out[at] = p.last_bias
        if log_c is None:
            torch.addcmul(p.shift[at], p.scale[at], eps[at], out=states[1:][at])
        else:
            states[1:][at], noise = p.shift[at], (p.scale[at] * eps[at]).unbind(0)
        rooms = [b[at].expand(-1, m, -1).clone(memory_format=CONTIGUOUS) for b in p.biases]
        if keep:
            for layer, room in zip(hidden, rooms, strict=True):
                layer.append(room)
        units = zip(*(room.unbind(0) for room in rooms), strict=True)
        for i, layers in enumerate(units, at.start):
            h = z[i]
            for weight_t, room in zip(weights, layers, strict=True):
                h = room.addmm_(h, weight_t).tanh_()
            outs[i].addmm_(h, last_t)
            add_product_(add_product_(z[i + 1], decay[i], z[i]), gain[i], us[i])
            if log_c is not None:
                z[i + 1].addcmul_(noise[i - at.start], log_c[i].exp())
    return blocks, states, out, hidden


def _in_chunks(eps: Tensor, p: Inputs, last_t: Tensor, keep: bool) -> Run:
    p, last_t = Inputs.of([x.detach() for x in p.flat()]), last_t.detach()
    blocks, z = chunks(len(eps), CHUNK), p.z0
    states, outs, hidden = [z.unsqueeze(0)], [], []
    for at in blocks:
        on_grid = (x[at] for x in (eps, p.decay, p.shift, p.gain, p.scale))
        biases = [b[at] for b in p.biases]
        zs, out, *hs = _compiled_steps(z, *on_grid, last_t, p.last_bias, p.weights, biases)
        z = zs[-1]
        states.append(zs)
        outs.append(out)
        hidden.append(hs)
    return blocks, torch.cat(states), torch.cat(outs), [list(h) for h in zip(*hidden, strict=True)]


def _steps(
    z: Tensor,
    eps: Tensor,
    decay: Tensor,
    shift: Tensor,
    gain: Tensor,
    scale: Tensor,
    last_t: Tensor,
    last_bias: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The states after, the outputs and the hidden units of a few steps, in plain operations."""
    states, outs = [], []
    hidden: list[list[Tensor]] = [[] for _ in weights]
    # A sum with a product would be compiled to addmm, which copies the bias first.
    minus = [-b for b in biases]
    for i, e in enumerate(eps.unbind(0)):
        h = z
        for weight, bias, kept in zip(weights, minus, hidden, strict=True):
            h = torch.tanh(torch.mm(h, weight.t()) - bias[i])
            kept.append(h)
        outs.append(torch.mm(h, last_t) - (-last_bias))
        u, log_c = halves(outs[-1], z.shape[-1])
        noise = scale[i] * e if log_c is None else scale[i] * e * log_c.exp()
        z = shift[i] + decay[i] * z + gain[i] * u + noise
        states.append(z)
    return *(torch.stack(x) for x in (states, outs)), *(torch.stack(h) for h in hidden)


_compiled_steps = compiled(_steps)


def _with_graph(
    eps: Tensor, flat: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients by ordinary autograd, to be differentiated again."""
    aliases = [x.view_as(x) for x in flat]
    p = Inputs.of(aliases)
    on_grid = (p.decay, p.shift, p.gain, p.scale)
    after, out, *_ = _steps(p.z0, eps, *on_grid, p.last.t(), p.last_bias, p.weights, p.biases)
    states = torch.cat([p.z0.unsqueeze(0), after])
    outputs = [states, out, _network(Inputs.of([x.detach() for x in aliases]), states[:-1])]
    live = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [x for x, need in zip(aliases, needed, strict=True) if need]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in live],
            wanted,
            [g for _, g in live],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if need else None for need in needed]


def _network(p: Inputs, h: Tensor) -> Tensor:
    """The outputs at states of all steps."""
    for weight, bias in zip(p.weights, p.biases, strict=True):
        h = torch.tanh(h @ weight.t() + bias)
    return h @ p.last.t() + p.last_bias
