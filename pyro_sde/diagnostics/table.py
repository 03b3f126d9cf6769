"""A table of plain text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text: a title, a row of column heads, a line, and the rows."""
    lines = [head, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    text = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return "\n".join([title, text[0], "-" * (sum(widths) + 2 * len(widths) - 2), *text[1:]])
