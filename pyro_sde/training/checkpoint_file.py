"""The file of a checkpoint: its lock, its drafts, and the generations before it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["CheckpointFile", "CheckpointInUse"]


class CheckpointInUse(RuntimeError):
    """Another training, in this process or in another one, writes to the same checkpoint.

    Example::

        >>> import tempfile
        >>> from pathlib import Path
        >>> import pyro, torch
        >>> from pyro_sde import fit
        >>> from pyro_sde.training import CheckpointInUse
        >>> path, refused = Path(tempfile.mkdtemp()) / "run.pt", []
        >>> def model():
        ...     pyro.factor("f", -pyro.param("a", torch.tensor(1.0)).square())
        ...     if not refused:  # a second training while this one runs
        ...         refused.append(True)
        ...         try:
        ...             fit(model, lambda: None, checkpoint=path)
        ...         except CheckpointInUse as e:
        ...             print("in use by process" in str(e))
        >>> pyro.clear_param_store()
        >>> history = fit(model, lambda: None, steps=1, checkpoint=path, progress=False)
        True
    """


class CheckpointFile:
    """A context in which this process alone writes to a file, and each write replaces it whole.

    The content goes to a draft with a name of its own, which then takes the place of the file, so
    a process that is killed leaves the previous content. A symbolic link is followed. The lock is
    that of the operating system, and ends with the process.

    Example::

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> with CheckpointFile(path, keep=2) as file:
        ...     file.write(b"first")
        ...     file.write(b"second")
        >>> path.read_bytes(), file.generation(1).read_bytes()
        (b'second', b'first')

    :param path: The file; missing folders are created.
    :param keep: How many generations are kept: the file, and ``keep - 1`` before it, in files
        with ``.1``, ``.2``, ... after their names.
    """

    def __init__(self, path: str | os.PathLike, keep: int = 1) -> None:
        self.given = Path(path)
        """The path as the user gave it, for messages."""
        self.path, self.keep = Path(os.path.realpath(path)), keep
        self._lock = self.path.with_name(f".{self.path.name}.lock")
        # Not in the lock file, which filelock before 4.0 empties when another process tries it.
        self._holder_file = self.path.with_name(f".{self.path.name}.holder")

    def __enter__(self) -> CheckpointFile:
        try:
            self._check_place()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._held = FileLock(self._lock, timeout=0)
            self._held.acquire()
        except Timeout:
            raise CheckpointInUse(
                f"checkpoint {self.given} is in use by {self._holder()}: two trainings cannot "
                "write to one file. Wait for the other one, end it, or give another path"
            ) from None
        except OSError as e:
            raise self._refused(e) from e
        try:
            self._holder_file.write_text(
                f"process {os.getpid()} on {socket.gethostname()}, since "
                f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            )
            self._remove_drafts()
            draft = self._draft_name()
            draft.touch(exist_ok=False)  # whether the folder and the length of the name allow it
            draft.unlink()
        except BaseException as e:
            self.__exit__()
            if isinstance(e, OSError):
                raise self._refused(e) from e
            raise
        return self

    def __exit__(self, *args: object) -> None:
        # The file of the lock stays: another process may have opened it, and would lock a file
        # without a name.
        with contextlib.suppress(OSError):
            self._holder_file.unlink()
        self._held.release()

    def _check_place(self) -> None:
        for k in range(self.keep):
            file = self.generation(k)
            name = f"checkpoint {self.given}" if k == 0 else f"{file}, where a checkpoint goes,"
            if file.is_dir():
                raise ValueError(f"{name} is a folder: give the path of a file in it")
            if file.is_symlink() and k == 0:
                raise ValueError(f"{name} is a symbolic link to itself: give the path of a file")
            if file.exists() and not file.is_file():
                raise ValueError(f"{name} is not a regular file: give the path of one")
            if k > 0 and file.exists() and not self.path.exists():
                raise ValueError(
                    f"{file} exists, the generation before checkpoint {self.given}, which does "
                    "not: copy it there to continue from it, move it away, or give another path"
                )
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is write protected")

    def _holder(self) -> str:
        """Who has the lock. It writes its name right after it took the lock, so there may be no
        name yet, or that of the process that had the lock before and was killed."""
        text = ""
        for _ in range(100):
            with contextlib.suppress(OSError):
                text = self._holder_file.read_text().strip()
                if text and not _has_ended(text):
                    break
            time.sleep(0.01)
        return text or "another process"

    def _remove_drafts(self) -> None:
        """Remove drafts of processes that were killed: this process holds the lock."""
        draft = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.draft")
        for name in os.listdir(self.path.parent):
            if draft.fullmatch(name):
                self.path.with_name(name).unlink(missing_ok=True)

    def generation(self, k: int) -> Path:
        """The path of an earlier generation.

        :param k: Its age, from 0 for the file itself.
        :returns: The path.
        """
        return self.path if k == 0 else self.path.with_name(f"{self.path.name}.{k}")

    def write(self, content: bytes, rotate: bool = True) -> None:
        """Replace the file.

        :param content: The new content.
        :param rotate: Whether the present content becomes the previous generation. If not, it is
            lost, and the previous generations stay.
        """
        draft = self._draft_name()
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if rotate and self.path.exists():
                self._rotate()
            os.replace(draft, self.path)
            _sync_folder(self.path.parent)
        except OSError as e:
            raise self._failed(e) from e
        finally:
            draft.unlink(missing_ok=True)

    def _draft_name(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.draft")

    def _rotate(self) -> None:
        """Number the generations anew. The file stays where it is all the time."""
        for k in range(self.keep - 1, 1, -1):
            if self.generation(k - 1).exists():
                os.replace(self.generation(k - 1), self.generation(k))
        if self.keep > 1:
            copy = self._draft_name()
            try:
                os.link(self.path, copy)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.path, copy)
            os.replace(copy, self.generation(1))

    def go_back(self) -> None:
        """Put the previous generation in the place of the file."""
        os.replace(self.generation(1), self.path)
        for k in range(2, self.keep):
            if self.generation(k).exists():
                os.replace(self.generation(k), self.generation(k - 1))

    def _refused(self, e: OSError) -> OSError:
        return type(e)(
            e.errno,
            f"checkpoint {self.given} cannot be written there ({e.strerror or e}): give another "
            "path, or change the permissions of the file and its folder",
        )

    def _failed(self, e: OSError) -> OSError:
        kept = "The file before it is as it was" if self.path.exists() else "There is no file yet"
        return type(e)(
            e.errno, f"checkpoint {self.given} could not be written ({e.strerror or e}). {kept}"
        )


def _has_ended(holder: str) -> bool:
    """Whether a holder is a process of this machine that is no more. Only POSIX can tell."""
    found = re.match(r"process (\d+) on (.*), since ", holder)
    if found is None or os.name != "posix" or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is of another user
        return False
    return False


def _sync_folder(folder: Path) -> None:
    """Write the folder's entry of the new name to disk, where the system can: Windows and some
    network file systems cannot. The file itself is complete without it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
