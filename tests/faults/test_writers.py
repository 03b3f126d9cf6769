"""Two trainings on one checkpoint, and places where none can be written."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import soak
from attacks import writers
from attacks.victim import Victim

from pyro_sde.training import CheckpointInUse, checkpoint_file, load_checkpoint

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")


def step_of(path):
    return load_checkpoint(path, "pyro_sde.fit")["step"]


@LINUX
def test_two_writers_that_are_killed():
    found = writers.attack(12, seed=3)
    assert soak.exceeded(found, writers.BOUNDS) == []
    assert found["writers"] > 1 and found["refused"] > 1 and found["steps"] > 1


def test_the_second_one_is_told_who_is_first(tmp_path, monkeypatch):
    """Also before the first one has written its name, or over that of a killed process."""
    path, holder = tmp_path / "run.pt", tmp_path / ".run.pt.holder"
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    with checkpoint_file.CheckpointFile(path):
        name = holder.read_text().strip()
        assert name.startswith(f"process {os.getpid()} on ")
        for second in (path, link):
            with pytest.raises(CheckpointInUse) as e:
                Victim().train(second, 1)
            assert f"{second} is in use by {name}: two trainings" in str(e.value)
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        for text in ("", name.replace(str(os.getpid()), str(ended.pid))):
            holder.write_text(text)
            monkeypatch.setattr(checkpoint_file.time, "sleep", lambda _: holder.write_text(name))
            with pytest.raises(CheckpointInUse, match=f"in use by process {os.getpid()} on"):
                Victim().train(path, 1)
        monkeypatch.undo()
        holder.unlink()
        with pytest.raises(CheckpointInUse, match="in use by another process: "):
            Victim().train(path, 1)
    assert not path.exists() and Victim().train(path, 1).step == [1]


@contextlib.contextmanager
def largest_file(size):
    """A limit to the size of files, as a disk that is full after so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full(tmp_path):
    path = tmp_path / "run.pt"
    Victim().train(path, 2)
    content = path.read_bytes()
    with largest_file(len(content) // 2), pytest.raises(OSError) as e:
        Victim().train(path, 4, resume=True)
    assert f"checkpoint {path} could not be written (File too large)" in str(e.value)
    assert "The file before it is as it was" in str(e.value)
    assert path.read_bytes() == content
    assert not list(tmp_path.glob(".run.pt.*.draft"))
    assert Victim().train(path, 4, resume=True).step == [1, 2, 3, 4]
    new = tmp_path / "new.pt"
    with largest_file(1000), pytest.raises(OSError, match=r"new\.pt.*There is no file yet"):
        Victim().train(new, 1)
    assert not new.exists()


def test_links_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "run.pt", tmp_path / "link.pt"
    link.symlink_to(Path("disk") / "run.pt")
    Victim().train(link, 2)
    Victim().train(link, 4, resume=True)
    assert link.is_symlink() and not real.is_symlink() and step_of(real) == 4
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    loop = tmp_path / "loop.pt"
    loop.symlink_to("loop.pt")
    with pytest.raises(ValueError, match=r"loop\.pt is a symbolic link to itself"):
        Victim().train(loop, 1)


def folder(path):
    path.mkdir()


def pipe(path):
    os.mkfifo(path)


def in_a_file(path):
    path.parent.rmdir()
    path.parent.touch()


def before_a_folder(path):
    path.touch()
    path.with_name("run.pt.1").mkdir()


PLACES = {
    "folder": (folder, ValueError, r"run\.pt is a folder: give the path of a file in it"),
    "pipe": (pipe, ValueError, r"run\.pt is not a regular file"),
    "in_a_file": (in_a_file, OSError, r"run\.pt cannot be written there"),
    "generation": (
        before_a_folder,
        ValueError,
        r"run\.pt\.1, where .* is a folder",
    ),
    "long_name": (None, OSError, r"a{300} cannot be written there"),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_are_refused_before_the_first_step(case, tmp_path):
    make, error, message = PLACES[case]
    path = tmp_path / "place" / "run.pt"
    path.parent.mkdir()
    if make is None:
        path = path.with_name("a" * 300)
    else:
        make(path)
    refuse(path, error, message, resume=True)


def refuse(path, error, message, **options):
    def none(step):
        raise AssertionError("a step was taken")

    with pytest.raises(error, match=message):
        Victim().train(path, 1, anneal=none, **options)


@pytest.fixture
def public_folder():
    """A folder that every user may enter, also while another pytest protects its own folders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def ordinary_user(public_folder):
    """Root may write anywhere, so a test by root goes on as nobody."""
    is_root = os.geteuid() == 0
    yield lambda: os.setresuid(65534, 65534, 0) if is_root else None
    if is_root:
        os.setresuid(0, 0, 0)


def test_write_protected_places_are_refused_before_the_first_step(public_folder, ordinary_user):
    read_only = public_folder / "folder" / "run.pt"
    protected = public_folder / "open" / "run.pt"
    for path in (read_only, protected):
        path.parent.mkdir()
    protected.touch()
    protected.chmod(0o444)
    protected.parent.chmod(0o777)
    read_only.parent.chmod(0o555)
    ordinary_user()
    refuse(read_only, PermissionError, r"folder/run\.pt cannot be written there .*permissions")
    refuse(protected, PermissionError, r"open/run\.pt cannot be written there .*write protected")
    assert os.listdir(read_only.parent) == []
