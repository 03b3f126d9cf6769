"""Parameters that a resumed training meets later than its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.optim.lr_scheduler import PyroLRScheduler
from pyro.poutine.messenger import Messenger
from torch import Tensor

from .checkpoint import CheckpointError
from .generators import keep_all_random_states
from .state import describe, make_optimiser, needs_metric

__all__ = ["LateParameters", "make_late_optimiser"]


class LateParameters(Messenger):
    """A messenger that gives parameters their values of a checkpoint when they first appear.

    A ``pyro.param`` statement that only a later step runs makes its parameter then, from its
    initial value, which is not what training had made of it.

    :param path: The checkpoint, for messages.
    :param functions: Model and guide, by their roles.
    """

    def __init__(self, path: Any, **functions: Callable) -> None:
        super().__init__()
        self.path, self.functions = path, functions
        self.values: dict[str, Tensor] = {}
        """The unconstrained values of parameters that have not appeared yet."""

    def _pyro_param(self, msg: Any) -> None:
        name = msg["name"]
        if name not in self.values:
            return
        store = pyro.get_param_store()
        if name not in store:
            # The run before has drawn the initial value already.
            with keep_all_random_states(**self.functions):
                options = {k: v for k, v in msg["kwargs"].items() if k != "event_dim"}
                store.get_param(*msg["args"], **options)
        shown: Any = store[name]
        mine, value = shown.unconstrained(), self.values[name]
        if (mine.shape, mine.dtype) != (value.shape, value.dtype):
            raise CheckpointError(
                f"{self.path} is of another model or guide: {name} is {describe(value)} in the "
                f"file and {describe(mine)} here. Begin anew with another path"
            )
        with torch.no_grad():
            mine.copy_(value)


def make_late_optimiser(training: Any, name: str, p: Tensor) -> None:
    """Make the optimiser of a parameter that appears after a training was resumed, with a scheduler
    that is as far as those of the other parameters.

    :param training: The training, before the step of the optimiser.
    :param name: The name of the parameter.
    :param p: Its unconstrained value.
    """
    optim, history, resumed = training.optim, training.history, training.resumed
    missed: list[tuple[float, ...]] = []
    if isinstance(optim, PyroLRScheduler):
        missed = [()] * (training.step - resumed)
        if needs_metric(optim):
            missed = [(-elbo,) for step, elbo in history.validation if step > resumed]
    make_optimiser(optim, name, p, missed)
