"""The backward pass of the fused path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compiling import compiled
from .contraction import Triangle, contracted, output_factors, spread
from .gradients import InputGradients
from .inputs import Inputs, Layout, Outputs
from .layers import ACTIVATIONS, add_product_, per_step_factors

__all__ = ["FusedBackward"]

MAX_CONTIGUOUS_COLUMNS = 16
"""Up to so many columns of a weight are laid out contiguously in memory."""


def _plus_product(start: Tensor, factor: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    if isinstance(factor, float):
        return torch.add(start, x, alpha=factor, out=out)
    return torch.addcmul(start, factor, x, out=out)


class _OutputGradients(NamedTuple):
    """Gradients with respect to the masked outputs of the control in a block of steps, without
    what they have from the states after each step.

    Without contraction the walk through the steps adds that in place.
    """

    own: Tensor
    """What the parameters are to have."""
    total: Tensor
    """What the states are to have; the same tensor if there is no difference."""


def _output_gradients(g: Outputs, out: Tensor, eps: Tensor) -> _OutputGradients:
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
    return _OutputGradients(own, total)


class _Block(NamedTuple):
    """Gradients in a block of steps."""

    grad_z: Tensor
    """With respect to the state before the block."""
    grad_next: Tensor
    """With respect to the state after each step."""
    grad_out: Tensor
    """With respect to the control's linear output, before its mask."""
    deltas: list[Tensor]
    """With respect to the arguments of the control's activations, layer by layer."""
    drift_deltas: list[Tensor]


class FusedBackward:
    """The gradients with respect to the inputs, one block of steps after the other, so that nothing
    computed on the way is as large as a path.

    :param hidden: The values of every hidden layer, in blocks of steps; the control's first.
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
        self.outputs = len(p.control.last)
        self.triangle = Triangle.of(p.z0, self.outputs)
        if grads.states is None:
            grads = grads._replace(states=torch.zeros_like(states))
        self.eps, self.grads = eps, grads
        self.back = [*p.control.weights[1:], last_t.t()]
        self.drift_back = [] if p.drift is None else [*p.drift.weights[1:], p.drift.last]

    def _walk(self, at: slice, grad_z: Tensor, factors: Tensor, hidden: list[Tensor]) -> _Block:
        """Walk through a block of steps, from the gradient with respect to the state after it.

        :param factors: See :func:`~pyro_sde._ops.fused.contraction.output_factors`.
        """
        control, drift = self.layout
        if self.compile and self.outputs > 1:
            return self._compiled(at, grad_z, factors, hidden)
        grad_out = _output_gradients(self.grads.at(at), self._outputs(at, hidden), self.eps[at])
        derivatives = _derivatives(control.activation, hidden[: control.depth])
        drift_derivatives = _derivatives(drift.activation, hidden[control.depth :]) if drift else []
        if self.outputs == 1:
            return self._one_output(at, grad_z, grad_out, derivatives, drift_derivatives)
        return self._step_by_step(at, grad_z, grad_out, factors, derivatives, drift_derivatives)

    def _one_output(
        self,
        at: slice,
        grad_z: Tensor,
        by: _OutputGradients,
        derivatives: list[Tensor],
        drift_derivatives: list[Tensor],
    ) -> _Block:
        """With one output, its derivatives with respect to all units are known before the walk."""
        p, gain = self.p, self.p.gain[at]
        one = torch.ones_like(by.total)
        masked = one if p.mask is None else p.mask[at].expand_as(one)
        deltas = _through_layers(masked, derivatives, self.back)
        derivative = deltas[0] @ p.control.weights[0]
        factor = torch.addcmul(p.decay[at], gain, derivative)
        rest = torch.addcmul(self.grads.states[at], by.total, derivative)
        drift_deltas = _through_layers(one, drift_derivatives, self.drift_back)
        if p.drift is not None:
            factor = torch.addcmul(factor, p.dt[at], drift_deltas[0] @ p.drift.weights[0])
        passed = []
        for f, r in _backwards(factor, rest):
            passed.append(grad_z)
            grad_z = torch.addcmul(r, f, grad_z)
        grad_next = torch.stack(passed[::-1])
        grad_out = by.own.addcmul_(gain, grad_next)
        if p.drift is not None:
            grad_drift = p.dt[at] * grad_next
            drift_deltas = [delta.mul_(grad_drift) for delta in drift_deltas]
        deltas = [delta.mul_(grad_out) for delta in deltas]
        if p.mask is not None:
            grad_out = grad_out * masked
        return _Block(grad_z, grad_next, grad_out, deltas, drift_deltas)

    def _step_by_step(
        self,
        at: slice,
        grad_z: Tensor,
        by: _OutputGradients,
        factors: Tensor,
        derivatives: list[Tensor],
        drift_derivatives: list[Tensor],
    ) -> _Block:
        p, shared, outputs, triangle = self.p, by.total is by.own, self.outputs, self.triangle
        decay = per_step_factors(p.decay[at])[::-1]
        factor: Any = per_step_factors(factors)[::-1]
        contracts = p.contracts
        mask = None if p.mask is None else p.mask[at].unbind(0)[::-1]
        back = _layers_back(self.back, derivatives)
        first = _with_columns(p.control.weights[0])
        found = grad_z.new_empty(at.stop - at.start + 1, *grad_z.shape)
        found[-1] = grad_z
        after, *befores = found.unbind(0)[::-1]
        if p.drift is not None:
            dt, drift_first = per_step_factors(p.dt[at])[::-1], _with_columns(p.drift.weights[0])
            drift_back = _layers_back(self.drift_back, drift_derivatives)
        steps = _backwards(self.grads.states[at], by.total)
        for i, (before, (grad_state, grad_o)) in enumerate(zip(befores, steps, strict=True)):
            if contracts:
                delta = torch.addcmul(grad_o, factor[i], spread(after, outputs, triangle))
            else:
                delta = add_product_(grad_o, factor[i], after)
            if mask is not None:
                delta.mul_(mask[i])
            for weight, derivative in back:
                # Deltas that serve the parameters too overwrite the derivatives.
                delta = torch.mm(delta, weight)
                delta = derivative[i].mul_(delta) if shared else delta.mul_(derivative[i])
            _plus_product(grad_state, decay[i], after, out=before).addmm_(delta, first)
            if p.drift is not None:
                delta = dt[i] * after
                for weight, derivative in drift_back:
                    delta = derivative[i].mul_(torch.mm(delta, weight))
                before.addmm_(delta, drift_first)
            after = before
        grad_next = found[1:]
        if contracts:
            grad_out = torch.addcmul(by.own, factors, spread(grad_next, outputs, triangle))
        else:
            grad_out = by.own if shared else by.own.addcmul_(factors, grad_next)
        if p.mask is not None:
            grad_out = grad_out * p.mask[at]
        deltas = derivatives if shared else _through_layers(grad_out, derivatives, self.back)
        return _Block(found[0], grad_next, grad_out, deltas, drift_derivatives)

    def _compiled(self, at: slice, grad_z: Tensor, factors: Tensor, hidden: list[Tensor]) -> _Block:
        grad_z, grad_next, grad_out, *deltas = _compiled_walk(
            grad_z,
            self.grads.at(at),
            self._outputs(at, hidden),
            self.eps[at],
            self.p.decay[at],
            factors,
            self.triangle,
            hidden,
            self.p.control.weights[0],
            self.back,
            self.layout.control.activation,
            None if self.p.mask is None else self.p.mask[at],
        )
        return _Block(grad_z, grad_next, grad_out, deltas, [])

    def _outputs(self, at: slice, hidden: list[Tensor]) -> Tensor:
        """The masked outputs in a block of steps, from the last hidden layer if they were not
        kept."""
        if self.out is not None:
            return self.out[at]
        units = hidden[self.layout.control.depth - 1]
        out = torch.addmm(self.p.control.last_bias, units.flatten(0, 1), self.last_t)
        out = out.unflatten(0, units.shape[:2])
        return out if self.p.mask is None else out * self.p.mask[at]

    def gradients(self, needed: Inputs) -> tuple[Tensor | None, ...]:
        """The gradients in the order of ``Inputs.flat``, None where they are not needed."""
        totals = InputGradients(self.p, needed)
        grad_z = self.grads.states[-1].contiguous()
        for number in range(len(self.blocks) - 1, -1, -1):
            grad_z = self._add_block(number, grad_z, totals)
        return totals.total(grad_z)

    def _add_block(self, number: int, grad_z: Tensor, totals: InputGradients) -> Tensor:
        """Add the gradients of a block to ``totals``.

        :param grad_z: The gradient with respect to the state after the block.
        :returns: The gradient with respect to the state before it.
        """
        p, k, at = self.p, self.layout.control.depth, self.blocks[number]
        states, hidden = self.states[at], [h[number] for h in self.hidden]
        eps, noise, factors = self.eps[at], self.eps[at], p.gain[at]
        if p.contracts:
            out = self._outputs(at, hidden)
            factors = output_factors(out, eps, factors, p.scale[at], self.triangle)
            if totals.scale.needed:
                noise = contracted(out, eps, self.triangle)
        block = self._walk(at, grad_z, factors, hidden)
        grad_next = block.grad_next
        totals.control.add(at, [states, *hidden[:k]], block.deltas, block.grad_out)
        totals.decay.add(at, grad_next, states)
        totals.shift.add(at, grad_next)
        if totals.gain.needed:
            totals.gain.add(at, grad_next, self._outputs(at, hidden)[..., : self.d])
        totals.scale.add(at, grad_next, noise)
        if totals.drift is not None and p.drift is not None:
            units = [states, *hidden[k:]]
            totals.drift.add(at, units, block.drift_deltas, p.dt[at] * grad_next)
            if totals.dt.needed:
                f = units[-1] @ p.drift.last.t() + p.drift.last_bias
                totals.dt.add(at, grad_next * f)
        return block.grad_z


def _derivatives(activation: str, hidden: Sequence[Tensor]) -> list[Tensor]:
    """The derivatives of the activations, layer by layer."""
    return [ACTIVATIONS[activation].grad_from_output(h) for h in hidden]


def _through_layers(
    delta: Tensor, derivatives: Sequence[Tensor], back: Sequence[Tensor]
) -> list[Tensor]:
    deltas: list[Tensor] = []
    for weight, derivative in zip(back[::-1], derivatives[::-1], strict=True):
        delta = (delta @ weight).mul_(derivative)
        deltas.insert(0, delta)
    return deltas


def _plain_walk(
    grad_z: Tensor,
    grads: Outputs,
    out: Tensor,
    eps: Tensor,
    decay: Tensor,
    factors: Tensor,
    triangle: Triangle | None,
    hidden: Sequence[Tensor],
    first: Tensor,
    back: Sequence[Tensor],
    activation: str,
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """The walk of :class:`FusedBackward` through a few steps, in plain operations."""
    derivatives = _derivatives(activation, hidden)
    own, total = _output_gradients(grads, out, eps)
    if mask is not None:
        own, total = (own * mask,) * 2 if total is own else (own * mask, total * mask)
        factors = factors * mask
    grad_next, grad_outs = [], []
    for i in range(len(own) - 1, -1, -1):
        grad_next.append(grad_z)
        part = factors[i] * spread(grad_z, out.shape[-1], triangle)
        grad_outs.append(own[i] + part)
        delta = grad_outs[-1] if total is own else total[i] + part
        for weight, derivative in zip(back[::-1], derivatives[::-1], strict=True):
            delta = torch.mm(delta, weight) * derivative[i]
        grad_z = grads.states[i] + decay[i] * grad_z + torch.mm(delta, first)
    grad_out = torch.stack(grad_outs[::-1])
    deltas = _through_layers(grad_out, derivatives, back)
    return grad_z, torch.stack(grad_next[::-1]), grad_out, *deltas


_compiled_walk = compiled(_plain_walk)


def _with_columns(weight: Tensor) -> Tensor:
    """``weight`` with contiguous columns if they are few, which is faster to multiply by."""
    return weight.t().contiguous().t() if 1 < weight.shape[1] <= MAX_CONTIGUOUS_COLUMNS else weight


def _layers_back(
    weights: Sequence[Tensor], derivatives: Sequence[Tensor]
) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """Weights and derivatives of a network, the last layer and the last step first."""
    return [*zip(weights[::-1], (s.unbind(0)[::-1] for s in derivatives[::-1]), strict=True)]


def _backwards(*tensors: Tensor) -> Any:
    """The steps of all tensors, last first."""
    return zip(*(x.unbind(0)[::-1] for x in tensors), strict=True)
