"""Script files: where the record of each utterance lies (kaldi `util/kaldi-table-inl.h`, `ClassifyRxfilename`)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path

from ddnn.errors import DataError
from ddnn.files import read_regular

_LINE_OF_SCP = "each line of an scp is: utterance, space, path (with :OFFSET and [FIRST:LAST] where wanted)"
_RANGE = re.compile(r"(?P<rows>:|\d{1,10}:\d{1,10})(?:,(?P<columns>:|\d{1,10}:\d{1,10}))?")
# A thousand million lines: no corpus has as many utterances.
MAX_TABLE_BYTES = 64 << 30
_OFFSET = re.compile(r"(?P<path>.+):(?P<offset>-?\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ScpEntry:
    """One line of a script file.

    Attributes:
        key: the utterance (or speaker).
        path: the file, found; None where the record comes from a shell command.
        offset: bytes before the record; None: the file is this one record.
        rows: first and last row to take, both included; None: all.
        columns: the same for columns.
        pipe: the shell command that writes the record, or None.
        scp: the script file, for messages.
    """

    key: str
    path: Path | None
    offset: int | None
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None
    pipe: str | None
    scp: Path

    @property
    def where(self) -> str:
        """File and offset (or command), for messages."""
        if self.path is None:
            return f"{self.pipe} | (in {self.scp})"
        return str(self.path) if self.offset is None else f"{self.path}:{self.offset}"


def read_lines(path: Path, kind: str) -> Iterator[tuple[int, list[bytes]]]:
    """The lines of a text file, each with its number and split once at its first white space; none may be blank.

    White space is ASCII's, as in Kaldi: a no-break space is part of a name.

    Raises:
        DataError: the file is missing, empty, not readable, or a line is blank.
    """
    try:
        if not path.is_file():
            raise DataError(f"{kind} does not exist, or is no regular file", where=path, mend="check the path")
        data = read_regular(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {kind}: {error.strerror}", where=path) from error
    if not data:
        raise DataError(f"{kind} is empty", where=path, mend="make it again; it should have a line per utterance")
    for number, line in enumerate(io.BytesIO(data), 1):  # a list of all lines would take many times the file's size
        parts = line.split(None, 1)
        if not parts:
            raise DataError(f"line {number} of {kind} is blank", where=path, mend="remove it")
        yield number, parts


def decode_utf8(data: bytes, path: Path, number: int) -> str:
    """`data` as text; DataError naming the line where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"line {number} is not UTF-8 (byte {data[error.start]:#04x})"
        raise DataError(what, where=path, mend="convert the file to UTF-8") from error


def read_scp(path: Path, *, allow_pipes: bool = False) -> list[ScpEntry]:
    """Reads a script file: `key path`, `key path:offset`, each also with `[first:last]` or `[first:last,first:last]`.

    A relative path is tried against the working directory (Kaldi's convention), then against the scp's own folder.
    A path may contain spaces. `command |` is an error unless `allow_pipes`.

    Raises:
        DataError: the file is missing, empty or not UTF-8; a line is malformed, a key occurs twice, a file does not
            exist; a shell command where none is allowed.
    """
    find = lru_cache(maxsize=None)(lambda name: _find(name, path.parent))
    entries = []
    seen: dict[str, int] = {}
    for number, parts in read_lines(path, "the scp"):
        key = decode_utf8(parts[0], path, number)
        if len(parts) < 2:
            raise DataError(f"line {number} has no path after {key!r}", where=path, mend=_LINE_OF_SCP)
        if key in seen:
            what = f"utterance {key} occurs twice, in lines {seen[key]} and {number}"
            raise DataError(what, where=path, mend="utterance ids must be unique; remove or rename one")
        seen[key] = number
        rest = decode_utf8(parts[1].strip(), path, number)
        if "\0" in rest:
            raise DataError(f"line {number}: a NUL character after {key!r}", where=path, mend=_LINE_OF_SCP)
        where = f"{path}, line {number}"
        if rest.startswith("|"):
            raise DataError(f"utterance {key}: {rest!r} writes to a command; nothing can be read", where=where)
        rest, rows, columns = _split_range(key, rest, where)
        if rest.endswith("|"):
            if not allow_pipes:
                mend = "set `data.allow_pipes: true` if you wrote this scp yourself, or copy the features to an archive"
                raise DataError(
                    f"utterance {key}: {rest!r} is a shell command, which is not run", where=where, mend=mend
                )
            entries.append(ScpEntry(key, None, None, rows, columns, rest[:-1].strip(), path))
            continue
        name, offset = _split_offset(key, rest, where)
        found = find(name)
        if found is None:
            tried = f"tried against the working directory ({Path.cwd()}) and the scp's folder"
            what = f"utterance {key}: the file {name!r} does not exist, or is no regular file"
            raise DataError(what, where=where, mend=f"check the path in the scp; {tried}")
        entries.append(ScpEntry(key, found, offset, rows, columns, None, path))
    return entries


def _find(name: str, folder: str | PathLike[str]) -> Path | None:
    for candidate in (Path(name), Path(folder) / name):
        try:
            if candidate.is_file():
                return candidate
        except OSError:  # a name too long, a folder without permission
            continue
    return None


def _split_range(key: str, rest: str, where: str) -> tuple[str, tuple[int, int] | None, tuple[int, int] | None]:
    """Cuts `[first:last]` or `[first:last,first:last]` off the end; `:` alone is everything."""
    if not rest.endswith("]") or "[" not in rest:
        return rest, None, None
    name, _, text = rest[:-1].rpartition("[")
    match = _RANGE.fullmatch(text)
    if match is None:
        what = f"utterance {key}: expected a range [first:last] or [first:last,first:last], found [{text}]"
        raise DataError(what, where=where, mend=_LINE_OF_SCP)
    ranges: list[tuple[int, int] | None] = []
    for part in (match["rows"], match["columns"]):
        if part is None or part == ":":
            ranges.append(None)
            continue
        first, last = map(int, part.split(":"))
        if first > last:
            raise DataError(f"utterance {key}: the range [{text}] ends before it begins", where=where)
        ranges.append((first, last))
    return name.strip(), ranges[0], ranges[1]


def _split_offset(key: str, rest: str, where: str) -> tuple[str, int | None]:
    match = _OFFSET.fullmatch(rest)
    if match is None:
        if rest in ("", "-"):
            raise DataError(f"utterance {key}: expected a file, found {rest!r}", where=where, mend=_LINE_OF_SCP)
        return rest, None
    digits = match["offset"]
    if digits.startswith("-") or len(digits) > 18:
        raise DataError(f"utterance {key}: {digits[:40]} is no offset into a file", where=where, mend=_LINE_OF_SCP)
    return match["path"], int(digits)
