"""Paths that are one operation: a process pushed by a network, with linear or neural drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .at_once import run_at_once
from .at_once_inputs import Inputs, Layout, Net, Shape, pieces
from .units import UNITS
from .util import broadcast_shapes

__all__ = [
    "Affine",
    "Contracted",
    "FusedDraw",
    "NetworkSteps",
    "Sums",
    "contracted",
    "network",
    "simulate_at_once",
    "split_output",
]

Affine = tuple[Tensor, Tensor, Tensor]
"""Decay, shift and scale of every step, time first: z moves to N(shift + decay z, scale^2)."""


def network(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    last: tuple[Tensor, Tensor],
    units: str = "tanh",
    compiled: bool = False,
) -> Tensor:
    """:param compiled: Whether this is inside of a function that is compiled."""
    unit = UNITS[units]
    of = unit.compiled if compiled and unit.compiled else unit.of
    for weight, bias in zip(weights, biases, strict=True):
        # One operation less where the bias is the same for all rows.
        h = linear(z, weight, bias) if bias.dim() == 1 else linear(z, weight) + bias
        z = of(h)
    return linear(z, *last)


@dataclass
class NetworkSteps:
    """A network of the state on a grid, as a function of the step's number.

    The ``on_grid`` of a control may return it, and that of a drift, for paths to be simulated in
    one operation.

    :param weights: Those of the hidden layers, of shape ``(out, in)``.
    :param biases: Those of the hidden layers, time first: of shape ``(N, out)`` or, where they
        differ within a batch, ``(N, ..., out)``.
    :param last: Weight and bias of the output.
    :param contraction: Whether the output is u and log c, side by side.
    :param units: The hidden units, ``"tanh"`` or ``"softplus"``.
    :param known: What else is known on the grid, side by side, of shapes ``(N, ..., F)``. In one
        operation the biases that it makes, which are larger, are computed a few steps at a time.
    :param reads: One weight a layer, of shape ``(out, C)``: the product with the first C columns
        of what is known is added to its bias. C is where one of its tensors ends, or 0.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    last: tuple[Tensor, Tensor]
    contraction: bool = False
    units: str = "tanh"
    known: list[Tensor] = field(default_factory=list)
    reads: list[Tensor] = field(default_factory=list)

    @cached_property
    def all_biases(self) -> list[Tensor]:
        """The biases, those of what is known included."""
        biases = list(self.biases)
        for k, weight in enumerate(self.reads):
            for i, columns in pieces(self.known, weight):
                more = linear(self.known[i], weight[:, columns])
                biases[k] = more + _with_ones(biases[k], more.dim())
        return biases

    @cached_property
    def _at(self) -> list[tuple[Tensor, ...]]:
        return list(zip(*(b.unbind(0) for b in self.all_biases), strict=True))

    def __call__(self, i: int, z: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.at(None, z, *self._at[i])

    def at(self, t: Any, z: Tensor, *biases: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The network with the biases of one step."""
        out = network(z, self.weights, biases, self.last, self.units)
        u, log_c = split_output(out, self.contraction)
        return u if log_c is None else (u, log_c)

    def fits(self, z: Tensor) -> bool:
        """Whether it maps states like ``z`` to outputs of the same batch, dtype and device."""
        on_grid = [*self.biases, *self.known]
        tensors = (*self.weights, *on_grid, *self.last, *self.reads)
        outputs = (2 if self.contraction else 1) * z.shape[-1]
        return (
            all(x.dtype == z.dtype and x.device == z.device for x in tensors)
            and self.weights[0].shape[1] == z.shape[-1]
            and self.last[0].shape[0] == outputs
            and all(x.dim() == 2 or _fits(x.shape[1:-1], z.shape[:-1]) for x in on_grid)
        )


def _fits(shape: torch.Size, batch: torch.Size) -> bool:
    try:
        return broadcast_shapes(shape, batch) == batch
    except RuntimeError:
        return False


@dataclass
class Sums:
    """Sums over the state of a path that is pushed without contraction, time first."""

    squares: Tensor
    """Of u."""
    products: Tensor
    """Of u and the noise."""
    of_states: Tensor
    """The same, with a gradient by the states that does not reach the control's parameters."""


@dataclass
class Contracted:
    """What a path is pushed and contracted by, time first."""

    u: Tensor
    log_c: Tensor
    of_states: tuple[Tensor, Tensor]
    """The same, with a gradient by the states that does not reach the control's parameters."""


@dataclass
class FusedDraw:
    """How a path was made: see :class:`~pyro_sde.distributions.path.Draw`."""

    value: Tensor
    has_grad: bool
    eps: Tensor
    prior_scale: Tensor
    control: NetworkSteps
    terms: Sums | Contracted

    @property
    def z(self) -> tuple[Tensor, ...]:
        """The states, but for the last."""
        return self.value.unbind(-2)[:-1]

    @property
    def u(self) -> Tensor:
        """The control along the path, time first: evaluated anew, as it was not kept."""
        return torch.stack([self.control_at(i) for i in range(len(self.eps))])

    def scales(self) -> Tensor:
        """The scale of every step, time first."""
        scale = self.prior_scale.detach()
        if not isinstance(self.terms, Contracted):
            return scale
        c = self.terms.log_c.detach().exp()
        return _with_ones(scale, c.dim()) * c

    def control_at(self, i: int) -> Tensor:
        out = self.control(i, self.value.select(-2, i))
        return out if isinstance(out, Tensor) else out[0]


def simulate_at_once(
    affine: Affine,
    drift: NetworkSteps | None,
    control: NetworkSteps,
    dt: Tensor,
    z0: Tensor,
    eps: Tensor,
    compile: bool = False,
) -> FusedDraw:
    """The path from ``z0`` with the noise ``eps``, of a process whose mean is ``affine`` and, if
    there is a drift, ``dt`` times that."""
    n, batch, d = len(eps), z0.shape[:-1], z0.shape[-1]
    decay, shift, scale, root = (_by_rows(x, batch) for x in (*affine, dt.sqrt()))
    net, shape = _by_net(control, batch, compile)
    inputs = Inputs(z0.reshape(-1, d), decay, shift, scale * root, scale, net)
    layout = Layout(shape)
    if drift is not None:
        net, shape = _by_net(drift, batch, compile)
        inputs = inputs._replace(dt=_by_rows(dt, batch), drift=net)
        layout = layout._replace(drift=shape)
    run = run_at_once(eps.reshape(n, -1, d), inputs, layout, compile)
    value = run.states.reshape(n + 1, *batch, d).movedim(0, -2).contiguous()
    terms: Sums | Contracted
    if control.contraction:
        terms = contracted(run.out.reshape(n, *batch, -1), run.out_of_states.reshape(n, *batch, -1))
    else:
        sums = (run.squares, run.products, run.products_of_states)
        terms = Sums(*(x.reshape(n, *batch) for x in sums))
    return FusedDraw(value, torch.is_grad_enabled(), eps, affine[2], control, terms)


def _by_net(net: NetworkSteps, batch: torch.Size, compile: bool) -> tuple[Net, Shape]:
    is_known = bool(net.known) and not compile  # in few chunks their biases are made at once
    biases = net.biases if is_known else net.all_biases
    found = Net(*net.last, tuple(net.weights), tuple(_by_rows(b, batch) for b in biases))
    if is_known:
        rows = batch.numel()
        known = tuple(_by_rows(x, batch).expand(-1, rows, -1) for x in net.known)
        found = found._replace(known=known, reads=tuple(net.reads))
    return found, Shape(len(net.weights), net.units, len(found.known))


def contracted(out: Tensor, again: Tensor) -> Contracted:
    """From the outputs, and these once more as functions of the states alone."""
    (u, log_c), (u_of_states, log_c_of_states) = (x.chunk(2, -1) for x in (out, again))
    return Contracted(u, log_c, (u_of_states, log_c_of_states))


def split_output(out: Tensor, contraction: bool) -> tuple[Tensor, Tensor | None]:
    """u and, with contraction, log c."""
    if not contraction:
        return out, None
    u, log_c = out.chunk(2, -1)
    return u, log_c


def _by_rows(x: Tensor, batch: torch.Size) -> Tensor:
    """From ``(N, ..., K)`` to ``(N, rows, K)``, or to ``(N, 1, K)`` where all rows agree."""
    n, k = x.shape[0], x.shape[-1]
    if x.numel() == n * k:
        return x.reshape(n, 1, k)
    return _with_ones(x, len(batch) + 2).expand(n, *batch, k).reshape(n, -1, k)


def _with_ones(x: Tensor, ndim: int) -> Tensor:
    """Time stays first; the other dimensions are broadcast from the right."""
    return x.reshape(x.shape[:1] + (1,) * (ndim - x.dim()) + x.shape[1:])
