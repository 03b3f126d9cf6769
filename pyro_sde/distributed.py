"""Training in several processes, which draw different noise and share all parameters."""

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
    """The rank of this process, and the number of processes.

    Example::

        >>> rank, world = Place(1, 4)
        >>> list(range(10))[rank::world]
        [1, 5, 9]
    """

    rank: int
    """The number of this process, from 0."""
    world: int
    """The number of processes."""


def place() -> Place:
    """The place of this process in the process group.

    Example::

        >>> from pyro_sde.distributed import place
        >>> place()
        Place(rank=0, world=1)

    :returns: Rank and number of processes; rank 0 of 1 where there is no process group.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Place(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Place(0, 1)


def join() -> torch.device:
    """Join the process group of ``torchrun``, with nccl where there is CUDA and gloo otherwise.

    A process that was not started by ``torchrun`` joins no group.

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
    """Endless mini-batches, as the numbers of the rows that belong to this rank.

    Every epoch shuffles the data anew, in the same way on all ranks, and gives every rank its part
    of each mini-batch. The parts do not overlap and have one size, so the average over the ranks is
    the loss of the whole mini-batch. Rows that are left over at the end of an epoch, less than a
    mini-batch, are dropped.

    Example::

        >>> from itertools import islice
        >>> from pyro_sde.distributed import mini_batches
        >>> rows = torch.cat(list(islice(mini_batches(6, batch=2), 3)))
        >>> rows.sort().values
        tensor([0, 1, 2, 3, 4, 5])

    :param size: The number of rows of the data.
    :param batch: The number of rows in a mini-batch, over all ranks.
    :param seed: The seed of the run, the same on every rank.
    :returns: An iterator over tensors of shape ``(batch / ranks,)``.
    """
    rank, world = place()
    if not 0 < batch <= size or batch % world:
        raise ValueError(
            f"batch must be a multiple of the {world} processes and at most size={size}, so that "
            f"all ranks have parts of one size: found {batch}"
        )
    return _mini_batches(size, batch, seed, rank, world)


def _mini_batches(size: int, batch: int, seed: int, rank: int, world: int) -> Iterator[Tensor]:
    for epoch in count():
        mixed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
        order = torch.randperm(size, generator=torch.Generator().manual_seed(mixed))
        for rows in order[: size // batch * batch].split(batch):
            yield rows[rank::world]


def seed_rank(seed: int) -> int:
    """Seed all random number generators, with a different seed on every rank of a process group.

    Two ranks with the same seed would draw the same noise for their parts of the data, and the
    average of their gradients would have the variance of one rank's. Call this function after the
    model is built and the guide is set up. ``DistributedDataParallel`` copies the parameters of
    rank 0 to all ranks. Without a process group the process is seeded as rank 0.

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
