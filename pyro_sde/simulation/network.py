"""A network of the state on a time grid, as its layers: what a fused or compiled path needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._checks import broadcasts_to, pad_after_time
from .._ops.fused.inputs import context_columns
from .._ops.fused.layers import ACTIVATIONS
from .step import triangle_places, triangular

__all__ = ["GridNetwork", "network", "outputs_of", "split_control"]


def network(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    last: tuple[Tensor, Tensor],
    activation: str = "tanh",
    compiled: bool = False,
) -> Tensor:
    """The output at the state ``z``.

    :param compiled: Whether this is inside of a function that is compiled.
    """
    unit = ACTIVATIONS[activation]
    function = unit.compiled if compiled and unit.compiled else unit.function
    for weight, bias in zip(weights, biases, strict=True):
        # One operation less where the bias is the same for all rows.
        h = linear(z, weight, bias) if bias.dim() == 1 else linear(z, weight) + bias
        z = function(h)
    return linear(z, *last)


def split_control(
    out: Tensor, d: int, contraction: Any, places: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """u and the contraction, from the output of a control's network for states in R^d.

    :param contraction: None; ``"diagonal"``, and the output is u and log c; or ``"full"``, and it
        is u, the logarithms of C's diagonal, and the entries below it, row by row.
    :param places: See :func:`~pyro_sde.simulation.step.triangular`.
    """
    if contraction is None:
        return out, None
    u, entries = out[..., :d], out[..., d:]
    return u, entries if contraction == "diagonal" else triangular(entries, d, places)


def outputs_of(d: int, contraction: Any) -> int:
    """How many outputs a control's network has for states in R^d."""
    return {None: d, "diagonal": 2 * d, "full": 2 * d + d * (d - 1) // 2}[contraction]


@dataclass
class GridNetwork:
    """A network of the state on a grid, a :class:`~pyro_sde.simulation.base.GridControl`.

    The ``on_grid`` of a control or of a drift may return it: paths can then be simulated in one
    operation.

    :param weights: Those of the hidden layers, of shape ``(out, in)``.
    :param biases: Those of the hidden layers, time first: of shape ``(N, out)`` or, where they
        differ within a batch, ``(N, ..., out)``.
    :param last: Weight and bias of the output.
    :param contraction: What the output holds beside u; see :func:`split_control`. True is
        ``"diagonal"``.
    :param activation: Of the hidden layers, ``"tanh"`` or ``"softplus"``.
    :param context: Further inputs on the grid, of shapes ``(N, ..., F)``. A fused path computes
        the biases that they make, which are larger, a few steps at a time.
    :param context_weights: One weight a layer, of shape ``(out, C)``: its product with the first C
        columns of the context is added to the bias of the layer. C is where one of the context
        tensors ends, or 0.
    :param active: Of shape ``(N, ..., 1)``: where it is False the output is zero.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    last: tuple[Tensor, Tensor]
    contraction: str | bool | None = None
    activation: str = "tanh"
    context: list[Tensor] = field(default_factory=list)
    context_weights: list[Tensor] = field(default_factory=list)
    active: Tensor | None = None

    def __post_init__(self) -> None:
        self.contraction = "diagonal" if self.contraction is True else self.contraction or None

    @cached_property
    def all_biases(self) -> list[Tensor]:
        """The biases, those that the context makes included."""
        biases = list(self.biases)
        for k, weight in enumerate(self.context_weights):
            for i, columns in context_columns(self.context, weight):
                more = linear(self.context[i], weight[:, columns])
                biases[k] = more + pad_after_time(biases[k], more.dim())
        return biases

    @cached_property
    def places(self) -> Tensor | None:
        """Where the entries of a contraction that is a matrix go; None if it is none."""
        if self.contraction != "full":
            return None
        return triangle_places(self.weights[0].shape[1], self.weights[0].device)

    @property
    def known(self) -> tuple[Tensor, ...]:
        """What depends on the time of a step but not on its state, time first."""
        return (*self.all_biases, *(() if self.active is None else (self.active,)))

    def __call__(self, z: Tensor, *rows: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """u, or (u, contraction), from the state and one row of each tensor in ``known``."""
        biases = rows[: len(self.weights)]
        out = network(z, self.weights, biases, self.last, self.activation)
        if self.active is not None:
            out = torch.where(rows[-1], out, 0.0)
        u, contraction = split_control(out, z.shape[-1], self.contraction, self.places)
        return u if contraction is None else (u, contraction)

    @cached_property
    def _rows(self) -> list[tuple[Tensor, ...]]:
        return list(zip(*(x.unbind(0) for x in self.known), strict=True))

    def at(self, i: int, z: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The same at step number ``i``."""
        return self(z, *self._rows[i])

    def fits(self, z: Tensor) -> bool:
        """Whether it maps states like ``z`` to outputs of the same batch, dtype and device."""
        on_grid = [*self.biases, *self.context]
        tensors = (*self.weights, *on_grid, *self.last, *self.context_weights)
        outputs = outputs_of(z.shape[-1], self.contraction)
        masks = [] if self.active is None else [self.active]
        return (
            all(x.dtype == z.dtype and x.device == z.device for x in tensors)
            and self.weights[0].shape[1] == z.shape[-1]
            and self.last[0].shape[0] == outputs
            and all(
                x.dim() == 2 or broadcasts_to(x.shape[1:-1], z.shape[:-1])
                for x in (*on_grid, *masks)
            )
        )
