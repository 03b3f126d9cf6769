"""Checks during the first step: that the whole data set counts, and that Pyro knows every
parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer.util import zero_grads
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from .._observed import check_observed
from .batches import Batches
from .state import keep_random_state

__all__ = ["FirstStep"]


class FirstStep(Messenger):
    """A messenger around the first evaluation of an ELBO, which sees all sites.

    :param times: The times of the data, if they are known.
    """

    def __init__(self, times: Any = None) -> None:
        super().__init__()
        self.times = times
        self.scales: dict[str, float | Tensor] = {}
        """The scale of each observed site."""
        self._seen: set[Any] = set()
        self._leaves: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            check_observed(msg, self.times)

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            self.scales[msg["name"]] = msg["scale"]
        self._follow(msg["value"])
        # A guide that is a messenger leaves the model's prior in infer.
        for fn in (msg["fn"], msg["infer"].get("prior")):
            # What has no density at its value is refused by the ELBO, which knows more to say.
            with keep_random_state(), poutine.block(), suppress(ValueError, NotImplementedError):
                self._follow(None if fn is None else fn.log_prob(msg["value"]))

    def _follow(self, x: Any) -> None:
        """Note the leaves of the graph of ``x``."""
        if not isinstance(x, Tensor) or not x.requires_grad:
            return
        if x.grad_fn is None:
            self._leaves.append(x)
            return
        queue: list[Any] = [x.grad_fn]
        while queue:
            node = queue.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self._leaves.append(leaf)
            queue.extend(before for before, _ in node.next_functions)

    def check(self, batches: Batches, found: list[Tensor], **functions: Callable) -> None:
        """Refuse a training in which a mini-batch is taken for all of the data, or in which the
        loss depends on a parameter that Pyro does not know.

        :param batches: The mini-batches.
        :param found: The unconstrained parameters that Pyro knows.
        :param functions: Model and guide, which are searched for the names of parameters.
        """
        known = {id(p) for p in found}
        others = {id(p): p for p in self._leaves if id(p) not in known}
        problem = self._unscaled(batches)
        if problem is None and others:
            names = _names(others, functions)
            problem = (
                "the loss depends on parameters that Pyro does not know, so they would not be "
                f"trained: {', '.join(names[:5])}{', ...' * (len(names) > 5)}. Make the model a "
                'pyro.nn.PyroModule that holds their modules, or call pyro.module("name", module) '
                "in the model. If a second model or guide reuses the names of a first one, call "
                "pyro.clear_param_store() before it. If a parameter is to stay fixed, call "
                "requires_grad_(False) on it"
            )
        if problem is not None:
            zero_grads([*found, *others.values()])
            raise ValueError(problem)

    def _unscaled(self, batches: Batches) -> str | None:
        rows, size = batches.rows, batches.part
        if rows is None or size is None or rows == size or not self.scales:
            return None
        scales = [torch.as_tensor(s) for s in self.scales.values()]
        if any(bool((s != 1).any()) for s in scales) and not self._is_of_all_ranks(batches, scales):
            return None
        seen = f"batch_size={batches.size}"
        if batches.world > 1:
            seen += f" in {batches.world} processes, so each sees {size}"
        return (
            f"{seen} of {rows} rows, but no observed site ({', '.join(self.scales)}) is "
            f"scaled up by {rows / size:g}: the model takes a batch for all of the data. Tell the "
            f'plate how many rows there are: pyro.plate("data", {rows}, subsample_size=len(x))'
        )

    @staticmethod
    def _is_of_all_ranks(batches: Batches, scales: list[Tensor]) -> bool:
        """Whether the scale is right for a batch of all ranks, of which this one sees a part."""
        if batches.rows is None or batches.size is None or batches.part == batches.size:
            return False
        whole, part = batches.rows / batches.size, batches.rows / (batches.size // batches.world)
        are = [{x for x in (whole, part) if bool((s == x).all())} for s in scales]
        return {whole} in are and {part} not in are


def _names(parameters: dict[int, Tensor], functions: dict[str, Callable]) -> list[str]:
    names: dict[int, str] = {}
    for role, f in functions.items():
        for name, p in _parameters_of(poutine.unwrap(f), role):
            names.setdefault(id(p), name)
    return [names.get(i, f"one of shape {tuple(p.shape)}") for i, p in parameters.items()]


def _parameters_of(f: Any, role: str, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of a module, or of the modules and tensors that a function captured.
    Functions that it captured are searched, too, down to ``depth``."""
    if isinstance(f, nn.Module):
        yield from ((f"{role}.{name}", p) for name, p in f.named_parameters())
        return
    if not inspect.isfunction(f):
        return
    captured = inspect.getclosurevars(f)
    for name, x in {**captured.globals, **captured.nonlocals}.items():
        if isinstance(x, nn.Module):
            yield from ((f"{name}.{key}", p) for key, p in x.named_parameters())
        elif isinstance(x, Tensor):
            yield name, x
        elif depth:
            yield from _parameters_of(x, role, depth - 1)
