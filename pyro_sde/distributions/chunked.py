"""Paths of any process that a network pushes, their steps compiled in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._compiling import chunks, compiled
from .fused import (
    Contracted,
    FusedDraw,
    NetworkSteps,
    Sums,
    contracted,
    network,
    split_output,
)

__all__ = ["simulate_in_chunks"]

Transition = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def simulate_in_chunks(
    transition: Transition, net: NetworkSteps, t: Tensor, dt: Tensor, z0: Tensor, eps: Tensor
) -> FusedDraw:
    """The path from ``z0`` with the noise ``eps``, as :class:`ControlledPath` makes it."""
    # Of two kinds of starts, with a gradient and without, each would have to be compiled.
    z = z0.detach().requires_grad_() if torch.is_grad_enabled() and not z0.requires_grad else z0
    parts = []
    for at in chunks(len(eps)):
        biases = [b[at] for b in net.all_biases]
        more = (net.weights, biases, net.last, net.contraction, net.units)
        parts.append(_compiled_steps(transition, t[at], dt[at], z, eps[at], *more))
        z = parts[-1][0][-1]
    states, out, again, scale = (torch.cat(x) for x in zip(*parts, strict=True))
    value = torch.cat([z0.unsqueeze(0), states]).movedim(0, -2)
    if net.contraction:
        terms: Sums | Contracted = contracted(out, again)
    else:
        terms = Sums(*((a * b).sum(-1) for a, b in ((out, out), (out, eps), (again, eps))))
    return FusedDraw(value, torch.is_grad_enabled(), eps, scale, net, terms)


def _steps(
    transition: Transition,
    t: Tensor,
    dt: Tensor,
    z: Tensor,
    eps: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    last: tuple[Tensor, Tensor],
    contraction: bool,
    units: str,
) -> tuple[Tensor, ...]:
    """The states after a few steps, the outputs of the network, these once more as functions of
    the states alone, and the prior's scales.

    The second evaluation costs nothing: what was computed before is recognised.
    """
    fixed = [x.detach() for x in weights], [x.detach() for x in biases]
    fixed_last = last[0].detach(), last[1].detach()
    states: list[Tensor] = []
    outs: list[Tensor] = []
    agains: list[Tensor] = []
    scales: list[Tensor] = []
    for i in range(len(eps)):
        mean, scale = transition(t[i], dt[i], z)
        out = network(z, weights, [b[i] for b in biases], last, units, True)
        again = network(z, fixed[0], [b[i] for b in fixed[1]], fixed_last, units, True)
        u, log_c = split_output(out, contraction)
        scale = scale.expand_as(z)
        mean = torch.addcmul(mean, scale * dt[i].sqrt(), u)
        z = torch.addcmul(mean, scale if log_c is None else scale * log_c.exp(), eps[i])
        states.append(z)
        outs.append(out)
        agains.append(again)
        scales.append(scale.detach())
    return tuple(torch.stack(x) for x in (states, outs, agains, scales))


_compiled_steps = compiled(_steps)
