"""Pages with code cells: how their kernel is set up, and when a cached result is still true."""

import hashlib
import logging
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build"
CACHE = BUILD / "executed_pages"
KERNEL = """\
c = get_config()
c.Application.log_level = "ERROR"
c.InteractiveShell.ast_node_interactivity = "none"  # a page shows what it prints and draws
c.InlineBackend.figure_formats = {"retina"}
c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "facecolor": "white"}
c.IPKernelApp.exec_lines = [
    "import warnings",
    "for kind in (UserWarning, RuntimeWarning, FutureWarning):\\n"
    "    warnings.simplefilter('error', kind)",
    "warnings.filterwarnings('ignore', message='IProgress not found')",  # a bar of text will do
    # Once a day, when it is imported.
    "warnings.filterwarnings('ignore', message=r'\\s*ArviZ is undergoing a major refactor')",
    "del warnings, kind",
]
"""


def fingerprint() -> str:
    """Of all that the output of a page depends on beside its own code."""
    digest = hashlib.sha256(KERNEL.encode())
    for name in ("torch", "pyro-ppl", "matplotlib"):
        digest.update(version(name).encode())
    for file in sorted((ROOT / "pyro_sde").rglob("*")):
        if file.suffix in (".py", ".csv"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def prepare(app: Sphinx, config: Config) -> None:
    """A profile for the kernels, and an empty cache if the package has changed since."""
    profile = BUILD / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text(KERNEL)
    os.environ["IPYTHONDIR"] = str(profile.parent)
    os.environ["OMP_NUM_THREADS"] = "1"  # small tensors: a second thread costs more
    logging.getLogger("traitlets").setLevel(logging.WARNING)  # one line for each page
    os.environ.pop("MPLBACKEND", None)  # the kernel's own shows figures on the page
    stamp = CACHE / "fingerprint"
    if not stamp.exists() or stamp.read_text() != config.package_fingerprint:
        shutil.rmtree(CACHE, ignore_errors=True)
        CACHE.mkdir(parents=True)
        stamp.write_text(config.package_fingerprint)


def shorten_messages(app: Sphinx, doctree: Any) -> None:
    """A progress bar that was written again and again is shown as it was at the end, and what Pyro
    logs as information is left out."""
    for block in list(doctree.findall(nodes.literal_block)):
        if "stderr" not in block["classes"]:
            continue
        lines: list[str] = []
        for line in re.split(r"[\r\n]+", block.astext().strip()):
            if line.startswith("INFO"):
                continue
            if lines and name_of_bar(line) == name_of_bar(lines[-1]) != "":
                lines.pop()
            lines.append(line)
        block.rawsource = "\n".join(lines)
        block[:] = [nodes.Text(block.rawsource)]
        if not lines:
            block.parent.remove(block)


def name_of_bar(line: str) -> str:
    """What stands before the percentage of a bar by tqdm; nothing if the line is none."""
    found = re.match(r"(\w+): +\d+%\|", line)
    return found[1] if found else ""


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("package_fingerprint", fingerprint(), "env", str)
    app.connect("config-inited", prepare)
    app.connect("doctree-read", shorten_messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
