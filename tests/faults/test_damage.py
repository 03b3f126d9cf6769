"""Checkpoints that are damaged, forged, or made to fill the memory."""

import hashlib
import io
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soak
import torch
from attacks import damage
from attacks.victim import Victim, are_same

from pyro_sde.training import (
    CheckpointError,
    checkpoint,
    checkpoint_file,
    load_checkpoint,
    save_checkpoint,
)

KIND = "pyro_sde.fit"
ROOT = Path(__file__).parent.parent.parent
VALIDATION = {"validation": torch.tensor([0.1, 0.2, 0.3]), "every": 2}


def test_bits_pages_and_ends():
    found = damage.attack(60, seed=1)
    assert soak.exceeded(found, damage.BOUNDS) == []
    assert (found["bits flipped"], found["pages zeroed"]) == (60, 12)


def test_every_bit_of_the_last_line(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"step": 3}, "mine")
    content = path.read_bytes()
    for i in range(len(content) - checkpoint.SEAL_LENGTH, len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match=r"a\.pt (is damaged|.* does not end with)"):
            load_checkpoint(path, "mine")


def test_a_damaged_file_names_the_one_before(tmp_path):
    path = tmp_path / "run.pt"
    with checkpoint_file.CheckpointFile(path, keep=2) as file:
        for step in (2, 3):
            Victim().train(tmp_path / "a.pt", step, resume=True)
            file.write((tmp_path / "a.pt").read_bytes())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"the checkpoint before it is .*run\.pt\.1: copy"):
        Victim().train(path, 4, resume=True)
    path.write_bytes(path.with_name("run.pt.1").read_bytes())
    assert Victim().train(path, 4, resume=True).step == [1, 2, 3, 4]


# Forged files: a valid digest, and a state that no training has.


def sealed(content: bytes) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    return content + f"\npyro_sde sha256 {digest} {len(content):020d}\n".encode()


def where_in(x: Any, where: tuple = ()) -> Iterator[tuple]:
    """The places of all entries; of many that are alike, two are enough."""
    yield where
    children: list[Any] = []
    if isinstance(x, (dict, list, tuple)):
        children = list(x.items() if isinstance(x, dict) else enumerate(x))
    if where and where[0] not in ("random", "settings"):
        children = children[:2]
    for k, child in children:
        yield from where_in(child, (*where, k))


def changed(x: Any, where: tuple, change: Callable | None) -> Any:
    """A copy with another entry, or without it."""
    if not where:
        return change(x)
    k, *rest = where
    copy = dict(x) if isinstance(x, dict) else list(x)
    if not rest and change is None:
        del copy[k]
    else:
        copy[k] = changed(x[k], tuple(rest), change)
    return copy if isinstance(x, dict) else type(x)(copy)


def forgeries(x: Any) -> Iterator[Callable]:
    """Changes to an entry of another type, dtype or shape."""
    others = [None, "x", torch.zeros(2, dtype=torch.float16), {3: 1}]
    others = [y for y in others if type(y) is not type(x) or isinstance(x, torch.Tensor)]
    yield from (lambda _, y=y: y for y in others)
    if isinstance(x, torch.Tensor):
        yield from (lambda x: x.flatten()[1:], lambda x: x[None])


MAY_BE_NONE = {("lr",), ("settings", "batch_size"), ("settings", "rows"), ("random", "python", 2)}


def test_forged_states_are_refused_by_the_name_of_the_entry(tmp_path):
    path = tmp_path / "run.pt"
    Victim().train(path, 4, **VALIDATION)
    state = load_checkpoint(path, KIND)
    victim = Victim()
    victim.train(None, 1)
    before, count = victim.state(), 0

    def refuse(where: tuple, change: Callable | None) -> None:
        save_checkpoint(path, changed(state, where, change), KIND)
        with pytest.raises(CheckpointError) as e:
            victim.train(path, 5, resume=True, **VALIDATION)
        message = str(e.value)
        names = [k for k in where if isinstance(k, str)]
        assert not names or any(k in message for k in names), (where, message)
        assert "weights_only" not in message and str(path) in message, message
        assert "Nothing was loaded" in message, message

    for where in list(where_in(state))[1:]:
        if isinstance(where[-1], str) and where[:2] != ("history", "kl_by_site"):
            refuse(where, None)
            count += 1
        entry = state
        for k in where:
            entry = entry[k]
        for change in forgeries(entry):
            if change(entry) is None and where in MAY_BE_NONE:
                continue
            refuse(where, change)
            count += 1
    assert count > 300 and are_same(victim.state(), before)


@pytest.mark.parametrize("value", [2**70, float("nan"), -float("inf")])
def test_an_optimiser_with_numbers_that_none_has(value, tmp_path):
    path = tmp_path / "run.pt"
    Victim().train(path, 2)
    where = ("optimiser", "loc", "optimizer", "param_groups", 0, "eps")
    state = changed(load_checkpoint(path, KIND), where, lambda _: value)
    save_checkpoint(path, state, KIND)
    with pytest.raises(CheckpointError, match=r"optimiser\['loc'\].*\['eps'\] is "):
        Victim().train(path, 3, resume=True)


# Small files that claim a lot of memory.

GIGABYTE = 2**30


def deflated() -> bytes:
    """An archive of torch whose tensor is compressed zeros."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"format": "pyro_sde checkpoint", "x": torch.zeros(1)}, plain)
    with (
        zipfile.ZipFile(plain) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as file:
                if name.endswith("/data/0"):
                    for _ in range(GIGABYTE // 2**24):
                        file.write(bytes(2**24))
                else:
                    file.write(old.read(name))
    return packed.getvalue()


def boastful() -> bytes:
    """An archive whose directory claims sizes that it does not have."""
    plain = io.BytesIO()
    torch.save({"format": "pyro_sde checkpoint", "x": torch.zeros(1)}, plain)
    with zipfile.ZipFile(plain, "a") as archive:
        archive._didModify = True  # so that it writes the directory anew
        for entry in archive.infolist():
            if entry.filename.endswith("/data/0"):
                entry.file_size = entry.compress_size = GIGABYTE
    return plain.getvalue()


def expanded() -> bytes:
    """One number that is seen as a large tensor, of which a copy would be large."""
    file = io.BytesIO()
    state = {"step": 1, "parameters": {"w": torch.zeros(1).expand(2**40)}}
    header = {"format": "pyro_sde checkpoint", "version": 2, "kind": KIND}
    torch.save(header | {"state": state}, file)
    return file.getvalue()


READ = """
    import sys
    import torch
    from pathlib import Path
    from pyro_sde.training import CheckpointError, load_checkpoint, save_checkpoint

    def highest():
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) // 1024

    def read(path):
        try:
            load_checkpoint(path, "pyro_sde.fit")
        except CheckpointError as e:
            print(str(e).replace(chr(10), " "))

    folder = Path(sys.argv[1])
    Path(folder / "small").write_bytes(b"no checkpoint")
    read(folder / "small")
    for name in sys.argv[2:]:
        before = highest()
        read(folder / name)
        print(highest() - before)
"""


def test_bombs_are_refused_before_they_fill_the_memory(tmp_path):
    bombs = {
        "deflated": (deflated(), "it is compressed, and checkpoints are not"),
        "boastful": (boastful(), "it claims to hold more than it does"),
        "expanded": (expanded(), r"['w'] is a tensor that is larger than its memory"),
    }
    for name, (content, _) in bombs.items():
        assert len(content) < GIGABYTE / 100
        (tmp_path / name).write_bytes(sealed(content))
    command = [sys.executable, "-c", textwrap.dedent(READ), str(tmp_path), *bombs]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    _, *lines = ended.stdout.splitlines()
    assert len(lines) == 2 * len(bombs)
    for (_, message), text, more in zip(bombs.values(), lines[::2], lines[1::2], strict=True):
        assert message in text and "Nothing was loaded" in text
        assert int(more) < 150, text  # megabytes


def test_a_large_file_without_a_seal_is_not_read(tmp_path):
    """A sparse file of a terabyte."""
    path = tmp_path / "a.pt"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="does not end with a digest"):
        load_checkpoint(path, "mine")


def test_drafts_of_killed_processes_are_removed(tmp_path):
    path, other = tmp_path / "run.pt", tmp_path / ".run.pt.mine.draft"
    (tmp_path / f".run.pt.{'0' * 16}.draft").write_bytes(b"half")
    other.touch()  # not one of ours
    Victim().train(path, 1)
    with checkpoint_file.CheckpointFile(path):
        assert list(tmp_path.glob(".run.pt.*.draft")) == [other]
