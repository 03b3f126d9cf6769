"""What :mod:`~pyro_sde.distributions.at_once` is a function of, and how a step uses it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "Inputs",
    "Layout",
    "Net",
    "Outputs",
    "Shape",
    "add_product_",
    "factors",
    "halves",
    "pieces",
]


class Shape(NamedTuple):
    """What of a network is no tensor."""

    depth: int
    """How many hidden layers it has."""
    units: str
    known: int = 0
    """How many tensors of what is known on the grid it reads."""

    def size(self) -> int:
        """Of how many tensors it consists."""
        return 2 + 2 * self.depth + (self.known + self.depth if self.known else 0)


def pieces(known: Sequence[Tensor], weight: Tensor) -> Iterator[tuple[int, slice]]:
    """Numbers of those tensors that a layer reads, the first ones, and their columns in its
    weight."""
    start = 0
    for i, x in enumerate(known):
        columns = slice(start, start + x.shape[-1])
        if columns.stop > weight.shape[1]:
            return
        yield i, columns
        start = columns.stop


class Net(NamedTuple):
    """A network of the state: hidden layers of W h + V known + bias, and a linear output.

    The biases, and what is known, are on the grid. That comes in several tensors, side by side, of
    which a layer reads the first few, or none.
    """

    last: Any
    last_bias: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    known: tuple[Any, ...] = ()
    reads: tuple[Any, ...] = ()

    @classmethod
    def of(cls, flat: Sequence[Any], shape: Shape) -> Net:
        k, (last, last_bias, *rest) = shape.depth, flat
        ends = [0, k, 2 * k, 2 * k + shape.known, len(rest)]
        parts = (tuple(rest[a:b]) for a, b in itertools.pairwise(ends))
        return cls(last, last_bias, *parts)

    def flat(self) -> tuple[Any, ...]:
        return self.last, self.last_bias, *self.weights, *self.biases, *self.known, *self.reads

    def at(self, steps: slice) -> Net:
        biases, known = (tuple(x[steps] for x in xs) for xs in (self.biases, self.known))
        return self._replace(biases=biases, known=known)

    def bias(self, layer: int, step: int) -> Tensor:
        """All that is added in a step to what a layer makes of the units before it."""
        bias = self.biases[layer][step]
        if self.known:
            weight = self.reads[layer]
            for i, columns in pieces(self.known, weight):
                bias = bias + self.known[i][step] @ weight[:, columns].t()
        return bias

    def width(self) -> int:
        """Of its widest layer."""
        return max(len(w) for w in self.weights)


class Layout(NamedTuple):
    control: Shape
    drift: Shape | None = None


class Inputs(NamedTuple):
    """The step is z' = shift + decay z + gain u + scale c eps + dt f, with u and log c the outputs
    of one network and f, if there is one, of another. What is on the grid has shape
    ``(N, rows, K)``, or ``(N, 1, K)`` if all rows agree."""

    z0: Any
    decay: Any
    shift: Any
    gain: Any
    scale: Any
    control: Net
    dt: Any = None
    drift: Net | None = None

    @classmethod
    def of(cls, flat: Sequence[Any], layout: Layout) -> Inputs:
        end = 5 + layout.control.size()
        z0, decay, shift, gain, scale = flat[:5]
        linear = cls(z0, decay, shift, gain, scale, Net.of(flat[5:end], layout.control))
        if layout.drift is None:
            return linear
        return linear._replace(dt=flat[end], drift=Net.of(flat[end + 1 :], layout.drift))

    @property
    def contracts(self) -> bool:
        """Whether the control has log c beside u."""
        return len(self.control.last) > self.z0.shape[-1]

    def at(self, steps: slice) -> Inputs:
        """What a block of steps uses."""
        names = ("decay", "shift", "gain", "scale")
        parts: dict[str, Any] = {name: getattr(self, name)[steps] for name in names}
        parts["control"] = self.control.at(steps)
        if self.drift is not None:
            parts |= {"dt": self.dt[steps], "drift": self.drift.at(steps)}
        return self._replace(**parts)

    def flat(self) -> tuple[Any, ...]:
        more = () if self.drift is None else (self.dt, *self.drift.flat())
        return *self[:5], *self.control.flat(), *more


class Outputs(NamedTuple):
    """What is drawn, and what its log ratio to the process is made of; or the gradients by that.

    With contraction the latter are the outputs of the control, else sums over the state, of shape
    ``(N, rows)``. "Of states" is the same once more as a function of the states alone, whose
    gradient does not reach the control's parameters.
    """

    states: Any
    out: Any = None
    out_of_states: Any = None
    squares: Any = None
    """The sums of u^2."""
    products: Any = None
    """Those of u and the noise."""
    products_of_states: Any = None

    def at(self, steps: slice) -> Outputs:
        """Those of a block of steps: of the states, those before each."""
        return Outputs(*(None if x is None else x[steps] for x in self))


def halves(out: Tensor, d: int) -> tuple[Tensor, Tensor | None]:
    """u and, if it is there, log c."""
    return out[..., :d], out[..., d:] if out.shape[-1] > d else None


Factors = Sequence[float] | Sequence[Tensor]


def factors(x: Tensor) -> Factors:
    """One factor a step, of shape ``(N, rows, K)``: a number where it is the same for all, as a
    view of each step costs as much as an operation."""
    if x.shape[1:] == (1, 1) and x.device.type == "cpu":
        return x.flatten().tolist()
    return x.unbind(0)


def add_product_(total: Tensor, factor: Any, x: Tensor) -> Tensor:
    if isinstance(factor, float):
        return total.add_(x, alpha=factor)
    return total.addcmul_(factor, x)
