r"""The log ratio of two Gaussian steps that share a scale, in whitened coordinates.

The step of q is that of p displaced by w and contracted by C (:mod:`~pyro_sde.simulation.step`).
With eps the standard normal draw of the step, summed over the state,

.. math::

    \log q - \log p = \underbrace{\tfrac12 (|w|^2 + |C|_F^2 - D) - \log \det C}_{\text{KL}}
        + \underbrace{w \cdot C \varepsilon
        + \tfrac12 (|C \varepsilon|^2 - |\varepsilon|^2 - |C|_F^2 + D)}_{\text{martingale}}

and the martingale has mean zero. The scale of p appears nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .step import (
    contract,
    diagonal_of,
    is_matrix,
    solve_transposed,
)

__all__ = ["Local", "LogRatio", "Shift", "kl", "martingale", "slopes", "stopped"]

Shift = tuple[Tensor, Tensor | None]
"""w and the contraction of a step."""


def kl(w: Tensor, contraction: Tensor | None) -> Tensor:
    """The KL of a step, the expectation of log q - log p under q."""
    if contraction is None:
        return 0.5 * w.square().sum(-1)
    if not is_matrix(contraction, w):
        return (0.5 * (w.square() + torch.expm1(2 * contraction)) - contraction).sum(-1)
    log_c = diagonal_of(contraction, w)
    return 0.5 * (w.square().sum(-1) + _excess(contraction, log_c)) - log_c.sum(-1)


def _excess(contraction: Tensor, log_c: Tensor) -> Tensor:
    """|C|_F^2 - D, from a contraction that is a matrix and its diagonal."""
    diagonal = torch.expm1(2 * log_c) - log_c.square()
    return diagonal.sum(-1) + contraction.square().sum((-2, -1))


def martingale(w: Tensor, contraction: Tensor | None, eps: Tensor) -> Tensor:
    """What is left of log q - log p, of mean zero."""
    if contraction is None:
        return (w * eps).sum(-1)
    if not is_matrix(contraction, w):
        c, excess = contraction.exp(), torch.expm1(2 * contraction)
        return (w * c * eps + 0.5 * excess * (eps.square() - 1)).sum(-1)
    contracted = contract(torch.zeros_like(w), contraction, eps)
    excess = _excess(contraction, diagonal_of(contraction, eps))
    squares = (contracted.square() - eps.square()).sum(-1)
    return (w * contracted).sum(-1) + 0.5 * (squares - excess)


def stopped(
    w: Tensor, contraction: Tensor | None, eps: Tensor, by_w: Tensor | None = None
) -> Tensor:
    """log q - log p with the parameters stopped in the densities. They keep the gradient that they
    have through the displacement xi = w + C eps, which made the path.

    The noise of q is C^-1 (xi - w), which in value is eps, so the ratio is
    1/2 (|xi|^2 - |eps|^2) - log det C. Its derivative with respect to xi is xi - y, with
    C^T y = eps: no backward pass goes through an inverse.

    :param by_w: y, the first of the :func:`slopes`, where they are known.
    """
    if contraction is None:
        return torch.addcmul(0.5 * w.square(), w.detach(), eps).sum(-1)
    fixed, xi = contraction.detach(), contract(w, contraction, eps)
    squares = xi.square() - eps.square()
    value = 0.5 * squares.sum(-1) - diagonal_of(fixed, eps).sum(-1)
    if not torch.is_grad_enabled():
        return value
    y = solve_transposed(fixed, eps) if by_w is None else by_w
    return value - (y * _zero(xi)).sum(-1)


def _zero(x: Tensor) -> Tensor:
    """Zero in value, ``x`` in gradient."""
    return x - x.detach()


def slopes(contraction: Tensor | None, eps: Tensor) -> Shift:
    """The derivatives of log q - log p with respect to w and to the contraction, at a fixed
    displacement."""
    if contraction is None:
        return eps, None
    contraction = contraction.detach()
    by_w = solve_transposed(contraction, eps)
    if not is_matrix(contraction, eps):
        return by_w, eps.square() - 1
    by_contraction = (by_w.unsqueeze(-1) * eps.unsqueeze(-2)).tril()
    on_diagonal = by_w * eps * diagonal_of(contraction, eps).exp() - 1
    diagonal_of(by_contraction, eps).copy_(on_diagonal)
    return by_w, by_contraction


class LogRatio:
    """log q - log p over the steps of one path: all that an ELBO may ask of a draw.

    :param kl_by_step: Returns the KL of every step, time first: shape ``(N, *batch)``.
    :param martingale: Returns the rest of log q - log p, of mean zero: shape ``batch``.
    :param stopped: Returns log q - log p with every parameter stopped in the densities, of the
        same shape: its gradient flows through the sampled path only.
    """

    def __init__(
        self,
        kl_by_step: Callable[[], Tensor],
        martingale: Callable[[], Tensor],
        stopped: Callable[[], Tensor],
    ) -> None:
        self.kl_by_step, self.martingale, self.stopped = kl_by_step, martingale, stopped

    @classmethod
    def of_steps(
        cls,
        w: Tensor,
        contraction: Tensor | None,
        eps: Tensor,
        local: Callable[[Shift], Iterable[Local]] = lambda slopes: (),
    ) -> LogRatio:
        """From w, the contraction and the noise of every step, time first.

        :param local: From the derivatives of log q - log p with respect to w and to the
            contraction to what was computed from the states, for the gradient of ``stopped`` with
            respect to them.
        """

        def stopped_over_steps() -> Tensor:
            noise = eps.detach()
            if not torch.is_grad_enabled():
                return stopped(w, contraction, noise).sum(0)
            found = slopes(contraction, noise)
            total = stopped(w, contraction, noise, found[0]).sum(0)
            return total + _through_states(local(found), noise.dim())

        return cls(
            lambda: kl(w, contraction),
            lambda: martingale(w, contraction, eps).sum(0),
            stopped_over_steps,
        )

    @classmethod
    def zero(cls, like: Tensor) -> LogRatio:
        """That of two laws that agree, for paths of the batch shape of ``like``."""
        return cls(lambda: like.new_zeros(1, *like.shape), lambda: like, lambda: like)

    def kl(self) -> Tensor:
        """The KL of all steps."""
        return self.kl_by_step().sum(0)


Local = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
"""The states of one step, or of all steps with time first; what was computed from them; and the
derivatives of log q - log p with respect to that."""


def _through_states(local: Iterable[Local], ndim: int) -> Tensor | float:
    """What the stopped ratio owes to the states: zero in value, exact in gradient.

    The derivatives of the log ratio are known in closed form, so one local vector-Jacobian product
    gives the states' share, without touching the parameters' and without evaluating a network
    again.

    :param ndim: The number of dimensions of the states of all steps.
    """
    total: Tensor | float = 0.0
    single_states, single_gradients = [], []
    for z, outputs, slope in local:
        live = [(o, g) for o, g in zip(outputs, slope, strict=True) if o.requires_grad]
        if not live or not z.requires_grad:
            continue
        tensors, gradients = zip(*live, strict=True)
        (gradient,) = torch.autograd.grad(
            tensors, z, gradients, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            continue
        if z.dim() == ndim:
            total = total + (gradient * _zero(z)).sum((0, -1))
        else:
            single_states.append(z)
            single_gradients.append(gradient)
    if single_states:
        z = torch.stack(single_states)
        total = total + (torch.stack(single_gradients) * _zero(z)).sum((0, -1))
    return total
