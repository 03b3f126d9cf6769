"""Small files in the formats of MNIST, its kin and CIFAR-10: nothing to learn, all to be read."""

import gzip
import struct
from pathlib import Path

import numpy as np
import torch


def idx(values: torch.Tensor) -> bytes:
    head = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return head + values.to(torch.uint8).numpy().tobytes()


def write_mnist(root: Path, train: int = 48, test: int = 12) -> Path:
    torch.manual_seed(0)
    for name in ("MNIST", "notMNIST", "FashionMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for stem, n in (("train", train), ("t10k", test)):
            for kind, shape in (("images-idx3", (n, 28, 28)), ("labels-idx1", (n,))):
                values = torch.randint(0, 256 if len(shape) > 1 else 10, shape)
                compressed = gzip.compress(idx(values))
                (raw / f"{stem}-{kind}-ubyte.gz").write_bytes(compressed)
    return root


def write_cifar10(root: Path, train: int = 48, test: int = 12) -> Path:
    rng = np.random.default_rng(0)
    arrays = {}
    for stem, n in (("train", train), ("test", test)):
        arrays[f"x_{stem}"] = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{stem}"] = rng.integers(0, 10, n, dtype=np.uint8)
    np.savez(root / "cifar10.npz", **arrays)
    return root
