"""A document as Markdown (GitHub's) or as one HTML file that needs nothing else: no script, no network."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from urllib.parse import quote

from ddnn.reproduce.document import Block, Bullets, Code, Document, Grid, Heading, Paragraph, Picture

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --faint: #f3f5f7; --text: #1f2328; --back: #fff; --soft: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --faint: #1c2129; --text: #e6edf3; --back: #0d1117; --soft: #9198a1; }
}
body { max-width: 70rem; margin: 0 auto; padding: 1rem; color: var(--text); background: var(--back);
  font: 1rem/1.5 system-ui, sans-serif; }
h1, h2 { border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
h2 { margin-top: 2.5rem; }
p, li { max-width: 48rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { background: var(--faint); }
.r { text-align: right; }
td.r { white-space: nowrap; }
@media (max-width: 45rem) { td:not(.r) { min-width: 6.5rem; } }
pre { overflow-x: auto; padding: .8rem; background: var(--faint); border-radius: .4rem; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
figcaption, nav { color: var(--soft); font-size: .9rem; }
nav a { color: inherit; margin-right: .8rem; }
"""
# Whatever slipped through the escaping: a browser runs no script and fetches nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_markdown(document: Document, folder: str) -> str:
    """The document as Markdown.

    Args:
        folder: where its pictures lie, relative to the file.
    """
    parts = [f"# {_inline(document.title)}", *(_markdown(block, folder) for block in document.blocks)]
    return "\n\n".join(parts) + "\n"


def to_html(document: Document, pictures: Mapping[str, bytes]) -> str:
    """The document as one HTML file.

    Args:
        pictures: name -> PNG.
    """
    title = _html(document.title)
    chapters = [block for block in document.blocks if isinstance(block, Heading) and block.level == 2]
    numbers = {id(block): number for number, block in enumerate(chapters)}
    links = " ".join(f'<a href="#s{numbers[id(block)]}">{_html(block.text)}</a>' for block in chapters)
    body = "\n".join(_element(block, numbers.get(id(block)), pictures) for block in document.blocks)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{title}</h1>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def _markdown(block: Block, folder: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_inline(block.text)}"
    if isinstance(block, Paragraph):
        return _line(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_line(item)}" for item in block.items)
    if isinstance(block, Code):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        return "\n".join((fence, _printable(block.text, "\n"), fence))
    if isinstance(block, Grid):
        rule = ("---:" if side == "r" else "---" for side in block.align)
        rows = [map(_inline, block.header), rule, *(map(_inline, row) for row in block.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    path = quote(f"{folder}/{block.name}")
    return f"![{_inline(block.alt)}]({path})\n\n{_line(block.caption)}"


def _element(block: Block, number: int | None, pictures: Mapping[str, bytes]) -> str:
    """Args: number: of a chapter, for links to it."""
    if isinstance(block, Heading):
        name = "" if number is None else f' id="s{number}"'
        return f"<h{block.level}{name}>{_html(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_html(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>\n" + "\n".join(f"<li>{_html(item)}</li>" for item in block.items) + "\n</ul>"
    if isinstance(block, Code):
        return "<pre><code>" + escape(_printable(block.text, "\n")) + "</code></pre>"
    if isinstance(block, Grid):
        return _table(block)
    return _figure(block, pictures[block.name])


def _table(grid: Grid) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        sides = (' class="r"' if side == "r" else "" for side in grid.align)
        return "<tr>" + "".join(f"<{tag}{side}>{_html(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True))

    rows = "\n".join(f"{row(cells, 'td')}</tr>" for cells in grid.rows)
    head = f"<thead>{row(grid.header, 'th')}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _figure(picture: Picture, png: bytes) -> str:
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    image = f'<img src="{source}" alt="{_html(picture.alt)}">'
    return f"<figure>{image}<figcaption>{_html(picture.caption)}</figcaption></figure>"


def _printable(text: str, kept: str = "") -> str:
    """Without control characters, lone surrogates and changes of direction, which no report needs."""
    return "".join(c if c.isprintable() or c in kept else " " if c.isspace() else "�" for c in text)


def _html(text: str) -> str:
    return escape(" ".join(_printable(text).split()))


def _inline(text: str) -> str:
    """Text within a line or a cell: nothing in it is markup, HTML or the end of a cell."""
    return re.sub(r"([\\`*_\[\]<>|~&$#!]|:(?=//))", r"\\\1", " ".join(_printable(text).split()))


def _line(text: str) -> str:
    """Text that a line begins with: no list, no rule, no heading of the line before."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _inline(text))
