"""Energies of dynamics, which measure how hard they are to solve."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ENERGIES", "with_energies"]

ENERGIES = ("kinetic", "r2")


def with_energies(
    field: Callable[[Tensor, Tensor, Any], Tensor], names: list[str], event_dim: int, h0: Tensor
) -> tuple[Callable[[Tensor, Tensor, Any], Tensor], Tensor, Callable]:
    r"""A field whose state includes the energies of each input.

    ``"kinetic"`` is :math:`\int |h'|^2 dt` (Finlay et al. 2020), and ``"r2"`` is
    :math:`\int |h''|^2 dt`, the :math:`R_2` of Kelly et al. (2020). Squares are means over the
    entries of one input. The path of the weights is rough, so h'' is taken with fixed weights.

    :param event_dim: How many of the last dimensions are one input.
    :param h0: The state at the start.
    :returns: The field and the start, for flattened inputs with one more entry for each name; and a
        function that splits their solution into h and a tensor of energies of shape ``(...,
        names)``.
    """
    shape, n = h0.shape, len(names)
    rows = shape[: len(shape) - event_dim]

    def apart(y: Tensor) -> tuple[Tensor, Tensor]:
        return y[..., :-n].reshape(shape), y[..., -n:]

    def augmented(t: Tensor, y: Tensor, w: Any) -> Tensor:
        h, _ = apart(y)
        f = field(t, h, w)
        parts = [f.reshape(*rows, -1)]
        for name in names:
            v = f if name == "kinetic" else _acceleration(field, t, h, w, f)
            parts.append(v.reshape(*rows, -1).square().mean(-1, keepdim=True))
        return torch.cat(parts, -1)

    flat = h0.reshape(*rows, -1)
    return augmented, torch.cat([flat, flat.new_zeros(*rows, n)], -1), apart


def _acceleration(field: Callable, t: Tensor, h: Tensor, w: Any, f: Tensor) -> Tensor:
    """df/dt along the solution: the derivative of the field in the direction (1, f)."""
    with warnings.catch_warnings():  # torch's jvp warns of its own implementation
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.func.jvp(lambda t, h: field(t, h, w), (t, h), (torch.ones_like(t), f))[1]
