"""Tables: archives (`ark`) of matrices and of integer vectors, plain or gzip, and script files (`scp`) that say where
the record of each utterance is; read in sequence or through an scp, and written.

Follows kaldi `util/kaldi-table-inl.h` and `util/kaldi-holder-inl.h`. kaldiio 2.18.1 on its own is not safe here: it
runs a shell for an entry that begins or ends with `|`, unpickles a record that begins with `PKL`, reads a missing or
cut gzip as an empty or partial table, clips a range past the end, and fails on text vectors that begin with 0 or 1e-05.
So it only decodes single matrices of plain floats, whose headers `basic_types` has checked."""

from __future__ import annotations

import gzip
import io
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ddnn.kaldi import compressed
from ddnn.kaldi.basic_types import (
    HINT_REMAKE,
    READ_ERRORS,
    BasicTypeReader,
    BasicTypeWriter,
    MalformedRecordError,
    describe_read_error,
    open_stream,
    to_integers,
)
from ddnn.util.arrays import AnyArray, Int32Array
from ddnn.util.errors import DataError
from ddnn.util.files import atomic_write, read_bytes_limited

_MAX_KEY = 4096
_HINT_LINE = "each line of an scp is: utterance, space, path (with :OFFSET and [FIRST:LAST] where wanted)"
_RANGE = re.compile(r"(?::|(\d{1,10}:\d{1,10}))(?:,(?::|(\d{1,10}:\d{1,10})))?")  # a `:` alone is everything
# A thousand million lines: no corpus has as many utterances.
MAX_TABLE_BYTES = 64 << 30
_OFFSET = re.compile(r"(.+):(-?\d+)", re.DOTALL)
# In the name no character that a shell would take for more.
_GUNZIP = re.compile(r"gunzip -c ([\w./+=@:,%-]+\.gz)\s*\|")
_T = TypeVar("_T")
_Reader = TypeVar("_Reader", bound="RecordReader")


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


def read_keyed_lines(
    path: Path, kind: str, key_name: str = "utterance", *, unique: bool = True
) -> Iterator[tuple[int, str, str]]:
    """(line number, key, the rest) of each line of a text file, split once at its first white space (ASCII's, as in Kaldi:
    a no-break space is part of a name). DataError: the file is missing, empty, not readable, or a line is blank or not
    UTF-8; where keys are to be `unique`, one occurs twice."""
    try:
        if not path.is_file():
            if path.is_dir():
                raise DataError(f"a directory found, {kind} expected", location=path, hint="name a file in it")
            raise DataError(f"{kind} does not exist, or is no regular file", location=path, hint="check the path")
        data = read_bytes_limited(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {kind}: {error.strerror}", location=path) from error
    if not data:
        raise DataError(f"{kind} is empty", location=path, hint="make it again; it should have a line per utterance")
    seen: dict[str, int] = {}
    for number, line in enumerate(io.BytesIO(data), 1):  # a list of all lines would take many times the file's size
        try:
            key, *rest = (part.decode("utf-8") for part in line.strip().split(None, 1))
        except UnicodeDecodeError as error:
            message = f"line {number} is not UTF-8 (byte {error.object[error.start]:#04x})"
            raise DataError(message, location=path, hint="convert the file to UTF-8") from error
        except ValueError as error:
            raise DataError(f"line {number} of {kind} is blank", location=path, hint="remove it") from error
        if unique and seen.setdefault(key, number) != number:
            message = f"{key_name} {key} occurs twice, in lines {seen[key]} and {number}"
            raise DataError(message, location=path, hint=f"each {key_name} must be unique; remove or rename one")
        yield number, key, rest[0] if rest else ""


def read_scp(path: Path, *, allow_pipes: bool = False) -> list[ScpEntry]:
    """Reads a script file: `key path`, `key path:offset`, each also with `[first:last]` or `[first:last,first:last]`.

    A relative path is tried against the working directory (Kaldi's convention), then against the scp's own folder. A
    path may contain spaces. `gunzip -c FILE.gz |` is that file, read without a shell; any other `command |` is an error
    unless `allow_pipes`. DataError: the file is missing, empty or not UTF-8; a line is malformed, a key occurs twice, a
    file does not exist; a shell command where none is allowed.
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
        problem = f"line {number}: a NUL character after" if rest else f"line {number} has no path after"
        raise DataError(f"{problem} {key!r}", location=path, hint=_HINT_LINE)
    location = f"{path}, line {number}"

    def error(message: str, hint: str | None = _HINT_LINE) -> DataError:
        return DataError(f"utterance {key}: {message}", location=location, hint=hint)

    if rest.startswith("|"):
        raise error(f"{rest!r} writes to a command; nothing can be read", None)
    rows: Any = None
    columns: Any = None
    if rest.endswith("]") and "[" in rest:
        rest, _, text = rest[:-1].rpartition("[")
        match = _RANGE.fullmatch(text)
        if match is None:
            raise error(f"expected a range [first:last] or [first:last,first:last], found [{text}]")
        rows, columns = (None if part is None else tuple(map(int, part.split(":"))) for part in match.groups())
        if any(limits is not None and limits[0] > limits[1] for limits in (rows, columns)):
            raise error(f"the range [{text}] ends before it begins", None)
        rest = rest.strip()
    if gunzip := _GUNZIP.fullmatch(rest):
        rest = gunzip[1]
    elif rest.endswith("|"):
        if not allow_pipes:
            hint = "add --allow-pipes (in a recipe of your own `data.allow_pipes: true`) if you wrote this scp"
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
    file = find(rest)
    if file is None:
        tried = f"tried against the working directory ({Path.cwd()}) and the scp's folder"
        message = f"the file {rest!r} does not exist, or is no regular file"
        raise error(message, f"check the path in the scp; {tried}")
    return ScpEntry(key, file, offset, rows, columns, None, path)


def _read_matrix(reader: BasicTypeReader) -> AnyArray:
    """The matrix that comes next: float32 (FM, CM, CM2, CM3) or float64 (DM, text), (rows, columns)."""
    if reader.read_marker():
        return reader.matrix_data(reader.matrix_header())
    return reader.text_matrix(ends_line=True)


def _read_int_vector(reader: BasicTypeReader) -> Int32Array:
    """The vector of integers that comes next, int32 (n,): binary, or as text the rest of the line."""
    if not reader.read_marker():
        line = reader.read_line()
        if not line.endswith(b"\n"):
            raise MalformedRecordError("cut short: no line end after the integers")
        return to_integers(line)
    count = reader.int32("the length of the vector")
    if count < 0:
        raise MalformedRecordError(f"the header claims {count} integers")
    return reader.int32_block(count, f"a vector of {count} integers")


def _read_key(reader: BasicTypeReader) -> str | None:
    """The key of the next record and the one space behind it; None at the end of the stream."""
    ahead = reader.stream.peek()[:_MAX_KEY]  # of a key at once as much as is there, the rest byte by byte
    words = ahead.split(None, 1) if ahead[:1] > b" " else []
    key = bytearray(words[0] if words and b"\0" not in words[0] else b"")
    if not key:
        reader.skip_space()
    reader.stream.read(len(key))
    while (byte := reader.stream.read(1)) and not byte.isspace():
        key += byte
        if len(key) > _MAX_KEY or byte == b"\0":
            raise MalformedRecordError(f"expected an utterance id, found {bytes(key[:24])!r}")
    if not byte:
        if key:
            raise MalformedRecordError(f"cut short after the utterance id {bytes(key[:60])!r}")
        return None
    if byte == b"\n":  # an empty record: leave the line end to the one who reads the record
        reader.stream.seek(-1, os.SEEK_CUR)
    try:
        return key.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRecordError(f"the utterance id {bytes(key[:60])!r} is not UTF-8") from error


def iterate_records(path: Path, read: Callable[[BasicTypeReader], _T]) -> Iterator[tuple[str, _T]]:
    """Every (key, what `read` makes of its record) of an archive, plain or gzip. DataError: the file is missing, empty,
    damaged or cut short; names the last complete record."""
    last, key = "no record was read", None
    reader = open_stream(path)
    with reader.stream:
        while True:
            try:
                key = None
                key = _read_key(reader)
                if key is None:
                    return
                value = read(reader)
            except READ_ERRORS as error:
                message = f"{'' if key is None else f'utterance {key}: '}{describe_read_error(error)} ({last})"
                raise DataError(message, location=path, hint=HINT_REMAKE) from error
            yield key, value
            last = f"the last complete record is {key}"


def iterate_matrices(path: Path) -> Iterator[tuple[str, AnyArray]]:
    """Every (key, matrix) of an archive in its order: binary, text or gzip, each record as its header says; float32, or
    float64 where the record is double or text, (rows, columns). DataError: the file is missing, empty, damaged or cut
    short; names the last complete record."""
    return iterate_records(path, _read_matrix)


def iterate_int_vectors(path: Path) -> Iterator[tuple[str, Int32Array]]:
    """Every (key, vector) of an archive of integers, int32 (n,): binary, text (a line each) or gzip. DataError: as
    `iterate_matrices`."""
    return iterate_records(path, _read_int_vector)


def _run_pipe(entry: ScpEntry) -> BasicTypeReader:
    """The output of a shell command, complete; the caller has been asked whether commands may run."""
    done = subprocess.run(
        ["/bin/sh", "-c", entry.pipe or "false"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["(no message)"]
        message = f"utterance {entry.key}: the command ended with exit status {done.returncode}: {output[0][:500]}"
        raise DataError(message, location=entry.location, hint="run the command by hand to see why")
    return BasicTypeReader.from_bytes(done.stdout)


class RecordReader:
    """Reads records by scp entry; keeps the last file open, as neighboring entries share an archive. A context manager.
    One reader per thread."""

    def __init__(self) -> None:
        self._open_file: tuple[Path, BasicTypeReader] | None = None

    def __enter__(self: _Reader) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        if self._open_file is not None:
            self._open_file[1].stream.close()
        self._open_file = None

    def read_record(self, entry: ScpEntry, read: Callable[[BasicTypeReader], _T]) -> _T:
        """What `read` makes of the entry's record. DataError: the file cannot be read, the offset is past its end, the
        record is damaged or cut short, a command failed."""
        try:
            reader = _run_pipe(entry) if entry.path is None else self._open(entry.path)
            if entry.path is not None:
                offset = entry.offset or 0
                if offset >= reader.limit:
                    size = f"which has {reader.limit} bytes"
                    raise MalformedRecordError(f"the offset {offset} is past the end of the file, {size}")
                if entry.offset is not None and reader.is_gzip:
                    raise MalformedRecordError("the file is a gzip, into which no offset can point")
                reader.stream.seek(offset)
            value = read(reader)
            if entry.offset is None:
                reader.verify_checksum()
            return value
        except READ_ERRORS as error:
            message = f"utterance {entry.key}: {describe_read_error(error)}"
            raise DataError(message, location=entry.location, hint=HINT_REMAKE) from error

    def _open(self, path: Path) -> BasicTypeReader:
        if self._open_file is None or path is not self._open_file[0]:
            self.__exit__()
            try:
                self._open_file = path, open_stream(path)
            except DataError as error:
                raise MalformedRecordError(error.message) from error
        return self._open_file[1]


class MatrixReader(RecordReader):
    """Reads matrices by scp entry."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: tuple[tuple[Path, int | None], AnyArray] | None = None

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._whole = None

    def shape(self, entry: ScpEntry) -> tuple[int, int]:
        """(rows, columns) of the entry's matrix, its range applied. Reads the header alone, unless the matrix is text.
        DataError: as `read`, but for damage that only shows in the data."""
        header = self.read_record(entry, lambda reader: reader.matrix_header() if reader.read_marker() else None)
        whole = self._read_whole(entry).shape if header is None else (header.rows, header.columns)
        rows, columns = _ranges(entry, whole)
        return rows.stop - rows.start, columns.stop - columns.start

    def read(self, entry: ScpEntry, dtype: DTypeLike = np.float32) -> AnyArray:
        """The entry's matrix, `dtype` (rows, columns), C-contiguous, its range applied. NaN and Inf are not looked for.
        DataError: the file cannot be read, the offset is past its end, the record is damaged or cut short or no matrix,
        the range goes past the matrix; a command failed."""
        whole = self._read_whole(entry)
        if entry.rows is not None or entry.columns is not None:
            whole = whole[_ranges(entry, whole.shape)].copy()
        # A double too large for a float becomes Inf, which check_finite finds; NaN may be of the kind that signals.
        with np.errstate(over="ignore", invalid="ignore"):
            return whole.astype(dtype, "C", copy=not whole.flags.writeable)

    def _read_whole(self, entry: ScpEntry) -> AnyArray:
        """The matrix before its range is applied; kept, as the segments of a recording follow each other."""
        if entry.path is None or (entry.rows is None and entry.columns is None):
            return self.read_record(entry, _read_matrix)
        place = (entry.path, entry.offset)
        if self._whole is None or self._whole[0] != place:
            self._whole = (place, self.read_record(entry, _read_matrix))
        return self._whole[1]


def _ranges(entry: ScpEntry, shape: tuple[int, ...]) -> tuple[slice, slice]:
    """The entry's range as slices. Kaldi would let rows go 3 past the end; here that is an error."""
    slices = []
    for name, limits, size in (("rows", entry.rows, shape[0]), ("columns", entry.columns, shape[1])):
        first, last = limits or (0, size - 1)
        if last >= size:
            message = f"the range takes {name} {first} to {last}, the matrix at {entry.location} has {size} {name}"
            hint = "correct the range: it counts from 0, and both ends are included"
            raise DataError(f"utterance {entry.key}: {message}", location=entry.scp, hint=hint)
        slices.append(slice(first, last + 1))
    return slices[0], slices[1]


def is_finite(matrix: AnyArray) -> bool:
    # A sum is finite only if all terms are, and needs no array of truth values; it may overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(matrix.sum(dtype=np.result_type(matrix, np.float32))) or np.isfinite(matrix).all())


def check_finite(key: str, matrix: AnyArray, location: str | Path) -> None:
    """Raises DataError naming utterance, row and column of the first NaN or Inf in `matrix` (rows, columns)."""
    if not is_finite(matrix):
        invalid = np.argwhere(~np.isfinite(matrix))
        row, column = invalid[0]
        more = f", and {len(invalid) - 1} more values that are not finite" if len(invalid) > 1 else ""
        message = f"utterance {key}: {matrix[row, column]} in row {row}, column {column}{more}"
        raise DataError(message, location=location, hint="compute the features of this utterance again, or remove it")


def write_records(
    handle: BinaryIO, items: Iterable[tuple[str, AnyArray]], location: str | Path, compress: int = 0
) -> Iterator[str]:
    """Writes matrices (rows, columns) as a binary archive to an open file or pipe. Yields each key once it is written,
    before its matrix. `compress`: 0, or the method of `compressed.encode`. `location`: for messages. OSError: nothing
    can be written. DataError: a matrix that is to be compressed is not finite."""
    writer = BasicTypeWriter(handle)
    for key, matrix in items:
        if compress and not np.isfinite(matrix).all():
            raise DataError(f"utterance {key}: NaN or Inf cannot be compressed", location=location)
        writer.token(key)
        yield key
        writer.marker()
        if compress and len(matrix):
            handle.write(compressed.encode(np.ascontiguousarray(matrix, np.float32), compress))
        else:
            writer.float_matrix(matrix.astype(np.float32) if compress else matrix)


def write_matrices(
    ark: Path, scp: Path, items: Iterable[tuple[str, AnyArray]], *, compress: int = 0, relative: bool = False
) -> None:
    """Writes matrices (rows, columns) as a binary archive and its scp; both appear complete or not at all. float64
    becomes double (DM), everything else float (FM); `compress`: lossily, as `copy-feats --compress=true` does with this
    --compression-method. `relative`: the scp names the archive relative to its own folder. UserError: the files cannot
    be written. DataError: a matrix that is to be compressed is not finite."""
    write_table(ark, scp, lambda handle: write_records(handle, items, ark, compress), relative=relative)


def write_table(ark: Path, scp: Path, write: Callable[[BinaryIO], Iterator[str]], *, relative: bool = False) -> None:
    """Writes an archive and its scp; both appear complete or not at all. `write` writes records to a file and yields
    each key once it is written, before what belongs to it. UserError: the files cannot be written."""
    name = os.path.relpath(ark.absolute(), scp.absolute().parent) if relative else str(ark.absolute())
    # The inner file is renamed first: an scp never names an archive that is not there.
    with atomic_write(scp) as scp_handle, atomic_write(ark) as handle:
        lines = [f"{key} {name}:{handle.tell()}\n" for key in write(handle)]
        scp_handle.write("".join(lines).encode())
        scp_handle.flush()  # on a full disk this fails while neither has its name yet


def write_int_vectors(path: Path, items: Iterable[tuple[str, NDArray[np.integer[Any]]]]) -> None:
    """Writes vectors of 32-bit integers as a binary archive, as gzip where `path` ends in .gz; complete or not at all.
    UserError: the file cannot be written."""
    with atomic_write(path) as handle:
        # No name and no time in the gzip, so that the same vectors give the same bytes.
        packed = gzip.GzipFile("", "wb", 6, handle, 0) if path.suffix == ".gz" else nullcontext(handle)
        with packed as target:
            writer = BasicTypeWriter(cast(BinaryIO, target))
            for key, values in items:
                writer.token(key)
                writer.marker()
                writer.int32_block(np.concatenate([[len(values)], values]))
