"""Image data: from disk, or through torchvision; splits, augmentation, corruptions."""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_sde._torchvision import import_with_repair

CLASSES = 10
STATISTICS = {
    "MNIST": ((0.1307,), (0.3081,)),
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


@dataclass
class Images:
    """Images as bytes, (n, channels, height, width), and their labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class Data:
    """A data set with the last part of the training images held out for validation."""

    name: str
    train: Images
    validation: Images
    test: Images

    def normalise(self, x: Tensor) -> Tensor:
        """Bytes, or numbers from 0 to 1, to numbers of mean 0 and spread 1."""
        mean, sd = (torch.tensor(s).view(-1, 1, 1) for s in STATISTICS[self.name])
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        return ((x - mean) / sd).contiguous(memory_format=torch.channels_last)


def read_idx(path: Path) -> Tensor:
    """An idx file, compressed or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of bytes")
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    data = torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8)
    if data.numel() != math.prod(shape):
        raise ValueError(f"{path} is cut off: {data.numel()} bytes, {math.prod(shape)} announced")
    return data.view(shape)


def load_idx(root: Path, name: str, train: bool) -> Images:
    """MNIST or one of its kin, from the files under ``root/name/raw``."""
    stem = "train" if train else "t10k"
    parts = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        path = root / name / "raw" / f"{stem}-{kind}"
        parts.append(read_idx(path if path.exists() else path.with_name(path.name + ".gz")))
    return Images(parts[0].unsqueeze(1), parts[1].long())


def _mnist(root: Path, train: bool) -> Images:
    if not list(root.glob("MNIST/raw/*idx3-ubyte*")):
        import_with_repair("torchvision", 'load("MNIST")')
        from torchvision.datasets import MNIST

        MNIST(root, train=train, download=True)
    return load_idx(root, "MNIST", train)


def _cifar10(root: Path, train: bool) -> Images:
    archive = root if root.suffix == ".npz" else root / "cifar10.npz"
    if archive.exists():
        import numpy as np

        with np.load(archive) as data:
            x, y = (_entry(data, kind, train) for kind in ("x", "y"))
    else:
        import_with_repair("torchvision", 'load("CIFAR10")')
        from torchvision.datasets import CIFAR10

        there = (root / CIFAR10.base_folder).exists()
        source = CIFAR10(root, train=train, download=not there)
        x, y = source.data, source.targets
    x, y = torch.as_tensor(x), torch.as_tensor(y).flatten().long()
    return Images(x.movedim(-1, 1).contiguous(), y)


def _entry(data, kind: str, train: bool):
    name = f"{kind}_{'train' if train else 'test'}"
    if name not in data:
        raise ValueError(f"the .npz has {sorted(data)}, but no {name}")
    return data[name]


def load(name: str, root: Path, subset: int | None = None, held_out: float = 1 / 12) -> Data:
    """MNIST or CIFAR10 from ``root``, downloaded if it is not there.

    :param subset: How many training images to use, and at most so many for validation and test.
    :param held_out: The share of the training images that is for validation.
    """
    source = {"MNIST": _mnist, "CIFAR10": _cifar10}[name]
    try:
        train, test = source(root, True), source(root, False)
    except Exception as e:
        raise SystemExit(
            f"no {name} under {root} and no way to download it ({e}); say where it is with "
            "--data-root"
        ) from e
    n = len(train) - round(len(train) * held_out)
    m = n if subset is None else min(n, subset)
    k = len(test) if subset is None else min(len(test), subset)
    return Data(
        name,
        Images(train.x[:m], train.y[:m]),
        Images(train.x[n : n + k], train.y[n : n + k]),
        Images(test.x[:k], test.y[:k]),
    )


def shift(x: Tensor, pixels: int, flip: bool = False) -> Tensor:
    """Every image moved by up to so many pixels each way, and turned left to right if asked."""
    n, _, h, w = x.shape
    padded = F.pad(x, (pixels,) * 4)
    dy, dx = torch.randint(0, 2 * pixels + 1, (2, n))
    rows = dy.view(-1, 1) + torch.arange(h)
    columns = dx.view(-1, 1) + torch.arange(w)
    if flip:
        turned = torch.rand(n, 1) < 0.5
        columns = torch.where(turned, columns.flip(1), columns)
    index = torch.arange(n).view(-1, 1, 1)
    return padded.movedim(1, -1)[index, rows.unsqueeze(2), columns.unsqueeze(1)].movedim(-1, 1)


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Numbers from 0 to 1, turned about the centre."""
    a = math.radians(degrees)
    matrix = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def blur(x: Tensor, sd: float) -> Tensor:
    """Numbers from 0 to 1, under a Gaussian of so many pixels."""
    radius = math.ceil(3 * sd)
    line = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sd) ** 2)
    kernel = torch.outer(line, line) / line.sum() ** 2
    c = x.shape[1]
    return F.conv2d(x, kernel.expand(c, 1, *kernel.shape), padding=radius, groups=c)


def add_noise(x: Tensor, sd: float, seed: int = 0) -> Tensor:
    """Numbers from 0 to 1, with Gaussian noise, clipped; always the same noise."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return (x + sd * noise).clamp(0, 1)
