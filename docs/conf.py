"""Sphinx: the pages of this folder, and one of each public module from its doc strings."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import pyro_sde

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from executed import CACHE
from reference import foreign_bases

project, author, copyright = "pyro_sde", "The pyro_sde authors", "The pyro_sde authors"
version = release = pyro_sde.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
extensions += ["executed", "figures", "formulas", "gallery", "reference"]  # of docs/_ext
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_ext"]

# Code cells run while the pages are built. An error in one, or a warning, is an error of the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(CACHE)
nb_execution_in_temp = True
nb_execution_show_tb = True
nb_execution_timeout = 300
nb_merge_streams = True

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
autodoc_default_options = {"inherited-members": foreign_bases()}
python_maximum_signature_line_length = 72

# Links to the pages of other libraries need their indices, which are fetched when a page is built.
# Without a network the names stay plain text.
if os.environ.get("READTHEDOCS") or os.environ.get("PYRO_SDE_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "pyro": ("https://docs.pyro.ai/en/stable", None),
        "matplotlib": ("https://matplotlib.org/stable", None),
    }


def keep_together(app: Sphinx, doctree: Any) -> None:
    """No line ends between a number and its spread or its percent sign."""
    for node in list(doctree.findall(nodes.Text)):
        kept = re.sub(r"(?<=\d) (?=[±%])|(?<=±) ", "\N{NO-BREAK SPACE}", node)
        if kept != node and not isinstance(node.parent, nodes.literal | nodes.literal_block):
            node.parent.replace(node, nodes.Text(kept))


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", keep_together)
