"""The backward pass of :mod:`~pyro_sde.distributions.at_once`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compiling import compiled

__all__ = ["Inputs", "Vjp", "add_product_", "factors", "halves"]


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


Factors = Sequence[float] | Sequence[Tensor]


def factors(x: Tensor) -> Factors:
    """One factor a step, of shape ``(N, rows, K)``: a number where it is the same for all, as a
    view of each step costs as much as an operation."""
    if x.shape[1:] == (1, 1) and x.device.type == "cpu":
        return x.flatten().tolist()
    return x.unbind(0)


def add_product_(total: Tensor, factor: Any, x: Tensor) -> Tensor:
    if isinstance(factor, float):
        return total.add_(x, alpha=factor)
    return total.addcmul_(factor, x)


def _plus_product(start: Tensor, factor: Any, x: Tensor) -> Tensor:
    if isinstance(factor, float):
        return torch.add(start, x, alpha=factor)
    return torch.addcmul(start, factor, x)


class Vjp:
    """The gradients by the inputs.

    :param hidden: The units of every layer, in blocks of steps.
    :param grads: By the states, by the outputs, and by the outputs once more, of which the last
        goes to the states and not to the parameters.
    :param compile: Whether the walk through a block of steps is compiled.
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
        compile: bool = False,
    ) -> None:
        self.compile = compile
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

    def _walk(self, at: slice, by_z: Tensor, hidden: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The gradients by the state before a block of steps, from that after it, and by the
        hidden units before their tanh."""
        if self.compile and len(self.p.last) > 1:
            return self._compiled(at, by_z, hidden)
        walk = self._with_slopes if len(self.p.last) == 1 else self._step_by_step
        return walk(at, by_z, [torch.addcmul(self.one, h, h, value=-1) for h in hidden])

    def _with_slopes(self, at: slice, by_z: Tensor, slopes: list[Tensor]) -> Any:
        """With one output, its slopes by all units are known before the steps are walked."""
        by_out, gain = self.by_out[at], self.p.gain[at]
        deltas = self._through_layers(torch.ones_like(by_out), slopes)
        slope = deltas[0] @ self.p.weights[0]
        total = by_out if self.by_again is None else by_out + self.by_again[at]
        factor = torch.addcmul(self.p.decay[at], gain, slope)
        rest = torch.addcmul(self.by_states[at], total, slope)
        passed = []
        for f, r in _backwards(factor, rest):
            passed.append(by_z)
            by_z = torch.addcmul(r, f, by_z)
        self._pass(at, passed)
        return by_z, [delta.mul_(by_out) for delta in deltas]

    def _step_by_step(self, at: slice, by_z: Tensor, slopes: list[Tensor]) -> Any:
        shared = self.by_again is None
        by_out = self.by_out[at]
        total = by_out if self.by_again is None else by_out + self.by_again[at]
        decay, gain = factors(self.p.decay[at])[::-1], factors(self.p.gain[at])[::-1]
        noise = None if self.by_log_c is None else self.by_log_c[at].unbind(0)[::-1]
        back = [*zip(self.back[::-1], (s.unbind(0)[::-1] for s in slopes[::-1]), strict=True)]
        first, passed = self.p.weights[0], []
        for i, (by_state, by_o) in enumerate(_backwards(self.by_states[at], total)):
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
            by_z = _plus_product(by_state, decay[i], by_z).addmm_(delta, first)
        self._pass(at, passed)
        return by_z, slopes if shared else self._through_layers(by_out, slopes)

    def _pass(self, at: slice, passed: list[Tensor]) -> None:
        """The gradients by the states after the steps, last first, go on to the outputs."""
        by_next = torch.stack(passed[::-1], out=self.by_next[at])
        by_u, by_log_c = halves(self.by_out[at], self.d)
        by_u.addcmul_(self.p.gain[at], by_next)
        if by_log_c is not None and self.by_log_c is not None:
            by_log_c.addcmul_(self.by_log_c[at], by_next)

    def _compiled(self, at: slice, by_z: Tensor, hidden: list[Tensor]) -> Any:
        on_grid = (
            None if x is None else x[at]
            for x in (self.by_states, self.by_out, self.p.decay, self.p.gain)
            + (self.by_again, self.by_log_c)
        )
        by_z, by_next, by_out, *deltas = _compiled_walk(
            by_z, *on_grid, hidden, self.p.weights[0], self.back
        )
        self.by_next[at], self.by_out[at] = by_next, by_out
        return by_z, deltas

    def _through_layers(self, delta: Tensor, slopes: list[Tensor]) -> list[Tensor]:
        """The gradients by the hidden units, before their tanh, of many steps at once."""
        return _through_layers(delta, slopes, self.back)

    def by_inputs(self, blocks: list[slice], needed: Inputs) -> Inputs:
        """The gradients, None where they are not needed."""
        p, by_next = self.p, self.by_next
        of_weights = [_Sum(need) for need in (*needed.weights, needed.last)]
        of_biases: list[list[Tensor]] = [[] for _ in p.biases]
        by_z = self.by_states[-1]
        for k in range(len(blocks) - 1, -1, -1):
            at, hidden = blocks[k], [h[k] for h in self.hidden]
            by_z, deltas = self._walk(at, by_z, hidden)
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
) -> tuple[Tensor, ...]:
    """The walk of :class:`Vjp` through a few steps, in plain operations."""
    slopes = [1 - h * h for h in hidden]
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
