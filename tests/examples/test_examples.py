"""Every example in a small form. An example that is not listed here fails the test."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import common
import latent_scaling
import nuts_reference
import ou_evidence
import pyro.distributions as dist
import pytest
import torch
from torch.utils._pytree import tree_leaves

from .fake_images import write_cifar10, write_mnist

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--iterations", "3", "--particles", "2"]
EXAMPLES = {
    "latent_sde.py": [
        ["--likelihood", name]
        for name in ("laplace", "cauchy", "poisson", "student-t", "categorical")
    ],
    "multimodal.py": [["--steps", "5", "--samples", "1000"]],
    "sdebnn_regression.py": [["--samples", "5"]],
    "sdebnn_likelihoods.py": [
        ["--likelihood", name]
        for name in ("categorical", "normal", "cauchy", "student-t", "poisson")
    ],
    "gradient_variance.py": [["--steps", "5", "--checkpoints", "2", "--samples", "2"]],
    "latent_ode_spirals.py": [
        ["--observations", "5", "10", "--series", "20", "--samples", "3", "--no-sde"],
        ["--observations", "5", "--series", "20", "--samples", "3"],
    ],
    "convergence.py": [["--levels", "2", "--digits", "1"]],
    "coal_mining.py": [["--dt", "8"]],
    "lynx_hare.py": [["--steps", "1", "--holdout", "3"]],
    "lorenz.py": [["--series", "16", "--batch", "8"]],
    "co2.py": [["--samples", "20"]],
    "distributed.py": [
        ["--task", task, "--size", "12", "--batch", "6"] for task in ("series", "sdebnn")
    ],
}
IMAGE_EXAMPLES = {
    "sdebnn_mnist.py": [["--steps", "2"], ["--initial", "normal", "--contraction"]],
    "sdebnn_cifar10.py": [["--steps", "1", "--estimator", "kl"]],
}
SOLVER_EXAMPLES = {
    "memory.py": ["--iterations", "2", "--steps", "2", "--depth", "2", "--batch", "4"],
    "precision.py": ["--epochs", "1", "--tolerances", "1", "0.5", "--images", "8", "--steps", "1"]
    + ["--samples", "2", "--batch", "8"],
}
IMAGE_RUNS = [(name, options) for name, runs in IMAGE_EXAMPLES.items() for options in runs]
RUNS = [(name, options) for name, runs in EXAMPLES.items() for options in runs]


@pytest.fixture(autouse=True)
def single_precision(clean_slate):
    """Users run the examples in float32."""
    torch.set_default_dtype(torch.float32)


def test_every_example_is_listed():
    found = {p.name for p in (ROOT / "examples").glob("*.py")}
    assert found == set(EXAMPLES) | set(IMAGE_EXAMPLES) | set(SOLVER_EXAMPLES)


@pytest.mark.parametrize("name, options", RUNS, ids=[" ".join([n, *o]) for n, o in RUNS])
def test_example(name, options, tmp_path, capsys):
    module = importlib.import_module(name.removesuffix(".py"))
    result = module.main(module.parse([*SMALL, *options, "--out", str(tmp_path)]))
    assert all(math.isfinite(x) for x in tree_leaves(result))
    (figure,) = tmp_path.glob("*.png")
    assert figure.stat().st_size > 5000
    assert str(figure) in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, options", IMAGE_RUNS, ids=[" ".join([n, *o]) for n, o in IMAGE_RUNS]
)
def test_image_example(name, options, tmp_path, capsys):
    """On noise: trained, judged, drawn, and a row of a table; then again, from the checkpoint."""
    root = write_cifar10(write_mnist(tmp_path / "data"))
    module = importlib.import_module(name.removesuffix(".py"))
    out = tmp_path / "out"
    command = ["--data-root", str(root), "--out", str(out), "--epochs", "2", "--batch", "16"]
    command += ["--samples", "2", "--subset", "16", "--threads", "1", *options]
    scores = module.main(module.parse(command))
    assert all(math.isfinite(x) for x in scores.values())
    assert ("AUROC notMNIST" in scores) == ("mnist" in name)
    (figure,) = out.glob("*.png")
    text = capsys.readouterr().out
    assert str(figure) in text and "| seed | epochs |" in text
    assert module.main(module.parse(command)) == scores
    assert "resumed" in capsys.readouterr().out


@pytest.mark.parametrize("name", SOLVER_EXAMPLES)
def test_solver_example(name, tmp_path, capsys):
    root = write_mnist(tmp_path / "data")
    module = importlib.import_module(name.removesuffix(".py"))
    command = ["--data-root", str(root), "--subset", "16", "--threads", "1"]
    command += ["--out", str(tmp_path), *SOLVER_EXAMPLES[name]]
    result = module.main(module.parse(command))
    numbers = [x for x in tree_leaves(result) if x is not None]
    assert numbers and all(math.isfinite(x) for x in numbers)
    (figure,) = tmp_path.glob("*.png")
    assert str(figure) in capsys.readouterr().out
    if name == "memory.py":
        assert max(result["errors"]["recompute"] + result["errors"]["reversible"]) < 1e-5
        assert result["curves"]["graph"] == pytest.approx(result["curves"]["reversible"], rel=1e-3)


def test_memory_does_not_grow_with_depth():
    """Peak resident memory of training steps of the MNIST SDE-BNN, each in its own process."""

    def peak(mode, steps):
        command = [sys.executable, str(ROOT / "examples/memory.py"), "--threads", "1"]
        command += ["--measure", mode, str(steps)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return json.loads(out.splitlines()[-1])["memory"]

    start, end = peak("reversible", 20), peak("reversible", 200)
    assert end < 1.15 * start
    # What is kept, not the peak: importing torch takes 220 to 670 MB, by its build.
    assert peak("graph", 100) - peak("graph", 20) > 4 * (end - start)


@pytest.mark.parametrize("name", [*EXAMPLES, *IMAGE_EXAMPLES, *SOLVER_EXAMPLES])
def test_help(name):
    command = [sys.executable, str(ROOT / "examples" / name), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = {"--seed", "--iterations"}
    if name in IMAGE_EXAMPLES or name == "precision.py":
        options = {"--seed", "--epochs", "--subset", "--data-root"}
    assert all(option in text for option in options)


def test_exact_filter_against_a_gaussian_process():
    """The examples' quadrature, on Gaussian observations where the answer is known."""
    torch.set_default_dtype(torch.float64)
    times, y = torch.tensor([0.3, 0.4, 1.5]), torch.tensor([0.5, -0.3, 1.0])

    def transition(dt):
        decay = math.exp(-dt)
        return decay, 0.0, math.sqrt((1 - decay**2) / 2)

    evidence, z, marginals = common.exact_filter(
        (0.0, math.sqrt(0.5)), transition, times, 0.0, lambda z: dist.Normal(z, 0.3).log_prob(y)
    )
    K = 0.5 * torch.exp(-(times.unsqueeze(-1) - times).abs())
    S = K + 0.09 * torch.eye(3)
    exact = dist.MultivariateNormal(torch.zeros(3), S).log_prob(y).item()
    assert evidence == pytest.approx(exact, abs=1e-8)
    mean = (marginals * z).sum(-1) * (z[1] - z[0])
    torch.testing.assert_close(mean, K @ torch.linalg.solve(S, y), rtol=0, atol=1e-8)
    median = common.quantiles(z, marginals, [0.5])[0]
    torch.testing.assert_close(median, mean, rtol=0, atol=0.02)  # the grid's spacing is 0.013


def test_normal_posterior_against_quadrature():
    """With what the figure of the latent SDE compares: the posterior under a Normal likelihood."""
    torch.set_default_dtype(torch.float64)
    module = importlib.import_module("latent_sde")
    times, y = torch.tensor([0.3, 0.4, 1.5]), torch.tensor([0.5, -3.0, 1.0])
    rate, scale = module.RATE, module.SCALE

    def transition(dt):
        decay = math.exp(-rate * dt)
        return decay, 0.0, scale * math.sqrt((1 - decay**2) / (2 * rate))

    start = (0.0, scale / math.sqrt(2 * rate))
    _, z, marginals = common.exact_filter(
        start, transition, times, 0.0, lambda z: dist.Normal(z, 0.2).log_prob(y)
    )
    weight = marginals * (z[1] - z[0])
    mean, sd = module.normal_posterior(times, times, y, 0.2)
    torch.testing.assert_close(mean, (weight * z).sum(-1), rtol=0, atol=1e-8)
    second = (weight * z**2).sum(-1)
    torch.testing.assert_close(sd, (second - mean**2).sqrt(), rtol=0, atol=1e-6)


def test_scaling_benchmark(capsys):
    """Both parts of it run; no time is judged, and the loss is that of one model."""
    sizes = ["--series", "4", "8", "--steps", "3", "6", "--dim", "2", "4", "--repeats", "1"]
    results = latent_scaling.main(latent_scaling.parse(sizes))
    assert len(results) == len(latent_scaling.PARTS)
    assert all(math.isfinite(found["exponent"]) for found in results.values())
    assert latent_scaling.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    training = ["--epochs", "2", "--train", "20", "6", "--batch", "10", "--every", "2"]
    results = latent_scaling.main(latent_scaling.parse(training))
    for found in results.values():
        assert len(found["loss"]) == len(found["megabytes"]) == 2
        assert min(found["megabytes"]) > 10 and all(map(math.isfinite, found["loss"]))
    assert "chosen by the plate" in capsys.readouterr().out


def test_evidence_benchmark(capsys):
    """The whole script, little of it trained: untrained guides are far from the evidence."""
    args = ou_evidence.parse(["--seeds", "1", "--iterations", "2", "--samples", "2000"])
    gaps = ou_evidence.main(args)
    assert gaps["optimal control, 480 steps"][0] < 1 < gaps["AutoSDE, 12 steps, contraction"][0]
    assert "exact log evidence -8.7595" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lynx_hare", "coal_mining"])
def test_nuts_benchmark(name, capsys):
    """Takes the models as they are, and starts where the posterior is: a few draws are near it."""
    options = ["--chains", "2", "--draws", "8", "--warmup", "4", "--guides", "1", "--steps", "3"]
    table = nuts_reference.main(nuts_reference.parse([name, *options]))
    text = capsys.readouterr().out
    assert "seed 0, by default: width over that of NUTS: " in text and "nan" not in text
    assert all(low < mean < high for mean, low, high, _, _ in table.values())
    known = {"alpha": (0.3, 0.9), "gamma": (0.5, 1.1), "beta": (0.015, 0.045)}
    known |= {"1851 to 1879": (2.2, 4.5), "1880 to 1899": (1.2, 3.0)}
    found = {key: table[key][0] for key in known if key in table}
    assert found and all(known[k][0] < x < known[k][1] for k, x in found.items())


def test_strong_orders_on_known_solutions(tmp_path):
    """Every method, with the exact solution beside it; 200 paths blur a fitted order by 0.05."""
    module = importlib.import_module("convergence")
    orders = module.main(module.parse(["--digits", "1", "--out", str(tmp_path)]))
    rough, smooth, sde = list(orders.values())[:3]
    expected = {"euler": 1, "heun": 2, "midpoint": 2, "rk4": 4, "reversible_heun": 2}
    assert set(rough) == set(smooth) == set(expected)
    for method, order in expected.items():
        assert abs(smooth[method] - order) < 0.1, method
        # From 4 steps on the noise decides: order 1, which Euler reaches from below.
        assert 0.75 < rough[method] < 1.25, method
    assert 0.4 < sde["SDEPath"] < 0.8 and sde["SDEPath"] == pytest.approx(sde["torchsde, euler"])
    assert 0.8 < sde["torchsde, milstein"] < 1.2 and sde["torchsde, srk"] > 1.3
