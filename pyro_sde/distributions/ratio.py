"""One step of q against one of p: the parts of their log ratio, entry by entry.

The step of q is shifted by w, in units of p's scale, and its scale is c times p's; eps is the
standard normal draw. No contraction (c = 1) is ``log_c = None``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kl", "martingale", "slopes", "stopped"]


def kl(w: Tensor, log_c: Tensor | None) -> Tensor:
    """The expectation of log q - log p under q."""
    if log_c is None:
        return 0.5 * w.square()
    return 0.5 * (w.square() + torch.expm1(2 * log_c)) - log_c


def martingale(w: Tensor, log_c: Tensor | None, eps: Tensor) -> Tensor:
    """What is left of log q - log p, of mean zero."""
    if log_c is None:
        return w * eps
    return w * log_c.exp() * eps + 0.5 * torch.expm1(2 * log_c) * (eps.square() - 1)


def stopped(
    w: Tensor,
    log_c: Tensor | None,
    eps: Tensor,
    of_states: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """log q - log p with the parameters stopped in the densities: they keep the gradient that
    they have through the displacement w + c eps, which made the path.

    ``of_states`` are w and log c with a gradient by the states, which then have their share.
    """
    fixed_w, fixed_log_c = of_states or (w.detach(), None)
    if log_c is None:
        return torch.addcmul(0.5 * w.square(), fixed_w, eps)
    if fixed_log_c is None:
        fixed_log_c = log_c.detach()
    xi = w + log_c.exp() * eps
    back = (xi - fixed_w) * (-fixed_log_c).exp()
    return 0.5 * (xi.square() - back.square()) - fixed_log_c


def slopes(log_c: Tensor | None, eps: Tensor) -> tuple[Tensor, Tensor | None]:
    """The derivatives of log q - log p, at a fixed displacement, by w and by log c."""
    if log_c is None:
        return eps, None
    return eps * (-log_c.detach()).exp(), eps.square() - 1
