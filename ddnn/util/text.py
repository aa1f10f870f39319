"""Text that commands show and write: tables, durations, plurals, rendered templates (`ddnn/templates`); lines and colors of
a terminal; and the escaping of names from files, which must not control the terminal or forge a line of ddnn."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import PurePath
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import jinja2


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str, keep: str = "\n") -> str:
    r"""Text with its control characters escaped, other than those of `keep`: \x1b, \n, and as in JSON \u009b, changes of
    direction and lone surrogates too. Applied twice it is as applied once. `keep`: empty for a name."""
    return text if text.isprintable() else "".join(c if c in keep else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    if c.isprintable() or unicodedata.category(c) == "Zs":  # wide and unbreakable spaces
        return c
    return repr(c)[1:-1] if c < " " else json.dumps(c)[1:-1].replace("\x7f", "\\u007f")


class _EscapingStream:
    """A standard stream for text that is shown to a person. stdout that nobody reads any more ends the program quietly
    with 141, as the signal SIGPIPE does; what stderr cannot take is lost, since nobody else could be told."""

    def __init__(self, stream: Any, is_error: bool) -> None:
        self._stream, self._is_error = stream, is_error

    def write(self, text: str, color: str = "") -> int:
        shown = printable(text, "\n\t")
        with self._no_reader():
            self._stream.write(f"\x1b[{_COLORS[color]}m{shown}\x1b[0m" if color else shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self._no_reader():
            self._stream.flush()

    @contextmanager
    def _no_reader(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not self._is_error:
                raise SystemExit(EXIT_NO_READER) from error
            if not self._is_error:
                raise

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write to it
            raise AttributeError(name)
        return getattr(self._stream, name)


EXIT_NO_READER = 141  # 128 + SIGPIPE
_COLORS = {"red": 31, "green": 32, "yellow": 33}


def show(line: str, stream: Any, color: str = "") -> None:
    """Writes a line to stdout or stderr: on a terminal in this color, one of `_COLORS`, unless NO_COLOR is set or TERM is
    dumb."""
    colorless = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if color and not colorless and stream.isatty() and isinstance(stream, _EscapingStream):
        stream.write(line, color)
        line = ""
    print(line, file=stream, flush=True)


NARROW = 110  # a terminal of fewer columns gets short lines of epochs: the full ones have 95 to 108
MAX_INDENT = 24


def fitted(text: str, stream: Any, short: str = "") -> str:
    """The text as `stream` shows it: on a terminal broken between words, on a narrow one `short` instead, if there is one.
    The rest of a line begins below its second column, which two blanks separate from the first, if it has one."""
    if not stream.isatty():
        return text
    columns, lines = get_terminal_size().columns, list[str]()
    for line in (short if short and columns < NARROW else text).split("\n"):
        gap = re.search(r"(^ {5}|\S ) +(?=\S)", line)
        indent = gap.end() if gap and gap.end() <= MAX_INDENT else 4
        wrapper = textwrap.TextWrapper(columns, subsequent_indent=" " * indent)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def unescaped(stream: Any) -> Any:
    """stdout or stderr as it is, for what moves the cursor: texts that it shows are to be `printable`."""
    return stream._stream if isinstance(stream, _EscapingStream) else stream


@contextmanager
def binary_output() -> Iterator[BinaryIO]:
    """Standard output for bytes, as they are. Ends the program quietly with 141 where nobody reads them any more."""
    stream: BinaryIO = unescaped(sys.stdout).buffer
    try:
        yield stream
        stream.flush()
    except BrokenPipeError as error:
        raise SystemExit(EXIT_NO_READER) from error


@contextmanager
def escaped_output() -> Iterator[None]:
    """What is written to stdout and stderr in this block is escaped as by `printable`."""
    before = sys.stdout, sys.stderr
    streams: tuple[Any, Any] = _EscapingStream(sys.stdout, False), _EscapingStream(sys.stderr, True)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def log_to_stderr() -> None:
    """The log of all packages on stderr, escaped; called once."""
    handler = _TerminalHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter())
    handler.setLevel(terminal_level())
    logging.basicConfig(handlers=[handler])


SUCCESS = {"color": "green"}
"""`extra` of a log line that says that all went well."""


class _TerminalHandler(logging.StreamHandler[Any]):
    """Log lines for a person: records may have a `color` and, for a narrow terminal, a `short` text."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        try:
            line = fitted(self.format(record), self.stream, getattr(record, "short", ""))
            show(line, self.stream, getattr(record, "color", level))
        except Exception:  # noqa: BLE001 (as logging has it: no training ends since a line cannot be shown)
            self.handleError(record)


def log_to(terminal: Any) -> None:
    """What stderr has got of the log so far goes to this terminal from here on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _TerminalHandler):
            handler.setStream(_EscapingStream(terminal, True))


TERMINAL_LEVEL = "DDNN_LOG_LEVEL"
"""Environment variable: the least level of the log on stderr, from the options of the command to all its workers."""


def terminal_level() -> int:
    """WARNING with --quiet, DEBUG with --verbose, else INFO."""
    return {"WARNING": logging.WARNING, "DEBUG": logging.DEBUG}.get(os.environ.get(TERMINAL_LEVEL, ""), logging.INFO)


def set_terminal_level(name: str) -> None:
    """For this command and the workers that it starts."""
    os.environ[TERMINAL_LEVEL] = name
    logging.getLogger("ddnn").setLevel(min(terminal_level(), logging.INFO))
    for handler in logging.getLogger().handlers:
        handler.setLevel(terminal_level())


class EscapingFormatter(logging.Formatter):
    """Log lines without control characters; texts and paths among the arguments have no line breaks either."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record = copy(record)
            names = (str, PurePath)
            record.args = tuple(printable(str(a), "") if isinstance(a, names) else a for a in record.args or ())
        return printable(super().format(record), "\n\t")


def duration(seconds: float) -> str:
    """In the two largest units: "3 h 20 min"."""
    whole_seconds = int(seconds)
    days, hours, minutes = whole_seconds // 86400, whole_seconds // 3600 % 24, whole_seconds // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole_seconds % 60} s" if minutes else f"{whole_seconds} s"


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "l") -> str:
    """Plain text in columns, two spaces apart, without trailing blanks. `rows`: of as many cells each as the header
    has, where there is one. `align`: a letter for each column, l or r; the last letter serves all further columns."""
    from rich.cells import cell_len  # double-width characters take two columns

    lines = [[printable(cell, "") for cell in line] for line in (*([header] if header else []), *rows)]
    columns = max((len(line) for line in lines), default=0)
    widths = [max(cell_len(line[i]) for line in lines if i < len(line)) for i in range(columns)]

    def padded(cell: str, width: int, side: str) -> str:
        blanks = " " * (width - cell_len(cell))
        return blanks + cell if side == "r" else cell + blanks

    sides = align.ljust(columns, align[-1])
    return "\n".join("  ".join(map(padded, line, widths, sides)).rstrip() for line in lines)


def definitions(pairs: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Lines of a name and its value, the values aligned; further lines of a value are aligned with its first."""
    lines = list(pairs)
    width = max((len(name) for name, _ in lines), default=0)
    below = "\n" + indent + " " * (width + 2)
    return "\n".join(f"{indent}{name:{width}}  {value.replace(chr(10), below)}".rstrip() for name, value in lines)


def render(template: str, **values: Any) -> str:
    """What a command prints, from a template, values as they are; without the line end."""
    return environment().overlay(finalize=None).get_template(template).render(values).rstrip("\n")


def environment(*, html: bool = False) -> jinja2.Environment:
    """The templates, with the filters `quote` (for a shell), `plural` and `duration`. A name that a template uses and nobody has given is an error. `html`: values are escaped for HTML."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("ddnn"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        finalize=without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "quote": shlex.quote,
        "plural": plural,
        "duration": duration,
    }
    return templates


def without_controls(value: Any) -> Any:
    """Text without control characters, lone surrogates and changes of direction; markup and numbers as they are."""
    if type(value) is not str:
        return value
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in value)
