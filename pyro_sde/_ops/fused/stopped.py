r"""log q - log p of the steps of a path with contraction, the parameters stopped in the densities,
from the outputs of its control.

With :math:`\xi = w + C \varepsilon` the displacement of a step, in units of its scale,

.. math:: \log q - \log p = \tfrac12 (|\xi|^2 - |\varepsilon|^2) - \log \det C

The noise of q is :math:`C^{-1} (\xi - w)`, which in value is the eps that the step was made from.
So no matrix is inverted forward, and backward the derivatives are known. With
:math:`C^T y = \varepsilon` they are :math:`\xi - y` with respect to the displacement, through
which the parameters have their gradient; and, with respect to w, C and the logarithms of C's
diagonal as functions of the states alone, y, :math:`y \varepsilon^T` and
:math:`c\, y\, \varepsilon - 1`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contraction import Triangle, contracted, output_factors, split_outputs, spread

__all__ = ["stopped_ratio"]


def stopped_ratio(
    out: Tensor, out_of_states: Tensor, root: Tensor, eps: Tensor, triangle: Triangle | None
) -> Tensor:
    """The ratio of every step, time first: shape ``(N, *batch)``.

    :param out: The outputs of the control, of shape ``(N, *batch, outputs)``.
    :param out_of_states: The same as functions of the states alone.
    :param root: sqrt(dt), to broadcast against the state.
    """
    return _StoppedRatio.apply(out, out_of_states, root, eps, triangle)


class _StoppedRatio(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        out_of_states: Tensor,
        root: Tensor,
        eps: Tensor,
        triangle: Triangle | None,
    ) -> Tensor:
        u, log_c, _ = split_outputs(out, eps.shape[-1])
        assert log_c is not None
        xi = torch.addcmul(contracted(out, eps, triangle), root, u)
        ctx.save_for_backward(out, root, eps, xi)
        ctx.triangle = triangle
        return (0.5 * (xi.square() - eps.square()) - log_c).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out, root, eps, xi), triangle = ctx.saved_tensors, ctx.triangle
        d, outputs, grad = eps.shape[-1], out.shape[-1], grad.unsqueeze(-1)
        by_w = _solve_transposed(out, eps) * grad
        by_xi = xi * grad - by_w
        # A displacement is a step of scale one.
        factors = output_factors(out, eps, root, None, triangle)
        grad_out = spread(by_xi, outputs, triangle) * factors
        grad_of_states = spread(by_w, outputs, triangle) * factors
        grad_of_states[..., d : 2 * d] -= grad
        grad_root = None
        if ctx.needs_input_grad[2]:
            grad_root = (by_xi * out[..., :d]).sum_to_size(root.shape)
        return grad_out, grad_of_states, grad_root, None, None


def _solve_transposed(out: Tensor, eps: Tensor) -> Tensor:
    """The solution y of C^T y = eps, by back substitution, for all steps and rows at once."""
    d = eps.shape[-1]
    _, log_c, below = split_outputs(out, d)
    assert log_c is not None
    if below is None:
        return eps * (-log_c).exp()
    inverse, rest, found = (-log_c).exp(), eps, []
    for j in range(d - 1, -1, -1):
        y = rest[..., j:] * inverse[..., j : j + 1]
        found.append(y)
        row = below[..., j * (j - 1) // 2 : j * (j + 1) // 2]
        rest = torch.addcmul(rest[..., :j], row, y, value=-1)
    return torch.cat(found[::-1], -1)
