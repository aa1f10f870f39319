"""Text from Jinja2 templates (`ddnn/templates`). A name that a template uses and nobody has given is an error."""

from __future__ import annotations

import re
import shlex
from typing import Any

import jinja2

from ddnn.util.text import plural


def environment(*, html: bool = False) -> jinja2.Environment:
    """The templates, with the filters `quote` (for a shell), `md` and `md_line` (for Markdown), `fence`, `plural`.

    Args:
        html: values are escaped for HTML.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("ddnn"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "quote": shlex.quote, "md": escape_markdown, "md_line": escape_line, "fence": _fence, "plural": plural,
    }  # fmt: skip
    return templates


def _printable(value: Any) -> Any:
    """Text without control characters, lone surrogates and changes of direction; markup and numbers as they are."""
    if type(value) is not str:
        return value
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in value)


def escape_markdown(text: object) -> str:
    """Text within a line or a table cell: nothing in it is markup, HTML or the end of a cell."""
    return re.sub(r"([\\`*_\[\]<>|~&$#!]|:(?=//))", r"\\\1", " ".join(_printable(str(text)).split()))


def escape_line(text: object) -> str:
    """Text that begins a line: it starts no list, no rule, and no heading of the line before."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", escape_markdown(text))


def _fence(text: str) -> str:
    """A row of backquotes longer than any in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
