"""Checkpoint files: written atomically, and read without running code from them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CheckpointError", "load_checkpoint", "save_checkpoint"]

FORMAT, VERSION = "pyro_sde checkpoint", 1


class CheckpointError(RuntimeError):
    """The file is not a checkpoint, or it belongs to another training.

    Example::

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> size = path.write_bytes(b"something else")
        >>> try:
        ...     load_checkpoint(path, kind="mine")
        ... except CheckpointError:
        ...     print("nothing was loaded")
        nothing was loaded
    """


def save_checkpoint(path: str | os.PathLike, state: Mapping[str, Any], kind: str) -> None:
    """Write ``state`` to ``path`` atomically: a process that is killed meanwhile leaves the
    previous file intact.

    Example::

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> save_checkpoint(path, {"step": 3, "w": torch.ones(2)}, kind="mine")
        >>> load_checkpoint(path, kind="mine")
        {'step': 3, 'w': tensor([1., 1.])}

    :param path: The file; missing folders are created.
    :param state: A dict of tensors, numbers, strings, None, and dicts, lists and tuples of them.
    :param kind: A name for this sort of checkpoint, which :func:`load_checkpoint` asks for.
    """
    path = Path(path)
    payload = {"format": FORMAT, "version": VERSION, "kind": kind, "state": _plain(state, "state")}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Write the folder's entry of the new name to disk. Windows neither can nor needs to."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_checkpoint(path: str | os.PathLike, kind: str) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, with all tensors on the CPU.

    Code in a file is never run. A file that is cut off, or that another program wrote, raises a
    :class:`CheckpointError`.

    Example::

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> save_checkpoint(path, {"step": 3}, kind="mine")
        >>> load_checkpoint(path, kind="mine")["step"]
        3

    :param path: The file.
    :param kind: The ``kind`` that the file was saved with.
    :returns: The saved ``state``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as e:
        reason = str(e).strip().split("\n")[0][:200] or type(e).__name__
        raise CheckpointError(
            f"{path} is not a checkpoint of pyro_sde, or is cut off ({reason}). Nothing was "
            "loaded and none of its code was run; move it away to begin anew, or give another path"
        ) from e
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} was written by another program: it holds no {FORMAT!r}. Nothing was "
            "loaded; give the path of a checkpoint, or another path to begin anew"
        )
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has the format version {found.get('version')!r}, and this pyro_sde reads "
            f"{VERSION}. Nothing was loaded; use the pyro_sde that wrote it, or begin anew with "
            "another path"
        )
    if found.get("kind") != kind or not isinstance(found.get("state"), dict):
        raise CheckpointError(
            f"{path} is a checkpoint of {found.get('kind')!r}, not of {kind!r}. Nothing was "
            "loaded; give another path"
        )
    return found["state"]


def _plain(x: Any, where: str) -> Any:
    if isinstance(x, Tensor):
        return x.detach().cpu().clone()
    if x is None or isinstance(x, (str, bool)):
        return x
    if isinstance(x, Integral):
        return int(x)
    if isinstance(x, Real):
        return float(x)
    if isinstance(x, Mapping):
        return {_key(k, where): _plain(v, f"{where}[{k!r}]") for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_plain(v, f"{where}[{i}]") for i, v in enumerate(x))
    raise TypeError(
        f"{where} is a {type(x).__name__}, and a checkpoint holds tensors, numbers and strings "
        "only, so that reading it runs no code"
    )


def _key(k: Any, where: str) -> Any:
    if not isinstance(k, (str, int)):
        raise TypeError(f"the keys of {where} must be strings or integers: found {k!r}")
    return k
