"""The history of a training: losses, validations, and the checks at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..diagnostics.importance_check import ImportanceCheck
from .matching import Matching

__all__ = ["History"]

_COLUMNS = ("step", "elbo", "kl", "log_likelihood", "lr")


@dataclass
class History:
    """The result of :func:`~pyro_sde.fit`: plain lists with one entry for every step.

    ``elbo`` is ``log_likelihood - kl``, also while annealing gives the KL a smaller weight.

    Example::

        >>> history = History()
        >>> history.add(1, elbo=-3.0, kl={"z": 1.0}, log_likelihood=-2.0, lr=0.01)
        >>> history
        History(1 step, ELBO -3)
    """

    step: list[int] = field(default_factory=list)
    """The number of the step, from 1."""
    elbo: list[float] = field(default_factory=list)
    """The estimate of the ELBO on the data of the step."""
    kl: list[float] = field(default_factory=list)
    """The KL of all latent sites. KL and log likelihood are NaN with an ELBO that does not record
    its parts."""
    log_likelihood: list[float] = field(default_factory=list)
    """The log likelihood of all observed sites."""
    lr: list[float] = field(default_factory=list)
    """The learning rate."""
    kl_by_site: dict[str, list[float]] = field(default_factory=dict)
    """The KL of each latent site."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """The step and ELBO of each validation."""
    stopped: str = ""
    """Why training ended: ``"steps"``, ``"patience"`` or ``"interrupted"``."""
    rejected: int = 0
    """How many steps were rejected because their loss or gradient was not finite. Their entries are
    NaN."""
    importance: ImportanceCheck | None = field(default=None, compare=False)
    """The importance check; None with ``progress=False``, on other ranks than 0, or where the check
    could not be made."""
    matching: Matching | None = field(default=None, compare=False)
    """How the latents that are not paths were matched; None, if that was not attempted."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and ELBO of the best validation; None without validations."""
        return max(self.validation, key=lambda v: v[1], default=None)

    def add(
        self, step: int, elbo: float, kl: dict[str, float] | None, log_likelihood: float, lr: float
    ) -> None:
        """Append the entries of one step.

        :param step: The number of the step.
        :param elbo: Its ELBO.
        :param kl: Its KL by site, or None if that is not known.
        :param log_likelihood: Its log likelihood.
        :param lr: Its learning rate.
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
        """The history in the form in which a checkpoint holds it.

        :returns: A dict of tensors and lists.
        """
        columns = {name: _pack(getattr(self, name)) for name in _COLUMNS}
        sites = {site: _pack(values) for site, values in self.kl_by_site.items()}
        return {
            **columns,
            "kl_by_site": sites,
            "validation": self.validation,
            "rejected": self.rejected,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """The history that a checkpoint holds.

        :param state: What :meth:`state` returned.
        :returns: The history, without its importance check and matching.
        """
        columns = {name: state[name].tolist() for name in _COLUMNS}
        columns["step"] = [int(k) for k in columns["step"]]
        sites = {site: values.tolist() for site, values in state["kl_by_site"].items()}
        validation = [(int(k), float(v)) for k, v in state["validation"]]
        rejected = int(state["rejected"])
        return cls(**columns, kl_by_site=sites, validation=validation, rejected=rejected)

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
