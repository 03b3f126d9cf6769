"""Without a package that is optional: the function that was called is named, with the remedy."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from common import images

from pyro_sde import Forecast, _extras, metrics, plotting, to_arviz
from pyro_sde._extras import EXTRAS, import_extra
from pyro_sde.diagnostics import CalibrationCheck

TIMES, PATHS = torch.arange(3.0), torch.zeros(2, 3)
PROBS, LABELS = torch.tensor([[0.6, 0.4], [0.2, 0.8]]), torch.tensor([0, 1])
CHECK = CalibrationCheck(
    {"x": torch.zeros(1, 1, dtype=torch.long)}, {"x": ((),)}, draws=1, simulations=1
)
HISTORY = {"step": [1, 2], "elbo": [-2.0, -1.0], "kl": [1.0, 0.5]}
FIGURES = {
    "plot_band": lambda: plotting.plot_band(TIMES, PATHS),
    "plot_calibration": lambda: plotting.plot_calibration(PATHS, PATHS[0]),
    "plot_forecast": lambda: plotting.plot_forecast(Forecast(TIMES, PATHS[..., None], {})),
    "plot_kl": lambda: plotting.plot_kl(HISTORY),
    "plot_paths": lambda: plotting.plot_paths(TIMES, PATHS),
    "plot_prior_posterior": lambda: plotting.plot_prior_posterior(TIMES, PATHS, PATHS),
    "plot_reliability": lambda: plotting.plot_reliability(PROBS, LABELS),
    "plot_sbc": lambda: plotting.plot_sbc(CHECK),
    "plot_training": lambda: plotting.plot_training(HISTORY),
}
SCORES = {
    "auroc": lambda: metrics.auroc(torch.zeros(2), torch.ones(2)),
    "classification": lambda: metrics.classification(PROBS, LABELS),
    "ece": lambda: metrics.ece(PROBS, LABELS),
    "ood_auroc": lambda: metrics.ood_auroc(PROBS, PROBS),
}
CALLS = [
    *(("matplotlib", name, call) for name, call in FIGURES.items()),
    *(("torchmetrics", name, call) for name, call in SCORES.items()),
    ("arviz", "to_arviz", lambda: to_arviz(lambda: None, (), {})),
    *(
        ("torchvision", f'load("{name}")', lambda load=load: load(Path("nowhere"), True))
        for name, load in (("MNIST", images._mnist), ("CIFAR10", images._cifar10))
    ),
]


@pytest.mark.parametrize("package, function, call", CALLS, ids=[name for _, name, _ in CALLS])
def test_the_function_that_was_called_is_named(monkeypatch, package, function, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        call()
    remedy = f"{function} needs {package}: pip install 'pyro-sde[{EXTRAS[package]}]'"
    assert str(caught.value) == remedy
    assert caught.value.name == package


def test_every_figure_is_here():
    assert set(FIGURES) == set(plotting.__all__)


def test_extras_are_those_of_the_package():
    """By hand: Python 3.10 has no tomllib."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for package, extra in EXTRAS.items():
        assert re.search(rf'^{extra} = \["{package}[><=]', text, re.MULTILINE), extra


def test_no_package_of_an_extra_is_imported_elsewhere():
    """All such imports go through one of two functions."""
    folder = Path(_extras.__file__).parent
    pattern = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(EXTRAS)})\b", re.MULTILINE)
    assert pattern.search("    import matplotlib.pyplot as plt")
    for file in folder.rglob("*.py"):
        assert not pattern.search(file.read_text()), file


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operator torchvision::roi_align does not exist"),
        ImportError("cannot import name 'x' from 'torchvision'", name="torchvision"),
        ModuleNotFoundError("No module named 'PIL'", name="PIL"),
        ModuleNotFoundError("No module named 'torchvision.x'", name="torchvision.x"),
    ],
    ids=str,
)
def test_another_error_is_left_alone(monkeypatch, error):
    def fails(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(type(error)) as caught:
        import_extra("torchvision", "load")
    assert caught.value is error
