"""The backward pass of :mod:`~pyro_sde.distributions.at_once`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compiling import compiled
from .at_once_inputs import Inputs, Layout, Outputs, factors, halves
from .at_once_sums import OfNet, OnGrid
from .units import UNITS

__all__ = ["Vjp"]

FEW = 16


def _plus_product(start: Tensor, factor: Any, x: Tensor) -> Tensor:
    if isinstance(factor, float):
        return torch.add(start, x, alpha=factor)
    return torch.addcmul(start, factor, x)


def _plus_weighted(start: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    """:param weight: One a row."""
    weight = weight.unsqueeze(-1)
    return weight * x if start is None else torch.addcmul(start, weight, x)


def _total(own: Tensor, again: Tensor | None) -> Tensor:
    return own if again is None else own + again


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
        eps: Tensor,
        states: Tensor,
        out: Tensor,
        last_t: Tensor,
        hidden: list[list[Tensor]],
        grads: Outputs,
        compile: bool = False,
    ) -> None:
        self.layout, self.compile = layout, compile
        self.p, self.d, self.states, self.hidden = p, eps.shape[-1], states, hidden
        self.by_states = torch.zeros_like(states) if grads.states is None else grads.states
        self.eps, self.grads = eps, grads
        self.u, self.log_c = halves(out, self.d)
        self.back = [*p.control.weights[1:], last_t.t()]
        self.drift_back = [] if p.drift is None else [*p.drift.weights[1:], p.drift.last]

    def _walk(self, at: slice, by_z: Tensor, hidden: list[Tensor]) -> _Block:
        """Through a block of steps, from the gradient by the state after it."""
        outputs, (control, drift) = len(self.p.control.last), self.layout
        if self.compile and outputs > 1:
            return self._compiled(at, by_z, hidden)
        walk = self._with_slopes if outputs == 1 else self._step_by_step
        slopes = [UNITS[control.units].slope(h) for h in hidden[: control.depth]]
        slope = UNITS[drift.units if drift else control.units].slope
        drift_slopes = [slope(h) for h in hidden[control.depth :]]
        return walk(at, by_z, slopes, drift_slopes)

    def _with_slopes(
        self, at: slice, by_z: Tensor, slopes: list[Tensor], drift_slopes: list[Tensor]
    ) -> _Block:
        """With one output, its slopes by all units are known before the steps are walked."""
        p, gain = self.p, self.p.gain[at]
        own, again = self._by_out(at)
        total = _total(own, again)
        one = torch.ones_like(total)
        deltas = _through_layers(one, slopes, self.back)
        slope = deltas[0] @ p.control.weights[0]
        factor = torch.addcmul(p.decay[at], gain, slope)
        rest = torch.addcmul(self.by_states[at], total, slope)
        drift_deltas = _through_layers(one, drift_slopes, self.drift_back)
        if p.drift is not None:
            factor = torch.addcmul(factor, p.dt[at], drift_deltas[0] @ p.drift.weights[0])
        passed = []
        for f, r in _backwards(factor, rest):
            passed.append(by_z)
            by_z = torch.addcmul(r, f, by_z)
        by_next = torch.stack(passed[::-1])
        by_out = torch.addcmul(own, gain, by_next)
        if p.drift is not None:
            by_drift = p.dt[at] * by_next
            drift_deltas = [delta.mul_(by_drift) for delta in drift_deltas]
        deltas = [delta.mul_(by_out) for delta in deltas]
        return _Block(by_z, by_next, by_out, deltas, drift_deltas)

    def _step_by_step(
        self, at: slice, by_z: Tensor, slopes: list[Tensor], drift_slopes: list[Tensor]
    ) -> _Block:
        p, (own, again) = self.p, self._by_out(at)
        shared = again is None
        decay, gain = factors(p.decay[at])[::-1], factors(p.gain[at])[::-1]
        by_log_c = self._by_log_c(at)
        noise = None if by_log_c is None else by_log_c.unbind(0)[::-1]
        back = _layers_back(self.back, slopes)
        first, passed = _with_columns(p.control.weights[0]), []
        if p.drift is not None:
            dt, drift_first = factors(p.dt[at])[::-1], _with_columns(p.drift.weights[0])
            drift_back = _layers_back(self.drift_back, drift_slopes)
        for i, (by_state, by_o) in enumerate(_backwards(self.by_states[at], _total(own, again))):
            passed.append(by_z)
            if noise is None:
                delta = _plus_product(by_o, gain[i], by_z)
            else:
                by_u = _plus_product(by_o[..., : self.d], gain[i], by_z)
                by_c = torch.addcmul(by_o[..., self.d :], noise[i], by_z)
                delta = torch.cat([by_u, by_c], -1)
            for weight, slope in back:
                # Deltas that are the parameters' too stay in the place of the slopes.
                delta = torch.mm(delta, weight)
                delta = slope[i].mul_(delta) if shared else delta.mul_(slope[i])
            before = _plus_product(by_state, decay[i], by_z).addmm_(delta, first)
            if p.drift is not None:
                delta = dt[i] * by_z
                for weight, slope in drift_back:
                    delta = slope[i].mul_(torch.mm(delta, weight))
                before.addmm_(delta, drift_first)
            by_z = before
        by_next = torch.stack(passed[::-1])
        by_out = torch.addcmul(own[..., : self.d], p.gain[at], by_next)
        if by_log_c is not None:
            by_c = torch.addcmul(own[..., self.d :], by_log_c, by_next)
            by_out = torch.cat([by_out, by_c], -1)
        deltas = slopes if shared else _through_layers(by_out, slopes, self.back)
        return _Block(by_z, by_next, by_out, deltas, drift_slopes)

    def _compiled(self, at: slice, by_z: Tensor, hidden: list[Tensor]) -> _Block:
        own, again = self._by_out(at)
        by_z, by_next, by_out, *deltas = _compiled_walk(
            by_z,
            self.by_states[at],
            own,
            self.p.decay[at],
            self.p.gain[at],
            again,
            self._by_log_c(at),
            hidden,
            self.p.control.weights[0],
            self.back,
            self.layout.control.units,
        )
        return _Block(by_z, by_next, by_out, deltas, [])

    def _by_out(self, at: slice) -> tuple[Tensor, Tensor | None]:
        """The gradients by the outputs, and those that only the states are to have."""
        g, u, eps = self.grads, self.u[at], self.eps[at]
        own = None if g.out is None else g.out[at]
        if g.squares is not None:
            own = _plus_weighted(own, 2 * g.squares[at], u)
        if g.products is not None:
            own = _plus_weighted(own, g.products[at], eps)
        if own is None:
            own = eps.new_zeros(*eps.shape[:-1], len(self.p.control.last))
        again = None if g.out_of_states is None else g.out_of_states[at]
        if g.products_of_states is not None:
            again = _plus_weighted(again, g.products_of_states[at], eps)
        return own, again

    def _by_scale(self, at: slice) -> Tensor:
        """The derivatives of the states after the steps by the scales."""
        return self.eps[at] if self.log_c is None else self.eps[at] * self.log_c[at].exp()

    def _by_log_c(self, at: slice) -> Tensor | None:
        return None if self.log_c is None else self.p.scale[at] * self._by_scale(at)

    def by_inputs(self, blocks: list[slice], needed: Inputs) -> Inputs:
        """The gradients, None where they are not needed."""
        p, k = self.p, self.layout.control.depth
        decay = OnGrid(p.decay, needed.decay, lambda at: self.states[at])
        shift = OnGrid(p.shift, needed.shift)
        gain = OnGrid(p.gain, needed.gain, lambda at: self.u[at])
        scale = OnGrid(p.scale, needed.scale, self._by_scale)
        control = OfNet(p.control, needed.control)
        drift = OfNet(p.drift, needed.drift) if p.drift and needed.drift else None
        dt = OnGrid(p.dt, needed.dt)
        by_z = self.by_states[-1].contiguous()
        for number in range(len(blocks) - 1, -1, -1):
            at, hidden = blocks[number], [h[number] for h in self.hidden]
            by_z, by_next, by_out, deltas, drift_deltas = self._walk(at, by_z, hidden)
            control.add(at, [self.states[at], *hidden[:k]], deltas, by_out)
            for x in (decay, shift, gain, scale):
                x.add(at, by_next)
            if drift is not None and p.drift is not None:
                units = [self.states[at], *hidden[k:]]
                drift.add(at, units, drift_deltas, p.dt[at] * by_next)
                if dt.needed:
                    f = units[-1] @ p.drift.last.t() + p.drift.last_bias
                    dt.add(at, by_next * f)
        return Inputs(
            by_z if needed.z0 else None,
            decay.total,
            shift.total,
            gain.total,
            scale.total,
            control.whole(),
            dt.total,
            None if drift is None else drift.whole(),
        )


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
    by_states: Tensor,
    by_out: Tensor,
    decay: Tensor,
    gain: Tensor,
    again: Tensor | None,
    noise: Tensor | None,
    hidden: Sequence[Tensor],
    first: Tensor,
    back: Sequence[Tensor],
    units: str,
) -> tuple[Tensor, ...]:
    """The walk of :class:`Vjp` through a few steps, in plain operations."""
    slopes = [UNITS[units].slope(h) for h in hidden]
    by_next, by_outs = [], []
    for i in range(len(by_out) - 1, -1, -1):
        by_next.append(by_z)
        parts = [gain[i] * by_z] if noise is None else [gain[i] * by_z, noise[i] * by_z]
        by_outs.append(by_out[i] + torch.cat(parts, -1))
        delta = by_outs[-1] if again is None else by_outs[-1] + again[i]
        for weight, slope in zip(back[::-1], slopes[::-1], strict=True):
            delta = torch.mm(delta, weight) * slope[i]
        by_z = by_states[i] + decay[i] * by_z + torch.mm(delta, first)
    total = torch.stack(by_outs[::-1])
    return by_z, torch.stack(by_next[::-1]), total, *_through_layers(total, slopes, back)


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
