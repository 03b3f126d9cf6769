"""Going on from a checkpoint as if nothing had happened, and refusing what is none."""

import errno
import hashlib
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

import pyro_sde
from pyro_sde import AutoSDE
from pyro_sde.training import CheckpointError, Diverged, load_checkpoint, save_checkpoint

from .killed import options
from .models import DATA, assert_identical, make, values

ROOT = Path(__file__).parent.parent.parent


def run(kind, **more):
    model, guide, elbo = make(kind)
    history = pyro_sde.fit(model, guide, DATA, elbo=elbo, **(options() | more))
    return history, values(model)


@pytest.mark.parametrize(
    ("kind", "where", "left"), [("functional", "step", 6), ("modular", "write", 6)]
)
def test_a_killed_run_goes_on_bit_for_bit(kind, where, left, tmp_path):
    path = tmp_path / "run.pt"
    command = [sys.executable, "-m", "tests.training.killed", kind, str(path), where]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=300)
    assert ended.returncode == -9, ended.stderr.decode()
    assert load_checkpoint(path, "pyro_sde.fit")["step"] == left
    assert bool(list(tmp_path.glob(".run.pt.*.draft"))) == (where == "write")
    resumed, found = run(kind, checkpoint=path, resume=True)
    whole, expected = run(kind)
    assert_identical(found, expected)
    assert resumed == whole and resumed.step == list(range(1, 13))
    assert sorted(os.listdir(tmp_path)) == [".run.pt.lock", "run.pt", "run.pt.1"]


@pytest.mark.parametrize("kind", ["functional", "modular"])
@pytest.mark.parametrize("stop", [3, 7])
def test_every_interval_is_a_place_to_go_on_from(kind, stop, tmp_path):
    """Also with other random numbers in between, and in the same process."""
    path = tmp_path / "run.pt"
    more = {"schedule": "constant", "validation": None, "every": None}
    run(kind, steps=stop, checkpoint=path, **more)
    torch.rand(5)
    resumed, found = run(kind, checkpoint=path, resume=True, **more | {"seed": None})
    whole, expected = run(kind, **more)
    assert_identical(found, expected)
    assert resumed.elbo == whole.elbo and resumed.lr == whole.lr


def test_the_best_of_before_is_still_the_best(tmp_path):
    def model(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    def fit(steps, **more):
        pyro.clear_param_store()
        options = dict(lr=0.1, schedule="constant", every=4, patience=3, progress=False, **more)
        data, validation = torch.tensor(3.0), torch.tensor(1.0)
        return pyro_sde.fit(
            model, lambda y: None, data, steps=steps, validation=validation, **options
        ), pyro.param("loc").item()

    whole, expected = fit(100)
    assert whole.best[0] == 12 and whole.stopped == "patience"
    path = tmp_path / "a.pt"
    fit(16, checkpoint=path)
    resumed, found = fit(100, checkpoint=path, resume=True)
    assert found == expected and resumed == whole


def test_an_optimiser_of_ones_own_goes_on(tmp_path):
    path = tmp_path / "run.pt"
    more = {"lr": None, "schedule": None, "validation": None, "every": None}

    def optim():
        return pyro.optim.ClippedAdam({"lr": 0.02, "lrd": 0.9})

    run("modular", steps=5, checkpoint=path, optim=optim(), **more)
    same = optim()
    _, found = run("modular", checkpoint=path, resume=True, optim=same, **more)
    _, expected = run("modular", optim=optim(), **more)
    assert_identical(found, expected)
    with pytest.raises(CheckpointError, match=r"other settings.*'optim': \('ClippedAdam', 'SGD'\)"):
        sgd = pyro.optim.SGD({"lr": 0.02})
        run("modular", checkpoint=path, resume=True, optim=sgd, **more)


def test_a_new_rate_counts(tmp_path):
    path = tmp_path / "run.pt"
    run("functional", steps=5, lr=0.05, schedule="cosine", checkpoint=path)
    history, _ = run("functional", lr=0.01, schedule="constant", checkpoint=path, resume=True)
    assert history.lr[5:] == [0.01] * 7 and history.lr[0] == 0.05


def test_a_finished_run_is_loaded(tmp_path):
    path = tmp_path / "run.pt"
    whole, expected = run("functional", checkpoint=path)
    before = path.read_bytes()
    again, found = run("functional", checkpoint=path, resume=True)
    assert_identical(found, expected)
    assert again == whole and path.read_bytes() == before


def test_a_file_is_not_overwritten(tmp_path):
    path = tmp_path / "run.pt"
    run("functional", steps=1, checkpoint=path)
    with pytest.raises(FileExistsError, match=r"run\.pt exists already.*resume=True"):
        run("functional", steps=1, checkpoint=path)
    run("functional", steps=2, checkpoint=tmp_path / "new" / "a.pt", resume=True)  # none yet


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_nan_names_the_checkpoint(tmp_path):
    def model(bad):
        a = pyro.param("a", torch.tensor(2.0))
        with pyro.poutine.scale(scale=float("nan") if a < 1.96 and bad else 1.0):
            pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(0.0))

    path = tmp_path / "a.pt"
    fixed = dict(
        steps=9,
        lr=0.01,
        schedule="constant",
        elbo=Trace_ELBO(),
        checkpoint_every=2,
        checkpoint=path,
        progress=False,
    )
    pyro.enable_validation(False)
    with pytest.raises(Diverged, match=r"step 6.*last checkpoint, after step 4, is .*a\.pt"):
        pyro_sde.fit(model, lambda bad: None, True, **fixed)
    pyro.clear_param_store()
    with pytest.raises(CheckpointError, match="made with other data"):
        pyro_sde.fit(model, lambda bad: None, False, resume=True, **fixed)
    fixed |= {"resume": True, "allow_other_data": True}
    history = pyro_sde.fit(model, lambda bad: None, False, **fixed)
    assert history.step == list(range(1, 10))


class Code:
    def __reduce__(self):
        return os.mkdir, (Code.folder,)


def pickled(path):
    path.write_bytes(pickle.dumps(Code()))


def saved_code(path):
    torch.save({"format": "pyro_sde checkpoint", "version": 1, "state": Code()}, path)


def seal(write, path):
    """With the digest of a checkpoint at its end."""
    write(path)
    content = path.read_bytes()
    line = f"\npyro_sde sha256 {hashlib.sha256(content).hexdigest()} {len(content):020d}\n"
    path.write_bytes(content + line.encode())


def cut_off(path):
    run("functional", steps=1, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-200])


FOREIGN = {
    "text": (lambda path: path.write_text("step 3\n"), "not a checkpoint of pyro_sde"),
    "empty": (lambda path: path.write_bytes(b""), "not a checkpoint of pyro_sde"),
    "cut_off": (cut_off, "or is cut off"),
    "pickle": (pickled, "none of its code was run"),
    "code": (saved_code, "none of its code was run"),
    "sealed_code": (lambda path: seal(saved_code, path), "it holds other objects"),
    "weights": (lambda path: torch.save({"w": torch.ones(2)}, path), "does not end with a digest"),
    "sealed_weights": (
        lambda path: seal(lambda p: torch.save({"w": torch.ones(2)}, p), path),
        "another program",
    ),
    "version": (
        lambda path: seal(
            lambda p: torch.save({"format": "pyro_sde checkpoint", "version": 9}, p), path
        ),
        "format version 9, and this pyro_sde reads 2",
    ),
    "kind": (lambda path: save_checkpoint(path, {}, "mine"), "a checkpoint of 'mine', not"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_refused(case, tmp_path):
    """Nothing changes, and no code in them runs."""
    Code.folder = str(tmp_path / "executed")
    path = tmp_path / "run.pt"
    write, message = FOREIGN[case]
    write(path)
    content = path.read_bytes()
    model, guide, elbo = make("functional")
    pyro_sde.fit(model, guide, DATA, steps=1, elbo=elbo, progress=False)
    before, state = values(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message) as e:
        pyro_sde.fit(
            model, guide, DATA, elbo=elbo, checkpoint=path, resume=True, **options() | {"seed": 9}
        )
    assert str(path) in str(e.value) and "Nothing was loaded" in str(e.value)
    assert not (tmp_path / "executed").exists() and path.read_bytes() == content
    assert_identical(values(), before)
    assert torch.equal(state, torch.get_rng_state())


def test_the_checkpoint_of_another_training_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    run("functional", steps=1, checkpoint=path)
    resume = {"checkpoint": path, "resume": True}
    with pytest.raises(CheckpointError, match=r"'batch_size': \(3, 2\)"):
        run("functional", batch_size=2, **resume)
    with pytest.raises(CheckpointError, match=r"'seed': \(5, 6\)"):
        run("functional", seed=6, **resume)
    with pytest.raises(
        CheckpointError,
        match=r"parameters only in the file: \[.*rest.*only in this model and guide: .*layers",
    ):
        run("modular", **resume)
    assert list(pyro.get_param_store().keys()) == []  # what was made to compare is gone again
    with pytest.raises(CheckpointError, match=r"is float64 \(2, 64\) in the file and .* \(1, 64\)"):
        model, _, elbo = make("functional")
        guide = AutoSDE(model, contraction=None)
        pyro_sde.fit(model, guide, DATA, elbo=elbo, **options() | resume)
    torch.set_default_dtype(torch.float32)
    model, guide, elbo = make("functional")
    with pytest.raises(CheckpointError, match=r"float64.* in the file and float32"):
        pyro_sde.fit(model, guide, DATA, elbo=elbo, **options() | resume)


def test_only_numbers_and_names_are_saved(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"a": (1, 2.5, None, [True, "x"]), "b": {3: torch.ones(2)}}, "mine")
    found = load_checkpoint(path, "mine")
    assert found["a"] == (1, 2.5, None, [True, "x"]) and torch.equal(found["b"][3], torch.ones(2))
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\] is a type, and a checkpoint holds"):
        save_checkpoint(path, {"a": [int]}, "mine")
    with pytest.raises(TypeError, match="keys of state must be strings or integers"):
        save_checkpoint(path, {2.5: 1}, "mine")
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt", "mine")


def test_a_view_is_saved_alone(tmp_path):
    save_checkpoint(tmp_path / "a.pt", {"x": torch.zeros(10**6)[:2]}, "mine")
    assert (tmp_path / "a.pt").stat().st_size < 10_000


def test_a_disk_that_is_full_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"x": 1}, "mine")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.pt could not be written \(No space.*as it was"):
        save_checkpoint(path, {"x": 2}, "mine")
    assert load_checkpoint(path, "mine") == {"x": 1} and sorted(os.listdir(tmp_path)) == [
        ".a.pt.lock",
        "a.pt",
    ]


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    sync, refused = os.fsync, []

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    save_checkpoint(tmp_path / "a.pt", {"x": 1}, "mine")
    assert refused and load_checkpoint(tmp_path / "a.pt", "mine") == {"x": 1}


def test_local_parameters_cannot_be_saved(tmp_path):
    local = pyro.settings.context(module_local_params=True)
    with local, pytest.raises(NotImplementedError, match="module_local_params"):
        run("modular", checkpoint=tmp_path / "a.pt")
