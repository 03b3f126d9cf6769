r"""One step of a Gaussian Markov chain, in whitened coordinates:

.. math:: z' = \mathrm{mean} + S\,\xi, \qquad \xi = w + C\,\varepsilon, \qquad
    \varepsilon \sim N(0, I)

S is the scale of the law: a vector ``(..., D)``, the diagonal of S, or a lower-triangular matrix
``(..., D, D)``, which has one dimension more than the state. The control displaces the noise by w
and contracts it by C, which is one of

- None: the identity;
- a vector ``(..., D)``: the logarithms of C's diagonal;
- a matrix ``(..., D, D)``: below the diagonal the entries of C, on it the logarithms of C's, above
  it zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "checkable",
    "compose",
    "contract",
    "contraction_between",
    "contraction_scale",
    "diagonal_of",
    "displace",
    "is_matrix",
    "solve_transposed",
    "triangle_places",
    "triangular",
    "uncontract",
    "whiten",
]


def is_matrix(scale: Tensor, z: Tensor) -> bool:
    """Whether a scale or contraction for states like ``z`` is a matrix rather than a vector."""
    return scale.dim() == z.dim() + 1


def scale_multiply(scale: Tensor, x: Tensor) -> Tensor:
    """S x."""
    return (scale @ x.unsqueeze(-1)).squeeze(-1) if is_matrix(scale, x) else scale * x


def scale_solve(scale: Tensor, x: Tensor) -> Tensor:
    """The solution y of S y = x."""
    if not is_matrix(scale, x):
        return x / scale
    return torch.linalg.solve_triangular(scale, x.unsqueeze(-1), upper=False).squeeze(-1)


def displace(mean: Tensor, scale: Tensor, xi: Tensor) -> Tensor:
    """The state after the step, mean + S xi."""
    if is_matrix(scale, xi):
        return mean + scale_multiply(scale, xi)
    return torch.addcmul(mean, scale, xi)


def whiten(mean: Tensor, scale: Tensor, z_next: Tensor) -> Tensor:
    """The displacement xi that leads to the state ``z_next``: the inverse of :func:`displace`."""
    return scale_solve(scale, z_next - mean)


def diagonal_of(scale: Tensor, z: Tensor) -> Tensor:
    """The diagonal of S, positive for a law."""
    return scale.diagonal(dim1=-2, dim2=-1) if is_matrix(scale, z) else scale


def triangle_places(d: int, device: torch.device | None = None) -> Tensor:
    """The places of the entries of :func:`triangular` in a ``(d, d)`` matrix that is flattened."""
    rows, columns = torch.tril_indices(d, d, -1, device=device)
    diagonal = torch.arange(d, device=device) * (d + 1)
    return torch.cat([diagonal, rows * d + columns])


def triangular(entries: Tensor, d: int, places: Tensor | None = None) -> Tensor:
    """A lower-triangular matrix ``(..., d, d)`` from its diagonal and, after it, the entries below
    the diagonal, row by row.

    :param places: The :func:`triangle_places`, where they are known.
    """
    places = triangle_places(d, entries.device) if places is None else places
    zeros = entries.new_zeros(()).expand(*entries.shape[:-1], d * d)
    # Of all ways to do this, the fastest, forward and backward.
    return zeros.scatter(-1, places.expand_as(entries), entries).unflatten(-1, (d, d))


def contraction_scale(contraction: Tensor, z: Tensor) -> Tensor:
    """C itself, as a scale: its diagonal, or a lower-triangular matrix."""
    if not is_matrix(contraction, z):
        return contraction.exp()
    diagonal = contraction.diagonal(dim1=-2, dim2=-1).exp()
    return contraction.tril(-1) + torch.diag_embed(diagonal)


def contract(w: Tensor, contraction: Tensor | None, eps: Tensor) -> Tensor:
    """The displacement xi = w + C eps."""
    if contraction is None:
        return w + eps
    if is_matrix(contraction, eps):
        # The matrix itself, times eps, has log c eps where C eps has c eps.
        log_c = diagonal_of(contraction, eps)
        return torch.addcmul(w + scale_multiply(contraction, eps), log_c.exp() - log_c, eps)
    return torch.addcmul(w, contraction.exp(), eps)


def uncontract(w: Tensor, contraction: Tensor | None, xi: Tensor) -> Tensor:
    """The noise eps that makes the displacement ``xi``: the inverse of :func:`contract`."""
    if contraction is None:
        return xi - w
    return scale_solve(contraction_scale(contraction, xi), xi - w)


def solve_transposed(contraction: Tensor, eps: Tensor) -> Tensor:
    """The solution y of C^T y = eps."""
    if not is_matrix(contraction, eps):
        return eps * (-contraction).exp()
    # C is a matrix with ones on its diagonal, whose columns are multiplied by c.
    inverse = (-diagonal_of(contraction, eps)).exp()
    ones = (contraction * inverse.unsqueeze(-2)).mT
    y = torch.linalg.solve_triangular(
        ones, (inverse * eps).unsqueeze(-1), upper=True, unitriangular=True
    )
    return y.squeeze(-1)


def compose(scale: Tensor, contraction: Tensor | None, z: Tensor) -> Tensor:
    """S C, the scale of a step that is contracted."""
    if contraction is None:
        return scale
    c = contraction_scale(contraction, z)
    if is_matrix(scale, z):
        return scale @ c if is_matrix(c, z) else scale * c.unsqueeze(-2)
    return scale.unsqueeze(-1) * c if is_matrix(c, z) else scale * c


def checkable(scale: Tensor, contraction: Tensor | None, z: Tensor) -> Tensor:
    """What there is to check of S C: as C is triangular, its diagonal unless S is a matrix."""
    if contraction is None or is_matrix(scale, z):
        return compose(scale, contraction, z)
    return scale * diagonal_of(contraction, z).exp()


def contraction_between(scale_q: Tensor, scale_p: Tensor, z: Tensor) -> Tensor:
    """The contraction C for which S_q = S_p C."""
    if not is_matrix(scale_q, z) and not is_matrix(scale_p, z):
        return (scale_q.log() - scale_p.log()).expand_as(z)
    as_matrix = [
        s if is_matrix(s, z) else torch.diag_embed(s.expand_as(z)) for s in (scale_p, scale_q)
    ]
    c = torch.linalg.solve_triangular(*as_matrix, upper=False)
    return c.tril(-1) + torch.diag_embed(c.diagonal(dim1=-2, dim2=-1).log())
