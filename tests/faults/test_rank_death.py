"""A rank that is stopped, is killed while it alone has a checkpoint, or exits: the other ends in
time, and both go on from the checkpoint."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as processes

from pyro_sde import distributed
from pyro_sde.distributed import RankError

from ..training.models import assert_identical
from ..training.ranks import Watched, trained

WORLD, TIMEOUT, PATIENCE = 2, 2, 300
SLACK = 20  # seconds for the other processes of a busy machine
OPTIONS = {"steps": 8, "schedule": "constant", "save_every": 2}


def suffer(folder, name, here, do, **options):
    """Train until ``do`` ends or stops the rank that is ``here``. The other one writes its error,
    and the seconds that it has waited for it."""
    begun = folder / f"{name} begun"

    def act():
        begun.write_text(f"{os.getpid()} {time.monotonic()}")
        return do() or 1.0

    try:
        trained(Watched(act, here, step=6), **OPTIONS | options)
    except RankError as e:
        seconds = time.monotonic() - float(begun.read_text().split()[1])
        torch.save((seconds, str(e)), folder / f"{name}, {'bad' if here else 'good'} rank")
    return int(begun.read_text().split()[0])


def first(rank, folder):
    """Rank 1 is stopped as by Ctrl-Z. Then rank 0, which alone writes, is killed."""
    distributed.join(timeout=timedelta(seconds=TIMEOUT))
    stopped = suffer(folder, "stopped", rank == 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    if rank == 0:
        os.kill(stopped, signal.SIGCONT)
    distributed.join(timeout=timedelta(seconds=PATIENCE))
    path = folder / "run.pt" if rank == 0 else None
    suffer(
        folder, "killed", rank == 0, lambda: os.kill(os.getpid(), signal.SIGKILL), checkpoint=path
    )


def second(rank, folder):
    """Both go on, and rank 1 exits without an error."""
    paths = [folder / name if rank == 0 else None for name in ("run.pt", "whole.pt")]
    again = trained(Watched(), **OPTIONS, checkpoint=paths[0], resume=rank == 0)
    whole = trained(Watched(), **OPTIONS, checkpoint=paths[1])
    torch.save((again, whole), folder / f"resumed {rank}")
    suffer(folder, "exited", rank == 1, lambda: os._exit(0))


def worker(rank, run, folder):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    method = f"file://{folder}/{run.__name__}"
    limit = timedelta(seconds=PATIENCE)
    processes.init_process_group("gloo", method, limit, rank=rank, world_size=WORLD)
    distributed.join(timeout=limit)
    run(rank, folder)


def start(run, folder):
    """The exit codes of both ranks."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=worker, args=(k, run, folder)) for k in range(WORLD)]
    deadline = time.monotonic() + PATIENCE
    try:
        with mock.patch.dict(os.environ, environment, clear=True):
            for process in ranks:
                process.start()
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rank_death")
    assert start(first, folder) == [-signal.SIGKILL, 0]
    assert start(second, folder) == [0, 0]
    return folder


@pytest.mark.parametrize(
    ("name", "least", "message"),
    [
        # It may wait already when the other one is stopped.
        ("stopped", 0.5 * TIMEOUT, "rank 0 of 2 has waited 2 s for another rank"),
        ("killed", 0.0, "rank 1 of 2 has lost the connection to another rank"),
        ("exited", 0.0, "rank 0 of 2 has lost the connection to another rank"),
    ],
)
def test_the_other_rank_ends_in_time(folder, name, least, message):
    seconds, error = torch.load(folder / f"{name}, good rank")
    assert message in error and "resume=True" in error
    assert least <= seconds < least + SLACK < PATIENCE


def test_a_rank_that_was_stopped_ends_when_it_goes_on(folder):
    assert "rank 1 of 2 has lost" in torch.load(folder / "stopped, bad rank")[1]


def test_both_go_on_from_the_checkpoint_of_the_rank_that_was_killed(folder):
    """As if it had not been killed."""
    for rank in range(WORLD):
        again, whole = torch.load(folder / f"resumed {rank}")
        assert_identical(again["values"], whole["values"])
        assert torch.equal(again["random"], whole["random"])
        assert torch.equal(again["history"]["elbo"], whole["history"]["elbo"])
