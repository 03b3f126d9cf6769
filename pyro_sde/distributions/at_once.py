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

from .at_once_vjp import Inputs, Vjp, halves

__all__ = ["run_at_once"]

BLOCK = 2**18
"""How many numbers of a layer the backward pass computes at once: a quarter of a million are
many for one operation, and few enough for a cache."""


def run_at_once(eps: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The states; the outputs of the network at all but the last; and the outputs once more, as
    functions of the states alone: gradients by these do not reach the network's parameters."""
    flat = inputs.flat()
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in flat)
    return _AtOnce.apply(eps, keep, *flat)


def _blocks(n: int, unit: int) -> list[slice]:
    """The steps in runs, each of so few that what it computes stays in the cache."""
    size = max(1, BLOCK // unit)
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: Tensor, keep: bool, *flat: Tensor) -> Any:
        p = Inputs.of(flat)
        n, m, d = eps.shape
        states, out = eps.new_empty(n + 1, m, d), eps.new_empty(n, m, len(p.last))
        ctx.blocks = _blocks(n, m * max(len(w) for w in p.weights))
        sizes = [s.stop - s.start for s in ctx.blocks] if keep else [1]
        hidden = [[eps.new_empty(k, m, len(w)) for k in sizes] for w in p.weights]
        net = [
            (w.t(), b.unbind(0), [x for block in h for x in block.unbind(0)] * (1 if keep else n))
            for w, b, h in zip(p.weights, p.biases, hidden, strict=True)
        ]
        # From few units to many outputs a product with the transpose in memory is much faster,
        # and so is to make that row by row.
        units, outputs = p.last.shape[1], p.last.shape[0]
        last_t = torch.stack(p.last.unbind(1)) if units < outputs else p.last.t()
        noise = p.scale * eps
        u, log_c = halves(out, d)
        start = (noise.add_(p.shift) if log_c is None else p.shift).unbind(0)
        z, outs, us = states.unbind(0), out.unbind(0), u.unbind(0)
        decay, gain = p.decay.unbind(0), p.gain.unbind(0)
        z[0].copy_(p.z0)
        for i in range(n):
            h = z[i]
            for weight_t, bias, room in net:
                h = torch.addmm(bias[i], h, weight_t, out=room[i]).tanh_()
            torch.addmm(p.last_bias, h, last_t, out=outs[i])
            torch.addcmul(start[i], decay[i], z[i], out=z[i + 1]).addcmul_(gain[i], us[i])
            if log_c is not None:
                z[i + 1].addcmul_(noise[i], log_c[i].exp())
        ctx.save_for_backward(eps, *flat, states, out, last_t, *(x for h in hidden for x in h))
        ctx.inputs = len(flat)
        ctx.set_materialize_grads(False)
        return states, out, out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        eps, *saved = ctx.saved_tensors
        flat, (states, out, last_t, *rest) = saved[: ctx.inputs], saved[ctx.inputs :]
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_with_graph(eps, flat, needed, grads)
        k = len(ctx.blocks)
        hidden = [rest[i : i + k] for i in range(0, len(rest), k)]
        vjp = Vjp(Inputs.of(flat), eps, states, out, last_t, hidden, grads)
        return None, None, *vjp.by_inputs(ctx.blocks, Inputs.of(needed)).flat()


def _with_graph(
    eps: Tensor, flat: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients by ordinary autograd, to be differentiated again."""
    aliases = [x.view_as(x) for x in flat]
    p = Inputs.of(aliases)
    fixed = Inputs.of([x.detach() for x in aliases])
    states, outs, again = [p.z0], [], []
    for i, e in enumerate(eps):
        z = states[-1]
        outs.append(_network(p, i, z))
        again.append(_network(fixed, i, z))
        u, log_c = halves(outs[-1], eps.shape[-1])
        noise = p.scale[i] * e if log_c is None else p.scale[i] * e * log_c.exp()
        states.append(p.shift[i] + p.decay[i] * z + p.gain[i] * u + noise)
    outputs = [torch.stack(x) for x in (states, outs, again)]
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


def _network(p: Inputs, i: int, h: Tensor) -> Tensor:
    for weight, bias in zip(p.weights, p.biases, strict=True):
        h = torch.tanh(h @ weight.t() + bias[i])
    return h @ p.last.t() + p.last_bias
