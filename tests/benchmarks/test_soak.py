"""The soak run in small, and that it would notice a leak."""

import math
import mmap

import pytest
import soak
import torch

SMALL = ["--steps", "60", "--every", "3", "--batch", "4"]


def test_a_few_steps(capsys):
    args = soak.parse(SMALL)
    result = soak.main(args)
    assert all(math.isfinite(x) for x in result.values())
    assert result["tensors"] == 0 and result["megabytes at first"] > 50
    assert "from step 6 to 60" in capsys.readouterr().out


def test_a_leak_is_noticed(monkeypatch):
    """A tensor is kept in every step, and pages that no free place on the heap could hold."""
    left: list = []
    page = bytes(range(256)) * 2048  # half a megabyte
    step = soak.SVI.step

    def leaky(self, *args):
        left.append((torch.ones(1), mmap.mmap(-1, len(page))))
        left[-1][1].write(page)
        return step(self, *args)

    monkeypatch.setattr(soak.SVI, "step", leaky)
    result = soak.main(soak.parse(SMALL))
    assert result["tensors"] == 54
    assert result["growth"] == pytest.approx(54 * 0.5, rel=0.3)
    assert not soak.is_flat(result, 4.0) and not soak.is_flat({"growth": 5.0, "tensors": 0}, 4.0)
    assert soak.is_flat({"growth": 1.0, "tensors": 0}, 4.0)
