"""An error tolerance in the place of a grid: for prediction, on a Brownian path that is refined."""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

__all__ = ["Solve", "current_tolerance", "tolerance"]


@dataclass
class Solve:
    """What one solution cost.

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
    """``"path"``, drawn by itself, or ``"block"``, with the hidden units of a block."""
    evaluations: int = 0
    """Of the field, for a block; of drift or control, for a path alone."""
    steps: int = 0
    """Those that were taken."""
    rejected: int = 0
    """Those whose error was too large."""
    shortest: float = float("inf")
    """The shortest step."""
    last: float = field(default=float("inf"), repr=False)
    """The step taken last."""


class tolerance:
    """Inside, paths and blocks are solved with error control in the place of their grid.

    Each path that is drawn is a Brownian path which can be refined without end, and the solution
    along it; a block (:class:`~pyro_sde.nn.SDEBlock`) solves its weights and hidden units
    together. A seed fixes the Brownian path whatever the tolerance: tightening it converges path
    by path. The error of a step, by which the solution in one step and in two halves differ, is
    kept below ``atol + rtol * |state|`` times the root of the step's share of the whole time, in
    the root mean square over the state.

    A posterior with contraction shrinks the noise of the steps of its grid. Here its control and
    contraction, evaluated at the times of the grid, move the noise of the interval that follows,
    and in between it is a Brownian bridge: given its states at the observations, which are on the
    grid, the exact posterior moves as the prior does.

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
    :param max_evaluations: The bound on the evaluations of one solution, which is an error when
        it is reached.
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
        self._tokens: list[Token] = []

    @property
    def evaluations(self) -> int:
        """In all solutions so far."""
        return sum(s.evaluations for s in self.solves)

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *args: Any) -> None:
        _current.reset(self._tokens.pop())
        if not self._tokens:
            self._refined.clear()

    def remember(self, refined: Any) -> None:
        self._refined.append(refined)

    def find(self, value: Tensor) -> Any:
        """How the path ``value`` was drawn; it is known by its states."""
        for refined in reversed(self._refined):
            if refined.value is value or (
                refined.value.numel() == value.numel()
                and torch.equal(refined.value.flatten(), value.flatten())
            ):
                return refined
        return None

    def __repr__(self) -> str:
        return f"tolerance(rtol={self.rtol:g}, atol={self.atol:g})"


_current: ContextVar[tolerance | None] = ContextVar("pyro_sde_tolerance", default=None)


def current_tolerance() -> tolerance | None:
    return _current.get()
