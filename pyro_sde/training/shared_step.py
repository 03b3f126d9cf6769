"""The evaluation of an ELBO on several ranks, as a vector that the ranks add up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..infer import ElboTerms

__all__ = ["Evaluation", "Layout"]


class Evaluation(NamedTuple):
    """The evaluation of an ELBO, with the gradients of all parameters that it has met."""

    loss: float
    parts: ElboTerms
    found: dict[str, Tensor]
    """The unconstrained parameters."""

    def terms(self, weight: float) -> tuple[float, dict[str, float] | None, float]:
        """The ELBO with a KL of weight 1, its KL by site, and its log likelihood.

        :param weight: The weight that the KL had.
        """
        if not (self.parts.kl or self.parts.log_likelihood):
            return -self.loss, None, math.nan
        kl = {site: value / weight for site, value in self.parts.kl.items()}
        data = sum(self.parts.log_likelihood.values(), 0.0)
        return -self.loss if weight == 1.0 else data - sum(kl.values()), kl, data


class Layout:
    """What all ranks know, in the order in which the vector has it: flags, the loss, the terms of
    the ELBO by site, which parameters were met and have a gradient, and the gradients.

    A single vector of all gradients costs one message for each step. That is also why the ranks do
    not use ``DistributedDataParallel``: it wraps a module whose parameters are all known before the
    first step, and calls ``forward``, whereas Pyro's ELBOs find their parameters in its store while
    they run, and have ``loss_and_grads``.
    """

    FLAGS = ("failed", "is_new", "buffers_changed", "interrupted")

    def __init__(self) -> None:
        self.sites: list[tuple[str, str]] = []
        """The fields of ``ElboTerms`` and the names of sites."""
        self.parameters: dict[str, Tensor] = {}

    def new_names(self, mine: Evaluation) -> tuple[list[tuple[str, str]], list[str]]:
        """The sites and parameters of an evaluation that are not in the layout."""
        fields = ("kl", "log_likelihood")
        sites = [(field, site) for field in fields for site in getattr(mine.parts, field)]
        return (
            [k for k in sites if k not in self.sites],
            [k for k in mine.found if k not in self.parameters],
        )

    def extend(self, sites: Iterable[tuple[str, str]], parameters: dict[str, Tensor]) -> None:
        """Add sites and parameters."""
        self.sites = sorted({*self.sites, *sites})
        self.parameters = dict(sorted({**self.parameters, **parameters}.items()))

    def pack(self, mine: Evaluation, flags: dict[str, bool], device: torch.device) -> Tensor:
        """The vector of one rank."""
        head = [float(flags[name]) for name in self.FLAGS] + [mine.loss]
        for field, site in self.sites:
            terms = getattr(mine.parts, field)
            head += [float(site in terms), terms.get(site, 0.0)]
        grads = {k: None if k not in mine.found else mine.found[k].grad for k in self.parameters}
        for name, grad in grads.items():
            head += [float(name in mine.found), float(grad is not None)]
        size = len(head) + sum(p.numel() for p in self.parameters.values())
        vector = torch.zeros(size, dtype=self._dtype(), device=device)
        vector[: len(head)] = torch.tensor(head, dtype=vector.dtype)
        i = len(head)
        for name, p in self.parameters.items():
            grad = grads[name]
            if grad is not None:
                vector[i : i + p.numel()] = grad.detach().to_dense().reshape(-1)
            i += p.numel()
        return vector

    def unpack(self, vector: Tensor) -> tuple[dict[str, bool], Evaluation]:
        """The flags and the evaluation of a sum of vectors over the ranks, divided by their number.
        The gradients are put into the parameters, unless an evaluation has failed or the vector
        does not have all of it."""
        n = len(self.FLAGS) + 1 + 2 * len(self.sites) + 2 * len(self.parameters)
        head = iter(vector[:n].tolist())
        flags = {name: next(head) > 0 for name in self.FLAGS}
        loss, parts, found = next(head), ElboTerms(), {}
        for field, site in self.sites:
            is_there, value = next(head) > 0, next(head)
            if is_there:
                getattr(parts, field)[site] = value
        i = n
        for name, p in self.parameters.items():
            is_met, has_gradient = next(head) > 0, next(head) > 0
            if is_met and not flags["failed"] and not flags["is_new"]:
                found[name] = p
                if has_gradient:
                    p.grad = vector[i : i + p.numel()].view(p.shape).to(p)
            i += p.numel()
        return flags, Evaluation(loss, parts, found)

    def _dtype(self) -> torch.dtype:
        dtype = torch.float32
        for p in self.parameters.values():
            dtype = torch.promote_types(dtype, p.dtype)
        return dtype
