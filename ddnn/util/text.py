"""Text that commands show: tables, durations, plurals. The same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def plural(number: int, noun: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
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


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "") -> str:
    """Plain text in columns, two spaces apart, the same on a terminal and in a file.

    Args:
        rows: of as many cells each as the header has, where there is one.
        header: titles of the columns; none where empty.
        align: a letter for each column, l or r; the last letter serves all further columns. Default: l.

    Returns:
        Lines without trailing blanks, each ended by a newline but the last.
    """
    from rich.cells import cell_len  # double-width characters take two columns

    lines = [*([header] if header else []), *rows]
    columns = max((len(line) for line in lines), default=0)
    widths = [max(cell_len(line[i]) for line in lines if i < len(line)) for i in range(columns)]
    sides = (align or "l").ljust(columns, (align or "l")[-1])

    def padded(cell: str, width: int, side: str) -> str:
        blanks = " " * (width - cell_len(cell))
        return blanks + cell if side == "r" else cell + blanks

    return "\n".join("  ".join(map(padded, line, widths, sides)).rstrip() for line in lines)


def definitions(pairs: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Lines of a name and its value, the values aligned; further lines of a value are aligned with its first."""
    known = list(pairs)
    width = max((len(name) for name, _ in known), default=0)
    below = "\n" + indent + " " * (width + 2)
    return "\n".join(f"{indent}{name:{width}}  {value.replace(chr(10), below)}".rstrip() for name, value in known)
