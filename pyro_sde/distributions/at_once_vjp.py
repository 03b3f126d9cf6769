"""The backward pass of :mod:`~pyro_sde.distributions.at_once`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Inputs", "Vjp", "halves"]


class Inputs(NamedTuple):
    """The step is z' = shift + decay z + gain u + scale c eps, with u and log c the outputs of a
    network. What is on the grid has shape ``(N, rows, K)``, or ``(N, 1, K)`` if all rows agree."""

    z0: Any
    decay: Any
    shift: Any
    gain: Any
    scale: Any
    last: Any
    last_bias: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Inputs:
        end = 7 + (len(flat) - 7) // 2
        z0, decay, shift, gain, scale, last, last_bias = flat[:7]
        rest = tuple(flat[7:end]), tuple(flat[end:])
        return cls(z0, decay, shift, gain, scale, last, last_bias, *rest)

    def flat(self) -> tuple[Any, ...]:
        return *self[:7], *self.weights, *self.biases


def halves(out: Tensor, d: int) -> tuple[Tensor, Tensor | None]:
    """u and, if it is there, log c."""
    return out[..., :d], out[..., d:] if out.shape[-1] > d else None


class Vjp:
    """The gradients by the inputs.

    :param hidden: The units of every layer, in blocks of steps.
    :param grads: By the states, by the outputs, and by the outputs once more, of which the last
        goes to the states and not to the parameters.
    """

    def __init__(
        self,
        p: Inputs,
        eps: Tensor,
        states: Tensor,
        out: Tensor,
        last_t: Tensor,
        hidden: list[list[Tensor]],
        grads: Sequence[Tensor | None],
    ) -> None:
        self.p, self.d, self.states, self.hidden = p, eps.shape[-1], states, hidden
        by_states, by_out, self.by_again = grads
        self.by_states = torch.zeros_like(states) if by_states is None else by_states
        self.by_out = torch.zeros_like(out) if by_out is None else by_out.clone()
        self.by_next = torch.empty_like(eps)
        self.u, log_c = halves(out, self.d)
        self.by_scale = eps if log_c is None else eps * log_c.exp()
        self.by_log_c = None if log_c is None else p.scale * self.by_scale
        self.back = [*p.weights[1:], last_t.t()]
        self.one = eps.new_ones(())

    def _with_slopes(self, at: slice, by_z: Tensor, slopes: list[Tensor]) -> Any:
        """With one output, its slopes by all units are known before the steps are walked."""
        by_out, by_next, gain = self.by_out[at], self.by_next[at], self.p.gain[at]
        deltas = self._through_layers(torch.ones_like(by_out), slopes)
        slope = deltas[0] @ self.p.weights[0]
        total = by_out if self.by_again is None else by_out + self.by_again[at]
        factor = torch.addcmul(self.p.decay[at], gain, slope)
        rest = torch.addcmul(self.by_states[at], total, slope)
        for f, r, room in _backwards(factor, rest, by_next):
            room.copy_(by_z)
            by_z = torch.addcmul(r, f, by_z)
        by_out.addcmul_(gain, by_next)
        return by_z, [delta.mul_(by_out) for delta in deltas]

    def _step_by_step(self, at: slice, by_z: Tensor, slopes: list[Tensor]) -> Any:
        shared = self.by_again is None
        by_out = self.by_out[at]
        by_u, by_log_c = halves(by_out, self.d)
        again = by_out if self.by_again is None else self.by_again[at]
        noise = by_u if self.by_log_c is None else self.by_log_c[at]
        steps = _backwards(
            *(x[at] for x in (self.p.decay, self.p.gain, self.by_states, self.by_next)),
            *(by_out, by_u, by_u if by_log_c is None else by_log_c, again, noise, *slopes),
        )
        for decay, gain, by_state, room, by_o, by_u_i, by_c_i, again_i, noise_i, *slope in steps:
            room.copy_(by_z)
            by_u_i.addcmul_(gain, by_z)
            if by_log_c is not None:
                by_c_i.addcmul_(noise_i, by_z)
            delta = by_o if shared else by_o + again_i
            for weight, s in zip(self.back[::-1], slope[::-1], strict=True):
                # Deltas that are the parameters' too stay in the place of the slopes.
                delta = torch.mm(delta, weight)
                delta = s.mul_(delta) if shared else delta.mul_(s)
            by_z = torch.addcmul(by_state, decay, by_z).addmm_(delta, self.p.weights[0])
        return by_z, slopes if shared else self._through_layers(by_out, slopes)

    def _through_layers(self, delta: Tensor, slopes: list[Tensor]) -> list[Tensor]:
        """The gradients by the hidden units, before their tanh, of many steps at once."""
        deltas: list[Tensor] = []
        for weight, slope in zip(self.back[::-1], slopes[::-1], strict=True):
            delta = (delta @ weight).mul_(slope)
            deltas.insert(0, delta)
        return deltas

    def by_inputs(self, blocks: list[slice], needed: Inputs) -> Inputs:
        """The gradients, None where they are not needed."""
        p, by_next = self.p, self.by_next
        of_weights = [_Sum(need) for need in (*needed.weights, needed.last)]
        of_biases: list[list[Tensor]] = [[] for _ in p.biases]
        walk = self._with_slopes if len(p.last) == 1 else self._step_by_step
        by_z = self.by_states[-1]
        for k in range(len(blocks) - 1, -1, -1):
            at, hidden = blocks[k], [h[k] for h in self.hidden]
            slopes = [torch.addcmul(self.one, h, h, value=-1) for h in hidden]
            by_z, deltas = walk(at, by_z, slopes)
            units = [self.states[at], *hidden]
            for total, delta, h in zip(of_weights, deltas, units, strict=False):
                total.add(delta, h)
            of_weights[-1].add(self.by_out[at], units[-1])
            for parts, delta, b in zip(of_biases, deltas, p.biases, strict=True):
                parts.insert(0, delta.sum_to_size(b[at].shape))

        def fit(x: Tensor, get: Callable[[], Tensor], need: bool) -> Tensor | None:
            return get().sum_to_size(x.shape) if need else None

        *weights, last = (s.total for s in of_weights)
        biases = zip(of_biases, needed.biases, strict=True)
        return Inputs(
            by_z if needed.z0 else None,
            fit(p.decay, lambda: by_next * self.states[:-1], needed.decay),
            fit(p.shift, lambda: by_next, needed.shift),
            fit(p.gain, lambda: by_next * self.u, needed.gain),
            fit(p.scale, lambda: by_next * self.by_scale, needed.scale),
            last,
            self.by_out.sum((0, 1)) if needed.last_bias else None,
            tuple(weights),
            tuple(torch.cat(b) if need else None for b, need in biases),
        )


class _Sum:
    """The sum of products a' b over all steps and rows."""

    def __init__(self, needed: bool) -> None:
        self.needed = needed
        self.total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        if self.needed:
            a, b = a.flatten(0, 1).t(), b.flatten(0, 1)
            self.total = a @ b if self.total is None else self.total.addmm_(a, b)


def _backwards(*tensors: Tensor) -> Any:
    """The steps of all tensors, last first."""
    return zip(*(x.unbind(0)[::-1] for x in tensors), strict=True)
