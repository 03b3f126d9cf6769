"""The attacks in small, and that they would notice what they look for."""

import importlib
import math
import mmap
import re

import pytest
import soak
import torch
from attacks import memory, writers

from pyro_sde.training import checkpoint
from pyro_sde.training.checkpoint import SEAL_LENGTH


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(memory, "BATCH", 4)


def test_a_few_steps(capsys):
    assert soak.main(soak.parse(["memory", "--count", "60"])) == []
    assert "memory: steps 60, MB at first" in capsys.readouterr().out


def test_a_leak_is_noticed(monkeypatch):
    """A tensor is kept in every step, and pages that no free place on the heap could hold."""
    left: list = []
    page = bytes(range(256)) * 2048  # half a megabyte
    step = memory.SVI.step

    def leaky(self, *args):
        left.append((torch.ones(1), mmap.mmap(-1, len(page))))
        left[-1][1].write(page)
        return step(self, *args)

    monkeypatch.setattr(memory.SVI, "step", leaky)
    found = memory.attack(60, seed=0)
    assert found["more tensors"] == 54
    assert found["growth in MB"] == pytest.approx(54 * 0.5, rel=0.3)
    assert len(soak.exceeded(found, memory.BOUNDS)) == 2


def test_bounds():
    assert soak.exceeded({"lost": 1, "seconds": 9.0}, {"lost": 1}) == []
    assert soak.exceeded({"lost": 2, "wrong": math.nan}, {"lost": 1, "wrong": 0}) == [
        "lost 2, more than 1",
        "wrong nan, more than 0",
    ]


@pytest.mark.parametrize("name", soak.NAMES)
def test_every_attack_has_bounds(name):
    module = importlib.import_module(f"attacks.{name}")
    assert module.BOUNDS and module.COUNT >= 100 and callable(module.attack)


def test_a_promise_that_is_broken_is_named(monkeypatch, capsys):
    """Checkpoints that are loaded whatever their digest is; torch alone notices few of the bits."""
    monkeypatch.setattr(checkpoint, "_verified", lambda path: path.read_bytes()[:-SEAL_LENGTH])
    broken = soak.main(soak.parse(["damage", "--count", "30"]))
    assert any(re.match(r"damage: loaded \d+, more than 0", text) for text in broken)
    assert "damage: bits flipped 30, pages zeroed 6" in capsys.readouterr().out


LOG = """1 step
2 told 1
1 killed
2 told 1
3 told nobody
2 step
1 step
3 error OSError()
"""


def test_what_writers_log_is_counted(capsys):
    assert writers._of_log(LOG) == {
        "writers": 3,
        "refused": 3,
        "told nobody": 1,
        "told wrongly": 1,
        "overlaps": 1,
        "other errors": 1,
    }
    assert capsys.readouterr().err == "OSError()\n"
