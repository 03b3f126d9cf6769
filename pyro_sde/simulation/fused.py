"""Paths that are one operation: a process pushed by a network, with linear or neural drift."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import pad_after_time
from .._ops.fused import (
    Inputs,
    Layout,
    Net,
    NetLayout,
    Outputs,
    Triangle,
    contracted,
    fused_path,
    split_outputs,
    stopped_ratio,
)
from .base import Draw, LinearSteps, Simulator, Task
from .network import GridNetwork
from .ratio import LogRatio, kl

__all__ = ["Fused", "draw_fused", "ratio_from_outputs", "ratio_from_sums"]


class Fused(Simulator):
    """Draws paths of a law with ``linear_steps`` that a :class:`GridNetwork` pushes."""

    def __call__(self, task: Task, noise: Tensor | None = None) -> Draw:
        return draw_fused(self, task, task.draw_noise() if noise is None else noise)


def draw_fused(simulator: Simulator, task: Task, noise: Tensor, compile: bool = False) -> Draw:
    """The path as one operation. The task has linear steps and a network."""
    control, linear, z0 = task.network, task.linear, task.z0
    assert control is not None and linear is not None
    n, batch, d = task.steps, z0.shape[:-1], z0.shape[-1]
    inputs, layout = _inputs(control, linear, task, compile)
    run = fused_path(noise.reshape(n, -1, d), inputs, layout, compile)
    value = run.states.reshape(n + 1, *batch, d).movedim(0, -2).contiguous()
    run = Outputs(
        None, *(None if x is None else x.reshape(n, *batch, *x.shape[2:]) for x in run[1:])
    )
    scale = linear.scale.detach() if task.validate else None
    if control.contraction:
        ratio = ratio_from_outputs(run.out, run.out_of_states, task.root, noise)
        if scale is not None:
            c = run.out[..., d : 2 * d].detach().exp()
            scale = pad_after_time(scale, c.dim()) * c
    else:
        ratio = ratio_from_sums(run.squares, run.products, run.products_of_states, task.root)
    return Draw(value, noise, simulator, ratio, scale=scale)


def ratio_from_outputs(out: Tensor, out_of_states: Tensor, root: Tensor, noise: Tensor) -> LogRatio:
    """From the outputs of a control's network, and these as functions of the states alone, to the
    log ratio of a path with contraction (:mod:`~pyro_sde.simulation.ratio` has the formulas)."""
    u, log_c, below = split_outputs(out, noise.shape[-1])
    triangle = Triangle.of(noise, out.shape[-1])
    assert log_c is not None

    def squares_below() -> Tensor | float:
        return 0.0 if below is None else 0.5 * below.square().sum(-1)

    def martingale() -> Tensor:
        contracts = contracted(out, noise, triangle)
        squares = contracts.square() - noise.square() - torch.expm1(2 * log_c)
        total = (root * u * contracts + 0.5 * squares).sum(-1)
        return (total - squares_below()).sum(0)

    return LogRatio(
        lambda: kl(root * u, log_c) + squares_below(),
        martingale,
        lambda: stopped_ratio(out, out_of_states, root, noise, triangle).sum(0),
    )


def ratio_from_sums(
    squares: Tensor, products: Tensor, products_of_states: Tensor, root: Tensor
) -> LogRatio:
    """From sums over the state, of which there may be many dimensions, to the log ratio of a path
    without contraction.

    :param squares: The sums of u^2 in every step, time first.
    :param products: The sums of u eps.
    :param products_of_states: The same as functions of the states alone.
    :param root: sqrt(dt), to broadcast against the state.
    """

    def kl() -> Tensor:
        return _weighted(0.5 * root.square(), squares)

    def stopped() -> Tensor:
        return (kl() + _weighted(root.detach(), products_of_states)).sum(0)

    return LogRatio(kl, lambda: _weighted(root, products).sum(0), stopped)


def _weighted(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x.unsqueeze(-1)).squeeze(-1)


def _inputs(
    control: GridNetwork, linear: LinearSteps, task: Task, compile: bool
) -> tuple[Inputs, Layout]:
    batch, d = task.z0.shape[:-1], task.z0.shape[-1]
    decay, shift, scale, root = (_as_rows(x, batch) for x in (*linear[:3], task.root))
    net, layout = _net(control, batch, compile)
    mask = None if control.active is None else _as_rows(control.active.to(task.z0), batch)
    inputs = Inputs(task.z0.reshape(-1, d), decay, shift, scale * root, scale, net, mask=mask)
    if linear.drift is None:
        return inputs, Layout(layout)
    drift, drift_layout = _net(linear.drift, batch, compile)
    inputs = inputs._replace(dt=_as_rows(task.dt, batch), drift=drift)
    return inputs, Layout(layout, drift_layout)


def _net(network: GridNetwork, batch: torch.Size, compile: bool) -> tuple[Net, NetLayout]:
    # Compiled, the biases that the context makes are computed at once.
    has_context = bool(network.context) and not compile
    biases = network.biases if has_context else network.all_biases
    tensors = Net(*network.last, tuple(network.weights), tuple(_as_rows(b, batch) for b in biases))
    if has_context:
        rows = batch.numel()
        context = tuple(_as_rows(x, batch).expand(-1, rows, -1) for x in network.context)
        tensors = tensors._replace(context=context, context_weights=tuple(network.context_weights))
    return tensors, NetLayout(len(network.weights), network.activation, len(tensors.context))


def _as_rows(x: Tensor, batch: torch.Size) -> Tensor:
    """From ``(N, ..., K)`` to ``(N, rows, K)``, or to ``(N, 1, K)`` where all rows agree."""
    n, k = x.shape[0], x.shape[-1]
    if x.numel() == n * k:
        return x.reshape(n, 1, k)
    return pad_after_time(x, len(batch) + 2).expand(n, *batch, k).reshape(n, -1, k)
