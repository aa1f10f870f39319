"""Plain files and gzips as streams with a limit on the bytes that they can hold; numbers from lines of text."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import cast

from ddnn.util.errors import DataError
from ddnn.util.files import open_regular

HINT_REMAKE = "make the file again, or copy it again from its source"
# A line of text: a row of 100,000 numbers, or the alignment of 10 hours.
MAX_LINE = 16 << 20
# White space between items, and empty rows of a text matrix: no writer produces as much.
MAX_BLANK = 1 << 16
_CHUNK = 4 << 20
_PIECE = 1 << 16
_SPACE = re.compile(rb"\s")
# No deflate stream decompresses to more than 1032 times its size. Alignments come to 10 to 50 times, so that a large
# file that decompresses to more than 250 times its size is no table, but crafted to fill the memory.
_DEFLATE_LIMIT = 1032
_LARGE, _LARGE_LIMIT = 64 << 20, 250


class MalformedRecordError(DataError):
    """What is wrong with the bytes at hand; the caller that knows file and key adds them."""


class BoundedStream:
    """A stream of bytes with a limit.

    Args:
        stream: positioned where reading begins.
        limit: the bytes that it can hold at most (of a gzip: once decompressed).
    """

    def __init__(self, stream: BufferedReader, limit: int) -> None:
        self.stream = stream
        self.limit = limit

    @property
    def remaining(self) -> int:
        """The bytes behind the position (of a gzip: at most)."""
        return self.limit - self.stream.tell()

    def read_exact(self, size: int, what: str) -> bytes | bytearray:
        """Exactly `size` bytes; MalformedRecordError where there are fewer, before memory is taken for them."""
        remaining = self.limit - self.stream.tell()
        if size > remaining:
            raise MalformedRecordError(f"cut short: {what} takes {size} bytes, at most {max(remaining, 0)} remain")
        data: bytes | bytearray = self.stream.read(min(size, _CHUNK))
        if size > _CHUNK:  # piece by piece: `limit` is only a bound where the file is a gzip
            whole = bytearray(data)
            while data and len(whole) < size:
                data = self.stream.read(min(_CHUNK, size - len(whole)))
                whole += data
            data = whole
        if len(data) < size:
            raise MalformedRecordError(f"cut short: {what} takes {size} bytes, {len(data)} remain")
        return data

    def read_line(self) -> bytes:
        """The rest of the line, with its end where there is one; empty at the end of the stream."""
        line = self.stream.readline(MAX_LINE)
        if len(line) == MAX_LINE:
            raise MalformedRecordError(f"a line of text longer than {MAX_LINE} bytes")
        return line

    def peek_byte(self) -> bytes:
        """The next byte, empty at the end of the stream. (BufferedReader.peek would copy the whole buffer.)"""
        byte = self.stream.read(1)
        if byte:
            self.stream.seek(-1, os.SEEK_CUR)
        return byte

    def skip_space(self) -> None:
        """Moves to the next byte that is not white space, or to the end of the stream."""
        for _ in range(MAX_BLANK):
            byte = self.stream.read(1)
            if not byte.isspace():
                if byte:
                    self.stream.seek(-1, os.SEEK_CUR)
                return
        raise MalformedRecordError(f"more than {MAX_BLANK} characters of white space where data should follow")

    def verify_checksum(self) -> None:
        """Reads a gzip to its end, where its checksum is: a damaged one must not pass."""
        if isinstance(self.stream.raw, gzip.GzipFile):
            while self.stream.read(1 << 20):
                pass


READ_ERRORS = (MalformedRecordError, EOFError, OSError, zlib.error)
"""What a malformed record, a damaged gzip, a disk error or a directory can raise while it is read."""


def describe_read_error(error: Exception) -> str:
    """One of `READ_ERRORS` in words."""
    if isinstance(error, MalformedRecordError):
        return error.message
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return f"damaged or cut gzip: {error}"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class _BoundedGzip(gzip.GzipFile):
    """A gzip that raises where it decompresses to more than it may."""

    limit = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > self.limit:
            raise MalformedRecordError(f"decompresses to more than {self.limit} bytes, which no table of its size does")
        return data


def open_stream(path: Path) -> BoundedStream:
    """Opens a file or gzip. A name that ends in .gz must be a gzip; any gzip is decompressed.

    Raises:
        DataError: the file is missing, no regular file, empty, or not the gzip that its name promises.
    """
    try:
        if not path.is_file():
            raise DataError("the file does not exist, or is no regular file", location=path, hint="check the path")
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            is_gzip = stream.read(min(size, 2)) == b"\x1f\x8b"  # nothing of a file in /proc, which might wait
        if size == 0 or (path.suffix == ".gz" and not is_gzip):
            message = "the file is empty" if size == 0 else "expected a gzip, found other bytes"
            raise DataError(message, location=path, hint=HINT_REMAKE)
        if is_gzip:
            unzipped = _BoundedGzip(path, "rb")
            unzipped.limit = min(size * _DEFLATE_LIMIT, max(_LARGE, size * _LARGE_LIMIT))
            return BoundedStream(BufferedReader(cast("io.RawIOBase", unzipped), 1 << 16), unzipped.limit)
        return BoundedStream(path.open("rb"), size)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path) from error


def split_words(line: bytes) -> Iterator[list[bytes]]:
    """The words of a line, some thousands at a time: a list of all would take twenty times the memory of the line."""
    start = 0
    while len(line) - start > _PIECE:
        space = _SPACE.search(line, start + _PIECE)
        end = len(line) if space is None else space.end()
        yield line[start:end].split()
        start = end
    yield line[start:].split()


def to_floats(values: array[float], row: bytes) -> int:
    """Appends the numbers of a row of text to `values`; returns how many there were."""
    if b"_" in row:  # Python's float takes 1_000
        raise MalformedRecordError("expected a number, found one with an underscore")
    before = len(values)
    try:
        for numbers in (row.split(),) if len(row) < _PIECE else split_words(row):
            values.extend(map(float, numbers))
    except ValueError as error:
        raise MalformedRecordError(f"expected a number: {str(error)[:100]}") from error
    return len(values) - before
