"""Text that commands show and write: tables, durations, plurals, and what is made from templates (`ddnn/templates`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str, keep: str = "\n") -> str:
    """Text from a file, for a terminal: control characters other than those of `keep` become question marks."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def duration(seconds: float) -> str:
    """In the two largest units: "3 h 20 min"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "l") -> str:
    """Plain text in columns, two spaces apart, without trailing blanks. `rows`: of as many cells each as the header
    has, where there is one. `align`: a letter for each column, l or r; the last letter serves all further columns."""
    from rich.cells import cell_len  # double-width characters take two columns

    lines = [*([header] if header else []), *rows]
    columns = max((len(line) for line in lines), default=0)
    widths = [max(cell_len(line[i]) for line in lines if i < len(line)) for i in range(columns)]

    def padded(cell: str, width: int, side: str) -> str:
        blanks = " " * (width - cell_len(cell))
        return blanks + cell if side == "r" else cell + blanks

    sides = align.ljust(columns, align[-1])
    return "\n".join("  ".join(map(padded, line, widths, sides)).rstrip() for line in lines)


def definitions(pairs: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Lines of a name and its value, the values aligned; further lines of a value are aligned with its first."""
    known = list(pairs)
    width = max((len(name) for name, _ in known), default=0)
    below = "\n" + indent + " " * (width + 2)
    return "\n".join(f"{indent}{name:{width}}  {value.replace(chr(10), below)}".rstrip() for name, value in known)


def render(template: str, **values: Any) -> str:
    """What a command prints, from a template, values as they are; without the line end."""
    return environment().overlay(finalize=None).get_template(template).render(values).rstrip("\n")


def environment(*, html: bool = False) -> jinja2.Environment:
    """The templates, with the filters `quote` (for a shell), `md` and `md_line` (for Markdown), `fence`, `plural`. A
    name that a template uses and nobody has given is an error. `html`: values are escaped for HTML."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("ddnn"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "quote": shlex.quote, "md": _escape_markdown, "md_line": _escape_line, "fence": _fence, "plural": plural,
    }  # fmt: skip
    return templates


def _without_controls(value: Any) -> Any:
    """Text without control characters, lone surrogates and changes of direction; markup and numbers as they are."""
    if type(value) is not str:
        return value
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in value)


def _escape_markdown(text: object) -> str:
    """Text within a line or a table cell: nothing in it is markup, HTML or the end of a cell."""
    return re.sub(r"([\\`*_\[\]<>|~&$#!]|:(?=//))", r"\\\1", " ".join(_without_controls(str(text)).split()))


def _escape_line(text: object) -> str:
    """Text that begins a line: it starts no list, no rule, and no heading of the line before."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _escape_markdown(text))


def _fence(text: str) -> str:
    """A row of backquotes longer than any in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
