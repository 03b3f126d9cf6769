"""Training in several processes, which draw different noise and share all parameters."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
import torch.distributed
from torch import Tensor

__all__ = ["Place", "RankError", "join", "mini_batches", "place", "seed_rank"]

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others, unless :func:`join` says otherwise."""
_timeout = TIMEOUT


class RankError(RuntimeError):
    """Another rank has failed, has ended, or has not come within the time limit, so this one
    cannot go on.

    Example::

        >>> from pyro_sde.distributed import RankError
        >>> try:
        ...     raise RankError("rank 0 of 2 has lost the connection to another rank")
        ... except RankError as e:
        ...     print("end this process:", e)
        end this process: rank 0 of 2 has lost the connection to another rank
    """


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


def join(timeout: timedelta = TIMEOUT) -> torch.device:
    """Join the process group of ``torchrun``: gloo for the tensors of the CPU, and nccl where there
    is CUDA.

    :func:`~pyro_sde.fit` does this itself. Call this function before, if the ranks are to have
    GPUs of their own, or another time limit. A process that was not started by ``torchrun`` joins
    no group, nor does one that has a group already.

    Example::

        >>> from datetime import timedelta
        >>> from pyro_sde.distributed import join
        >>> device = join(timeout=timedelta(minutes=2))

    :param timeout: How long a rank waits for the others, by default ten minutes. A rank that hangs
        for longer ends the others, in ``fit`` with a :class:`RankError`. A rank that dies ends them
        at once.
    :returns: The device of this process.
    """
    global _timeout
    if not timeout > timedelta(0):
        raise ValueError(f"timeout must be positive: found {timeout}")
    _timeout = timeout
    cuda, device = torch.cuda.is_available(), torch.device("cpu")
    if cuda:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if here > gpus:
            raise ValueError(
                f"{here} processes cannot share {gpus} GPU{'s' * (gpus > 1)}: start at most as "
                "many processes as there are GPUs (torchrun --nproc-per-node), or hide the GPUs "
                "by the environment variable CUDA_VISIBLE_DEVICES="
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        torch.distributed.init_process_group(backend, timeout=timeout)
        atexit.register(_leave)
    return device


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def training_group() -> tuple[Any, timedelta]:
    """A process group for one training, after this process has joined that of ``torchrun``.

    In a group of its own a training does not meet other messages of the program, and closing the
    group ends the ranks that wait in it.

    :returns: The group, None where there is only one process, and its time limit.
    """
    try:
        if place().world == 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            join(_timeout)
        if place().world == 1:
            return None, _timeout
        return torch.distributed.new_group(timeout=_timeout), _timeout
    except RuntimeError as e:
        raise RankError(
            f"not all processes have called fit within {_timeout.total_seconds():g} s "
            f"({reason_of(e)}). Call fit on all of them, or with distributed=False where a process "
            "is to train alone"
        ) from e


def reason_of(error: RuntimeError) -> str:
    """The first sentence of an error of torch.distributed, without the file that it comes from."""
    return re.sub(r"\[\S+\.cc:\d+\] *", "", str(error)).split(". ")[0]


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
