"""Checkpoints: written whole, verified before they are read, and read without running code."""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_file import CheckpointFile

__all__ = ["CheckpointError", "encode_checkpoint", "load_checkpoint", "save_checkpoint"]

FORMAT, VERSION = "pyro_sde checkpoint", 2
SEAL = re.compile(rb"\npyro_sde sha256 ([0-9a-f]{64}) ([0-9]{20})\n")
"""The last line of a file: a digest of what stands before it, and its length. torch.load verifies
neither the content of tensors nor their names."""
SEAL_LENGTH = len("\npyro_sde sha256 ") + 64 + 1 + 20 + 1
NOTHING = "Nothing was loaded and none of its code was run"


class CheckpointError(RuntimeError):
    """The file is not a checkpoint, is damaged, or belongs to another training.

    Example::

        >>> import tempfile
        >>> from pathlib import Path
        >>> from pyro_sde.training import CheckpointError, load_checkpoint
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> size = path.write_bytes(b"something else")
        >>> try:
        ...     load_checkpoint(path, kind="mine")
        ... except CheckpointError:
        ...     print("nothing was loaded")
        nothing was loaded
    """


def save_checkpoint(
    path: str | os.PathLike, state: Mapping[str, Any], kind: str, *, keep: int = 1
) -> None:
    """Write ``state`` to ``path`` atomically: a process that is killed meanwhile leaves the
    previous file intact. A file that another training writes to is refused.

    Example::

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from pyro_sde.training import load_checkpoint, save_checkpoint
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> save_checkpoint(path, {"step": 3, "w": torch.ones(2)}, kind="mine")
        >>> load_checkpoint(path, kind="mine")
        {'step': 3, 'w': tensor([1., 1.])}

    :param path: The file; missing folders are created, and a symbolic link is followed.
    :param state: A dict of tensors, numbers, strings, None, and dicts, lists and tuples of them.
    :param kind: A name for this sort of checkpoint, which :func:`load_checkpoint` asks for.
    :param keep: How many generations to keep; with 2 the file before is kept as ``path`` with
        ``.1`` after it.
    """
    content = encode_checkpoint(state, kind)
    with CheckpointFile(path, keep) as file:
        file.write(content)


def encode_checkpoint(state: Mapping[str, Any], kind: str) -> bytes:
    """The content of a checkpoint's file.

    :param state: As for :func:`save_checkpoint`.
    :param kind: As for :func:`save_checkpoint`.
    :returns: What ``torch.save`` writes, and a line with its digest.
    """
    payload = {"format": FORMAT, "version": VERSION, "kind": kind, "state": _plain(state, "state")}
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    content = buffer.getbuffer()
    digest = hashlib.sha256(content).hexdigest()
    return b"".join((content, f"\npyro_sde sha256 {digest} {len(content):020d}\n".encode()))


def load_checkpoint(path: str | os.PathLike, kind: str) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, with all tensors on the CPU.

    Code in a file is never run. A file that is cut off or damaged, be it by a single bit, or that
    another program wrote, raises a :class:`CheckpointError`.

    Example::

        >>> import tempfile
        >>> from pathlib import Path
        >>> from pyro_sde.training import load_checkpoint, save_checkpoint
        >>> path = Path(tempfile.mkdtemp()) / "run.pt"
        >>> save_checkpoint(path, {"step": 3}, kind="mine")
        >>> load_checkpoint(path, kind="mine")["step"]
        3

    :param path: The file.
    :param kind: The ``kind`` that the file was saved with.
    :returns: The saved ``state``.
    """
    content = _verified(Path(path))
    try:
        _check_size(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        _check_tensors(found)
    except Exception as e:
        reason = str(e).strip().split("\n")[0]
        if "weights_only" in reason:  # torch advises to load what it has refused to
            reason = "it holds other objects than numbers, strings and tensors"
        raise CheckpointError(
            f"{path} is not a checkpoint of pyro_sde ({reason[:200] or type(e).__name__}). "
            f"{NOTHING}; move it away to begin anew, or give another path"
        ) from None
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


def _verified(path: Path) -> bytes:
    """The content of a file without its seal. A file without one is not read into memory."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file. {NOTHING}; give the path of a file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - SEAL_LENGTH))
        seal = SEAL.fullmatch(file.read(SEAL_LENGTH))
        if seal is None or int(seal[2]) != size - SEAL_LENGTH:
            raise CheckpointError(
                f"{path} is not a checkpoint of pyro_sde, or is cut off, or was written by a "
                f"version before 0.2: it does not end with a digest. {NOTHING}; "
                f"{_other_generation(path)}"
            )
        file.seek(0)
        content = file.read(size - SEAL_LENGTH)
    if hashlib.sha256(content).hexdigest().encode() != seal[1]:
        raise CheckpointError(
            f"{path} is damaged: its content does not have the digest that it ends with. "
            f"{NOTHING}; {_other_generation(path)}"
        )
    return content


def _other_generation(path: Path) -> str:
    before = path.with_name(path.name + ".1")
    if before.exists():
        return f"the checkpoint before it is {before}: copy that file to {path} to go on from it"
    return "move it away to begin anew, or give another path"


def _check_size(content: bytes) -> None:
    """Refuse an archive that unpacks to more than it is."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
        raise ValueError("it is compressed, and checkpoints are not")
    if sum(e.file_size for e in entries) > len(content):
        raise ValueError("it claims to hold more than it does")


def _check_tensors(x: Any, where: str = "the file", seen: set[int] | None = None) -> None:
    """Refuse tensors that are larger than their memory: a copy of one could be of any size."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        if x.layout != torch.strided or x.is_quantized or x.is_meta:
            raise ValueError(f"{where} is a tensor of an unusual kind")
        if x.numel() * x.element_size() > x.untyped_storage().nbytes():
            raise ValueError(f"{where} is a tensor that is larger than its memory")
    elif isinstance(x, Mapping):
        for k, v in x.items():
            _check_tensors(v, f"{where}[{k!r}]", seen)
    elif isinstance(x, (list, tuple)):
        for i, v in enumerate(x):
            _check_tensors(v, f"{where}[{i}]", seen)


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
