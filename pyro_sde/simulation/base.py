"""What a simulator knows of a process and of a control, what it returns, and which one is used."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._checks import broadcasts_to
from .._ops.common import inside_func
from .checks import check_draw
from .network import GridNetwork
from .ratio import LogRatio, Shift
from .step import compose, contract, displace
from .tolerance import Solve, current_tolerance, tolerance

__all__ = [
    "CalledControl",
    "Draw",
    "GridControl",
    "GridNetwork",
    "Law",
    "LinearSteps",
    "Simulator",
    "Solve",
    "Task",
    "choose",
    "current_tolerance",
    "grid_control",
    "register",
    "simulate",
    "take_step",
    "tolerance",
]


class LinearSteps(NamedTuple):
    r"""All steps of a process that is linear but for a network in its drift, time first:

    .. math:: z' = \mathrm{shift} + \mathrm{decay}\,z + dt\,\mathrm{drift}(z)
        + \mathrm{scale}\,\varepsilon
    """

    decay: Tensor
    shift: Tensor
    scale: Tensor
    drift: GridNetwork | None = None
    dt: Tensor | None = None

    @property
    def known(self) -> tuple[Any, ...]:
        drift = () if self.drift is None else (self.dt, *self.drift.known)
        return self.decay, self.shift, self.scale, *drift

    def __call__(self, z: Tensor, *rows: Any) -> tuple[Tensor, Tensor]:
        """Mean and scale of a step, from the state and one row of each tensor in ``known``."""
        decay, shift, scale, *more = rows
        mean = torch.addcmul(shift, decay, z)
        if self.drift is None:
            return mean, scale
        return torch.addcmul(mean, more[0], self.drift(z, *more[1:])), scale  # type: ignore

    def fits(self, z: Tensor) -> bool:
        """Whether the steps are for states like ``z``."""
        shapes = (x.shape[1:] for x in self[:3])
        return (
            self.scale.dtype == z.dtype
            and all(broadcasts_to(shape, z.shape) for shape in shapes)
            and (self.drift is None or self.drift.fits(z))
        )


class Law(Protocol):
    """What a simulator may know of a process. A path distribution is one."""

    times: Tensor

    @property
    def batch_shape(self) -> torch.Size: ...

    def transition(self, t: Tensor, dt: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale of the state after a step: the definition of the process."""

    def linear_steps(self) -> LinearSteps | None:
        """The same for all steps at once, where the process is linear."""

    def coefficients(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Drift and diffusion of the SDE that the transition discretises."""


class GridControl(Protocol):
    """A control on a grid, all that does not depend on the state computed ahead."""

    @property
    def known(self) -> tuple[Tensor, ...]:
        """What is computed ahead, time first."""

    def __call__(self, z: Tensor, *rows: Tensor) -> Any:
        """u, or (u, contraction), from the state and one row of each tensor in ``known``."""


@dataclass
class CalledControl:
    """A callable of ``(t, z, *context)`` on a grid."""

    control: Callable[..., Any]
    known: tuple[Tensor, ...]
    """The times of the steps, and the context at these times."""

    def __call__(self, z: Tensor, *rows: Tensor) -> Any:
        t, *context = rows
        return self.control(t, z, *context)


def grid_control(control: Any, t: Tensor, *context: Tensor) -> GridControl:
    """``control`` on the grid ``t``: what its ``on_grid`` returns, or the control itself."""
    prepare = getattr(control, "on_grid", None)
    prepared = None if prepare is None else prepare(t, *context)
    if prepared is None:
        return CalledControl(control, (t, *context))
    if not hasattr(prepared, "known"):
        raise TypeError(
            f"on_grid of {type(control).__name__} returned a {type(prepared).__name__}; it must "
            "return None or a GridControl: an object with known, a tuple of tensors with time "
            "first, that is called as grid_control(z, *rows) with one row of each"
        )
    return prepared


class Step(NamedTuple):
    """A step and what it was made of."""

    before: Tensor
    after: Tensor
    mean: Tensor
    """Mean and scale of the law."""
    scale: Tensor
    w: Tensor | None = None
    contraction: Tensor | None = None

    def transition(self) -> tuple[Tensor, Tensor]:
        """Mean and scale of the step as it was taken."""
        if self.w is None:
            return self.mean, self.scale
        mean = displace(self.mean, self.scale, self.w)
        return mean, compose(self.scale, self.contraction, mean)


def take_step(
    z: Tensor, mean: Tensor, scale: Tensor, eps: Tensor, push: Push | None = None
) -> Step:
    """The one formula of a step: mean + S (sqrt(dt) u + C eps).

    :param z: The state before the step.
    :param push: sqrt(dt), u and the contraction; None for a path that is not pushed.
    """
    if push is None:
        return Step(z, displace(mean, scale, eps), mean, scale)
    root, u, contraction = push
    w = root * u
    after = displace(mean, scale, contract(w, contraction, eps))
    return Step(z, after, mean, scale, w, contraction)


Push = tuple[Tensor, Tensor, Tensor | None]


@dataclass
class Task:
    """A path to be drawn."""

    target: Law
    """The process to draw from: ``law``, pushed by ``control`` if there is one."""
    law: Law
    z0: Tensor
    t: Tensor
    """Start and length of the steps, time first, to broadcast against ``z0``."""
    dt: Tensor
    control: GridControl | None = None
    split: Callable[[Any, Tensor, Tensor], Shift] | None = None
    """u and the contraction from what the control returns, its time and its state."""
    contraction: Any = None
    """As :class:`~pyro_sde.distributions.ControlledPath` has it."""
    memory: str = "graph"
    compile: bool = False
    validate: bool = False

    @property
    def steps(self) -> int:
        return len(self.t)

    def draw_noise(self) -> Tensor:
        """Standard normal noise for all steps, time first."""
        z0 = self.z0
        return torch.randn((self.steps, *z0.shape), dtype=z0.dtype, device=z0.device)

    @cached_property
    def root(self) -> Tensor:
        return self.dt.sqrt()

    @cached_property
    def linear(self) -> LinearSteps | None:
        """The linear steps of the law, if it has them, diagonal ones, and they fit the state."""
        found = self.law.linear_steps()
        if found is None or found.scale.dim() > len(self.law.batch_shape) + 2:
            return None
        return found if found.fits(self.z0) else None

    @cached_property
    def network(self) -> GridNetwork | None:
        """The control as layers, if it has that form and a fused or compiled path may take it."""
        control, z0 = self.control, self.z0
        fits = (
            isinstance(control, GridNetwork)
            and self.contraction is (True if control.contraction else None)
            and control.fits(z0)
            and not torch.is_autocast_enabled(z0.device.type)
            and not inside_func()
        )
        return control if fits else None  # type: ignore[return-value]

    @cached_property
    def transition(self) -> Any:
        """The transition of the law on the grid: what is called as a :class:`GridControl` is, and
        returns mean and scale."""
        law = self.law
        called = CalledControl(lambda t, z, dt: law.transition(t, dt, z), (self.t, self.dt))
        return self.linear or called

    @cached_property
    def known(self) -> tuple[Tensor, ...]:
        """All that is computed ahead of the steps, time first: what :meth:`step` has rows of."""
        if self.control is None:
            return self.transition.known
        return (*self.transition.known, self.root, self.t, *self.control.known)

    @cached_property
    def step(self) -> Callable[..., Step]:
        """A step as a function ``(z, eps, *rows)``, with one row of each tensor in ``known``."""
        evaluate, control, split = self.transition, self.control, self.split
        n = len(evaluate.known)
        if control is None or split is None:

            def plain_step(z: Tensor, eps: Tensor, *rows: Tensor) -> Step:
                mean, scale = evaluate(z, *rows)
                return take_step(z, mean, scale, eps)

            return plain_step

        def step(z: Tensor, eps: Tensor, *rows: Tensor) -> Step:
            mean, scale = evaluate(z, *rows[:n])
            root, t, *ahead = rows[n:]
            u, contraction = split(control(z, *ahead), t, z)
            return take_step(z, mean, scale, eps, (root, u, contraction))

        return step

    def control_at(self, i: int, z: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """u and the contraction at step number ``i``, where there are such."""
        if self.control is None or self.split is None:
            return None, None
        return self.split(self.control(z, *(x[i] for x in self.control.known)), self.t[i], z)


@dataclass
class Draw:
    """A path and how it was made."""

    value: Tensor
    """The path, of shape ``(*batch, T, D)``."""
    noise: Tensor | None
    """The standard normal noise of the steps, time first; None if it is not on the grid."""
    simulator: Simulator
    ratio: LogRatio | None = None
    """Against the law that the control pushes; None without a control."""
    steps: Sequence[Step] | None = None
    """The steps, if they were kept, each attached to the graph of its own state alone."""
    scale: Tensor | None = None
    """The scale of every step, time first, detached; None if it was checked."""
    has_grad: bool = True


class Simulator(ABC):
    """A way to draw a path. The path, its log ratio and their gradients are those of
    :class:`~pyro_sde.simulation.loop.Loop`, whatever the way."""

    @abstractmethod
    def __call__(self, task: Task, noise: Tensor | None) -> Draw:
        """Draw the path.

        :param noise: The standard normal noise of the steps, time first; None is to be drawn.
        """


_simulators: dict[str, Simulator] = {}


def register(**simulators: Simulator) -> None:
    """Give the simulators the names that :func:`choose` knows."""
    _simulators.update(simulators)


def choose(task: Task) -> str:
    """The name of the simulator for a path: the one place where that is decided."""
    if current_tolerance() is not None:
        return "adaptive"
    if task.memory == "recompute":
        return "checkpointed"
    if task.compile and not isinstance(task.control, GridNetwork):
        warnings.warn(
            "compile=True has no effect on a path whose control is not an MLPControl",
            RuntimeWarning,
            stacklevel=2,
        )
    if task.network is None:
        return "loop"
    if task.compile:
        return "compiled"
    return "loop" if task.linear is None else "fused"


def simulate(task: Task, noise: Tensor | None = None) -> Draw:
    """Draw a path.

    :param noise: The standard normal noise of the steps, time first; by default it is drawn.
    """
    try:
        draw = _simulators[choose(task)](task, noise)
    except RuntimeError as e:
        if "dtype" not in str(e):
            raise
        raise ValueError(
            f"a step of the path fails on states of {task.z0.dtype}, times being "
            f"{task.dt.dtype}: {e}. Use one dtype: times.to(...) as the networks are, or "
            "network.double()"
        ) from e
    draw.has_grad = torch.is_grad_enabled()
    if task.validate:
        u_at = lambda i, z: task.control_at(i, z)[0]  # noqa: E731
        check_draw(task.target, draw.value, draw.scale, u_at)
    return draw
