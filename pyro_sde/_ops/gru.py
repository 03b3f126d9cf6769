r"""A gated recurrent unit over whole sequences, as one operation.

Forward, with :math:`\sigma` the logistic function,

.. math::

    r, z &= \sigma(W_{rz} x_t + U_{rz} h_t + b_{rz}), \qquad
    s = U_n h_t + c_n, \\
    n &= \tanh(W_n x_t + b_n + r \odot s), \qquad
    h_{t+1} = n + z \odot (h_t - n)

It keeps inputs and states, which are the output; autograd would keep the gates of every step too.
Backward, many steps at once compute their gates again from the states, and with them the
derivatives of the new state with respect to the arguments of r, z and n and to s. With
:math:`g_{t+1}` the gradient with respect to :math:`h_{t+1}`, the gradients :math:`\delta` with
respect to the arguments of the gates are these derivatives times :math:`g_{t+1}`, and

.. math:: g_t = z \odot g_{t+1} + U^T \delta_t + \frac{\partial L}{\partial h_t}

The gradients with respect to W and U are the sums of :math:`\delta_t x_t^T` and
:math:`\delta_t h_t^T`, one matrix product for many steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from .common import BLOCK, fits_cpu, gradients_with_graph, inside_func

__all__ = ["run_gru"]


def run_gru(gru: nn.GRU, x: Tensor) -> Tensor:
    """The states before and after all steps, ``(n + 1, rows, hidden)``, the first of them zero.

    :param gru: One layer in one direction, with ``batch_first=True``.
    :param x: The inputs, time first: ``(n, rows, inputs)``.
    """
    weights: Any = (gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0)
    if inside_func():
        return _plain_gru(x, *weights)  # the module's operation is not for vmap
    # Other devices have kernels for all steps, and a launch for each of ours would cost more.
    if fits_cpu(x, *weights):
        return _GRU.apply(x, *weights)
    states, _ = gru(x.transpose(0, 1))
    return pad(states.transpose(0, 1), (0, 0, 0, 0, 1, 0))


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        states = _forward(x, *weights)
        ctx.save_for_backward(x, *weights, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad_states: Tensor) -> Any:
        *inputs, states = ctx.saved_tensors
        needed = ctx.needs_input_grad
        # A batch of gradients does not go into the place of one.
        if torch.is_grad_enabled() or inside_func(grad_states):
            plain = lambda *x: (_plain_gru(*x),)  # noqa: E731
            return tuple(gradients_with_graph(plain, inputs, needed, (grad_states,)))
        return _backward(needed[0], grad_states, states, *inputs)


def _blocks(n: int, gates: int) -> list[slice]:
    """The steps in blocks, from the numbers of the gates in one step."""
    size = min(n, max(1, BLOCK // max(1, gates)))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _input_weight(w_ih: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """The transposed weight of inputs with a one appended, which brings the biases.

    For n it is twice the weight: tanh(a) = 2 sigmoid(2 a) - 1 takes a third of the time so.
    """
    d = len(b_ih) // 3
    bias = b_ih + pad(b_hh[: 2 * d], (0, d))
    weight = torch.cat([w_ih.t(), bias.unsqueeze(0)])
    weight[:, 2 * d :] *= 2
    return weight


def _with_ones(x: Tensor) -> Tensor:
    return pad(x, (0, 1), value=1.0).flatten(0, 1)


def _forward(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    (n, m, _), d = x.shape, w_hh.shape[1]
    states = x.new_empty(n + 1, m, d)
    states[0] = 0
    h, blocks, minus = states.unbind(0), _blocks(n, m * 3 * d), x.new_tensor(-1.0)
    gate_buffer, seen_buffer = (x.new_empty(blocks[0].stop, m, k * d) for k in (3, 1))
    input_weight, (of_h, seen_of_h) = _input_weight(w_ih, b_ih, b_hh), w_hh.t().split([2 * d, d], 1)
    for at in blocks:
        gates, seen = (a[: at.stop - at.start] for a in (gate_buffer, seen_buffer))
        torch.mm(_with_ones(x[at]), input_weight, out=gates.flatten(0, 1))
        # The bias of many steps in one copy, which addmm would make for each.
        seen.copy_(b_hh[2 * d :])
        views = (gates[..., : 2 * d], *gates.chunk(3, -1), seen)
        steps = zip(*(v.unbind(0) for v in views), strict=True)
        for i, (rz, r, z, new, s) in enumerate(steps, at.start):
            rz.addmm_(h[i], of_h).sigmoid_()
            new.addcmul_(r, s.addmm_(h[i], seen_of_h), value=2).sigmoid_()
            torch.add(minus, new, alpha=2, out=new)
            torch.lerp(new, h[i], z, out=h[i + 1])
    return states


class _Buffers(NamedTuple):
    """Memory for the numbers of a block of steps in the backward pass."""

    gates: Tensor
    rz: Tensor
    new: Tensor
    grad_n: Tensor
    """The derivative of the new state with respect to the argument of n's tanh."""

    @classmethod
    def empty(cls, x: Tensor, size: int, d: int) -> _Buffers:
        return cls(*(x.new_empty(size, x.shape[1], k * d) for k in (3, 2, 1, 1)))


def _derivatives(
    buffers: _Buffers, h: Tensor, inputs: Tensor, input_weight: Tensor, w_hh: Tensor, b_seen: Tensor
) -> None:
    """Overwrite ``gates`` with the derivatives of the new state with respect to the arguments of r
    and z, and to s."""
    gates, rz, new, grad_n = buffers
    d, flat = h.shape[-1], gates.flatten(0, 1)
    torch.mm(h.flatten(0, 1), w_hh.t(), out=flat)
    flat[:, : 2 * d].addmm_(inputs, input_weight[:, : 2 * d])
    torch.mm(inputs, input_weight[:, 2 * d :], out=new.flatten(0, 1))
    torch.sigmoid(gates[..., : 2 * d], out=rz)
    (r, z), (grad_r, grad_z, seen) = rz.chunk(2, -1), gates.chunk(3, -1)
    # n = 2 s - 1 is not computed: 1 - n^2 = 4 s (1 - s) and h - n = h - 2 s + 1.
    s = new.addcmul_(r, seen.add_(b_seen), value=2).sigmoid_()
    torch.addcmul(s, s, s, value=-1, out=grad_n).mul_(4)
    grad_n.addcmul_(grad_n, z, value=-1)
    torch.add(h, s, alpha=-2, out=new).add_(1).mul_(z)
    torch.addcmul(new, new, z, value=-1, out=grad_z)
    torch.mul(seen, r, out=new).mul_(grad_n)
    torch.addcmul(new, new, r, value=-1, out=grad_r)
    torch.mul(grad_n, r, out=seen)


def _backward(
    needs_x: bool,
    grad_states: Tensor,
    states: Tensor,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients with respect to the inputs and the parameters.

    Those of the gates of a step are the gradient with respect to the state after it times
    derivatives, which are known for many steps before the walk back.
    """
    (n, m, c), d = x.shape, w_hh.shape[1]
    blocks, input_weight, b_seen = (
        _blocks(n, m * 3 * d),
        _input_weight(w_ih, b_ih, b_hh),
        b_hh[2 * d :],
    )
    grad_x = x.new_empty(n, m, c) if needs_x else None
    # A product with few columns takes five times as long as its transpose.
    grad_inputs, grad_h, grad_seen = (
        x.new_zeros(c + 1, 3 * d),
        x.new_zeros(d, 3 * d),
        x.new_zeros(d),
    )
    whole = _Buffers.empty(x, blocks[0].stop, d)
    passed, arriving = x.new_empty(blocks[0].stop + 1, m, d), grad_states.unbind(0)
    g, g_for_all = passed.unbind(0), passed.unsqueeze(2).unbind(0)
    g[0].copy_(arriving[-1])
    for at in blocks[::-1]:
        k = at.stop - at.start
        buffers, h, inputs = _Buffers(*(a[:k] for a in whole)), states[at], _with_ones(x[at])
        _derivatives(buffers, h, inputs, input_weight, w_hh, b_seen)
        deltas, flat, seen = buffers.gates, buffers.gates.flatten(0, 1), buffers.gates[..., 2 * d :]
        gates, z = deltas.unflatten(-1, (3, d)).unbind(0), buffers.rz[..., d:].unbind(0)
        g[k].copy_(g[0])
        for i, delta in reversed([*enumerate(deltas.unbind(0))]):
            gates[i].mul_(g_for_all[i + 1])
            torch.addcmul(arriving[at.start + i], g[i + 1], z[i], out=g[i]).addmm_(delta, w_hh)
        grad_h.addmm_(h.flatten(0, 1).t(), flat)
        grad_seen += seen.sum((0, 1))
        torch.mul(buffers.grad_n, passed[1 : k + 1], out=seen)
        grad_inputs.addmm_(inputs.t(), flat)
        if grad_x is not None:
            torch.mm(flat, w_ih, out=grad_x[at].flatten(0, 1))
    grad_w_ih, grad_b_ih = grad_inputs[:-1].t().contiguous(), grad_inputs[-1]
    grad_b_hh = torch.cat([grad_b_ih[: 2 * d], grad_seen])
    return grad_x, grad_w_ih, grad_h.t().contiguous(), grad_b_ih, grad_b_hh


def _plain_gru(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """The states, in plain operations."""
    states = [x.new_zeros(x.shape[1], w_hh.shape[1])]
    for gates in linear(x, w_ih, b_ih).unbind(0):
        (r, z, new), h = gates.chunk(3, -1), states[-1]
        r_of_h, z_of_h, seen = linear(h, w_hh, b_hh).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(r + r_of_h) * seen)
        states.append(new + torch.sigmoid(z + z_of_h) * (h - new))
    return torch.stack(states)
