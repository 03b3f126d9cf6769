"""Checkpoints that a disk has damaged: single bits, pages of zeros, ends that are missing.

Each damaged file is given to ``fit(resume=True)``, which must refuse it with a ``CheckpointError``
before anything in model, guide, param store or random state has changed. For every five bits
that are flipped, one page of 4 KiB is zeroed and one file is cut off.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from pyro_sde.training import CheckpointError

from .victim import Victim, are_same, checkpoint

COUNT = 1000
BOUNDS = {"loaded": 0, "other errors": 0, "changed something": 0}
PAGE = 4096


def flip(content: bytes, rng: random.Random) -> bytes:
    """One bit, anywhere."""
    damaged = bytearray(content)
    damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def zero(content: bytes, rng: random.Random) -> bytes:
    """One page that was not zero."""
    while True:
        start = PAGE * rng.randrange(-(-len(content) // PAGE))
        length = min(PAGE, len(content) - start)
        if any(content[start : start + length]):
            return content[:start] + bytes(length) + content[start + length :]


def cut(content: bytes, rng: random.Random) -> bytes:
    """The end, of any length."""
    return content[: rng.randrange(len(content))]


def attack(count: int, seed: int) -> dict[str, int]:
    """Flip ``count`` bits, and zero and cut a fifth as many."""
    rng = random.Random(seed)
    ways: list[Callable[[bytes, random.Random], bytes]]
    ways = [flip] * count + [zero] * (count // 5) + [cut] * (count // 5)
    found = {"bits flipped": count, "pages zeroed": count // 5, "cut off": count // 5}
    found |= dict.fromkeys(BOUNDS, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        content = checkpoint(path)
        found["bytes"] = len(content)
        victim = Victim()
        victim.train(None, 1)
        torch.rand(3)
        before = victim.state()
        for way in tqdm(ways, desc="damage", unit="file", mininterval=1.0):
            path.write_bytes(way(content, rng))
            try:
                victim.train(path, 4, resume=True)
                found["loaded"] += 1
            except CheckpointError:
                pass
            except Exception:
                found["other errors"] += 1
            if not are_same(before, victim.state()):
                found["changed something"] += 1
                before = victim.state()
    return found
