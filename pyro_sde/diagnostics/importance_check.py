"""What an importance check found, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .table import table

__all__ = ["Estimate", "ImportanceCheck", "SiteCheck"]

GOOD, USABLE = 0.5, 0.7
"""k-hat below which weights have a finite variance, and below which they can be relied on."""
SHIFT, RATIO = 0.25, 1.25
"""By how many standard deviations a mean, and by what factor a standard deviation, may be off."""
ERRORS = 4.0
"""In how many standard errors a difference is believed."""
MIN_EFFECTIVE = 64.0
"""Effective draws of the prior, with which half of the mass is four standard errors."""


class Estimate(NamedTuple):
    """A mean over draws and its standard error.

    Example::

        >>> print(Estimate(-12.3141, 0.0213))
        -12.31 ± 0.021
    """

    value: float
    """The estimate."""
    error: float
    """Its standard error."""

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2g}"


@dataclass(frozen=True)
class SiteCheck:
    """How much a latent site moves when its draws are weighted, at its worst entries.

    Example::

        >>> SiteCheck("z", shift=0.1, ratio=1.6, shift_at=(3, 0), ratio_at=(9, 0)).is_off(1000.0)
        True
    """

    name: str
    """The site."""
    shift: float
    """The largest shift of a mean, in standard deviations of the guide."""
    ratio: float
    """The standard deviation of the weighted draws over that of the guide, where that is furthest
    from 1. Above 1 the guide is too narrow."""
    shift_at: tuple[int, ...] = ()
    """The entry of the site with that shift."""
    ratio_at: tuple[int, ...] = ()
    """The entry of the site with that ratio."""

    def is_off(self, effective: float) -> bool:
        """Whether the site moves by more than a quarter of a standard deviation, or its standard
        deviation by more than a quarter, beyond the noise of so many effective draws."""
        noise = ERRORS / max(effective, 1.0) ** 0.5
        factor = max(self.ratio, 1 / max(self.ratio, 1e-300))
        return abs(self.shift) > max(SHIFT, noise) or factor > max(RATIO, 1 + noise)


@dataclass(frozen=True)
class ImportanceCheck:
    """What :func:`importance` found. Print it, or read its fields.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde.diagnostics import importance
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))
        >>> def narrow():  # the posterior is Normal(1, 0.71)
        ...     pyro.sample("x", dist.Normal(1.0, 0.35))
        >>> pyro.set_rng_seed(0)
        >>> found = importance(model, narrow)
        >>> found.verdict, found.sites[0].name, found.sites[0].ratio > 1.25
        ('the posterior is not to be trusted, least of all at site x', 'x', True)
    """

    log_evidence: Estimate
    """The logarithm of the mean weight. Like a bound, it is rather too low than too high. Where
    k-hat is above a half, the error counts the tail that was not drawn; from 1 on it is
    infinite."""
    elbo: Estimate
    """The mean log weight."""
    bound: Estimate
    """The importance-weighted bound with :attr:`bound_samples` draws, between both."""
    bound_samples: int
    """How many draws a term of :attr:`bound` has: the square root of all."""
    k_hat: float
    """The shape of the tail of the weights; in a plate, that of the worst element."""
    effective: float
    """The effective number of draws; in a plate, that of the worst element."""
    num_samples: int
    """How many draws there were."""
    sites: tuple[SiteCheck, ...]
    """How much each latent site moves under the weights, the worst first."""
    missed: Estimate | None
    """How far the log evidence by draws of the prior is above :attr:`log_evidence`, at the element
    of the plate where that is most significant; None, if so few of them come near the data (of one
    element) that they cannot tell."""
    misses: bool
    """Whether that is significant: there are parts of the posterior where the guide does not go."""
    plate: str | None
    """The plate that all sites are in: its elements are weighted apart. None, if there is none."""
    plate_dims: dict[str, int]
    """The dimension of that plate in each of :attr:`draws`."""
    draws: dict[str, Tensor]
    """The draws of the latents, of shape ``(num_samples, ...)``."""
    element_log_weights: Tensor
    """Log weights of shape ``(num_samples, elements of the plate)``."""

    @property
    def log_weights(self) -> Tensor:
        """log p(x, z) - log q(z) of every draw, of shape ``(num_samples,)``."""
        return self.element_log_weights.sum(1)

    @property
    def worst(self) -> SiteCheck | None:
        """The site that is off most, if one is."""
        return next((site for site in self.sites if site.is_off(self.effective)), None)

    @property
    def is_right(self) -> bool:
        """Whether nothing was found that is wrong with the guide."""
        # Weights that are nearly equal do no harm, though their tail is somewhat heavy.
        limit = USABLE if self.effective > 0.9 * self.num_samples else GOOD
        return self.k_hat < limit and self.worst is None and not self.misses

    @property
    def verdict(self) -> str:
        """One clause that says how right the posterior is."""
        if self.misses and self.missed is not None:
            return (
                "the posterior misses a part: by draws of the prior the log evidence is "
                f"{self.missed} higher"
            )
        if self.is_right:
            if self.missed is None:
                return "the posterior is right where it draws (other modes were not looked for)"
            return "the posterior is right"
        where = "" if self.worst is None else self.worst.name
        if not self.k_hat < USABLE:
            return "the posterior is not to be trusted" + (
                f", least of all at site {where}" if where else ""
            )
        return "the posterior is usable with reweight()" + (f", site {where} is off" * bool(where))

    @property
    def line(self) -> str:
        """The check in one line."""
        gap = self.log_evidence.value - self.elbo.value
        of = "" if self.plate is None else f" (the worst in {self.plate})"
        # Beyond that the largest weights have not been seen yet, and the error is not known either.
        evidence = str(self.log_evidence)
        if self.k_hat > USABLE:
            evidence = f"of at least about {self.log_evidence.value:.2f}"
        return (
            f"importance check: log evidence {evidence}, ELBO {gap:.2f} below, k-hat "
            f"{self.k_hat:.2f}, effective samples {self.effective:.0f} of {self.num_samples}{of}: "
            f"{self.verdict}"
        )

    def __str__(self) -> str:
        rows = [
            [s.name, f"{s.shift:+.2f}", str(s.shift_at), f"{s.ratio:.2f}", str(s.ratio_at)]
            for s in self.sites
        ]
        head = ["site", "shift of mean / sd", "entry", "ratio of sd", "entry"]
        return table(self.line, head, rows)

    __repr__ = __str__
