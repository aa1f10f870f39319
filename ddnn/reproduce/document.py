"""What a report consists of, whatever it is written as. All text is plain: the renderers escape it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    """Level 2 or deeper; level 1 is the document's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """A few sentences."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """Lines as they are: a command."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        header: of its columns.
        rows: of as many cells each.
        align: "l" or "r" for each column.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in (*self.rows, self.align)):
            raise ValueError(f"a row of other than {len(self.header)} cells")


@dataclass(frozen=True)
class Picture:
    """A plot.

    Attributes:
        name: of its file, a PNG.
        alt: what it shows, for those who do not see it.
        caption: under it.
        draw: writes it to a path.
    """

    name: str
    alt: str
    caption: str
    draw: Callable[[Path], Path]


Block = Heading | Paragraph | Bullets | Code | Grid | Picture


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        summary: the same figures for machines, of JSON's types.
    """

    title: str
    blocks: tuple[Block, ...]
    summary: dict[str, object] = field(default_factory=dict)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """In their order."""
        return tuple(block for block in self.blocks if isinstance(block, Picture))
