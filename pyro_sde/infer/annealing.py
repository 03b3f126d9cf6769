"""Annealing of the KL: a smaller weight at the beginning of training."""

from __future__ import annotations

import math
import threading
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from typing_extensions import Self

__all__ = ["anneal_kl", "kl_weight"]


class anneal_kl(Messenger):
    r"""A context in which an ELBO multiplies its KL by ``weight``:
    :math:`\mathbb{E}[\log p(y \mid z)] - \mathrm{weight} \cdot \mathrm{KL}(q \| p)`.

    Small weights at the beginning of training let a latent path fit the data before the prior
    pulls it back. Otherwise training may end with a posterior that stays at the prior, where noise
    explains the data. The ELBO is a bound of the evidence only with weight 1. So let the schedule
    end at 1, as :func:`kl_weight` does, and continue training there. Do not evaluate a model inside
    this context, which holds in the thread that enters it.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import TraceMeanField_ELBO
        >>> from pyro_sde import anneal_kl, kl_weight
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> def guide():
        ...     pyro.sample("x", dist.Normal(2.0, 1.0))
        >>> for i in range(3):  # in training, call svi.step() here
        ...     with anneal_kl(kl_weight(i, 2, start=0.5)):
        ...         print(TraceMeanField_ELBO().loss(model, guide))
        1.0
        1.5
        2.0

    :param weight: The weight of the KL, above zero.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        if not 0 < weight < math.inf:
            raise ValueError(f"weight must be positive: found {weight!r}; begin with 1e-3, say")
        self.weight = weight

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        # Other threads and generators may have come and gone in any order.
        if self in _PYRO_STACK:
            _PYRO_STACK.remove(self)

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and threading.get_ident() == self._thread:
            msg["scale"] = msg["scale"] * self.weight


def kl_weight(step: int, steps: int, start: float = 0.01) -> float:
    """A weight of the KL that rises linearly from ``start`` to 1 in ``steps`` steps, and stays 1.

    Example::

        >>> [round(kl_weight(i, 4, start=0.2), 2) for i in range(6)]
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]

    :param step: The number of the training step, from 0.
    :param steps: The number of steps that the rise takes; 0 gives the weight 1 from the first step.
    :param start: The first weight.
    :returns: The weight of this step.
    """
    if not 0 < start <= 1:
        raise ValueError(f"start must be above 0 and at most 1: found {start:g}")
    if not 0 <= steps < math.inf:
        raise ValueError(f"steps must be a number of at least 0: found {steps!r}")
    return 1.0 if step >= steps else start + (1 - start) * step / steps
