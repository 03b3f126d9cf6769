"""A figure leads to its file, where a narrow screen can enlarge it."""

import posixpath

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri


def link_to_files(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Around every figure that is not part of a link already."""
    if app.builder.format != "html":
        return
    folder = relative_uri(app.builder.get_target_uri(docname), app.builder.imagedir)
    for image in list(doctree.findall(nodes.image)):
        source = image.get("candidates", {}).get("*", image["uri"])
        if source not in app.env.images or isinstance(image.parent, nodes.reference):
            continue
        target = posixpath.join(folder, app.env.images[source][1])
        link = nodes.reference("", "", refuri=target, internal=True, classes=["image-reference"])
        image.replace_self(link)
        link += image


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", link_to_files, priority=900)  # after links of the gallery
    return {"parallel_read_safe": True, "parallel_write_safe": True}
