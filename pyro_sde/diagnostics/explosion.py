"""Telling when a posterior has run away from its prior."""

from __future__ import annotations

import math

from ..infer.elbo_terms import ElboTerms

__all__ = ["ExplosionWarning", "explosion"]

INTENSITY = 100.0
"""Nats in a step and a dimension: every step pushed by some 14 standard deviations of its noise."""
RATIO = 100.0
"""How many times the log likelihood."""
ABSURD = 1e4
"""Nats in a step and a dimension, whatever the likelihood, which may have exploded with it."""


class ExplosionWarning(UserWarning):
    """The KL of a path, or the control that makes it, is beyond all reason.

    It is given by :func:`~pyro_sde.fit` and by the summary of a guide when the KL of a path is
    not finite, or 10,000 nats in each step and dimension, or both 100 nats there and 100 times
    the log likelihood (in training, the best one so far). A guide that begins as its prior, and
    learns, has no business there: what it gains in likelihood is what it can pay in KL.

    Example::

        >>> import warnings
        >>> warnings.simplefilter("error", ExplosionWarning)  # stop there
        >>> warnings.simplefilter("default", ExplosionWarning)
    """


def explosion(parts: ElboTerms, weight: float = 1.0, best: float | None = None) -> str | None:
    """What to say of the first path that has exploded; None, if none has.

    :param parts: Of an evaluation.
    :param weight: That of the KL in it.
    :param best: The best log likelihood so far.
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
