"""What the fused path is a function of, and how a step uses it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "Inputs",
    "Layout",
    "Net",
    "NetLayout",
    "Outputs",
    "context_columns",
]


class NetLayout(NamedTuple):
    """What of a network is not a tensor."""

    depth: int
    """The number of hidden layers."""
    activation: str
    context: int = 0
    """The number of context tensors."""

    def size(self) -> int:
        """The number of tensors of the network."""
        return 2 + 2 * self.depth + (self.context + self.depth if self.context else 0)


def context_columns(context: Sequence[Tensor], weight: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield ``(i, columns)`` for each context tensor this layer uses; ``weight[:, columns]``
    multiplies it."""
    start = 0
    for i, x in enumerate(context):
        columns = slice(start, start + x.shape[-1])
        if columns.stop > weight.shape[1]:
            return
        yield i, columns
        start = columns.stop


class Net(NamedTuple):
    """A network of the state: hidden layers f(W h + V context + bias), and a linear output.

    Biases and context are on the grid. The context comes in several tensors, of which a layer uses
    the first few, or none.
    """

    last: Any
    last_bias: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    context: tuple[Any, ...] = ()
    context_weights: tuple[Any, ...] = ()

    @classmethod
    def of(cls, flat: Sequence[Any], layout: NetLayout) -> Net:
        k, (last, last_bias, *rest) = layout.depth, flat
        ends = [0, k, 2 * k, 2 * k + layout.context, len(rest)]
        parts = (tuple(rest[a:b]) for a, b in itertools.pairwise(ends))
        return cls(last, last_bias, *parts)

    def flat(self) -> tuple[Any, ...]:
        tensors = (*self.weights, *self.biases, *self.context, *self.context_weights)
        return self.last, self.last_bias, *tensors

    def at(self, steps: slice) -> Net:
        """The network in a block of steps."""
        biases, context = (tuple(x[steps] for x in xs) for xs in (self.biases, self.context))
        return self._replace(biases=biases, context=context)

    def bias(self, layer: int, step: int) -> Tensor:
        """All that a layer adds to W h in a step."""
        bias = self.biases[layer][step]
        if self.context:
            weight = self.context_weights[layer]
            for i, columns in context_columns(self.context, weight):
                bias = bias + self.context[i][step] @ weight[:, columns].t()
        return bias

    def width(self) -> int:
        """The width of its widest layer."""
        return max(len(w) for w in self.weights)


class Layout(NamedTuple):
    control: NetLayout
    drift: NetLayout | None = None


class Inputs(NamedTuple):
    """The step is z' = shift + decay z + gain u + scale C eps + dt f, with u and the entries of C,
    its diagonal as logarithms, the outputs of one network, times the mask, and f, if there is one,
    the output of another. What is on the grid has shape ``(N, rows, K)``, or ``(N, 1, K)`` if all
    rows agree."""

    z0: Any
    decay: Any
    shift: Any
    gain: Any
    scale: Any
    control: Net
    dt: Any = None
    drift: Net | None = None
    mask: Tensor | None = None
    """Ones and zeros, of shape ``(N, rows or 1, 1)``; None for ones. It has no gradient."""

    @classmethod
    def of(cls, flat: Sequence[Any], layout: Layout, mask: Tensor | None = None) -> Inputs:
        end = 5 + layout.control.size()
        control = Net.of(flat[5:end], layout.control)
        z0, decay, shift, gain, scale = flat[:5]
        linear = cls(z0, decay, shift, gain, scale, control, mask=mask)
        if layout.drift is None:
            return linear
        return linear._replace(dt=flat[end], drift=Net.of(flat[end + 1 :], layout.drift))

    @property
    def contracts(self) -> bool:
        """Whether the control has the entries of C beside u."""
        return len(self.control.last) > self.z0.shape[-1]

    def at(self, steps: slice) -> Inputs:
        """The inputs of a block of steps."""
        names = ("decay", "shift", "gain", "scale")
        parts: dict[str, Any] = {name: getattr(self, name)[steps] for name in names}
        parts["control"] = self.control.at(steps)
        if self.drift is not None:
            parts |= {"dt": self.dt[steps], "drift": self.drift.at(steps)}
        if self.mask is not None:
            parts["mask"] = self.mask[steps]
        return self._replace(**parts)

    def flat(self) -> tuple[Any, ...]:
        """All inputs but the mask, in the order of :meth:`of`."""
        more = () if self.drift is None else (self.dt, *self.drift.flat())
        return *self[:5], *self.control.flat(), *more


class Outputs(NamedTuple):
    """The path and what its log ratio is made of; or the gradients with respect to these.

    With contraction the log ratio is made of the outputs of the control, else of sums over the
    state, of shape ``(N, rows)``. A name that ends in ``of_states`` is the same number once more,
    as a function of the states alone: its gradient does not reach the control's parameters.
    """

    states: Any
    out: Any = None
    out_of_states: Any = None
    squares: Any = None
    """The sums of u^2."""
    products: Any = None
    """The sums of u eps."""
    products_of_states: Any = None

    def at(self, steps: slice) -> Outputs:
        """The outputs of a block of steps; of the states, those before each step."""
        return Outputs(*(None if x is None else x[steps] for x in self))
