"""Importing torchvision and torchmetrics where the compiled operators do not load."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from pyro_sde import _torchvision
from pyro_sde._torchvision import import_with_repair

MISSING = "operator torchvision::nms does not exist"


def run(script, path=None):
    """In a fresh process with warnings as errors, ``path`` shadowing the installed packages."""
    prelude = """
        import sys, torch
        from pyro_sde._torchvision import _declare_schemas, import_with_repair
        declared = lambda: _declare_schemas.cache_info().currsize
        packages = {"torchvision", "torchmetrics"}
        loaded = lambda: {m.partition(".")[0] for m in sys.modules} & packages
        assert not loaded() and not declared()
    """
    folders = [str(Path(_torchvision.__file__).parents[1])] + ([str(path)] if path else [])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def package(folder, name, **modules):
    """A package whose submodules record in ``sys.log`` that they were run."""
    root = folder / name
    root.mkdir()
    for module, text in modules.items():
        log = f"import sys; sys.log = [*getattr(sys, 'log', []), {f'{name}.{module}'!r}]\n"
        (root / f"{module}.py").write_text(log + textwrap.dedent(text))


FAKES = """
    import torch
    @torch.library.register_fake("torchvision::{op}")
    def fake(dets, scores, iou_threshold):
        return dets.new_empty(0)
"""


def test_the_installed_torchvision_and_torchmetrics():
    """Repaired if and only if the compiled operators do not load; torchvision first."""
    run(
        """
        import pyro_sde.metrics
        assert not loaded()
        try:
            import torchvision
            broken = False
        except RuntimeError as error:
            assert "torchvision::nms" in str(error)
            broken = True
        vision = import_with_repair("torchvision", "auroc")
        assert declared() == broken
        assert broken is not vision.extension._has_ops()
        import torchvision
        assert torchvision is vision is import_with_repair("torchvision", "auroc")
        assert vision.transforms.functional.hflip(torch.tensor([[1, 2]])).tolist() == [[2, 1]]
        if broken:
            try:
                vision.ops.nms(torch.ones(1, 4), torch.ones(1), 0.5)
                raise SystemExit("an operator that is not there was called")
            except RuntimeError as error:
                assert "C++ ops" in str(error), error
        metrics = import_with_repair("torchmetrics", "auroc")
        assert metrics.functional.accuracy is not None
        assert sys.modules["torchvision"] is vision
        """
    )


def test_the_installed_torchmetrics_first():
    run(
        """
        from pyro_sde.metrics import auroc
        assert not loaded()
        assert auroc(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 7.0])) == 0.75
        assert "torchmetrics" in loaded()
        import torchmetrics, torchvision
        assert declared() == (not torchvision.extension._has_ops())
        """
    )


def test_a_broken_torchvision_is_repaired_in_any_environment(tmp_path):
    package(
        tmp_path,
        "torchvision",
        extension="",
        meta=FAKES.format(op="nms") + FAKES.format(op="qnms"),
        __init__="from . import extension, meta\n",
    )
    package(
        tmp_path,
        "torchmetrics",
        basis="",
        image="import torchvision\n",
        __init__="from . import basis, image\n",
    )
    run(
        """
        metrics = import_with_repair("torchmetrics.image", "auroc")
        assert metrics is sys.modules["torchmetrics.image"]
        assert metrics.torchvision.__file__.startswith(sys.path[2]), sys.path
        assert declared() == 1
        for op in ("nms", "qnms"):
            schema = str(getattr(torch.ops.torchvision, op).default._schema)
            arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            assert schema == f"torchvision::{op}" + arguments, schema
        run = ["torchmetrics.__init__", "torchmetrics.basis", "torchmetrics.image"]
        run += ["torchvision.__init__", "torchvision.extension", "torchvision.meta"]
        assert sys.log == run * 2, sys.log
        """,
        tmp_path,
    )


def test_nothing_is_repaired_where_the_import_works(tmp_path):
    package(tmp_path, "torchvision", extension="", __init__="from . import extension\n")
    run(
        """
        vision = import_with_repair("torchvision", "auroc")
        assert vision.__file__.startswith(sys.path[2]), sys.path
        assert sys.log == ["torchvision.__init__", "torchvision.extension"]
        assert not declared()
        assert not hasattr(torch.ops.torchvision, "nms")
        """,
        tmp_path,
    )


@pytest.fixture
def imports(monkeypatch):
    """Stands in for the import system: raises the listed errors in turn, then succeeds."""
    errors, calls, declared = [], [], []
    module = ModuleType("found")

    def fake_import(name):
        calls.append(name)
        if errors:
            raise errors.pop(0)
        return module

    monkeypatch.setattr(importlib, "import_module", fake_import)
    monkeypatch.setattr(_torchvision, "_declare_schemas", lambda: declared.append(len(calls)))
    return errors, calls, declared, module


def without(monkeypatch, *packages):
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)


def test_no_repair_upon_success(imports):
    _, calls, declared, module = imports
    assert import_with_repair("torchvision", "auroc") is module
    assert calls == ["torchvision"] and not declared


def test_only_what_is_half_imported_is_removed(imports, monkeypatch):
    errors, calls, declared, module = imports
    errors.append(RuntimeError(MISSING))
    without(monkeypatch, "torchvision", "torchmetrics")
    # Whole, as its root is there; half imported; and a namesake that is neither.
    for name in ("torchmetrics", "torchmetrics.x", "torchvision.x.y", "torchvisionary.x"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert import_with_repair("torchvision", "auroc") is module
    assert calls == ["torchvision", "torchvision"] and declared == [1]
    assert "torchvision.x.y" not in sys.modules
    assert {"torchmetrics", "torchmetrics.x", "torchvisionary.x"} <= set(sys.modules)


def test_a_failure_that_the_repair_does_not_cure_is_raised(imports, monkeypatch):
    errors, calls, *_ = imports
    without(monkeypatch, "torchvision", "torchmetrics")
    errors.extend([RuntimeError(MISSING), RuntimeError(f"still: {MISSING}")])
    with pytest.raises(RuntimeError, match="still"):
        import_with_repair("torchmetrics", "auroc")
    assert len(calls) == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operator torchvision::roi_align does not exist"),
        ValueError(MISSING),
        ImportError("cannot import name 'x' from 'torchvision'", name="torchvision"),
        ModuleNotFoundError("No module named 'PIL'", name="PIL"),
        ModuleNotFoundError("No module named 'torchvision.x'", name="torchvision.x"),
    ],
    ids=lambda e: f"{type(e).__name__}-{e}",
)
def test_any_other_error_is_left_alone(imports, error):
    errors, calls, declared, _ = imports
    errors.append(error)
    with pytest.raises(type(error)) as caught:
        import_with_repair("torchvision", "auroc")
    assert caught.value is error
    assert len(calls) == 1 and not declared
