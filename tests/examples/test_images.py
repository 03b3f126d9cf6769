"""What the image examples and benchmarks share: data, training, resuming, comparing."""

import json
import math
from dataclasses import replace

import control_scaling
import image_classification
import posterior_study
import pyro
import pytest
import sdebnn_step
import torch
from baselines import build
from baselines.build import NAMES
from baselines.networks import DistanceHead
from common import fit as training
from common import images
from common.classify import Deterministic, predict
from torch import nn

from pyro_sde import metrics
from pyro_sde.training import load_checkpoint

from .fake_images import idx, write_cifar10, write_mnist


@pytest.fixture(autouse=True)
def single_precision(clean_slate):
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def root(tmp_path):
    return write_cifar10(write_mnist(tmp_path / "data"))


def small(root, **changes):
    return replace(images.load("MNIST", root), **changes)


def test_idx_is_read_compressed_or_not(tmp_path):
    values = torch.arange(24).reshape(2, 3, 4)
    plain = tmp_path / "a"
    plain.write_bytes(idx(values))
    assert torch.equal(images.read_idx(plain).long(), values)
    plain.write_bytes(idx(values)[:-1])
    with pytest.raises(ValueError, match="cut off: 23 bytes, 24 announced"):
        images.read_idx(plain)
    plain.write_bytes(b"no idx file")
    with pytest.raises(ValueError, match="not an idx file"):
        images.read_idx(plain)


def test_split(root):
    """A twelfth of the training images is for validation; none is in two parts."""
    data = images.load("MNIST", root)
    assert (len(data.train), len(data.validation), len(data.test)) == (44, 4, 12)
    both = torch.cat([data.train.x, data.validation.x])
    assert torch.equal(both, images.load_idx(root, "MNIST", True).x)
    part = images.load("MNIST", root, subset=8)
    assert (len(part.train), len(part.validation), len(part.test)) == (8, 4, 8)
    assert torch.equal(part.validation.x, data.validation.x)


def test_cifar10_from_npz(root):
    data = images.load("CIFAR10", root)
    assert data.train.x.shape == (44, 3, 32, 32) and data.test.y.dtype == torch.int64
    assert torch.equal(images.load("CIFAR10", root / "cifar10.npz").test.x, data.test.x)


def test_missing_data_says_where_to_put_it(tmp_path, monkeypatch):
    def offline(name, function):
        raise OSError("no network")

    monkeypatch.setattr(images, "import_with_repair", offline)
    for name in ("MNIST", "CIFAR10"):
        with pytest.raises(SystemExit, match=rf"no {name} under .*no network.*--data-root"):
            images.load(name, tmp_path)


def test_normalise_has_the_statistics_of_the_data():
    """Bytes and numbers from 0 to 1 are the same; the mean goes to 0."""
    x = torch.full((2, 1, 4, 4), 51, dtype=torch.uint8)
    data = images.Data("MNIST", None, None, None)
    torch.testing.assert_close(data.normalise(x), data.normalise(x.float() / 255))
    torch.testing.assert_close(data.normalise(x), torch.full(x.shape, (0.2 - 0.1307) / 0.3081))


def test_shift_moves_whole_images():
    torch.manual_seed(0)
    x = torch.zeros(200, 2, 9, 9, dtype=torch.uint8)
    x[:, 0, 4, 4], x[:, 1, 4, 5] = 1, 2
    moved = images.shift(x, 2)
    where = moved[:, 0].flatten(1).argmax(1)
    rows, columns = where // 9, where % 9
    assert set(rows.tolist()) == set(columns.tolist()) == {2, 3, 4, 5, 6}
    assert torch.equal(moved[:, 1].flatten(1).argmax(1), where + 1)  # the channels move together
    flipped = images.shift(x, 0, flip=True)
    beside = flipped[:, 1].flatten(1).argmax(1) - flipped[:, 0].flatten(1).argmax(1)
    assert set(beside.tolist()) == {-1, 1}


def test_corruptions():
    x = torch.zeros(1, 1, 9, 9)
    x[..., 4, 7] = 1.0
    quarter = images.rotate(x, 90.0)
    assert quarter[0, 0, 4, 7] < 1e-6
    assert quarter[0, 0, 1, 4] + quarter[0, 0, 7, 4] == pytest.approx(1.0, abs=1e-5)
    centre = torch.zeros(1, 1, 9, 9)
    centre[..., 4, 4] = 1.0
    soft = images.blur(centre, 1.0)
    assert float(soft.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(soft[0, 0, 4, 4] / soft[0, 0, 4, 5]) == pytest.approx(math.exp(0.5), rel=1e-5)
    noisy = images.add_noise(x, 0.4)
    assert torch.equal(noisy, images.add_noise(x, 0.4)) and not torch.equal(noisy, x)
    assert 0 <= float(noisy.min()) and float(noisy.max()) <= 1


def linear() -> Deterministic:
    torch.manual_seed(0)
    return Deterministic(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))


def run(data, path, classifier=None, **options):
    classifier = classifier or linear()
    options = {"seed": 3, "epochs": 3, "batch": 16} | options
    history = training.fit(classifier, data, path, {"a": 1}, **options)
    return classifier, history


def test_a_killed_run_goes_on_as_it_would_have(root, tmp_path):
    data = small(root)
    whole, history = run(data, tmp_path / "whole.pt")

    class Killed(Deterministic):
        calls = 0

        def loss(self, x, y):
            self.calls += 1
            if self.calls == 4:  # in the middle of the second epoch of two batches
                raise KeyboardInterrupt
            return super().loss(x, y)

    path = tmp_path / "killed.pt"
    with pytest.raises(KeyboardInterrupt):
        run(data, path, Killed(linear().net))
    resumed, again = run(data, path)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    clock = {"seconds"}
    strip = [[{k: v for k, v in h.items() if k not in clock} for h in x] for x in (history, again)]
    assert strip[0] == strip[1] and [h["epoch"] for h in again] == [1, 2, 3]


def test_a_finished_run_is_not_trained_again(root, tmp_path):
    data, path = small(root), tmp_path / "a.pt"
    first, _ = run(data, path)
    second, _ = run(data, path)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_run_or_another_file_is_refused(root, tmp_path):
    data, path = small(root), tmp_path / "a.pt"
    run(data, path)
    with pytest.raises(SystemExit, match=r"other settings.*'a': \(1, 2\)"):
        training.fit(linear(), data, path, {"a": 2}, seed=0, epochs=1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SystemExit, match="not a checkpoint of pyro_sde, or is cut off"):
        run(data, path)


def test_divergence_stops_with_the_last_good_checkpoint(root, tmp_path):
    class Diverging(Deterministic):
        calls = 0

        def loss(self, x, y):
            self.calls += 1
            return super().loss(x, y) * (math.nan if self.calls > 3 else 1.0)

    data, path = small(root), tmp_path / "a.pt"
    with pytest.raises(training.Diverged, match=r"nan in epoch 2.*after epoch 1.*lower --lr"):
        run(data, path, Diverging(linear().net))
    state = load_checkpoint(path, training.KIND)
    assert state["epoch"] == 1
    assert all(bool(p.isfinite().all()) for p in state["classifier"].values())


def test_diverging_at_once_has_no_checkpoint(root, tmp_path):
    class Diverging(Deterministic):
        def loss(self, x, y):
            return super().loss(x, y) * math.inf

    with pytest.raises(training.Diverged, match="no checkpoint yet"):
        run(small(root), tmp_path / "a.pt", Diverging(linear().net))
    assert not (tmp_path / "a.pt").exists()


def test_minutes_are_those_of_training(root, tmp_path):
    _, history = run(small(root), tmp_path / "a.pt", epochs=None, minutes=1e-3)
    assert 0.06 <= history[-1]["seconds"] < 2  # a step of a linear layer on 16 images is short
    with pytest.raises(ValueError, match="either epochs or minutes"):
        run(small(root), tmp_path / "b.pt", minutes=1.0)


def test_rate_rises_and_falls():
    assert training.rate(0.0) == 0.01 and training.rate(0.05) == 1.0
    assert training.rate(0.525) == pytest.approx(0.5) and training.rate(1.0) == 0.0


def test_learns(root, tmp_path):
    """Labels that can be read off one pixel are learnt, and better than at the start."""
    data = small(root)
    for part in (data.train, data.validation, data.test):
        part.x.zero_()
        part.x[torch.arange(len(part)), 0, 10 + part.y, 14] = 255
    _, history = run(data, tmp_path / "a.pt", epochs=60, pixels=0, lr=1e-2)
    assert history[-1]["accuracy"] == 1.0 and history[-1]["nll"] < 0.5 < 1.5 < history[0]["nll"]


def test_distance_head():
    """Sure at a centre, up to the floor; nothing is sure far from all of them."""
    head = DistanceHead(4, dim=3, floor=-9.0)
    with torch.no_grad():
        head.centres.copy_(100 * torch.eye(10)[:, :3] * torch.arange(1.0, 11.0).unsqueeze(-1))
        head.features.weight.copy_(torch.eye(3, 4))
        head.features.bias.zero_()
        p = head(torch.tensor([[100.0, 0, 0, 7], [0, 200.0, 0, 0], [0, 0, -1e4, 0]])).softmax(-1)
    sure = 1 / (1 + 9 * math.exp(-9.0))
    assert p[0, 0].item() == pytest.approx(sure, rel=1e-4)
    assert p[1, 1].item() == pytest.approx(sure, rel=1e-4)
    torch.testing.assert_close(p[2], torch.full((10,), 0.1))


@pytest.mark.parametrize(
    "kind, name",
    [("MNIST", n) for n in NAMES]
    + [("CIFAR10", n) for n in image_classification.MODELS["CIFAR10"]],
)
def test_every_classifier_trains_and_predicts(kind, name, root):
    """Every parameter gets a gradient; several draws of the weights differ; seeds reproduce."""
    pyro.clear_param_store()
    data = images.load(kind, root, 8)
    classifier = build(name, data, seed=1)
    x, y = data.normalise(data.train.x), data.train.y
    optimiser = torch.optim.Adam(classifier.parameters(), lr=1e-3)
    torch.manual_seed(0)
    for _ in range(2):
        optimiser.zero_grad()
        classifier.loss(x, y).backward()
        optimiser.step()
    classifier.loss(x, y).backward()
    idle = [n for n, p in classifier.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []
    torch.manual_seed(5)
    p = predict(classifier, data.test.x, 2, data.normalise)
    assert metrics.classification(p, data.test.y)["nll"] < 20
    torch.manual_seed(5)
    assert torch.equal(p, predict(classifier, data.test.x, 2, data.normalise))
    draws = list(classifier.functions(x, 3))
    with torch.no_grad():
        outputs = [draw(x) for draw in draws]
    random = "mfvi" in name or "sdebnn" in name
    assert len(draws) == (3 if random or name == "ensemble" else 1)
    assert not any(torch.equal(outputs[0], out) for out in outputs[1:])
    if random:  # a draw is one function: the same weights for every batch
        assert torch.equal(draws[1](x), outputs[1])


def test_comparison(root, tmp_path, capsys):
    """Two models in a moment each; a second call trains nothing and prints the same table."""
    command = ["--data-root", str(root), "--models", "odenet", "sdebnn-stl", "--minutes", "1e-4"]
    command += ["--samples", "2", "--out", str(tmp_path / "out")]
    args = image_classification.parse(command)
    first = image_classification.main(args)
    assert {(r["model"], r["seed"]) for r in first} == {
        (m, s) for m in ("odenet", "sdebnn-stl") for s in (0, 1)
    }
    assert {r["evaluations"] for r in first} == {5}
    text = capsys.readouterr().out
    assert image_classification.main(args) == first
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [x for x in capsys.readouterr().out.splitlines() if x.startswith("| ")]
    assert len(rows) == 3 and "±" in rows[1]


def test_study(root, tmp_path, capsys):
    command = ["--data-root", str(root), "--minutes", "1e-4", "--samples", "2", "--draws", "2"]
    command += ["--seeds", "0", "--out", str(tmp_path / "out")]
    found = posterior_study.main(posterior_study.parse(command))
    assert {r["model"] for r in found} == set(posterior_study.MODELS)
    by_name = {r["model"]: r for r in found}
    ((_, kl),) = by_name["sdebnn-normal"]["kl"].items()
    assert len(kl) == 6 and kl[0] > 1000  # the narrow start of 18,496 weights
    ((_, kl),) = by_name["sdebnn-stl"]["kl"].items()
    assert kl[0] == 0.0
    ((_, spread),) = by_name["sdebnn-stl"]["spread"].items()
    assert spread["sd"][0] == 0.0  # a point
    # The untrained posterior is the prior: sd of an OU process from a point.
    prior = [0.1 * math.sqrt((1 - math.exp(-2 * t / 5)) / 2) for t in range(6)]
    torch.testing.assert_close(torch.tensor(spread["sd"]), torch.tensor(prior), rtol=0.03, atol=0)
    assert "figure:" in capsys.readouterr().out
    json.dumps(found)


def test_step_benchmark(capsys):
    args = sdebnn_step.parse(["--batch", "2", "--steps", "2", "--repeats", "1"])
    assert len(sdebnn_step.main(args)) == 6
    assert "x bare loop" in capsys.readouterr().out


def test_step_benchmark_compares_equals(monkeypatch):
    """Hardly any noise, short steps: three programs of one equation have one loss."""
    monkeypatch.setattr(sdebnn_step, "SCALE", 1e-6)
    torch.manual_seed(0)
    _, *losses = sdebnn_step.competitors(2, 100).values()
    values = [float(loss().detach()) for loss in losses]
    # Euler steps of the weights' decay are off by dt/2 = 0.5 %.
    assert values == pytest.approx([values[0]] * 5, rel=0.01)


def test_scaling_benchmark(capsys):
    """Each size in a process of its own; five numbers of the control for each weight."""
    command = ["--sizes", "600", "6000", "--steps", "2", "--repeats", "1", "--keep-memory"]
    found = control_scaling.main(control_scaling.parse(command))
    assert found[6000]["parameters"] - found[600]["parameters"] == 5 * 5400
    assert 100 < found[6000]["megabytes"] < 1000
    assert "time grows with the power" in capsys.readouterr().out
