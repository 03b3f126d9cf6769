"""A loss that is not finite, and the site that is to blame."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.poutine import Trace
from torch import Tensor

__all__ = ["NonFiniteLoss", "check_finite"]


class NonFiniteLoss(ArithmeticError):
    """The loss of an ELBO is NaN or infinite. The gradients are as before.

    Example::

        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_sde import TraceSDE_ELBO
        >>> def model():
        ...     pyro.sample("y", dist.Normal(1e30, 1.0), obs=torch.tensor(0.0))
        >>> try:
        ...     TraceSDE_ELBO().loss_and_grads(model, lambda: None)
        ... except NonFiniteLoss as e:
        ...     print("the log density of site 'y' is -inf" in str(e))
        True
    """


def check_finite(loss: Any, model: Trace, guide: Trace) -> None:
    """Refuse a loss that is not finite before it has gradients. An evaluation without gradients
    is left alone.

    :param loss: The loss of one pair of traces, a number or a tensor.
    :param model: The trace of the model.
    :param guide: The trace of the guide.
    """
    if not torch.is_grad_enabled():
        return
    number = float(loss.detach()) if isinstance(loss, Tensor) else loss
    if not math.isfinite(number):
        raise NonFiniteLoss(
            f"the loss became {number}: {_reason(model, guide)}. No parameter was changed. Look "
            "for a likelihood that is impossible, or overflows, at these draws; lower the "
            "learning rate, or give the model narrower priors"
        )


def _reason(model: Trace, guide: Trace) -> str:
    for role, trace in (("guide", guide), ("model", model)):
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                continue
            value = site["value"]
            if isinstance(value, Tensor) and value.is_floating_point():
                bad = ~value.detach().isfinite()
                if bool(bad.any()) and not site["is_observed"]:
                    return f"site {name!r} of the {role} is {_first(value, bad)}{_time(site, bad)}"
            density = site.get("log_prob")
            if isinstance(density, Tensor):
                bad = ~density.detach().isfinite()
                if bool(bad.any()):
                    return (
                        f"the log density of site {name!r} is {_first(density, bad)} in the {role}"
                    )
    return "the sum of the log densities of all sites overflows"


def _first(x: Tensor, bad: Tensor) -> str:
    if not x.dim():
        return f"{float(x):g}"
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"{float(x[index]):g} at the element {list(index)} of the shape {tuple(x.shape)}"


def _time(site: Any, bad: Tensor) -> str:
    """The first time at which a path is not finite."""
    times = getattr(site["fn"], "times", None)
    if not isinstance(times, Tensor) or bad.dim() < 2 or bad.shape[-2] != times.shape[-1]:
        return ""
    row = times.reshape(-1, times.shape[-1])[0]
    first = int(bad.any(-1).reshape(-1, bad.shape[-2]).any(0).nonzero()[0])
    return f", first at t = {float(row[first]):g}"
