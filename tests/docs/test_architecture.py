"""What the architecture promises: imports point one way, laws know no simulator, short files."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_imports_point_one_way():
    """As the picture of docs/architecture.md has it."""
    laws = {"distributions", "guides", "infer", "interop", "nn", "solvers", "series", "metrics"}
    never = {
        "_ops": laws | {"simulation"},
        "simulation": laws,
        "distributions": laws - {"distributions"},
        "solvers": {"guides", "infer", "nn", "distributions"},
        "nn": {"guides", "infer", "interop"},
        "guides": {"infer", "nn", "solvers", "interop"},
        "infer": {"guides", "nn", "solvers", "interop"},
    }
    graph = import_graph()
    for module, imported in graph.items():
        folder = module.split(".")[1] if "." in module else ""
        # solvers.torchsde is the former name of a module of interop
        if module != "pyro_sde.solvers.torchsde":
            found = {name.split(".")[1] for name in imported if "." in name}
            assert not found & never.get(folder, set()), module


def test_distributions_know_no_simulator():
    """But through the function that chooses one."""
    simulators = {"loop", "fused", "checkpointed", "compiled", "adaptive"}
    for module, imported in import_graph().items():
        if module.startswith("pyro_sde.distributions"):
            assert not {f"pyro_sde.simulation.{s}" for s in simulators} & imported, module


def test_no_import_cycle():
    """Imports for type checkers and inside of functions count."""
    graph = import_graph()
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as e:
        pytest.fail(f"imports in a circle: {e.args[1]}")


def test_no_long_file():
    for folder in ("pyro_sde", "tests", "examples", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            if "out" in file.relative_to(ROOT).parts:
                continue  # what a benchmark has written: an environment with jax, say
            assert len(file.read_text().splitlines()) <= 350, file


@functools.cache
def import_graph():
    """From every module of the package to those that it imports."""
    files = {}
    for file in (ROOT / "pyro_sde").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = {}
    for module, file in files.items():
        package = module.split(".")[: None if file.stem == "__init__" else -1]
        graph[module] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                start = package[: len(package) - node.level + 1]
                base = ".".join([*start, *([node.module] if node.module else [])])
                names = (f"{base}.{alias.name}" for alias in node.names)
                graph[module] |= {name if name in files else base for name in names} - {module}
    return graph
