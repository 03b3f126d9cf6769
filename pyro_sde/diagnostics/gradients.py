"""The variance of the gradient of an ELBO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.infer.util import zero_grads
from torch import Tensor

__all__ = ["GradientVariance", "gradient_variance"]


class GradientVariance(NamedTuple):
    """Gradients of an ELBO over repeated draws.

    Example::

        >>> import torch
        >>> found = GradientVariance({"u": torch.tensor(0.5)}, {"u": torch.tensor(2.0)}, 0.5)
        >>> found.variance["u"] / found.average["u"].square()  # relative
        tensor(0.1250)
    """

    variance: dict[str, Tensor]
    """Variance of every entry of every parameter's gradient."""
    average: dict[str, Tensor]
    """The mean gradient itself."""
    mean: float
    """The variance averaged over all entries of all parameters."""


def gradient_variance(
    elbo: Any,
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int = 100,
    **kwargs: Any,
) -> GradientVariance:
    """The variance of the gradient of ``elbo`` for this model and guide, over repeated draws.

    Neither the parameters nor their ``.grad`` are changed. To compare estimators, call this
    function once for each estimator, from the same seed.

    Example::

        >>> import pyro, torch
        >>> from pyro_sde import TraceSDE_ELBO
        >>> from pyro_sde.diagnostics import gradient_variance
        >>> from pyro_sde.distributions import BrownianMotion, ControlledPath
        >>> prior = BrownianMotion(1.0, torch.linspace(0.0, 1.0, 11), 0.0)
        >>> def model():
        ...     pyro.sample("z", prior)
        >>> def guide():
        ...     u = pyro.param("u", torch.tensor(2.0))
        ...     pyro.sample("z", ControlledPath(prior, lambda t, z: u.expand_as(z)))
        >>> pyro.set_rng_seed(0)
        >>> for name in ("kl", "full"):  # the gradient is u; and u + B(1), of variance 1
        ...     found = gradient_variance(TraceSDE_ELBO(path_estimator=name), model, guide)
        ...     print(f"{name}: {found.average['u']:.0f}, {found.mean:.0f}")
        kl: 2, 0
        full: 2, 1

    :param elbo: The ELBO, of any kind.
    :param model: The model.
    :param guide: The guide.
    :param args: Arguments of both.
    :param kwargs: Keyword arguments of both.
    :param num_samples: How many gradients to draw, at least 2.
    :returns: A :class:`GradientVariance`: variance and mean of the gradient by parameter, and the
        variance averaged over all entries.
    """
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2 for a variance: found {num_samples}")
    count = 0
    average: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    kept: dict[Tensor, Tensor | None] = {}
    try:
        for _ in range(num_samples):
            with poutine.trace(param_only=True) as capture:
                loss = elbo.differentiable_loss(model, guide, *args, **kwargs)
            sites: dict[str, Any] = dict(capture.trace.nodes)
            params = {name: site["value"].unconstrained() for name, site in sites.items()}
            if not params:
                raise ValueError("neither model nor guide has a parameter")
            for p in params.values():
                kept.setdefault(p, p.grad)
            zero_grads(params.values())
            loss.backward()
            count += 1
            for name, p in params.items():
                g = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                # Welford's update: no cancellation where the variance nearly vanishes.
                m = average.get(name, torch.zeros_like(g))
                delta = g - m
                average[name] = m + delta / count
                squares[name] = squares.get(name, torch.zeros_like(g)) + delta * (g - average[name])
    finally:
        for p, grad in kept.items():
            p.grad = grad
    variance = {name: s / (num_samples - 1) for name, s in squares.items()}
    mean = float(torch.cat([v.flatten() for v in variance.values()]).mean())
    return GradientVariance(variance, average, mean)
