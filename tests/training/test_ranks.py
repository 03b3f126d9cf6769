"""``fit`` in two real processes is that of one on the same batches, and both end together."""

import os
import shutil
import time
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp

from pyro_sde import fit
from pyro_sde.training import CheckpointError

from ..ranks import WORLD
from . import ranks as cases
from .models import DATA, assert_identical, make
from .ranks import CASES, OPTIONS, PATIENCE, STEPS, worker

ALL = list(CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    """What each rank found, by case."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    context = mp.get_context("spawn")
    ranks = [context.Process(target=worker, args=(k, str(folder))) for k in range(WORLD)]
    with mock.patch.dict(os.environ, environment, clear=True):
        for process in ranks:
            process.start()
    deadline = time.monotonic() + PATIENCE
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, "the ranks wait for each other"
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, -9]  # the last case kills rank 1
    results = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert [list(r) for r in results] == [ALL, ALL[:-1]]
    return {name: [r.get(name) for r in results] for name in ALL}


def assert_equal_results(a, b):
    assert_identical(a["values"], b["values"])
    for name, x in a["history"].items():
        torch.testing.assert_close(b["history"][name], x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["mixed", "functional"])
def test_two_ranks_are_one_process_on_the_same_batches(found, kind):
    a, b = found[f"same noise, {kind}"]
    assert_equal_results(a, b)
    one = cases.same_noise(kind)
    for name, x in one["history"].items():
        torch.testing.assert_close(a["history"][name], x, rtol=1e-9, atol=1e-9)
    for name, x in one["values"].items():
        torch.testing.assert_close(a["values"][name], x, rtol=1e-8, atol=1e-8)
    assert len(set(one["history"]["elbo"].tolist())) == STEPS


def test_parameters_begin_as_those_of_one_process(found):
    one = cases.beginning()
    for r in found["beginning"]:
        for name, x in one["values"].items():
            torch.testing.assert_close(r["values"][name], x, rtol=0, atol=1e-250)


def test_ranks_that_see_all_of_the_data_have_noise_of_their_own(found):
    a, b = found["all_of_the_data"]
    assert_equal_results(a, b)
    mean = (torch.tensor(a["losses"]) + torch.tensor(b["losses"])) / 2
    torch.testing.assert_close(a["history"]["elbo"], -mean)
    assert not set(a["losses"]) & set(b["losses"])
    assert not torch.equal(a["random"], b["random"])
    a, b = found["own_generator"]
    assert not set(a.tolist()) & set(b.tolist())


def test_buffers_are_those_of_rank_0(found):
    a, b = found["buffers"]
    assert a == b != 0


@pytest.mark.parametrize("kind", ["functional", "modular"])
def test_a_resumed_run_is_one_that_was_not_interrupted(found, kind, folder):
    a, b = found[f"resumed, {kind}"]
    for r in (a, b):
        assert_equal_results(r["whole"], r["again"])
        assert torch.equal(r["whole"]["random"], r["again"]["random"])
    assert not torch.equal(a["again"]["random"], b["again"]["random"])
    assert_equal_results(a["again"], b["again"])
    assert len(a["writes"]) == 6 and not b["writes"]
    shutil.copy(folder / f"{kind} b.pt", path := folder / f"{kind} c.pt")
    model, guide, elbo = make(kind)
    options = {"steps": 8, "elbo": elbo, "checkpoint": path, "resume": True} | OPTIONS
    with pytest.raises(CheckpointError, match=r"'processes': \(2, 1\)"):
        fit(model, guide, DATA, **options)


def test_a_late_parameter(found):
    """Beside one that only rank 0 uses, whose gradient on rank 1 is zero."""
    a = b = 0.0
    late = 1.0
    for step in range(4):
        shift = late if step else 0.0
        r0, r1 = 1.0 + b + shift - a, 1.0 + shift - a
        mean = (r0 + r1) / 2
        a, b, late = a + 0.1 * mean, b - 0.1 * r0 / 2, late - 0.1 * mean * bool(step)
    for r in found["late parameter"]:
        assert {k: x.item() for k, x in r["values"].items()} == pytest.approx(
            {"a": a, "b": b, "late": late}
        )
    for kind, message, _ in found["late parameter with other values"]:
        assert kind == "ValueError" and "late is float64 () with digest" in message


def test_matching(found):
    a, b = found["matched"]
    assert_identical(a["values"], b["values"])
    assert a["matching"] == b["matching"] and "widths" in a["matching"]


def test_ranks_may_train_alone(found):
    a, b = found["alone"]
    assert not torch.equal(a["history"]["elbo"], b["history"]["elbo"])
    one = cases.trained(seed=1)
    assert_equal_results(b, one)


def test_a_step_that_one_rank_cannot_make_is_rejected_by_both(found):
    a, b = found["rejected"]
    assert_equal_results(a, b)
    assert a["history"]["rejected"] == 1
    assert a["history"]["elbo"].isnan().nonzero().tolist() == [[1]]


def test_both_diverge_and_name_the_checkpoint(found, folder):
    for kind, message, checkpoint in found["diverged"]:
        assert kind == "Diverged" and "The last checkpoint, after step" in message
        assert checkpoint == str(folder / "diverged.pt")


def test_a_signal_to_one_rank_ends_both(found):
    a, b = found["terminated"]
    assert_equal_results(a, b)
    assert a["stopped"] == b["stopped"] == "interrupted"
    assert a["history"]["step"].tolist() == [1, 2]


REFUSED = {
    "other_steps": "arguments of rank 1 are not those of rank 0: steps is 6 instead of 5",
    "other_data": "arguments of rank 1 are not those of rank 0: data is of digest",
    "other_shapes": "rank 1 are not those of rank 0: b is float64 (3,) instead of float64 (2,)",
    "scale_of_all_ranks": "in 2 processes, so each sees 3 of 7 rows, but no observed site (y) is "
    "scaled up by 2.33333",
    "odd_batch": "batch_size=5 is of all 2 processes together, and must be a multiple of 2",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(found, case):
    for kind, message, _ in found[case]:
        assert kind == "ValueError" and REFUSED[case] in message


LOST = "has lost the connection to another rank"
ENDED = {
    "failed": ("rank 1 has failed, so rank 0 of 2 ends, too. IndexError: no row 7", "no row 7"),
    "left": (f"rank 0 of 2 {LOST}", ""),
    "locked": ("is in use by process", "rank 0 has failed, so rank 1 of 2 ends, too. Checkpoint"),
    "hanging": ("rank 0 of 2 has waited 2 s for another rank", f"rank 1 of 2 {LOST}"),
    "absent": ("not all processes have called fit within 1 s", "not all processes have called"),
    "killed": (f"rank 0 of 2 {LOST}", None),
}
KINDS = {
    "failed": ("RankError", "IndexError"),
    "left": ("RankError", "KeyboardInterrupt"),
    "locked": ("CheckpointInUse", "RankError"),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_rank_does_not_outlive_another(found, case):
    """It dies, fails, hangs, or never comes."""
    kinds = KINDS.get(case, ("RankError", "RankError"))
    for rank, kind, message in zip(found[case], kinds, ENDED[case], strict=True):
        if rank is not None:
            assert rank[0] == kind and message in rank[1]
