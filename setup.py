"""The metadata that depends on the address of the repository; all else is in pyproject.toml.

The address is `repository` in `[tool.pyro_sde]` of pyproject.toml. From it the relative links and
images of README.md become absolute in the description that a package index shows, and the project
gets its addresses. While it is empty, links are left there as plain text, and images are left out.
"""

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent
FENCED = re.compile(r"^( {0,3}```.*?^ {0,3}```[ \t]*$)", re.DOTALL | re.MULTILINE)
CODE = r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
TEXT = r"\[(?P<text>(?:!\[[^\]]*\]\([^)]*\)|`[^`]*`|[^\[\]`])*)\]"  # an image may be in a link
LINK = rf"(?P<image>!?){TEXT}\((?P<target>[^)\s]+)(?P<title>[^)]*)\)"
INLINE = re.compile(f"{CODE}|{LINK}", re.DOTALL)
CAPTION = re.compile(r"(?P<mark>[*_])(?![*_\s]).*[^*_\s](?P=mark)", re.DOTALL)
OTHER = re.compile(r"""(?:src|srcset|href)=["'][^"']*["']|^ {0,3}\[[^\]]+\]:""", re.MULTILINE)


def describe(readme: str, repository: str, ref: str) -> str:
    """The text of README.md for a package index, which does not have the files of the repository.

    With an address, relative links and images lead to the files at ``ref``. Without one, a link
    becomes its text; an image is left out, and if it is a paragraph of its own, then so is a
    paragraph in italics after it, its caption. Code is not touched.

    :param readme: In Markdown, with all links and images inline.
    :param repository: The address, such as ``https://host/owner/name``, or an empty string.
    :param ref: A tag or branch of the repository.
    :returns: The text, in Markdown.
    """
    repository = repository.rstrip("/")

    def replace(match: re.Match) -> str:
        if match["ticks"]:
            return match[0]
        image, target = match["image"], match["target"]
        text = INLINE.sub(replace, match["text"])
        if is_relative(target):
            if not repository:
                return "" if image else text
            file = ("README.md" if target.startswith("#") else "") + target.removeprefix("./")
            target = f"{repository}/{'raw' if image else 'blob'}/{ref}/{file}"
        return f"{image}[{text}]({target}{match['title']})"

    def prose(part: str) -> str:
        kept, follows_image = [], False
        for paragraph in re.split(r"\n[ \t]*\n", part):
            link = INLINE.fullmatch(paragraph.strip())
            is_image = link is not None and link["image"] and is_relative(link["target"])
            is_caption = follows_image and CAPTION.fullmatch(paragraph.strip())
            if repository or not (is_image or is_caption):
                refuse_other_links(INLINE.sub("", paragraph))
                kept.append(INLINE.sub(replace, paragraph))
            follows_image = is_image
        return "\n\n".join(kept)

    parts = FENCED.split(readme)  # every other one is a block of code
    return "".join(part if i % 2 else prose(part) for i, part in enumerate(parts))


def is_relative(target: str) -> bool:
    return re.match(r"[a-zA-Z][\w+.-]*:|//", target) is None


def refuse_other_links(text: str) -> None:
    found = OTHER.search(text)
    if found:
        raise ValueError(
            f"README.md has {found[0]!r}, which cannot be made absolute: write links and images "
            "as [text](target) and ![text](target)"
        )


def project_urls(repository: str, ref: str) -> dict[str, str]:
    """The addresses of the project, none while the repository has none."""
    repository = repository.rstrip("/")
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/{ref}/docs/index.md",
        "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


if __name__ == "__main__":
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = settings["tool"]["pyro_sde"]["repository"]
    source = (ROOT / "pyro_sde/__init__.py").read_text(encoding="utf-8")
    tag = "v" + re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]
    setup(
        long_description=describe((ROOT / "README.md").read_text(encoding="utf-8"), address, tag),
        long_description_content_type="text/markdown",
        project_urls=project_urls(address, tag),
    )
