"""What :mod:`~pyro_sde.distributions.at_once` is a function of, and how a step uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Inputs", "Layout", "Net", "add_product_", "factors", "halves"]


class Net(NamedTuple):
    """A network of the state. The biases of its hidden layers are on the grid."""

    last: Any
    last_bias: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Net:
        end = 2 + (len(flat) - 2) // 2
        return cls(flat[0], flat[1], tuple(flat[2:end]), tuple(flat[end:]))

    def flat(self) -> tuple[Any, ...]:
        return self.last, self.last_bias, *self.weights, *self.biases

    def at(self, steps: slice) -> Net:
        return self._replace(biases=tuple(b[steps] for b in self.biases))

    def width(self) -> int:
        """Of its widest layer."""
        return max(len(w) for w in self.weights)


class Layout(NamedTuple):
    """What is not a tensor: how deep the control is, and the units of control and drift."""

    depth: int
    units: str
    drift_units: str = ""


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
        end = 5 + 2 + 2 * layout.depth
        z0, decay, shift, gain, scale = flat[:5]
        linear = cls(z0, decay, shift, gain, scale, Net.of(flat[5:end]))
        if not layout.drift_units:
            return linear
        return linear._replace(dt=flat[end], drift=Net.of(flat[end + 1 :]))

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
