"""Weighing the KL less while training begins."""

from __future__ import annotations

from typing import Any

from pyro.poutine.messenger import Messenger

__all__ = ["anneal_kl", "kl_weight"]


class anneal_kl(Messenger):
    r"""Inside, an ELBO counts its KL ``weight`` times:
    :math:`\mathbb{E}[\log p(y \mid z)] - \mathrm{weight} \cdot KL(q \,\|\, p)`.

    Small weights at the beginning of training let a latent path fit the data before the prior
    pulls it back, which would otherwise hide it (the posterior stays at the prior, and noise
    explains the data). Only with weight 1 it is the evidence that is bounded: let the schedule end
    there, as :func:`kl_weight` does, and train on; what is then optimised is the ELBO itself. Do
    not evaluate a model inside.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import TraceMeanField_ELBO
        >>> from pyro_sde import anneal_kl, kl_weight
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> def guide():
        ...     pyro.sample("x", dist.Normal(2.0, 1.0))
        >>> for i in range(3):  # in the place of the loss: svi.step()
        ...     with anneal_kl(kl_weight(i, 2, start=0.5)):
        ...         print(TraceMeanField_ELBO().loss(model, guide))
        1.0
        1.5
        2.0

    :param weight: A number above zero.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        if not weight > 0:
            raise ValueError(f"weight must be positive: found {weight!r}; begin with 1e-3, say")
        self.weight = weight

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["scale"] = msg["scale"] * self.weight


def kl_weight(step: int, steps: int, start: float = 0.01) -> float:
    """A weight that rises linearly from ``start`` to 1 in ``steps`` steps, and stays there.

    Example::

        >>> [round(kl_weight(i, 4, start=0.2), 2) for i in range(6)]
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]

    :param step: The number of the training step, from 0.
    :param steps: How many steps the rise takes; 0 for none.
    :param start: The first weight.
    """
    if not 0 < start <= 1:
        raise ValueError(f"start must be above 0 and at most 1: found {start:g}")
    return 1.0 if step >= steps else start + (1 - start) * step / steps
