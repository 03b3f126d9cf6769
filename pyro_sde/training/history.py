"""How a training went."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import ImportanceCheck
from .matching import Matching

__all__ = ["History"]

_COLUMNS = ("step", "elbo", "kl", "log_likelihood", "lr")


@dataclass
class History:
    """What :func:`~pyro_sde.fit` returns: one entry for every step, in plain lists.

    ``elbo`` is ``log_likelihood - kl``, also while the loss counts a smaller weight of the KL.

    Example::

        >>> history = History()
        >>> history.add(1, elbo=-3.0, kl={"z": 1.0}, log_likelihood=-2.0, lr=0.01)
        >>> history
        History(1 step, ELBO -3)
    """

    step: list[int] = field(default_factory=list)
    """From 1."""
    elbo: list[float] = field(default_factory=list)
    """Of the step's data, an estimate."""
    kl: list[float] = field(default_factory=list)
    """Of all sites. NaN, like the log likelihood, with an ELBO that does not tell its parts."""
    log_likelihood: list[float] = field(default_factory=list)
    """Of all observed sites."""
    lr: list[float] = field(default_factory=list)
    """The learning rate."""
    kl_by_site: dict[str, list[float]] = field(default_factory=dict)
    """The same by latent site."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Step and ELBO of each validation."""
    stopped: str = ""
    """Why training ended: ``"steps"``, ``"patience"`` or ``"interrupted"``."""
    importance: ImportanceCheck | None = field(default=None, compare=False)
    """How right the posterior is; None without ``progress``, or where that is not known."""
    matching: Matching | None = field(default=None, compare=False)
    """How the latents that are no paths were matched; None, if that was not tried."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and ELBO of the best validation."""
        return max(self.validation, key=lambda v: v[1], default=None)

    def add(
        self, step: int, elbo: float, kl: dict[str, float] | None, log_likelihood: float, lr: float
    ) -> None:
        """One more step.

        :param kl: By site, or None if it is not known.
        """
        for site in kl or ():
            self.kl_by_site.setdefault(site, [math.nan] * len(self.step))
        for site, values in self.kl_by_site.items():
            values.append((kl or {}).get(site, math.nan))
        self.step.append(step)
        self.elbo.append(elbo)
        self.kl.append(math.nan if kl is None else sum(kl.values(), 0.0))
        self.log_likelihood.append(log_likelihood)
        self.lr.append(lr)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        columns = {name: _pack(getattr(self, name)) for name in _COLUMNS}
        sites = {site: _pack(values) for site, values in self.kl_by_site.items()}
        return {**columns, "kl_by_site": sites, "validation": self.validation}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        columns = {name: state[name].tolist() for name in _COLUMNS}
        columns["step"] = [int(k) for k in columns["step"]]
        sites = {site: values.tolist() for site, values in state["kl_by_site"].items()}
        validation = [(int(k), float(v)) for k, v in state["validation"]]
        return cls(**columns, kl_by_site=sites, validation=validation)

    def __repr__(self) -> str:
        n = len(self.step)
        text = f"{n} step{'s' * (n != 1)}"
        if n:
            last = self.elbo[-50:]
            text += f", ELBO {sum(last) / len(last):.5g}"
        if self.best is not None:
            text += f", best validation {self.best[1]:.5g} at step {self.best[0]}"
        return f"History({text})"


def _pack(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
