"""A loss that is not finite, and the site that is to blame."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.poutine import Trace
from torch import Tensor

from .._observed import place_of
from .girsanov import first_step_not_finite

__all__ = ["NonFiniteLoss", "check_finite"]


class NonFiniteLoss(ArithmeticError):
    """The loss of an ELBO is NaN or infinite. It is raised before the loss has gradients, so that
    no parameter changes. Particles that are not vectorised may have added their gradients before:
    a loop that goes on sets them to zero first.

    Example::

        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_sde import TraceSDE_ELBO
        >>> from pyro_sde.infer import NonFiniteLoss
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
        nodes: dict[str, Any] = dict(trace.nodes)
        for name, site in nodes.items():
            if site["type"] != "sample":
                continue
            if "path_divergence" in site and not _is_finite(site["log_prob"]):
                t = first_step_not_finite(site["fn"], _law(model, name), site["value"])
                where = "at its start" if t is None else f"from t = {t:g} on"
                return f"the KL of the path {name!r} is not finite {where}"
            if site["is_observed"] and not _is_finite(site["value"]):
                if not _is_finite(site.get("log_prob")):
                    value = site["value"]
                    bad = ~value.isfinite()
                    return (
                        f"site {name!r} is observed at {value[bad][0].item()}, "
                        f"{place_of(site, bad)}, so the data are wrong or have gaps"
                    )
            elif not _is_finite(site["value"]):
                return f"site {name!r} of the {role} is {_first(site['value'])}"
            if not _is_finite(site.get("log_prob")):
                return (
                    f"the log density of site {name!r} is {_first(site['log_prob'])} in the {role}"
                )
    return "the sum of the log densities of all sites overflows"


def _law(trace: Trace, name: str) -> Any:
    site: Any = trace.nodes[name]
    return site["fn"]


def _is_finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or bool(x.detach().isfinite().all())


def _first(x: Tensor) -> str:
    """The first value that is not finite, and where it is."""
    x = x.detach()
    if not x.dim():
        return f"{x.item():g}"
    index = tuple(int(i) for i in (~x.isfinite()).nonzero()[0])
    return f"{x[index].item():g} at the element {list(index)} of the shape {tuple(x.shape)}"
