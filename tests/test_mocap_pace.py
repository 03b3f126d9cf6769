"""What three frames tell of the pace, on walkers whose posture tells it, or does not."""

import math

import gait
import mocap_pace
import pytest
import torch
from scipy.io import savemat


def walkers(count, tells):
    """Waves of known periods, with a joint that is still: where, says the period or chance."""
    period = 120 + 50 * torch.rand(count, 1, 1)
    angle = 2 * math.pi * torch.arange(300).unsqueeze(-1) / period + 6.3 * torch.rand(count, 1, 1)
    x = 10 * torch.sin(angle * torch.tensor([1.0, 1.0, 2.0]) + torch.tensor([0.0, 1.0, 2.0]))
    held = (period - 145) if tells else 15 * torch.randn(count, 1, 1)
    return torch.cat([x, held.expand(-1, 300, -1)], -1), period.flatten()


def test_periods():
    x, true = walkers(5, True)
    found = torch.tensor([gait.period(one) for one in x])
    torch.testing.assert_close(found.to(true), true, rtol=0, atol=0.3)


@pytest.mark.parametrize("tells", [True, False])
def test_what_a_posture_tells(tells, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mocap_pace, "EVERY", 20)
    sets = {"Xtr": walkers(16, tells)[0], "Xval": walkers(3, tells)[0], "Xtest": torch.zeros(1)}
    savemat(tmp_path / "walks.mat", {name: x.numpy() for name, x in sets.items()})
    best = mocap_pace.main(mocap_pace.parse(["--data", str(tmp_path / "walks.mat")]))
    assert all(r > 0.9 if tells else r < 0.5 for r in best.values())
    assert "training, 16 walkers" in capsys.readouterr().out
