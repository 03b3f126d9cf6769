"""Paths that a network pushes, their steps compiled in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._compiling import chunks, compiled
from .base import Draw, Simulator, Task, take_step
from .fused import draw_fused, ratio_from_outputs, ratio_from_sums
from .network import network, split_control
from .step import diagonal_of

__all__ = ["Compiled"]

Transition = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Compiled(Simulator):
    """Draws paths with ``compile=True`` that a network pushes."""

    def __call__(self, task: Task, noise: Tensor | None = None) -> Draw:
        noise = task.draw_noise() if noise is None else noise
        if task.linear is not None and task.linear.drift is None:
            return draw_fused(self, task, noise, compile=True)
        return self._draw_in_chunks(task, noise)

    def _draw_in_chunks(self, task: Task, noise: Tensor) -> Draw:
        net, z0, t, dt = task.network, task.z0, task.t, task.dt
        assert net is not None
        needs_leaf = torch.is_grad_enabled() and not z0.requires_grad
        # Starts with a gradient and without one would each be compiled for.
        z = z0.detach().requires_grad_() if needs_leaf else z0
        transition, parts = task.law.transition, []
        active = None if net.active is None else net.active.to(z0)
        for at in chunks(task.steps):
            biases = [b[at] for b in net.all_biases]
            mask = None if active is None else active[at]
            layers = (net.weights, biases, net.last, net.activation)
            control = (*layers, net.contraction, net.places, mask)
            parts.append(_compiled_steps(transition, t[at], dt[at], z, noise[at], *control))
            z = parts[-1][0][-1]
        states, out, again, scale = (torch.cat(x) for x in zip(*parts, strict=True))
        value = torch.cat([z0.unsqueeze(0), states]).movedim(0, -2)
        if net.contraction:
            ratio = ratio_from_outputs(out, again, task.root, noise)
        else:
            pairs = ((out, out), (out, noise), (again, noise))
            squares, products, of_states = ((a * b).sum(-1) for a, b in pairs)
            ratio = ratio_from_sums(squares, products, of_states, task.root)
        return Draw(value, noise, self, ratio, scale=scale if task.validate else None)


def _steps(
    transition: Transition,
    t: Tensor,
    dt: Tensor,
    z: Tensor,
    noise: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    last: tuple[Tensor, Tensor],
    activation: str,
    contraction: str | None,
    places: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """The states after a few steps, the outputs of the control, these once more as functions of
    the states alone, and the diagonals of the scales.

    The second evaluation costs nothing: the compiler recognises what was computed before.
    """
    fixed = [x.detach() for x in weights], [x.detach() for x in biases]
    fixed_last = last[0].detach(), last[1].detach()
    states: list[Tensor] = []
    outs: list[Tensor] = []
    agains: list[Tensor] = []
    scales: list[Tensor] = []
    for i in range(len(noise)):
        mean, scale = transition(t[i], dt[i], z)
        out = network(z, weights, [b[i] for b in biases], last, activation, True)
        again = network(z, fixed[0], [b[i] for b in fixed[1]], fixed_last, activation, True)
        if mask is not None:
            out, again = out * mask[i], again * mask[i]
        u, c = split_control(out, z.shape[-1], contraction, places)
        step = take_step(z, mean, scale, noise[i], (dt[i].sqrt(), u, c))
        scale = diagonal_of(scale, z).detach().expand_as(z)
        z = step.after
        states.append(z)
        outs.append(out)
        agains.append(again)
        scales.append(scale if c is None else scale * diagonal_of(c.detach(), scale).exp())
    return tuple(torch.stack(x) for x in (states, outs, agains, scales))


_compiled_steps = compiled(_steps)
