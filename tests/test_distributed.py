"""Two real processes train as one does on the same data, and noise is never shared by accident."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from unittest import mock

import pyro
import pytest
import torch
import torch.multiprocessing as mp

from pyro_sde.distributed import join, mini_batches, seed_rank

from .ranks import BATCH, CASES, PATIENCE, WORLD, noise_of, problem, rows_of, worker


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with mock.patch.dict(os.environ, environment, clear=True):
        context = mp.spawn(worker, (str(folder),), WORLD, join=False)
    deadline = time.monotonic() + PATIENCE
    try:
        while not context.join(1.0):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def assert_equal(found, loss, module):
    assert sum(r["loss"] for r in found) / WORLD == pytest.approx(loss, rel=1e-10)
    for name, p in module.named_parameters():
        for r in found:
            torch.testing.assert_close(r["gradients"][name], p.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process_on_the_global_batch(ranks, case):
    """On the same noise, mean loss and gradient are those of all rows at once."""
    found = [r[case] for r in ranks]
    rows = torch.cat([r["rows"] for r in found])
    assert len(rows.unique()) == BATCH
    data, model, guide, elbo = problem(case)
    module = elbo(model, guide)
    with noise_of(rows_of(case, rows)):
        loss = module(*(x[rows] for x in data))
    loss.backward()
    assert abs(found[0]["loss"] - found[1]["loss"]) > 1e-3
    assert_equal(found, loss.item(), module)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_draws_noise_of_its_own(ranks, case):
    """And the average is that of one process which draws both noises, one after the other."""
    found = [r[case]["own noise"] for r in ranks]
    a, b = (r["path"] for r in found)
    assert a.shape == b.shape and not (a[..., 1:, :] == b[..., 1:, :]).any()
    data, model, guide, elbo = problem(case)
    module, total = elbo(model, guide), 0.0
    for r, other in zip(found, ranks, strict=True):
        pyro.set_rng_seed(r["seed"])
        loss = module(*(x[other[case]["rows"]] for x in data)) / WORLD
        loss.backward()
        total += loss.item()
    assert_equal(found, total, module)


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_with_the_same_parameters(ranks, case):
    """Bit by bit; they began with rank 0's, and moved."""
    a, b = (r[case]["trained"] for r in ranks)
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
    _, model, guide, elbo = problem(case)
    for name, p in elbo(model, guide).named_parameters():
        assert 0 < (a[name] - p).abs().max() < 0.1, name


def test_ranks_know_their_place(ranks):
    assert [r["place"] for r in ranks] == [(0, 2), (1, 2)]
    assert len({r["seed"] for r in ranks} | {seed_rank(6)}) == 3
    assert ranks[0]["seed"] == seed_rank(5)


def test_mini_batches_deal_the_data():
    whole = list(islice(mini_batches(11, 4, seed=1), 4))
    assert all(len(rows) == 4 for rows in whole)
    assert len(torch.cat(whole[:2]).unique()) == 8  # an epoch: 3 of 11 are left over
    assert not torch.equal(torch.cat(whole[:2]), torch.cat(whole[2:]))
    parts = []
    for rank in range(2):
        with mock.patch("pyro_sde.distributed.place", lambda rank=rank: (rank, 2)):
            parts.append(list(islice(mini_batches(11, 4, seed=1), 4)))
            with pytest.raises(ValueError, match=r"multiple of the 2 processes.*found 3"):
                mini_batches(11, 3)
    for rows, *both in zip(whole, *parts, strict=True):
        assert torch.equal(torch.stack(both, -1).flatten(), rows)
    with pytest.raises(ValueError, match="at most size=3"):
        mini_batches(3, 4)


def test_join_refuses(monkeypatch):
    with pytest.raises(ValueError, match=r"timeout must be positive: found 0:00:00"):
        join(timedelta(0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes cannot share 1 GPU: .*CUDA_VISIBLE_DEVICES"):
        join()


def test_torchrun(tmp_path):
    """The command of the doc string; one rank speaks."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(root / "examples/distributed.py"), "--task", "sdebnn"]
    command += ["--iterations", "3", "--size", "12", "--batch", "6", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sdebnn, 2 processes") == done.stdout.count("figure:") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["distributed_sdebnn.png"]
