"""The simulations of simulation-based calibration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from .._buffers import keep_buffers
from .._errors import SolutionError
from ..guides import AutoSDE
from ..predictive import Predictive
from ..training.divergence import Diverged
from ..training.fit import fit
from .calibration_check import CalibrationCheck
from .simulated_data import Simulation, simulate

__all__ = ["CalibrationRun"]

LOG_LIKELIHOOD = "log likelihood"
MAX_ENTRIES = 64
"""The most numbers of a quantity whose ranks are kept, evenly spaced."""
MAX_FAILURES = 10
"""So many failures before the first success end the check."""


@dataclass
class CalibrationRun:
    """The simulations that were made, and how to make one."""

    model: Callable
    guide_factory: Callable
    args: tuple
    kwargs: dict[str, Any]
    draws: int
    statistics: Mapping[str, Callable]
    to_data: Callable | None
    options: dict[str, Any]
    ranks: list[dict[str, Tensor]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    entries: dict[str, Entries] = field(default_factory=dict)
    varies: dict[str, Tensor] = field(default_factory=dict)
    """Which entries are not the same number in every draw, as the fixed start of a path is."""
    last_guide: Any = None

    def simulate(self, i: int) -> bool:
        """Make a simulation, or count its failure.

        :returns: Whether it was not interrupted.
        """
        store = pyro.get_param_store()
        try:
            with store.scope(None if self.is_trained else store.get_state()):
                found = self._rank()
        except (ValueError, ArithmeticError, RuntimeError) as e:
            # What is wrong with every simulation is for the first one to say.
            is_chance = isinstance(e, Diverged | SolutionError | ArithmeticError)
            if isinstance(e, torch.OutOfMemoryError) or not (self.ranks or is_chance):
                raise
            self.failures[i] = str(e)
            if not self.ranks and len(self.failures) >= MAX_FAILURES:
                raise RuntimeError(
                    f"the first {MAX_FAILURES} simulations failed, the last one because {e}"
                ) from e
            return True
        if found is None:
            return False
        self.ranks.append(found)
        return True

    @property
    def is_trained(self) -> bool:
        return self.options.get("steps") != 0

    def _rank(self) -> dict[str, Tensor] | None:
        """The ranks by site and statistic; None if the training was interrupted."""
        made = simulate(self.model, self.args, self.kwargs, self.to_data, self.is_trained)
        guide = self._new_guide()
        if self.is_trained:
            options = copy.deepcopy(self.options)
            data = made.kwargs or made.args
            if fit(self.model, guide, data, progress=False, **options).stopped == "interrupted":
                return None
        self._check_guide(guide, made)
        with keep_buffers(guide):
            posterior = Predictive(
                self.model, guide=guide, num_samples=self.draws, return_sites=list(made.latents)
            )
            samples = posterior(*made.args, **made.kwargs)
        both = {
            name: torch.cat([x.unsqueeze(0), samples[name].to(x)])
            for name, x in made.latents.items()
        }
        ranks = {}
        for name, x in self._quantities(made, both).items():
            if bool(x.isnan().any()):
                raise ArithmeticError(f"{name!r} is NaN in a draw of the posterior or the truth")
            below, ties = (x[1:] < x[0]).sum(0), (x[1:] == x[0]).sum(0)
            ranks[name] = below + (torch.rand(ties.shape) * (ties + 1)).long()
            varies = ties < self.draws
            self.varies[name] = varies | self.varies.get(name, varies)
        return ranks

    def _new_guide(self) -> Any:
        guide = self.guide_factory(self.model)
        if not callable(guide):
            raise TypeError(
                f"guide_factory(model) returned a {type(guide).__name__}, and must return a guide: "
                "pass AutoSDE, or lambda model: guide"
            )
        is_old = isinstance(guide, nn.Module) and guide is self.last_guide
        if is_old and self.is_trained:
            raise TypeError(
                "guide_factory(model) returned the guide that the last simulation has trained: it "
                "must make a new one. To check a guide as it is, say steps=0"
            )
        self.last_guide = guide
        return guide

    @torch.no_grad()
    def _check_guide(self, guide: Any, made: Simulation) -> None:
        """Refuse a guide that does not draw all latents, or that reads other data."""
        drawn = poutine.trace(guide).get_trace(*made.args, **made.kwargs).nodes
        missing = sorted(made.latents.keys() - drawn.keys())
        if missing:
            raise ValueError(f"the guide does not draw the latents {missing}: add them to it")
        if not isinstance(guide, AutoSDE) or guide.encoder is None:
            return
        old, new = (
            guide._read(*given).values.nan_to_num()
            for given in ((self.args, self.kwargs), (made.args, made.kwargs))
        )
        if old.shape == new.shape and torch.equal(old, new):
            raise ValueError(
                "the encoder of the guide reads the same observations for other data: observations "
                "must read them from the arguments that simulated data replace. If several "
                "arguments hold the data, say what they are: to_data=lambda seen: (times, ...)"
            )

    @torch.no_grad()
    def _quantities(self, made: Simulation, both: dict[str, Tensor]) -> dict[str, Tensor]:
        """The numbers to rank, of shape ``(1 + draws, entries)``, the truth first."""
        found = dict(both)
        one_by_one = [{name: x[i] for name, x in both.items()} for i in range(1 + self.draws)]
        for name, function in self.statistics.items():
            if name in found or name == LOG_LIKELIHOOD:
                raise ValueError(f"statistics has {name!r}, which is ranked already: rename it")
            values = [torch.as_tensor(function(latents)) for latents in one_by_one]
            found[name] = torch.stack(values)
        log_likelihood = [made.log_likelihood(self.model, latents) for latents in one_by_one]
        found[LOG_LIKELIHOOD] = torch.tensor(log_likelihood, dtype=torch.float64)
        for name, x in found.items():
            entries = self.entries.setdefault(name, Entries.of(x[0], made.time_dims.get(name)))
            if entries.shape != x.shape[1:]:
                raise ValueError(
                    f"{name!r} has the shape {tuple(x.shape[1:])}, and had {tuple(entries.shape)} "
                    "in another simulation: its ranks cannot be compared"
                )
            found[name] = x.flatten(1)[:, entries.positions] if x.dim() > 1 else x.unsqueeze(1)
        return found

    def result(self, simulations: int) -> CalibrationCheck:
        if not self.ranks:
            raise RuntimeError("no simulation was completed: let the first one end")
        ranks, entries = {}, {}
        for name, kept in self.varies.items():
            if bool(kept.any()):
                ranks[name] = torch.stack([found[name] for found in self.ranks])[:, kept]
                entries[name] = self.entries[name].indices(kept)
        return CalibrationCheck(ranks, entries, self.draws, simulations, self.failures)


@dataclass
class Entries:
    """The numbers of a quantity whose ranks are kept."""

    shape: torch.Size
    positions: Tensor
    """Where they are in the flat quantity."""

    @classmethod
    def of(cls, x: Tensor, time_dim: int | None) -> Entries:
        """All numbers of ``x``; of a path those at its start, middle and end."""
        positions = torch.arange(x.numel())
        if time_dim is not None:
            last = x.shape[time_dim] - 1
            times = torch.unravel_index(positions, x.shape)[time_dim]
            positions = positions[torch.isin(times, torch.tensor([0, last // 2, last]))]
        if len(positions) > MAX_ENTRIES:
            positions = positions[torch.linspace(0, len(positions) - 1, MAX_ENTRIES).long()]
        return cls(x.shape, positions)

    def indices(self, kept: Tensor) -> tuple[tuple[int, ...], ...]:
        """The index of each number that is kept."""
        if not self.shape:
            return ((),)
        index = torch.unravel_index(self.positions[kept], self.shape)
        return tuple(tuple(entry) for entry in torch.stack(index, 1).tolist())
