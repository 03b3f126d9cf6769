"""Adaptive steps with an error tolerance, for prediction, on a Brownian path that is refined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._scopes import Scope

__all__ = ["Solve", "current_tolerance", "tolerance"]


@dataclass
class Solve:
    """The cost of one solution.

    Example::

        >>> import torch
        >>> from pyro_sde import tolerance
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> path = OrnsteinUhlenbeck(1.0, 0.0, 0.5, torch.linspace(0.0, 1.0, 5), torch.ones(1))
        >>> with tolerance(rtol=1e-2) as solved:
        ...     z = path.sample()
        >>> (cost,) = solved.solves
        >>> cost.kind, cost.evaluations >= cost.steps >= 4
        ('path', True)
    """

    kind: str
    """``"path"`` for a path alone, or ``"block"`` for weights and hidden units of a block."""
    evaluations: int = 0
    """Evaluations of the field of a block, or of the drift or control of a path."""
    steps: int = 0
    """The number of accepted steps."""
    rejected: int = 0
    """The number of steps whose error was too large."""
    shortest: float = float("inf")
    """The length of the shortest step."""
    last: float = field(default=float("inf"), repr=False)
    """The length of the last step."""


class tolerance:
    """A context in which paths and blocks are solved with adaptive steps instead of their grid.

    Each draw of a path is driven by a Brownian path that can be refined without limit. A block
    (:class:`~pyro_sde.nn.SDEBlock`) solves its weights and hidden units together. The seed fixes
    the Brownian path for all tolerances, so each path converges as the tolerance decreases. The
    error of a step is the difference between one step and two half steps. Its root mean square
    over the state is kept below ``atol + rtol * |state|``, times the square root of the step's
    share of the whole time.

    For a posterior with contraction, control and contraction are evaluated at the times of the
    grid, and change the noise of the interval that follows. Inside of the interval the noise is a
    Brownian bridge: given the states at the observations, which are on the grid, the exact
    posterior moves as the prior does.

    The context holds in the thread that enters it. Threads that it starts have their own.

    Example::

        >>> import pyro
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> path = OrnsteinUhlenbeck(1.0, 0.0, 0.5, torch.linspace(0.0, 1.0, 5), torch.ones(1))
        >>> ends = []
        >>> for rtol in (1e-2, 1e-3):
        ...     pyro.set_rng_seed(0)
        ...     with tolerance(rtol=rtol) as solved:
        ...         ends.append(path.sample()[-1, 0])
        >>> bool((ends[0] - ends[1]).abs() < 1e-2), solved.evaluations > 4
        (True, True)

    :param rtol: Relative tolerance.
    :param atol: Absolute tolerance; by default a tenth of ``rtol``.
    :param max_evaluations: The most evaluations of one solution; more are an error.
    """

    def __init__(
        self, rtol: float = 1e-3, atol: float | None = None, *, max_evaluations: int = 20_000
    ) -> None:
        atol = 0.1 * rtol if atol is None else atol
        for name, value in (("rtol", rtol), ("atol", atol)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0: found {value!r}")
        if rtol == atol == 0:
            raise ValueError("rtol and atol cannot both be 0: no solver has an error of zero")
        if max_evaluations < 1:
            raise ValueError(f"max_evaluations must be at least 1: found {max_evaluations!r}")
        self.rtol, self.atol, self.max_evaluations = rtol, atol, max_evaluations
        self.solves: list[Solve] = []
        self._refined: list[Any] = []
        self._entries: list[None] = []

    @property
    def evaluations(self) -> int:
        """The evaluations of all solutions so far."""
        return sum(s.evaluations for s in self.solves)

    def __enter__(self) -> Self:
        self._entries.append(None)
        _tolerances.enter(self)
        return self

    def __exit__(self, *args: Any) -> None:
        _tolerances.leave(self)
        self._entries.pop()
        if not self._entries:
            self._refined.clear()

    def remember(self, refined: Any) -> None:
        """Keep how a path was drawn, for :meth:`find`.

        :param refined: The path with its Brownian path.
        """
        self._refined.append(refined)

    def find(self, value: Tensor) -> Any:
        """How a path was drawn inside of this context.

        :param value: The states of the path.
        :returns: The path with its Brownian path; None if it was not drawn here.
        """
        for refined in reversed(self._refined):
            if refined.value is value or (
                refined.value.numel() == value.numel()
                and torch.equal(refined.value.flatten(), value.flatten())
            ):
                return refined
        return None

    def __repr__(self) -> str:
        return f"tolerance(rtol={self.rtol:g}, atol={self.atol:g})"


_tolerances: Scope[tolerance] = Scope("pyro_sde_tolerance")


def current_tolerance() -> tolerance | None:
    return _tolerances.current
