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
    assert all(best[n] > 0.9 if tells else best[n] < 0.5 for n in list(best)[:2])
    assert "training, 16 walkers" in capsys.readouterr().out


def test_one_shape():
    """Waves of one shape, but for period and phase: what is missed is what is not known."""
    period = torch.linspace(130, 140, 12).double()[torch.randperm(12)]
    angle = 2 * math.pi * (torch.rand(12, 1) + torch.arange(300) / period.unsqueeze(-1))
    x = torch.stack([(k * angle + k).sin() for k in (1, 1, 2, 3)], -1)
    noise = 0.1 * torch.randn(x.shape)
    mean, own, best = mocap_pace.one_shape(x + noise, period).values()
    # The noise; a phase is off by up to 0.0025 cycles of a third harmonic: 3e-3 at most.
    assert best == pytest.approx(0.01, rel=0.2)
    assert best <= own < 0.03 < mean


def test_one_shape_does_not_see_whom_it_is_judged_by():
    """A walker unlike the others is predicted as badly when it is among those to learn from."""
    period = torch.full((8,), 135.0, dtype=torch.float64)
    x = (2 * math.pi * torch.arange(300).double() / 135).sin().expand(8, -1).unsqueeze(-1).clone()
    x[5] *= -3
    found = mocap_pace.one_shape(x, period)
    # Half a period later it is three times as large: (3 - 1)^2 / 2 of it is missed, in one of 8,
    # and the shape of those who learn from it is 1 + 2 / 6: its square / 2 is missed in six.
    assert found["best phase, own pace"] == pytest.approx((2 + 6 * (2 / 6) ** 2 / 2) / 8, rel=0.05)
