"""The attacks in small, and that they would notice what they look for."""

import math
import mmap

import pytest
import soak
import torch
from attacks import memory


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
