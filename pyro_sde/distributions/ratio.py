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


def stopped(w: Tensor, log_c: Tensor | None, eps: Tensor) -> Tensor:
    """log q - log p with the parameters stopped in the densities: they keep the gradient that
    they have through the displacement w + c eps, which made the path."""
    if log_c is None:
        return 0.5 * w.square() + w.detach() * eps
    fixed_w, fixed_log_c = w.detach(), log_c.detach()
    xi = w + log_c.exp() * eps
    back = (xi - fixed_w) * (-fixed_log_c).exp()
    return 0.5 * (xi.square() - back.square()) - fixed_log_c


def slopes(log_c: Tensor | None, eps: Tensor) -> tuple[Tensor, Tensor | None]:
    """The derivatives of log q - log p, at a fixed displacement, by w and by log c."""
    if log_c is None:
        return eps, None
    return eps * (-log_c.detach()).exp(), eps.square() - 1
