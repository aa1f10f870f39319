"""Script files: where the record of each utterance is stored (kaldi `util/kaldi-table-inl.h`, `ClassifyRxfilename`)."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited

_HINT_LINE = "each line of an scp is: utterance, space, path (with :OFFSET and [FIRST:LAST] where wanted)"
_RANGE = re.compile(r"(:|\d{1,10}:\d{1,10})(?:,(:|\d{1,10}:\d{1,10}))?")
# A thousand million lines: no corpus has as many utterances.
MAX_TABLE_BYTES = 64 << 30
_OFFSET = re.compile(r"(.+):(-?\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ScpEntry:
    """One line of a script file."""

    key: str  # the utterance (or speaker)
    path: Path | None  # the file, found; None where the record comes from a shell command
    offset: int | None  # bytes before the record; None: the file is this one record
    rows: tuple[int, int] | None  # first and last to take, both included; None: all
    columns: tuple[int, int] | None
    pipe: str | None  # the shell command
    scp: Path  # the script file, for messages

    @property
    def location(self) -> str:
        if self.path is None:
            return f"{self.pipe} | (in {self.scp})"
        return str(self.path) if self.offset is None else f"{self.path}:{self.offset}"


def read_lines(path: Path, kind: str) -> Iterator[tuple[int, list[bytes]]]:
    """The lines of a text file, each with its number and split once at its first white space (ASCII's, as in Kaldi: a
    no-break space is part of a name). DataError: the file is missing, empty, not readable, or a line is blank."""
    try:
        if not path.is_file():
            raise DataError(f"{kind} does not exist, or is no regular file", location=path, hint="check the path")
        data = read_bytes_limited(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {kind}: {error.strerror}", location=path) from error
    if not data:
        raise DataError(f"{kind} is empty", location=path, hint="make it again; it should have a line per utterance")
    for number, line in enumerate(io.BytesIO(data), 1):  # a list of all lines would take many times the file's size
        parts = line.split(None, 1)
        if not parts:
            raise DataError(f"line {number} of {kind} is blank", location=path, hint="remove it")
        yield number, parts


def decode_utf8(data: bytes, path: Path, number: int) -> str:
    """`data` as text; DataError naming the line where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"line {number} is not UTF-8 (byte {data[error.start]:#04x})"
        raise DataError(message, location=path, hint="convert the file to UTF-8") from error


def read_keyed_lines(path: Path, kind: str) -> Iterator[tuple[int, str, str]]:
    """(line number, key, the rest) of each line of a table, as `read_lines`; DataError also where a key occurs twice."""
    seen: dict[str, int] = {}
    for number, parts in read_lines(path, kind):
        key = decode_utf8(parts[0], path, number)
        if key in seen:
            message = f"utterance {key} occurs twice, in lines {seen[key]} and {number}"
            raise DataError(message, location=path, hint="utterance ids must be unique; remove or rename one")
        seen[key] = number
        yield number, key, decode_utf8(parts[1].strip(), path, number) if len(parts) > 1 else ""


def read_scp(path: Path, *, allow_pipes: bool = False) -> list[ScpEntry]:
    """Reads a script file: `key path`, `key path:offset`, each also with `[first:last]` or `[first:last,first:last]`.

    A relative path is tried against the working directory (Kaldi's convention), then against the scp's own folder. A
    path may contain spaces. `command |` is an error unless `allow_pipes`. DataError: the file is missing, empty or not
    UTF-8; a line is malformed, a key occurs twice, a file does not exist; a shell command where none is allowed.
    """

    @cache
    def find(name: str) -> Path | None:
        for candidate in (Path(name), path.parent / name):
            with suppress(OSError):  # a name too long, a folder without permission
                if candidate.is_file():
                    return candidate
        return None

    return [
        _parse_entry(key, rest, path, number, find, allow_pipes)
        for number, key, rest in read_keyed_lines(path, "the scp")
    ]


def _parse_entry(
    key: str, rest: str, path: Path, number: int, find: Callable[[str], Path | None], allow_pipes: bool
) -> ScpEntry:
    if not rest or "\0" in rest:
        found = f"line {number}: a NUL character after" if rest else f"line {number} has no path after"
        raise DataError(f"{found} {key!r}", location=path, hint=_HINT_LINE)
    location = f"{path}, line {number}"

    def error(message: str, hint: str | None = _HINT_LINE) -> DataError:
        return DataError(f"utterance {key}: {message}", location=location, hint=hint)

    if rest.startswith("|"):
        raise error(f"{rest!r} writes to a command; nothing can be read", None)
    rest, rows, columns = _split_range(rest, error)
    if rest.endswith("|"):
        if not allow_pipes:
            hint = "set `data.allow_pipes: true` if you wrote this scp yourself, or copy the features to an archive"
            raise error(f"{rest!r} is a shell command, which is not run", hint)
        return ScpEntry(key, None, None, rows, columns, rest[:-1].strip(), path)
    offset = None
    if match := _OFFSET.fullmatch(rest):
        rest, digits = match.groups()
        if digits.startswith("-") or len(digits) > 18:
            raise error(f"{digits[:40]} is not an offset into a file")
        offset = int(digits)
    elif rest in ("", "-"):
        raise error(f"expected a file, found {rest!r}")
    found_file = find(rest)
    if found_file is None:
        tried = f"tried against the working directory ({Path.cwd()}) and the scp's folder"
        message = f"the file {rest!r} does not exist, or is no regular file"
        raise error(message, f"check the path in the scp; {tried}")
    return ScpEntry(key, found_file, offset, rows, columns, None, path)


def _split_range(
    rest: str, error: Callable[..., DataError]
) -> tuple[str, tuple[int, int] | None, tuple[int, int] | None]:
    """Cuts `[first:last]` or `[first:last,first:last]` off the end; `:` alone is everything."""
    if not rest.endswith("]") or "[" not in rest:
        return rest, None, None
    name, _, text = rest[:-1].rpartition("[")
    match = _RANGE.fullmatch(text)
    if match is None:
        raise error(f"expected a range [first:last] or [first:last,first:last], found [{text}]")
    ranges: list[tuple[int, int] | None] = []
    for part in match.groups():
        if part is None or part == ":":
            ranges.append(None)
            continue
        first, last = map(int, part.split(":"))
        if first > last:
            raise error(f"the range [{text}] ends before it begins", None)
        ranges.append((first, last))
    return name.strip(), ranges[0], ranges[1]
