"""The motion capture benchmark, in a small form on sequences of the same layout."""

import math

import gait
import mocap
import pytest
import torch
from scipy.io import savemat

from pyro_sde import TraceSDE_ELBO

FRAMES, JOINTS = 40, 45
SMALL = ["--iterations", "3", "--batch", "4", "--hidden", "8", "--samples", "3", "--shift", "20"]


@pytest.fixture(autouse=True)
def single_precision(clean_slate):
    torch.set_default_dtype(torch.float32)


def sequences(count):
    """Periodic, one joint of them not moving but for rounding."""
    phase = 6.3 * torch.rand(count, 1, 1) + 0.3 * torch.arange(FRAMES).unsqueeze(-1)
    x = 10 * torch.sin(phase + torch.arange(JOINTS)) + 0.1 * torch.randn(count, FRAMES, JOINTS)
    x[..., 0] = 1e-15 * torch.randn(count, FRAMES)
    return x


@pytest.fixture
def command(tmp_path):
    sets = {"Xtr": sequences(8), "Xval": sequences(2), "Xtest": sequences(3)}
    savemat(tmp_path / "walks.mat", {name: x.double().numpy() for name, x in sets.items()})
    out = ["--out", str(tmp_path / "out"), "--figure", str(tmp_path / "mocap.png")]
    return ["--data", str(tmp_path / "walks.mat"), *out, *SMALL]


def test_benchmark(command, tmp_path, capsys):
    """Trained, judged and drawn; then the same again from what was kept."""
    args = mocap.parse([*command, "--seeds", "0", "1"])
    runs = mocap.main(args)
    text = capsys.readouterr().out
    assert {kind: len(found) for kind, found in runs.items()} == {"sde": 2, "ode": 2}
    for run in [*runs["sde"], *runs["ode"]]:
        assert len(run["test"]["future"]) == 3 and all(map(math.isfinite, run["test"]["future"]))
    assert "| latent SDE | 2 |" in text and "| hold the third frame | - |" in text
    assert (tmp_path / "mocap.png").stat().st_size > 5000
    assert mocap.main(args) == runs
    assert len((tmp_path / "out/runs.jsonl").read_text().splitlines()) == 4


def test_cross_validation_leaves_the_test_alone(command, monkeypatch, capsys):
    data = mocap.load(mocap.parse(command).data)
    del data["test"]
    monkeypatch.setattr(mocap, "load", lambda path: data)
    runs = mocap.main(mocap.parse([*command, "--cv", "--seeds", "0", "--kind", "ode"]))
    assert len(runs["ode"]) == mocap.FOLDS
    assert "cross-validated MSE" in capsys.readouterr().out


def test_the_difference_is_that_of_the_seeds():
    runs = {
        kind: [{"test": {"future": errors}} for errors in found]
        for kind, found in {
            "sde": ([1.0, 3.0], [5.0, 5.0]),
            "ode": ([1.0, 1.0], [1.0, 3.0]),
        }.items()
    }
    # 1 and 3: their mean 2, their deviation 2 / sqrt 2, over sqrt 2.
    assert mocap.difference(runs) == "sde less ode: +2.00, standard error 1.00"


def test_baselines():
    x = sequences(4)
    found = mocap.baselines(x, x)
    torch.testing.assert_close(torch.tensor(found["zero"]["all"]), x.square().mean((1, 2)))
    assert found["nearest training sequence"]["all"] == [0.0] * 4
    standing = (x[:, 3:] - x[:, 2:3]).square().mean((1, 2))
    torch.testing.assert_close(torch.tensor(found["hold the third frame"]["future"]), standing)


def test_the_pace_that_suits_is_found():
    """Waves that are played at other paces than predicted, and one that is not."""
    true = torch.tensor([0.95, 1.0, 1.1])
    wave = lambda frames: (0.2 * frames).sin().unsqueeze(-1).expand(-1, -1, 2)  # noqa: E731
    predicted = wave(torch.arange(70.0).expand(3, -1))
    found = mocap.paced(predicted, wave(true.unsqueeze(-1) * torch.arange(60.0)))
    torch.testing.assert_close(torch.tensor(found["pace"]), true, rtol=0, atol=1e-6)
    assert max(found["at its pace"]) < 1e-4  # linear between frames


@pytest.mark.parametrize("contraction", [False, True])
def test_the_control_is_the_same_on_the_grid(contraction):
    control = gait.Control(3, 8, 5, contraction)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(torch.randn_like(p))
    t, z = torch.arange(4.0).reshape(-1, 1, 1), torch.randn(6, 3)
    context = torch.randn(6, 5).expand(4, -1, -1)
    torch.testing.assert_close(control.on_grid(t, context).at(2, z), control(t[2], z, context[2]))


def test_a_share_of_the_joints_is_hidden():
    """In training and in prediction; others in each window, the same in its three frames."""
    frames = gait.hide(torch.randn(400, 3, 20), 0.3).isnan()
    assert torch.equal(frames[:, 0], frames[:, 2]) and frames[:, 0].unique(dim=0).shape[0] > 200
    assert frames.float().mean() == pytest.approx(0.3, abs=0.03)
    assert not gait.hide(torch.randn(4, 3, 20), 0.0).isnan().any()
    args = mocap.parse(["--data", "unused", *SMALL])
    x = sequences(4)
    model, guide = gait.build("ode", x, args)
    seen, *_ = gait.windows(x, torch.ones(4), model.unit, gait.times_of(args, FRAMES), args)
    assert 0.2 < seen.isnan().float().mean() < 0.8
    read = []
    guide.encoder.register_forward_pre_hook(lambda _, inputs: read.append(inputs[2]))
    gait.predict(model, guide, x, args, FRAMES)
    assert 0.2 < read[0].float().mean() < 0.8


@pytest.mark.parametrize("warp", ["0", "0.1"])
def test_windows_show_what_they_say(warp):
    """On a ramp the value is the position: start, the speed of the window, then its period."""
    x = torch.arange(100.0).expand(2, -1).unsqueeze(-1).repeat(1, 1, 45)
    x[..., 1] = torch.tensor([[0.8], [1.2]])  # which of the two it is
    options = ["--jitter", "0", "--offset", "0", "--hide", "0", "--shift", "30", "--batch", "64"]
    args = mocap.parse(["--data", "unused", *options, "--warp", warp])
    times = gait.times_of(args, 100)
    assert float(times[-1]) >= 9.9 - 1e-4 > float(times[-2])
    periods = torch.tensor([0.8, 1.2])
    seen, _, values, mask = gait.windows(x, periods, torch.ones(45), times, args)
    speed = seen[:, 1:, 0] - seen[:, :-1, 0]
    torch.testing.assert_close(speed[:, 0], speed[:, 1], rtol=0, atol=1e-4)
    assert speed.std() < 1e-4 if warp == "0" else speed.std() > 0.05
    expected = seen[:, :1, 0] + speed[:, :1] * seen[:, :1, 1] * times / gait.DT
    torch.testing.assert_close(values[..., 0][mask], expected[mask], rtol=0, atol=1e-2)
    torch.testing.assert_close(mask, expected <= 99)


def test_walkers_go_on_at_a_common_pace():
    """Waves of other periods are one wave by the clock of each, but not with ``--common 0``."""
    true = torch.tensor([120.0, 140.0, 160.0])
    x = (2 * math.pi * torch.arange(300.0) / true.unsqueeze(-1)).sin().unsqueeze(-1)
    common, own = (mocap.parse(["--data", "unused", "--common", c]) for c in "10")
    periods = gait.relative_periods(x, common)
    torch.testing.assert_close(periods, true / 140)
    torch.testing.assert_close(gait.relative_periods(x, own), torch.ones(3))
    played = gait.at(x, torch.arange(3), periods.unsqueeze(-1) * torch.arange(250))
    torch.testing.assert_close(played[::2], played[1].expand(2, -1, -1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["sde", "ode"])
def test_the_bound_of_copies(kind):
    """On the same draws: the ELBO for small powers, and the tighter the larger the power."""
    args = mocap.parse(["--data", "unused", *SMALL])
    x = sequences(4)
    model, guide = gait.build(kind, x, args)
    with torch.no_grad():  # away from the prior, or the KL is zero whatever its sign
        for p in guide.parameters():
            p.add_(0.3 * torch.randn_like(p))
    data = gait.windows(x, torch.ones(4), model.unit, gait.times_of(args, FRAMES), args)
    one = []
    for elbo in (gait.RenyiSDE_ELBO(1, 1.0), TraceSDE_ELBO(path_estimator="full")):
        torch.manual_seed(0)
        one.append(elbo.differentiable_loss(model, guide, *data).item())
    assert one[0] == pytest.approx(one[1], rel=1e-6)
    losses = []
    for power in (1e-6, 0.01, 1.0):
        torch.manual_seed(0)
        losses.append(gait.RenyiSDE_ELBO(4, power).differentiable_loss(model, guide, *data).item())
    torch.manual_seed(0)
    four = (data[0].repeat(4, 1, 1), data[1], data[2].repeat(4, 1, 1), data[3].repeat(4, 1))
    plain = TraceSDE_ELBO(path_estimator="full").loss(model, guide, *four) / 4
    assert losses[0] == pytest.approx(plain, rel=1e-2)
    assert losses[0] > losses[1] > losses[2]


def test_options_of_the_model(command):
    """Noise of each joint, contraction and a diffusion of the state, all at once."""
    options = ["--joints", "1", "--contraction", "1", "--stateful", "1", "--copies", "2"]
    options += ["--cv", "--seeds", "0", "--kind", "sde"]
    for run in mocap.main(mocap.parse([*command, *options]))["sde"]:
        assert all(map(math.isfinite, run["held out"]["future"]))
        assert all(0 <= share <= 1 for share in run["held out"]["coverage"])
