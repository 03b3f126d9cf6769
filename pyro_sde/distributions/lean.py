"""Drawing a path of which only the states and the noise are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._replay import Replay, capture
from . import ratio
from .checks import check_scale

if TYPE_CHECKING:
    from .path import PathDistribution

__all__ = ["LeanDraw", "LeanTerms", "simulate", "terms_of"]

Ratio = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]
"""w and log c of the step's number and the state before it."""


@dataclass
class LeanTerms:
    """Of each step the parts of its log ratio, summed over the state, and how to get them again."""

    kl: list[Tensor]
    martingale: list[Tensor]
    stopped: list[Tensor]
    ratio: Ratio


@dataclass
class LeanDraw:
    """How a path was made: see :class:`~pyro_sde.distributions.path.Draw`."""

    value: Tensor
    has_grad: bool
    z: list[Tensor]
    eps: Tensor
    terms: LeanTerms | None = None
    """Against the prior, for a path pushed by a control: they cost no second pass there."""

    scale = None

    def control_at(self, i: int) -> Tensor | None:
        return None if self.terms is None else self.terms.ratio(i, self.z[i].detach())[0]


def simulate(path: PathDistribution, z0: Tensor, eps: Tensor) -> LeanDraw:
    """Draw as ``path`` does, each step to be redone in the backward pass."""
    step, replay, noise = path.lean_kernel(z0), Replay(), eps.unbind(0)
    z = [z0]
    parts: list[tuple[Tensor, ...]] = []

    def forward(i: int, state: Tensor) -> tuple[Tensor, ...]:
        mean, scale, shift = step(i, state)
        if path._validate_args:
            check_scale(path, scale.detach().unsqueeze(0), i)
        after = torch.addcmul(mean, scale, noise[i])
        if shift is None:
            return (after,)
        w, log_c = shift
        return after, *_terms(w, log_c, noise[i])

    needs_grad: list[bool] = []

    def again(i: int) -> list[Tensor]:
        # From the path that is kept anyway: the states that it was stacked of are gone by now.
        state = value.select(-2, i).detach().requires_grad_(needs_grad[i])
        return capture(functools.partial(forward, i), state)[1]

    for i in range(len(noise)):
        needs_grad.append(z[i].requires_grad)
        after, *terms = replay.record(
            functools.partial(forward, i), (z[i],), functools.partial(again, i)
        )
        z.append(after)
        parts.append(tuple(terms))
    value = torch.stack(z, -2)
    del z
    lean = None
    if parts[0]:
        kl, martingale, stopped = (list(p) for p in zip(*parts, strict=True))

        def shift_of(i: int, state: Tensor) -> tuple[Tensor, Tensor | None]:
            shift = step(i, state)[2]
            assert shift is not None
            return shift

        lean = LeanTerms(kl, martingale, stopped, shift_of)
    return LeanDraw(value, torch.is_grad_enabled(), list(value.unbind(-2)[:-1]), eps, lean)


def _terms(w: Tensor, log_c: Tensor | None, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        ratio.kl(w, log_c).sum(-1),
        ratio.martingale(w, log_c, eps).sum(-1),
        ratio.stopped(w, log_c, eps).sum(-1),
    )


def terms_of(shift: Ratio, states: list[Tensor], eps: Tensor) -> LeanTerms:
    """The same for states that have been drawn, each step to be redone in the backward pass."""
    replay, noise = Replay(), eps.unbind(0)
    parts = [
        replay.run(lambda state, i=i: _terms(*shift(i, state), noise[i]), state)
        for i, state in enumerate(states)
    ]
    kl, martingale, stopped = (list(p) for p in zip(*parts, strict=True))
    return LeanTerms(kl, martingale, stopped, shift)
