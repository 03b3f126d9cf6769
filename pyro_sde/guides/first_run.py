"""The run of the model that a guide is set up from, the same whatever the seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .._observed import check_observed, naming_empty
from ..distributions import PathDistribution
from ..distributions.wrapping import unwrap
from .amortisation import times_of
from .correlated_normal import begin_at_median

__all__ = ["draws_of_prior", "first_trace"]

PRIOR_PATHS = 64


class LatentsAtMedian(Messenger):
    """Sets the latents that are no paths to the medians of their priors, and looks at the data.

    :param times: The times of the data, if they are known.
    """

    def __init__(self, times: Any) -> None:
        super().__init__()
        self.times = times

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["is_observed"]:
            check_observed(msg, self.times)
        if msg["is_observed"] or site_is_subsample(msg) or not getattr(fn, "has_rsample", False):
            return
        if unwrap(fn) is None:
            msg["value"], msg["done"] = begin_at_median(msg), True


def first_trace(model: Callable, args: tuple, kwargs: dict) -> Trace:
    """A run of the model with the other latents at their medians. What is measured in it, the
    units of states and latents, is what loaded parameters were measured in."""
    at_median = LatentsAtMedian(times_of(model, args, kwargs))
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices), at_median, naming_empty(args, kwargs):
        torch.manual_seed(0)
        return poutine.trace(model).get_trace(*args, **kwargs)


@torch.no_grad()
def draws_of_prior(path: PathDistribution) -> Tensor | None:
    """A few paths of a prior, always the same ones; None if it cannot be drawn from."""
    number = max(1, PRIOR_PATHS // max(1, path.batch_shape.numel()))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the path that is drawn in training warns
        torch.manual_seed(0)
        try:
            return path._without_record().sample((number,))
        except ValueError:
            return None
