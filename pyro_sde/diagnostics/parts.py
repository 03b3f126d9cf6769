"""The terms of the ELBO of a model and a guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..infer import ElboTerms, TraceSDE_ELBO, record_parts

__all__ = ["elbo_parts"]


@torch.no_grad()
def elbo_parts(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_particles: int = 1,
    elbo: Any = None,
    **kwargs: Any,
) -> ElboTerms:
    """Evaluate the ELBO in parts: KL by latent site and time step, log likelihood by observed site.

    To record the parts of a training step at no further cost, use
    :func:`~pyro_sde.infer.record_parts`.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_sde import AutoSDE
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> pyro.clear_param_store()
        >>> def model(y):
        ...     z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.linspace(0, 1, 9)))
        ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
        >>> elbo_parts(model, AutoSDE(model), torch.tensor(1.0)).kl  # a new guide is the prior
        {'z': 0.0}

    :param model: The model.
    :param guide: The guide.
    :param args: Arguments of both.
    :param kwargs: Keyword arguments of both.
    :param num_particles: How many draws to average over, one after the other.
    :param elbo: A :class:`~pyro_sde.TraceSDE_ELBO` or :class:`~pyro_sde.TraceMeanFieldSDE_ELBO`
        of your own; by default one with the estimator ``"kl"``, which has the least noise.
    :returns: The terms, averaged over the draws.
    """
    if elbo is None:
        elbo = TraceSDE_ELBO(num_particles=num_particles, path_estimator="kl")
    elif num_particles != 1:
        raise ValueError("num_particles belongs to the ELBO: leave it out, or leave elbo out")
    with record_parts() as parts:
        elbo.loss(model, guide, *args, **kwargs)
    if not parts.log_likelihood and not parts.kl:
        raise TypeError(
            f"{type(elbo).__name__} does not record its parts; use TraceSDE_ELBO or "
            "TraceMeanFieldSDE_ELBO"
        )
    return parts
