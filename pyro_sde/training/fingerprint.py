"""A fingerprint of data, by which a resumed training notices other data."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["fingerprint"]


def fingerprint(*arguments: Any) -> str:
    """A digest of the values of tensors, arrays, numbers and strings, in containers or not.

    Of other objects only the type counts.

    Example::

        >>> y = torch.zeros(3)
        >>> fingerprint((y, 1)) == fingerprint((y.clone(), 1)) != fingerprint((y + 1e-6, 1))
        True

    :param arguments: Arguments of a model.
    :returns: The digest, as hexadecimal digits.
    """
    digest = hashlib.sha256()
    _add(digest, arguments)
    return digest.hexdigest()


def _add(digest: Any, x: Any) -> None:
    if isinstance(x, Tensor):
        digest.update(f"tensor {x.dtype} {tuple(x.shape)};".encode())
        if x.layout == torch.strided and not x.is_quantized:
            plain = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(plain.flatten().view(torch.uint8).numpy().data)
    elif isinstance(x, dict):
        digest.update(f"dict {len(x)};".encode())
        for k, v in sorted(x.items(), key=lambda item: repr(item[0])):
            digest.update(f"{k!r}:".encode())
            _add(digest, v)
    elif isinstance(x, (list, tuple)):
        digest.update(f"{type(x).__name__} {len(x)};".encode())
        for v in x:
            _add(digest, v)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        _add(digest, {field.name: getattr(x, field.name) for field in dataclasses.fields(x)})
    elif x is None or type(x) in (bool, int, float, complex, str, bytes):
        digest.update(f"{x!r};".encode())
    elif isinstance(x, (np.ndarray, np.generic)):
        digest.update(f"array {x.dtype} {x.shape};".encode())
        _add(digest, x.tolist()) if x.dtype.hasobject else digest.update(x.tobytes())
    else:
        digest.update(f"{type(x).__qualname__};".encode())
