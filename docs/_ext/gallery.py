"""The grid of the gallery: each entry is a picture with a title, one line, and a link.

In Markdown::

    :::{gallery}
    - [Lorenz](#lorenz): a law of motion is learned. ![](lorenz.png)
    - [Many series](tutorials/many_series.md): one guide for all of them.
    :::

An entry without a picture shows the last figure that the code of the linked page drew.
"""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)


class gallery(nodes.container):
    """The grid."""


class Gallery(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        grid = gallery(classes=["gallery"])
        self.state.nested_parse(self.content, self.content_offset, grid)
        for item in grid.findall(nodes.list_item):
            picture(item)
        self.env.metadata[self.env.docname]["has_gallery"] = True
        return [grid]


def picture(item: nodes.list_item) -> None:
    """Move the picture of an entry to its front."""
    for image in list(item.findall(nodes.image)):
        image.parent.remove(image)
        item.insert(0, image)


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Pictures for the entries that have none, and links around all of them."""
    for grid in doctree.findall(gallery):
        for item in grid.findall(nodes.list_item):
            link = next(item.findall(nodes.reference), None)
            if link is None:
                logger.warning("no link in an entry of the gallery", location=item)
                continue
            if next(item.findall(nodes.image), None) is None:
                image = last_figure(app, docname, link)
                if image is None:
                    logger.warning("no figure on the page %s", link.get("refuri"), location=item)
                    continue
                item.insert(0, image)
            image = item[0]
            image["alt"] = ""  # the title beside it is the text of the link
            where = {k: link[k] for k in ("refuri", "refid", "internal") if k in link}
            item[0] = nodes.reference("", "", image, classes=["thumbnail"], **where)


def last_figure(app: Sphinx, docname: str, link: nodes.reference) -> nodes.image | None:
    for name in app.env.found_docs:
        if link.get("refuri", "").partition("#")[0] == app.builder.get_relative_uri(docname, name):
            images = list(app.env.get_doctree(name).findall(nodes.image))
            return images[-1].deepcopy() if images else None
    return None


def always_rewrite(app: Sphinx, env: Any) -> list[str]:
    """A gallery shows what other pages drew."""
    return [name for name, found in env.metadata.items() if found.get("has_gallery")]


def visit(writer: Any, node: gallery) -> None:
    writer.body.append('<div class="gallery">\n')


def depart(writer: Any, node: gallery) -> None:
    writer.body.append("</div>\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("gallery", Gallery)
    app.add_node(gallery, html=(visit, depart))
    app.connect("env-updated", always_rewrite)
    app.connect("doctree-resolved", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
