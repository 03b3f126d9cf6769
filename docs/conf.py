"""Sphinx: the pages of this folder, and one of each public module from its doc strings."""

import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
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
if found := importlib.util.find_spec("ziamath"):  # for its font: browsers need one for formulas
    html_static_path.append(str(Path(found.origin).parent / "fonts/STIXTwoMath-Regular.ttf"))
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
FURTHER = ["pyro_sde.interop.torchsde"]  # modules of their own inside of public packages
PRIVATE = ["pyro_sde.simulation"]  # its classes are chosen, never named by a user


def public_modules() -> dict[str, list[str]]:
    """From the modules that users import to the names in them that are public.

    Some modules have names for the package's own use: of a single file that pyro_sde does not
    export, but exports something from, only that is shown.
    """
    found = {}
    names = [f"pyro_sde.{m.name}" for m in pkgutil.iter_modules(pyro_sde.__path__)]
    for name in sorted([*names, *FURTHER]):
        last = name.rpartition(".")[2]
        if last.startswith("_") or name in PRIVATE:
            continue
        module = importlib.import_module(name)
        members = [x for x in module.__all__ if callable(getattr(module, x))]
        exported = [x for x in members if x in pyro_sde.__all__]
        if exported and last not in pyro_sde.__all__ and not hasattr(module, "__path__"):
            members = exported
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
        + ", ".join(
            f"`{x}`" for x in pyro_sde.__all__ if not inspect.ismodule(getattr(pyro_sde, x))
        )
        + ".\n\n| module | what it holds | names |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    )


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


def drop_private_bases(app: Sphinx, name: str, obj: Any, options: Any, bases: list) -> None:
    bases[:] = [base for base in bases if not getattr(base, "__name__", "").startswith("_")]


def drop_field_numbers(app: Sphinx, what: str, name: str, obj: Any, o: Any, lines: list) -> None:
    """Fields of a NamedTuple that nobody has described."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def mathml(node: Any, as_block: bool = False) -> str:
    """With amends for what docutils does not know, takes for something else, or sets badly."""
    tex = node.astext().replace(r"\dots", r"\ldots").replace(r"\|", r"\parallel ")
    tex = re.sub(r"frac(\d)(\d)", r"frac{\1}{\2}", tex)
    tex = re.sub(r"(?<!\\)\|([^|]+)(?<!\\)\|", r"{\\lvert \1 \\rvert}", tex)
    try:
        result = tex2mathml(tex, as_block=as_block)
    except MathError as e:
        logger.warning("%s in %s", e, node.astext(), location=node)
        return node.astext()
    # log p, but log(p): a space after the name of a function, if no bracket follows.
    return re.sub(r"<mo>&ApplyFunction;</mo>(?=\s*<m[^o])", '<mspace width="0.17em"/>', result)


def link_names(app: Sphinx, doctree: Any) -> None:
    """`AutoSDE` or `forecast(...)` in a text leads to its description, with plain Markdown."""
    known = {name: name for name in public_modules()}
    for module, members in public_modules().items():
        if module not in FURTHER:
            known |= {member: f"{module}.{member}" for member in members}
    if app.env.docname.startswith("api/"):
        return
    for node in list(doctree.findall(nodes.literal)):
        target = known.get(node.astext().partition("(")[0])
        if target is None or isinstance(node.parent, nodes.reference | addnodes.pending_xref):
            continue
        options = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refwarn": False}
        link = addnodes.pending_xref("", refexplicit=True, **options)
        node.replace_self(link)
        link += node


def keep_together(app: Sphinx, doctree: Any) -> None:
    """No line ends before the spread of a number."""
    for node in list(doctree.findall(nodes.Text)):
        if " ± " in node:
            node.parent.replace(
                node, nodes.Text(node.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"))
            )


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
    app.connect("autodoc-process-bases", drop_private_bases)
    app.connect("autodoc-process-docstring", drop_field_numbers)
    app.connect("doctree-read", link_names)
    app.connect("doctree-read", keep_together)
    app.connect("missing-reference", find_reexported)
