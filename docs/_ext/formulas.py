"""Formulas as MathML, made by docutils: the pages need no script and no network for them."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


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
    # A prime of the font, which is raised, and bars around it that are as tall as a letter.
    result = result.replace("<mo>'</mo>", '<mo lspace="0" rspace="0">\N{PRIME}</mo>')
    result = re.sub(r'<mo( class="mathopen")?>\|</mo>', r'<mo stretchy="false"\1>|</mo>', result)
    # A space before the name of a function that is multiplied, or to which an operator is applied.
    before = r"(</m(?:i|n|sub|sup)>|\)</mo>)(?=\s*<mi>\w+</mi>\s*<mo>&ApplyFunction;)"
    result = re.sub(before, r'\1<mspace width="0.17em"/>', result)
    # log p, but log(p): a space after the name of a function, if no bracket follows.
    return re.sub(r"<mo>&ApplyFunction;</mo>(?=\s*<m[^o])", '<mspace width="0.17em"/>', result)


def inline_math(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node))
    raise nodes.SkipNode


def block_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
