"""The result of an importance check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .table import table

__all__ = ["Estimate", "ImportanceCheck", "SiteCheck"]

GOOD, USABLE = 0.5, 0.7
"""Below the first k-hat the weights have a finite variance; below the second they are reliable."""
SHIFT, RATIO = 0.25, 1.25
"""The tolerated shift of a mean, in standard deviations, and factor of a standard deviation."""
ERRORS = 4.0
"""The number of standard errors from which on a difference is significant."""
MIN_EFFECTIVE = 64.0
"""The fewest effective draws of the prior: with these, half of the mass is four standard errors."""


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
    """How much weighting moves the draws of a latent site, at the entries where it moves most.

    Example::

        >>> SiteCheck("z", shift=0.1, ratio=1.6, shift_at=(3, 0), ratio_at=(9, 0)).is_off(1000.0)
        True
    """

    name: str
    """The name of the site."""
    shift: float
    """The largest shift of a mean, in standard deviations of the guide."""
    ratio: float
    """The standard deviation of the weighted draws divided by that of the guide, at the entry where
    this ratio is furthest from 1. Above 1 the guide is too narrow."""
    shift_at: tuple[int, ...] = ()
    """The index of the entry with the largest shift."""
    ratio_at: tuple[int, ...] = ()
    """The index of the entry with that ratio."""

    def is_off(self, effective: float) -> bool:
        """Whether the guide is wrong about this site.

        It is where weighting shifts a mean by more than a quarter of a standard deviation, or
        changes a standard deviation by more than a quarter, and the change exceeds the Monte Carlo
        noise.

        :param effective: The effective number of draws, which determines that noise.
        :returns: True if the guide is wrong about the site.
        """
        noise = ERRORS / max(effective, 1.0) ** 0.5
        factor = max(self.ratio, 1 / max(self.ratio, 1e-300))
        return abs(self.shift) > max(SHIFT, noise) or factor > max(RATIO, 1 + noise)


@dataclass(frozen=True)
class ImportanceCheck:
    """The result of :func:`importance`. Print it, or read its fields.

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
    """The logarithm of the mean weight. Like a bound, it tends to be too low rather than too high.
    Where k-hat is above 0.5, the error includes the tail of weights that were not drawn; where
    k-hat is 1 or more, the error is infinite."""
    elbo: Estimate
    """The mean log weight."""
    bound: Estimate
    """The importance-weighted bound with :attr:`bound_samples` draws, which lies between
    :attr:`elbo` and :attr:`log_evidence`."""
    bound_samples: int
    """The number of draws in each term of :attr:`bound`: the square root of ``num_samples``."""
    k_hat: float
    """The shape of the tail of the weights; in a plate, that of the worst element."""
    effective: float
    """The effective number of draws; in a plate, that of the worst element."""
    num_samples: int
    """The number of draws of the guide."""
    sites: tuple[SiteCheck, ...]
    """How much weighting moves each latent site, the worst site first."""
    missed: Estimate | None
    """By how much draws of the prior estimate a higher log evidence than :attr:`log_evidence`, at
    the element of the plate where the difference is most significant. None, if too few draws of
    the prior come near the data (of one element) to estimate it."""
    misses: bool
    """Whether :attr:`missed` is significant: the guide does not visit a part of the posterior."""
    plate: str | None
    """The plate that contains all sites, whose elements are weighted separately. None, if there is
    no such plate."""
    plate_dims: dict[str, int]
    """The dimension of the plate in each tensor of :attr:`draws`."""
    draws: dict[str, Tensor]
    """The draws of the latents by site, each of shape ``(num_samples, ...)``."""
    element_log_weights: Tensor
    """The log weights, of shape ``(num_samples, elements of the plate)``."""

    @property
    def log_weights(self) -> Tensor:
        """``log p(x, z) - log q(z)`` for every draw, of shape ``(num_samples,)``."""
        return self.element_log_weights.sum(1)

    @property
    def worst(self) -> SiteCheck | None:
        """The site about which the guide is most wrong; None, if it is right about all."""
        return next((site for site in self.sites if site.is_off(self.effective)), None)

    @property
    def is_right(self) -> bool:
        """Whether the check found nothing wrong with the guide."""
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
        # Above USABLE the largest weights have not been drawn yet, so the error is unknown, too.
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
