"""Every code block of the README and of the pages runs; every command that they name exists.

Pages with cells are executed by ``make docs``, which fails where a cell fails, or where a tutorial
in the gallery draws no figure. Here their cells are compiled.
"""

import ast
import functools
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    p
    for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/RESULTS.md"]
    if p.parent.name != "api"  # made from doc strings, whose examples are tests already
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CELL = "{code-cell} python"  # runs when the pages are built: its output is beside it there
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def fences(page):
    return [(m[1].strip(), m[2]) for m in FENCE.finditer(page.read_text())]


def name_of(page):
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in PAGES if any(kind == "python" for kind, _ in fences(page))]
EXECUTED = [page for page in PAGES if any(kind == CELL for kind, _ in fences(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_blocks_run(page, monkeypatch, capsys, tmp_path):
    """One after the other in one namespace, as a reader would; what is shown as printed is."""
    torch.set_default_dtype(torch.float32)
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    printed = None
    for kind, text in fences(page):
        if kind == "python":
            # Blank lines in front give tracebacks the line of the page.
            line = page.read_text().partition(text)[0].count("\n")
            exec(compile("\n" * line + text, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
            plt.close("all")
        elif kind == "text" and printed:
            assert_same_text(text, printed)
            printed = None
    if page.name == "README.md":
        assert namespace["lower"].shape == (15,) and namespace["draws"].shape == (50, 60)


def assert_same_text(shown, printed):
    """The same words, and numbers within a half: they are of training, which rounding changes."""
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", printed).split(), printed
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        assert float(a) == pytest.approx(float(b), rel=0.5, abs=0.05), printed


def test_the_comparison_of_text_can_fail():
    assert_same_text("loss 1.50\n", "loss 1.6\n")
    for wrong in ("loss 4.5", "gain 1.5", "loss 1.5 1.5"):
        with pytest.raises(AssertionError):
            assert_same_text("loss 1.50", wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_escapes(page):
    """A fence is code that runs, a command that is checked, text, or a directive of Sphinx."""
    for kind, _ in fences(page):
        assert kind in ("python", "sh", "text", "bibtex") or kind.startswith("{"), kind
        assert kind == CELL or not kind.startswith("{code"), f"write {CELL}: found {kind}"


FRONT_MATTER = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_executed_pages_show_their_output(page):
    """The build executes a page by its front matter, and shows what the code prints."""
    assert page.read_text().startswith(FRONT_MATTER)
    kinds = {kind for kind, _ in fences(page)}
    assert not kinds & {"python", "text"}, "not executed, or copied by hand"
    for kind, text in fences(page):
        if kind == CELL:
            compile(text, str(page), "exec")


def test_tutorials_are_executed_and_in_the_gallery():
    tutorials = set(ROOT.glob("docs/tutorials/*.md"))
    assert tutorials <= set(EXECUTED)
    gallery = (ROOT / "docs/gallery.md").read_text()
    assert all(f"(tutorials/{page.name})" in gallery for page in tutorials)


def targets():
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def options_of(script):
    """What a script's parser knows, its helpers' in examples/common included."""
    texts = [script.read_text(), *(p.read_text() for p in (ROOT / "examples/common").glob("*.py"))]
    found = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^--[\w-]+$", node.value))
        if 'f"--{' in text:  # names from a table of the script
            found |= {f"--{word}" for word in re.findall(r"\w+", text)}
    # argparse.BooleanOptionalAction makes the second of each.
    return found | {f"--no-{x[2:]}" for x in found}


def extras():
    text = (ROOT / "pyproject.toml").read_text()  # by hand: Python 3.10 has no tomllib
    table = text.split("[project.optional-dependencies]")[1].split("\n\n")[0]
    return set(re.findall(r"^(\w+) = ", table, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    text = page.read_text().replace("\\\n", " ")
    for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
        assert target in targets(), f"make {target}"
    for script, rest in re.findall(r"python ((?:\w+/)+\w+\.py)([^`|\n]*)", text):
        assert (ROOT / script).exists(), script
        for option in re.findall(r"--[\w-]+", rest):
            assert option in options_of(ROOT / script), f"{script} {option}"
    for extra in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(extra.split(",")) <= extras(), extra


def test_every_example_is_described():
    text = (ROOT / "docs/examples.md").read_text()
    for script in (ROOT / "examples").glob("*.py"):
        assert f"examples/{script.name}" in text, script.name


def test_links_between_pages_exist():
    """Links and images that are files of this repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target and not target.startswith(("mailto:", "api/")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
