"""The ELBO of a training that was not given one."""

from __future__ import annotations

from collections.abc import Callable

import pyro.poutine as poutine
import torch

from .._buffers import keep_buffers
from ..diagnostics.weighted_draws import Problem, check_at_once
from ..guides import AutoSDE
from ..infer import TraceSDE_ELBO
from .generators import keep_all_random_states

__all__ = ["default_elbo"]

PARTICLES, MAX_ELEMENTS = 16, 2048
"""So many vectorised particles, for models whose sites have at most so many elements."""


def default_elbo(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> TraceSDE_ELBO:
    """:class:`~pyro_sde.TraceSDE_ELBO`, with vectorised particles where they cost little and the
    model allows them; the random state is left as it was.

    Two of many draws at once, alone, must have the likelihood that they have among all. What is
    wrong with a model is for the first step to say.

    :returns: An ELBO with 16 particles, or with one.
    """
    auto = poutine.unwrap(guide)
    if not isinstance(auto, AutoSDE):
        return TraceSDE_ELBO()
    with keep_all_random_states(model=model, guide=guide), torch.no_grad():
        try:
            with keep_buffers(model):  # those of an encoder get the units of the data, once
                auto.setup(*args, **kwargs)
            with keep_buffers(model, guide):
                problem = Problem.of(model, guide, args, kwargs)
                if sum(shape.numel() for shape in problem.shapes.values()) > MAX_ELEMENTS:
                    return TraceSDE_ELBO()
                check_at_once(problem)
        except Exception:  # whatever a model raises on shapes that it was not written for
            return TraceSDE_ELBO()
    return TraceSDE_ELBO(
        num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=problem.nesting
    )
