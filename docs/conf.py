"""Sphinx: the pages of this folder, and one of each public module from its doc strings."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import pyro_sde

project, author, copyright = "pyro_sde", "The pyro_sde authors", "The pyro_sde authors"
version = release = pyro_sde.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "pyro_sde"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 72

logger = logging.getLogger(__name__)
HERE = Path(__file__).parent
FURTHER = ["pyro_sde.solvers.torchsde"]  # modules of their own inside of public packages


def public_modules() -> dict[str, list[str]]:
    """From the modules that users import to the names in them that are public.

    A module that pyro_sde does not export shows only what pyro_sde exports from it.
    """
    found = {}
    names = [f"pyro_sde.{m.name}" for m in pkgutil.iter_modules(pyro_sde.__path__)]
    for name in sorted([*names, *FURTHER]):
        last = name.rpartition(".")[2]
        if last.startswith("_"):
            continue
        module = importlib.import_module(name)
        exported = last in pyro_sde.__all__ or name in FURTHER
        members = [x for x in module.__all__ if exported or x in pyro_sde.__all__]
        if members:
            found[name] = members
    return found


def write_api(app: Sphinx) -> None:
    """One page of every public module, and the table that leads to them."""
    folder, rows = HERE / "api", []
    folder.mkdir(exist_ok=True)
    for name, members in public_modules().items():
        doc = (importlib.import_module(name).__doc__ or "").strip().partition("\n\n")[0]
        text = f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n"
        text += f"   :members: {', '.join(members)}\n   :show-inheritance:\n```\n"
        write(folder / f"{name.removeprefix('pyro_sde.')}.md", text)
        links = ", ".join(f"{{py:obj}}`{m} <{name}.{m}>`" for m in members)
        rows.append(f"| [{name}]({name.removeprefix('pyro_sde.')}.md) | {doc} | {links} |")
    toc = "\n".join(name.removeprefix("pyro_sde.") for name in public_modules())
    write(
        folder / "index.md",
        "# Reference\n\nWhat is used most can be imported from `pyro_sde` itself: "
        + ", ".join(f"`{x}`" for x in pyro_sde.__all__ if not hasattr_module(x))
        + ".\n\n| module | what it holds | names |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    )


def hasattr_module(name: str) -> bool:
    return hasattr(getattr(pyro_sde, name), "__path__") or f"pyro_sde.{name}" in public_modules()


def write(path: Path, text: str) -> None:
    """Only what has changed, or Sphinx would read it all again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def find_reexported(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """A reference to pyro_sde.X leads to where X is described, in the module that defines it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("pyro_sde."):
        return None
    for name, found in env.domains["py"].objects.items():
        if name.rpartition(".")[2] == target.rpartition(".")[2]:
            here = node.get("refdoc", env.docname)
            return make_refnode(app.builder, here, found.docname, found.node_id, contnode)
    return None


def mathml(node: Any, as_block: bool = False) -> str:
    try:
        return tex2mathml(node.astext().replace(r"\dots", r"\ldots"), as_block=as_block)
    except MathError as e:
        logger.warning("%s in %s", e, node.astext(), location=node)
        return node.astext()


def inline_math(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node))
    raise nodes.SkipNode


def block_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    # MathML is made here: the pages need no script and no network for their formulas.
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("builder-inited", write_api)
    app.connect("missing-reference", find_reexported)
