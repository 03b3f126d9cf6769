"""What is published: one version everywhere, a description that renders without the repository."""

import importlib.util
import re
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest

import pyro_sde

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/owner/name"
README = (ROOT / "README.md").read_text()
TARGET = re.compile(r"\]\(([^)\s]+)[^)]*\)")


def load_setup():
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_setup()


def blob(path):
    return f"{ADDRESS}/blob/v1/{path}"


def raw(path):
    return f"{ADDRESS}/raw/v1/{path}"


@pytest.mark.parametrize(
    "readme, with_address, without",
    [
        ("See [docs](docs/a.md).", f"See [docs]({blob('docs/a.md')}).", "See docs."),
        ("[`f`](./a.md#b)", f"[`f`]({blob('a.md#b')})", "`f`"),
        ("[two\nlines](a.md)", f"[two\nlines]({blob('a.md')})", "two\nlines"),
        ('[a](b.md "title")', f'[a]({blob("b.md")} "title")', "a"),
        ("[below](#part)", f"[below]({blob('README.md#part')})", "below"),
        ("[x](https://pyro.ai)", "[x](https://pyro.ai)", "[x](https://pyro.ai)"),
        ("[x](mailto:a@b.org)", "[x](mailto:a@b.org)", "[x](mailto:a@b.org)"),
        ("a ![x](b.png) c", f"a ![x]({raw('b.png')}) c", "a  c"),
        ("![x](https://a.org/b.svg)", "![x](https://a.org/b.svg)", "![x](https://a.org/b.svg)"),
        ("[![x](b.png)](c.md)", f"[![x]({raw('b.png')})]({blob('c.md')})", ""),
        ("[![x](https://a/b)](c.md)", f"[![x](https://a/b)]({blob('c.md')})", "![x](https://a/b)"),
        (
            "one\n\n![x](b.png)\n\n*A caption\nof `b`.*\n\n*two*",
            f"one\n\n![x]({raw('b.png')})\n\n*A caption\nof `b`.*\n\n*two*",
            "one\n\n*two*",
        ),
        ("![x](b.png)\n\n**Bold** *a*", f"![x]({raw('b.png')})\n\n**Bold** *a*", "**Bold** *a*"),
        ("`[0](t)` and ``a`[0](t)``", "`[0](t)` and ``a`[0](t)``", "`[0](t)` and ``a`[0](t)``"),
    ],
)  # fmt: skip
def test_links_and_images(readme, with_address, without):
    assert setup.describe(readme, ADDRESS, "v1") == with_address
    assert setup.describe(readme, ADDRESS + "/", "v1") == with_address
    assert setup.describe(readme, "", "v1") == without


def test_code_is_not_touched():
    code = "```python\nf[0](x)  # ![a](b)\n\n[1](y)\n```"
    for address in ("", ADDRESS):
        before, after = (setup.describe(link, address, "v1") for link in ("[a](b.md)", "[c](d.md)"))
        text = setup.describe(f"[a](b.md)\n\n{code}\n\n[c](d.md)", address, "v1")
        assert text == f"{before}\n\n{code}\n\n{after}"


@pytest.mark.parametrize("line", ['<img src="docs/a.png">', '<a href="b.md">b</a>', "[a]: b.md"])
def test_what_cannot_be_made_absolute_is_refused(line):
    with pytest.raises(ValueError, match=r"README\.md has .* write links and images as"):
        setup.describe(f"text\n\n{line}", "", "v1")
    assert line in setup.describe(f"`{line}`", "", "v1")


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_the_readme_has_no_relative_link_left(address):
    prose = setup.FENCED.sub("", setup.describe(README, address, "v1"))
    targets = TARGET.findall(prose)
    assert targets and all(target.startswith("https://") for target in targets)
    assert any(target.startswith(ADDRESS) for target in targets) == bool(address)
    if not address:
        assert not re.search(r"!\[[^\]]*\]\((?!https)", prose)
    else:
        inside = {t.partition("v1/")[2].partition("#")[0] for t in targets if ADDRESS in t}
        assert all((ROOT / path).exists() for path in inside)


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_metadata(address, tmp_path):
    """As setuptools writes it; the same as in a wheel and an sdist."""
    text = (ROOT / "pyproject.toml").read_text()
    setting = re.compile(r'^repository = "[^"]*"$', re.MULTILINE)
    assert len(setting.findall(text)) == 1
    (tmp_path / "pyproject.toml").write_text(setting.sub(f'repository = "{address}"', text))
    for name in ("setup.py", "README.md", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "pyro_sde").mkdir()
    init = (ROOT / "pyro_sde/__init__.py").read_text()
    (tmp_path / "pyro_sde/__init__.py").write_text(init)
    command = [sys.executable, "setup.py", "-q", "egg_info"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = message_from_string((tmp_path / "pyro_sde.egg-info/PKG-INFO").read_text())
    ref = f"v{pyro_sde.__version__}"
    assert found["Version"] == pyro_sde.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().strip() == setup.describe(README, address, ref).strip()
    urls = dict(line.split(", ") for line in found.get_all("Project-URL", []))
    assert urls == setup.project_urls(address, ref)
    assert (urls.get("Source") == address) if address else not urls


def test_one_version():
    version = pyro_sde.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == version
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == version
    for found in re.findall(r"^\s*version = \{(.+?)\}", README, re.MULTILINE):  # BibTeX
        assert found == version


def test_the_address_is_that_of_the_citation():
    """Both or neither: the one that is read by tools, and the one that is read by people."""
    text = (ROOT / "pyproject.toml").read_text()
    address = re.search(r'^repository = "(.*)"$', text, re.MULTILINE)[1]
    citation = re.search(
        r"^repository-code: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert (citation[1] if citation else "") == address
