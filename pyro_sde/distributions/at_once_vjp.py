"""The backward pass of :mod:`~pyro_sde.distributions.at_once`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compiling import compiled
from .at_once_inputs import Inputs, Layout, Outputs, add_product_, factors
from .at_once_sums import OfInputs
from .units import UNITS

__all__ = ["Vjp"]

FEW = 16
"""Up to so many columns of a weight are laid side by side in memory."""


def _plus_product(start: Tensor, factor: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    if isinstance(factor, float):
        return torch.add(start, x, alpha=factor, out=out)
    return torch.addcmul(start, factor, x, out=out)


class _ByOut(NamedTuple):
    """Gradients by the outputs in a block of steps, but for what they have by the states after.

    Without contraction the walk adds that in place.
    """

    own: Tensor
    """Those that the parameters are to have."""
    total: Tensor
    """Those that the states are to have; the same tensor if there are no others."""


def _by_out(g: Outputs, out: Tensor, eps: Tensor) -> _ByOut:
    own = torch.zeros_like(out) if g.out is None else g.out
    if g.squares is not None:
        own = (2 * g.squares).unsqueeze(-1) * out
    if g.products is not None:
        own = torch.addcmul(own, g.products.unsqueeze(-1), eps)
    total = own
    if g.out_of_states is not None:
        total = own + g.out_of_states
    if g.products_of_states is not None:
        total = torch.addcmul(own, g.products_of_states.unsqueeze(-1), eps)
    return _ByOut(own, total)


class _Block(NamedTuple):
    """Gradients in a block of steps: by the state before it, the states after each, the outputs,
    and what the hidden units are functions of."""

    by_z: Tensor
    by_next: Tensor
    by_out: Tensor
    deltas: list[Tensor]
    drift_deltas: list[Tensor]


class Vjp:
    """The gradients by the inputs, a block of steps after the other: nothing that is computed on
    the way is as large as a path.

    :param hidden: The units of every layer, in blocks of steps; the control's first.
    :param compile: Whether the walk through a block of steps is compiled.
    """

    def __init__(
        self,
        p: Inputs,
        layout: Layout,
        blocks: list[slice],
        eps: Tensor,
        states: Tensor,
        out: Tensor | None,
        last_t: Tensor,
        hidden: list[list[Tensor]],
        grads: Outputs,
        compile: bool = False,
    ) -> None:
        self.layout, self.blocks, self.compile = layout, blocks, compile
        self.p, self.d, self.states, self.hidden = p, eps.shape[-1], states, hidden
        self.out, self.last_t = out, last_t
        if grads.states is None:
            grads = grads._replace(states=torch.zeros_like(states))
        self.eps, self.grads = eps, grads
        self.back = [*p.control.weights[1:], last_t.t()]
        self.drift_back = [] if p.drift is None else [*p.drift.weights[1:], p.drift.last]

    def _walk(
        self, at: slice, by_z: Tensor, by_log_c: Tensor | None, hidden: list[Tensor]
    ) -> _Block:
        """Through a block of steps, from the gradient by the state after it."""
        outputs, (control, drift) = len(self.p.control.last), self.layout
        if self.compile and outputs > 1:
            return self._compiled(at, by_z, by_log_c, hidden)
        by_out = _by_out(self.grads.at(at), self._outputs(at, hidden), self.eps[at])
        slopes = [UNITS[control.units].slope(h) for h in hidden[: control.depth]]
        slope = UNITS[drift.units if drift else control.units].slope
        drift_slopes = [slope(h) for h in hidden[control.depth :]]
        if outputs == 1:
            return self._with_slopes(at, by_z, by_out, slopes, drift_slopes)
        return self._step_by_step(at, by_z, by_out, by_log_c, slopes, drift_slopes)

    def _with_slopes(
        self,
        at: slice,
        by_z: Tensor,
        by: _ByOut,
        slopes: list[Tensor],
        drift_slopes: list[Tensor],
    ) -> _Block:
        """With one output, its slopes by all units are known before the steps are walked."""
        p, gain = self.p, self.p.gain[at]
        one = torch.ones_like(by.total)
        deltas = _through_layers(one, slopes, self.back)
        slope = deltas[0] @ p.control.weights[0]
        factor = torch.addcmul(p.decay[at], gain, slope)
        rest = torch.addcmul(self.grads.states[at], by.total, slope)
        drift_deltas = _through_layers(one, drift_slopes, self.drift_back)
        if p.drift is not None:
            factor = torch.addcmul(factor, p.dt[at], drift_deltas[0] @ p.drift.weights[0])
        passed = []
        for f, r in _backwards(factor, rest):
            passed.append(by_z)
            by_z = torch.addcmul(r, f, by_z)
        by_next = torch.stack(passed[::-1])
        by_out = by.own.addcmul_(gain, by_next)
        if p.drift is not None:
            by_drift = p.dt[at] * by_next
            drift_deltas = [delta.mul_(by_drift) for delta in drift_deltas]
        deltas = [delta.mul_(by_out) for delta in deltas]
        return _Block(by_z, by_next, by_out, deltas, drift_deltas)

    def _step_by_step(
        self,
        at: slice,
        by_z: Tensor,
        by: _ByOut,
        by_log_c: Tensor | None,
        slopes: list[Tensor],
        drift_slopes: list[Tensor],
    ) -> _Block:
        p, shared = self.p, by.total is by.own
        decay, gain = factors(p.decay[at])[::-1], factors(p.gain[at])[::-1]
        noise = None if by_log_c is None else by_log_c.unbind(0)[::-1]
        back = _layers_back(self.back, slopes)
        first = _with_columns(p.control.weights[0])
        found = by_z.new_empty(at.stop - at.start + 1, *by_z.shape)
        found[-1] = by_z
        after, *befores = found.unbind(0)[::-1]
        if p.drift is not None:
            dt, drift_first = factors(p.dt[at])[::-1], _with_columns(p.drift.weights[0])
            drift_back = _layers_back(self.drift_back, drift_slopes)
        steps = _backwards(self.grads.states[at], by.total)
        for i, (before, (by_state, by_o)) in enumerate(zip(befores, steps, strict=True)):
            if noise is None:
                delta = add_product_(by_o, gain[i], after)
            else:
                by_u = _plus_product(by_o[..., : self.d], gain[i], after)
                by_c = torch.addcmul(by_o[..., self.d :], noise[i], after)
                delta = torch.cat([by_u, by_c], -1)
            for weight, slope in back:
                # Deltas that are the parameters' too stay in the place of the slopes.
                delta = torch.mm(delta, weight)
                delta = slope[i].mul_(delta) if shared else delta.mul_(slope[i])
            _plus_product(by_state, decay[i], after, out=before).addmm_(delta, first)
            if p.drift is not None:
                delta = dt[i] * after
                for weight, slope in drift_back:
                    delta = slope[i].mul_(torch.mm(delta, weight))
                before.addmm_(delta, drift_first)
            after = before
        by_next = found[1:]
        if by_log_c is not None:
            by_u = torch.addcmul(by.own[..., : self.d], p.gain[at], by_next)
            by_c = torch.addcmul(by.own[..., self.d :], by_log_c, by_next)
            by_out = torch.cat([by_u, by_c], -1)
        else:
            by_out = by.own if shared else by.own.addcmul_(p.gain[at], by_next)
        deltas = slopes if shared else _through_layers(by_out, slopes, self.back)
        return _Block(found[0], by_next, by_out, deltas, drift_slopes)

    def _compiled(
        self, at: slice, by_z: Tensor, by_log_c: Tensor | None, hidden: list[Tensor]
    ) -> _Block:
        by_z, by_next, by_out, *deltas = _compiled_walk(
            by_z,
            self.grads.at(at),
            self._outputs(at, hidden),
            self.eps[at],
            self.p.decay[at],
            self.p.gain[at],
            by_log_c,
            hidden,
            self.p.control.weights[0],
            self.back,
            self.layout.control.units,
        )
        return _Block(by_z, by_next, by_out, deltas, [])

    def _outputs(self, at: slice, hidden: list[Tensor]) -> Tensor:
        """In a block of steps, from the units of the last layer if they were not kept."""
        if self.out is not None:
            return self.out[at]
        units = hidden[self.layout.control.depth - 1]
        out = torch.addmm(self.p.control.last_bias, units.flatten(0, 1), self.last_t)
        return out.unflatten(0, units.shape[:2])

    def by_inputs(self, needed: Inputs) -> Inputs:
        """The gradients, None where they are not needed."""
        totals = OfInputs(self.p, needed)
        by_z = self.grads.states[-1].contiguous()
        for number in range(len(self.blocks) - 1, -1, -1):
            by_z = self._add_block(number, by_z, totals)
        return totals.whole(by_z)

    def _add_block(self, number: int, by_z: Tensor, totals: OfInputs) -> Tensor:
        """The gradient by the state before a block of steps, from that by the state after it."""
        p, k, at = self.p, self.layout.control.depth, self.blocks[number]
        states, hidden = self.states[at], [h[number] for h in self.hidden]
        by_scale, by_log_c = self.eps[at], None
        if p.contracts:
            by_scale = by_scale * self._outputs(at, hidden)[..., self.d :].exp()
            by_log_c = p.scale[at] * by_scale
        block = self._walk(at, by_z, by_log_c, hidden)
        by_next = block.by_next
        totals.control.add(at, [states, *hidden[:k]], block.deltas, block.by_out)
        totals.decay.add(at, by_next, states)
        totals.shift.add(at, by_next)
        if totals.gain.needed:
            totals.gain.add(at, by_next, self._outputs(at, hidden)[..., : self.d])
        totals.scale.add(at, by_next, by_scale)
        if totals.drift is not None and p.drift is not None:
            units = [states, *hidden[k:]]
            totals.drift.add(at, units, block.drift_deltas, p.dt[at] * by_next)
            if totals.dt.needed:
                f = units[-1] @ p.drift.last.t() + p.drift.last_bias
                totals.dt.add(at, by_next * f)
        return block.by_z


def _through_layers(
    delta: Tensor, slopes: Sequence[Tensor], back: Sequence[Tensor]
) -> list[Tensor]:
    deltas: list[Tensor] = []
    for weight, slope in zip(back[::-1], slopes[::-1], strict=True):
        delta = (delta @ weight).mul_(slope)
        deltas.insert(0, delta)
    return deltas


def _plain_walk(
    by_z: Tensor,
    grads: Outputs,
    out: Tensor,
    eps: Tensor,
    decay: Tensor,
    gain: Tensor,
    noise: Tensor | None,
    hidden: Sequence[Tensor],
    first: Tensor,
    back: Sequence[Tensor],
    units: str,
) -> tuple[Tensor, ...]:
    """The walk of :class:`Vjp` through a few steps, in plain operations."""
    slopes = [UNITS[units].slope(h) for h in hidden]
    own, total = _by_out(grads, out, eps)
    by_next, by_outs = [], []
    for i in range(len(own) - 1, -1, -1):
        by_next.append(by_z)
        parts = [gain[i] * by_z] if noise is None else [gain[i] * by_z, noise[i] * by_z]
        part = torch.cat(parts, -1)
        by_outs.append(own[i] + part)
        delta = by_outs[-1] if total is own else total[i] + part
        for weight, slope in zip(back[::-1], slopes[::-1], strict=True):
            delta = torch.mm(delta, weight) * slope[i]
        by_z = grads.states[i] + decay[i] * by_z + torch.mm(delta, first)
    by_out = torch.stack(by_outs[::-1])
    return by_z, torch.stack(by_next[::-1]), by_out, *_through_layers(by_out, slopes, back)


_compiled_walk = compiled(_plain_walk)


def _with_columns(weight: Tensor) -> Tensor:
    """The same with columns side by side in memory if they are few: faster to multiply by."""
    return weight.t().contiguous().t() if 1 < weight.shape[1] <= FEW else weight


def _layers_back(
    weights: Sequence[Tensor], slopes: Sequence[Tensor]
) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """Weights and slopes of a network, the last of layers and of steps first."""
    return [*zip(weights[::-1], (s.unbind(0)[::-1] for s in slopes[::-1]), strict=True)]


def _backwards(*tensors: Tensor) -> Any:
    """The steps of all tensors, last first."""
    return zip(*(x.unbind(0)[::-1] for x in tensors), strict=True)
