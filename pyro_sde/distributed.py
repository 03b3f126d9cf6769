"""Training in several processes: each draws noise of its own, all share every parameter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import pyro
import torch
import torch.distributed
from torch import Tensor

__all__ = ["Place", "join", "mini_batches", "place", "seed_rank"]


class Place(NamedTuple):
    """Which of the processes this one is.

    Example::

        >>> rank, world = Place(1, 4)
        >>> list(range(10))[rank::world]
        [1, 5, 9]
    """

    rank: int
    """Its number, from 0."""
    world: int
    """How many processes there are."""


def place() -> Place:
    """The place in the process group; rank 0 of 1 where there is none.

    Example::

        >>> from pyro_sde.distributed import place
        >>> place()
        Place(rank=0, world=1)
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Place(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Place(0, 1)


def join() -> torch.device:
    """Enter the process group that ``torchrun`` announces, by nccl if there is CUDA, else by gloo.
    A process that was started alone stays alone.

    Example::

        >>> from pyro_sde.distributed import join
        >>> device = join()

    :returns: The device of this process.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    return torch.device(device)


def mini_batches(size: int, batch: int, seed: int = 0) -> Iterator[Tensor]:
    """This rank's rows of one mini-batch after the other, without end.

    In every epoch the data are shuffled anew, in the same way on all ranks, and every rank gets
    its part of each mini-batch: parts never overlap, and all have one size, so that the average of
    the ranks is the loss of the whole mini-batch. What is left over at the end of an epoch is
    dropped.

    Example::

        >>> from itertools import islice
        >>> from pyro_sde.distributed import mini_batches
        >>> rows = torch.cat(list(islice(mini_batches(6, batch=2), 3)))
        >>> rows.sort().values
        tensor([0, 1, 2, 3, 4, 5])

    :param size: How many data there are.
    :param batch: How many of them are in a mini-batch, all ranks together.
    :param seed: The seed of the run, the same on every rank.
    """
    rank, world = place()
    if not 0 < batch <= size or batch % world:
        raise ValueError(
            f"batch must be a multiple of the {world} processes and at most size={size}, or ranks "
            f"would differ in how much they count: found {batch}"
        )
    return _mini_batches(size, batch, seed, rank, world)


def _mini_batches(size: int, batch: int, seed: int, rank: int, world: int) -> Iterator[Tensor]:
    for epoch in count():
        mixed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
        order = torch.randperm(size, generator=torch.Generator().manual_seed(mixed))
        for rows in order[: size // batch * batch].split(batch):
            yield rows[rank::world]


def seed_rank(seed: int) -> int:
    """Seed all generators of random numbers, on every rank of a process group with another seed.

    Two ranks with one seed would draw one noise for their two parts of the data, and the average
    of their gradients would have the variance of one. Call it after the model is built and the
    guide is set up; parameters need no care, for ``DistributedDataParallel`` gives those of rank 0
    to all. Without a process group it is rank 0 that is seeded.

    Example::

        >>> import torch
        >>> from pyro_sde.distributed import seed_rank
        >>> assert seed_rank(3) == seed_rank(3) != seed_rank(4)
        >>> noise = torch.randn(2)

    :param seed: The seed of the run, the same on every rank.
    :returns: The seed of this rank.
    """
    # Not seed + rank: the runs of seeds 0 and 1 would then share half of their noise.
    mine = int(np.random.SeedSequence((seed, place().rank)).generate_state(1)[0])
    pyro.set_rng_seed(mine)
    return mine
