"""A page of each public module, links to the names on it, and a check that none is missing."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import pyro_sde

DOCS = Path(__file__).parent.parent
FURTHER = ["pyro_sde.interop.torchsde"]  # modules of their own inside of public packages
PRIVATE = ["pyro_sde.simulation"]  # its classes are chosen, never named by a user

logger = logging.getLogger(__name__)


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


def public_classes() -> dict[type, str]:
    """To the full name under which each is described."""
    found: dict[type, str] = {}
    for module, members in public_modules().items():
        for member in members:
            value = getattr(importlib.import_module(module), member)
            if inspect.isclass(value):
                found[value] = f"{module}.{member}"
    return found


def is_ours(obj: Any) -> bool:
    return obj.__module__.partition(".")[0] == "pyro_sde"


def foreign_bases() -> str:
    """Classes whose members are described elsewhere: those of torch, Pyro and Python, and our
    own public ones, which have an entry of their own. What is left are private ones of ours."""
    classes = public_classes()
    bases = {base for cls in classes for base in cls.__mro__[1:]}
    return ",".join(sorted({b.__name__ for b in bases if not is_ours(b) or b in classes}))


def write_api(app: Sphinx) -> None:
    """One page of every public module, and the table that leads to them."""
    folder, rows = DOCS / "api", []
    folder.mkdir(exist_ok=True)
    for name, members in public_modules().items():
        doc = (importlib.import_module(name).__doc__ or "").strip().partition("\n\n")[0]
        doc = doc.replace("\n", " ")  # a row of a table is one line
        text = f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n"
        text += f"   :members: {', '.join(members)}\n   :show-inheritance:\n"
        if internal := set(importlib.import_module(name).__all__) - set(members):
            text += f"   :exclude-members: {', '.join(sorted(internal))}\n"
        text += "```\n"
        write(folder / f"{name.removeprefix('pyro_sde.')}.md", text)
        links = ", ".join(f"{{py:obj}}`{m} <{name}.{m}>`" for m in members)
        rows.append(f"| [{name}]({name.removeprefix('pyro_sde.')}.md) | {doc} | {links} |")
    toc = "\n".join(name.removeprefix("pyro_sde.") for name in public_modules())
    used_most = (x for x in pyro_sde.__all__ if not inspect.ismodule(getattr(pyro_sde, x)))
    write(
        folder / "index.md",
        "# Reference\n\nWhat is used most can be imported from `pyro_sde` itself: "
        + ", ".join(f"{{py:obj}}`{x} <pyro_sde.{x}>`" for x in used_most)
        + ".\n\n| module | what it holds | names |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    )
    for page in folder.glob("*.md"):  # of a module that is no more
        if page.stem != "index" and f"pyro_sde.{page.stem}" not in public_modules():
            page.unlink()


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
    """In the place of a class without an entry, what it inherits from in turn."""
    classes = public_classes()

    def public(base: Any) -> list:
        if not is_ours(base) or base in classes:
            return [base]
        return [above for below in base.__bases__ for above in public(below)]

    found = dict.fromkeys(above for base in bases for above in public(base))
    bases[:] = [base for base in found if base is not object] or [object]


def drop_object(app: Sphinx, doctree: Any) -> None:
    """All classes have this base."""
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)


def skip_foreign(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> Any:
    """Methods of torch and Pyro, whose doc strings are about something else."""
    return True if inspect.isfunction(obj) and not is_ours(obj) else None


def tidy_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: Any, result: Any
) -> tuple[Any, Any] | None:
    """Without what a caller never passes, and with defaults that can be parsed."""
    if signature is None:
        return None
    signature = re.sub(r", _instance: [^,)]+", "", signature)
    return re.sub(r" ?= ?<factory>", " = ...", signature), result


def drop_field_numbers(app: Sphinx, what: str, name: str, obj: Any, o: Any, lines: list) -> None:
    """Fields of a NamedTuple that nobody has described."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def list_inherited(app: Sphinx, what: str, name: str, obj: Any, o: Any, lines: list) -> None:
    """At the end of a class: which members it has from public classes of ours, with links."""
    if not inspect.isclass(obj):
        return
    classes = public_classes()
    seen = set(vars(obj))
    for base in obj.__mro__[1:]:
        own = {k for k, v in vars(base).items() if k[0] != "_" and described(v)}
        if base in classes and own - seen:
            where = classes[base]
            links = ", ".join(f":py:obj:`{k} <{where}.{k}>`" for k in sorted(own - seen))
            lines += ["", f"From :py:obj:`{base.__name__} <{where}>`: {links}."]
        seen |= set(vars(base))


def described(member: Any) -> bool:
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return inspect.isfunction(function) and bool(function.__doc__)


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


def check_complete(app: Sphinx, env: Any) -> None:
    """Every public name has an entry."""
    for module, members in public_modules().items():
        for member in members:
            if f"{module}.{member}" not in env.domains["py"].objects:
                logger.warning("%s.%s has no entry in the reference", module, member)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_api)
    app.connect("autodoc-process-bases", drop_private_bases)
    app.connect("autodoc-skip-member", skip_foreign)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("autodoc-process-docstring", drop_field_numbers)
    app.connect("autodoc-process-docstring", list_inherited)
    app.connect("doctree-read", drop_object)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", find_reexported)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
