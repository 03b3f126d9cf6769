"""Every figure of the results stands beside its command, and every benchmark is reported."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HEADLINES = ROOT / "docs/results.md"
ARCHIVE = sorted((ROOT / "docs/results").glob("*.md"))


def rows(text):
    """The cells of each row of the tables whose first column is "what"."""
    for table in re.findall(r"^\| what \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for line in table.splitlines():
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_headlines_have_figure_spread_and_command():
    found = list(rows(HEADLINES.read_text()))
    assert len(found) > 20
    last = None
    for what, figure, spread, command in found:
        assert what and re.search(r"\d", figure), what
        assert re.search(r"seed|run|toleranc", spread), what  # of how many
        if command in ("the same", "the first of these"):
            assert last, what
        else:
            assert re.fullmatch(r"`(python|torchrun|make) .+`", command), what
            last = command


@pytest.mark.parametrize("page", ARCHIVE, ids=lambda page: page.name)
def test_archive(page):
    """Each page has commands, and is found from both tables of contents."""
    assert "```sh\n" in page.read_text()
    assert page.stem in HEADLINES.read_text(), "docs/results.md does not link to it"
    assert page.name in (ROOT / "benchmarks/RESULTS.md").read_text()


def test_every_benchmark_is_reported():
    text = "".join(page.read_text() for page in ARCHIVE)
    for script in (ROOT / "benchmarks").glob("*.py"):
        if "\ndef parse(" in script.read_text():  # not a part of another one
            assert f"benchmarks/{script.name}" in text, script.name
