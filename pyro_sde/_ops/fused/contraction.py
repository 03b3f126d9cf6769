"""The outputs of a control that contracts the noise of a step by a lower-triangular matrix C: u,
the logarithms of C's diagonal and, unless C is diagonal, its entries below that, row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Triangle", "contracted", "output_factors", "split_outputs", "spread"]


class Triangle(NamedTuple):
    """The places of the entries below the diagonal of a matrix, row by row."""

    rows: Tensor
    columns: Tensor
    sums: Tensor
    """A matrix of zeros and ones: the product with it sums the entries of each row."""
    row_of_output: Tensor
    """The entry of the state that each output of the control moves."""

    @classmethod
    def of(cls, z: Tensor, outputs: int) -> Triangle | None:
        """For states like ``z`` and that many outputs; None if C is diagonal or the identity."""
        d = z.shape[-1]
        if outputs <= 2 * d:
            return None
        rows, columns = torch.tril_indices(d, d, -1, device=z.device)
        states = torch.arange(d, device=z.device)
        sums = (rows.unsqueeze(-1) == states).to(z.dtype)
        return cls(rows, columns, sums, torch.cat([states, states, rows]))

    def noise(self, scale: Tensor | None, eps: Tensor) -> Tensor:
        """What the entries are multiplied by in a step: the noise of their column, times the scale
        of their row; None is a scale of one."""
        noise = _select(eps, self.columns)
        if scale is None:
            return noise
        scale = scale.expand(*scale.shape[:-1], eps.shape[-1])
        return noise.mul_(_select(scale, self.rows))


def _select(x: Tensor, columns: Tensor) -> Tensor:
    """Columns of ``x``, which take several times as long without one leading dimension."""
    return x.flatten(0, -2).index_select(-1, columns).unflatten(0, x.shape[:-1])


def split_outputs(out: Tensor, d: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """u and, if they are there, the logarithms of C's diagonal and its entries below that."""
    outputs = out.shape[-1]
    log_c = out[..., d : 2 * d] if outputs > d else None
    return out[..., :d], log_c, out[..., 2 * d :] if outputs > 2 * d else None


def contracted(out: Tensor, eps: Tensor, triangle: Triangle | None) -> Tensor:
    """C eps."""
    _, log_c, below = split_outputs(out, eps.shape[-1])
    if log_c is None:
        return eps
    diagonal = log_c.exp() * eps
    if triangle is None or below is None:
        return diagonal
    return diagonal + (below * triangle.noise(None, eps)) @ triangle.sums


def output_factors(
    out: Tensor, eps: Tensor, gain: Tensor, scale: Tensor | None, triangle: Triangle | None
) -> Tensor:
    """The derivative of the state after a step with respect to each output of the control, which
    moves one entry of the state.

    :param scale: None is a scale of one.
    """
    _, log_c, _ = split_outputs(out, eps.shape[-1])
    if log_c is None:
        return gain
    diagonal = log_c.exp() * eps
    factors = [gain.expand_as(eps), diagonal if scale is None else scale * diagonal]
    if triangle is not None:
        factors.append(triangle.noise(scale, eps))
    return torch.cat(factors, -1)


def spread(x: Tensor, outputs: int, triangle: Triangle | None) -> Tensor:
    """For each output of the control, the entry of ``x`` at the entry of the state it moves."""
    if triangle is not None:
        return _select(x, triangle.row_of_output)
    return x if outputs == x.shape[-1] else torch.cat([x, x], -1)
