"""A loss that is not finite, and the site that is to blame."""

from __future__ import annotations

import math
from typing import Any

from pyro.poutine import Trace
from torch import Tensor

from .._observed import place_of

__all__ = ["NonFiniteLoss", "check_finite"]


class NonFiniteLoss(ArithmeticError):
    """The loss of an ELBO is NaN or infinite. The gradients are as before.

    Example::

        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_sde import TraceSDE_ELBO
        >>> def model():
        ...     pyro.sample("y", dist.Normal(torch.tensor(1e200), 1e-200), obs=torch.zeros(()))
        >>> try:
        ...     TraceSDE_ELBO().loss_and_grads(model, lambda: None)
        ... except NonFiniteLoss as e:
        ...     print("the log density of site 'y' is -inf" in str(e))
        True
    """


def check_finite(loss: Any, model: Trace, guide: Trace) -> None:
    """Refuse a loss that is not finite before it has gradients.

    :param loss: The loss of one pair of traces, a number or a tensor.
    :param model: The trace of the model.
    :param guide: The trace of the guide.
    """
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
                if bool(bad.any()) and site["is_observed"] and _is_bad(site.get("log_prob")):
                    return (
                        f"site {name!r} is observed at {float(value[bad][0])}, "
                        f"{place_of(site, bad)}, so the data are wrong or have gaps"
                    )
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


def _is_bad(x: Any) -> bool:
    return isinstance(x, Tensor) and not bool(x.detach().isfinite().all())


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
