"""Detection of posteriors that have diverged from their prior."""

from __future__ import annotations

import math

from ..infer.elbo_terms import ElboTerms

__all__ = ["ExplosionWarning", "explosion"]

INTENSITY = 100.0
"""Nats per step and dimension: the control moves each step by some 14 standard deviations."""
RATIO = 100.0
"""The KL above :data:`INTENSITY` is an explosion if it is this many times the log likelihood."""
ABSURD = 1e4
"""Nats per step and dimension above which any KL is an explosion: the likelihood may have
exploded with it."""


class ExplosionWarning(UserWarning):
    """Warns that the KL of a path has become too large for training to recover.

    :func:`~pyro_sde.fit` and the summary of a guide give this warning when the KL of a path

    - is not finite,
    - or exceeds 10,000 nats per step and dimension,
    - or exceeds both 100 nats per step and dimension and 100 times the log likelihood (during
      training, the best log likelihood so far).

    A guide that begins as its prior and learns does not get there, because every nat of KL must be
    paid for by a gain in log likelihood.

    Example::

        >>> import warnings
        >>> warnings.simplefilter("error", ExplosionWarning)  # stop there
        >>> warnings.simplefilter("default", ExplosionWarning)
    """


def explosion(parts: ElboTerms, weight: float = 1.0, best: float | None = None) -> str | None:
    """A message about the first path whose KL has exploded, if there is one.

    :param parts: The terms of one evaluation of the ELBO.
    :param weight: The weight of the KL in this evaluation.
    :param best: The best log likelihood so far.
    :returns: The message, or None where no KL has exploded.
    """
    data = sum(parts.log_likelihood.values())
    for name, path in parts.paths.items():
        kl, intensity = parts.kl[name] / weight, path.intensity
        is_dear = kl > RATIO * abs(data if best is None else best)
        if math.isfinite(kl) and not intensity > (INTENSITY if is_dear else ABSURD):
            continue
        return (
            f"the posterior of {name!r} has left its prior: its KL is {kl:.3g} nats, the log "
            f"likelihood {data:.3g}, and its control pushes each step by some "
            f"{math.sqrt(2 * max(intensity, 0.0)):.3g} standard deviations of the noise. Lower "
            "the learning rate, clip gradients, begin with a small weight of the KL (anneal_kl), "
            "or give the prior a larger scale, if the data cannot be reached with this one"
        )
    return None
