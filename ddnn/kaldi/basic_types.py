"""Kaldi's basic types in files, gzips and memory, text and binary; no size that a file claims is believed unchecked.
Follows kaldi `base/io-funcs.cc`, `base/io-funcs-inl.h`, `matrix/kaldi-vector.cc` and `matrix/kaldi-matrix.cc`."""

from __future__ import annotations

import errno
import gzip
import os
import re
import struct
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, RawIOBase
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from kaldiio.matio import read_matrix_or_vector
from numpy.typing import NDArray

from ddnn.kaldi import compressed
from ddnn.kaldi.compressed import MatrixHeader
from ddnn.util.arrays import AnyArray, Float32Array, Float64Array, Int32Array
from ddnn.util.errors import DataError
from ddnn.util.files import open_regular

HINT_REMAKE = "make the file again, or copy it again from its source"
# A network of 500 million parameters as text; a larger file is no model.
MAX_FILE_BYTES = 8 << 30
# A line of text: a row of 100,000 numbers, or the alignment of 10 hours.
MAX_LINE = 16 << 20
# White space between items, and empty rows of a text matrix: no writer produces as much.
MAX_BLANK = 1 << 16
_MAX_WORD = 256
_CHUNK = 4 << 20
_PIECE = 1 << 16
# No deflate stream decompresses to more than 1032 times its size. Alignments come to 10 to 50 times, so that a large
# file that decompresses to more than 250 times its size is no table, but crafted to fill the memory.
_DEFLATE_LIMIT = 1032
_LARGE, _LARGE_LIMIT = 64 << 20, 250
_SPACE = re.compile(rb"\s")
_INTEGER = re.compile(rb"[+-]?\d{1,10}")
INT32 = np.iinfo(np.int32)
_SIZED_INT32 = np.dtype([("size", "u1"), ("value", "<i4")])
"""One binary int32 as Kaldi writes it: a byte that says 4, then the value."""


class MalformedRecordError(DataError):
    """What is wrong with the bytes at hand; the caller that knows file and key adds them."""


READ_ERRORS = (MalformedRecordError, EOFError, OSError, zlib.error)
"""What a malformed record, a damaged gzip, a disk error or a directory can raise while it is read."""


def describe_read_error(error: Exception) -> str:
    if isinstance(error, MalformedRecordError):
        return error.message
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return f"damaged or cut gzip: {error}"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


@contextmanager
def locating_errors(location: str | Path, of: str = "") -> Iterator[None]:
    """Makes a DataError, which begins with `of`, of any of `READ_ERRORS` in the block."""
    try:
        yield
    except READ_ERRORS as error:
        raise DataError(of + describe_read_error(error), location=location, hint=HINT_REMAKE) from error


_PLAIN, _COMPRESSED = struct.Struct("<xixi"), struct.Struct("<ffii")
_HEADERS = {b"FM ": _PLAIN, b"DM ": _PLAIN, b"CM ": _COMPRESSED, b"CM2 ": _COMPRESSED, b"CM3 ": _COMPRESSED}


class BasicTypeReader:
    """Reads values from a stream of `limit` bytes at most (of a gzip: once decompressed). Each method reads a value at
    the position, or raises MalformedRecordError. `read_marker` sets the mode, `binary`."""

    def __init__(self, stream: BufferedReader, limit: int, *, binary: bool = False) -> None:
        self.stream, self.limit, self.binary = stream, limit, binary

    @classmethod
    def from_bytes(cls, data: bytes, *, binary: bool = False) -> BasicTypeReader:
        return cls(BufferedReader(BytesIO(data)), len(data), binary=binary)

    def error(self, expected: str, found: str | None = None) -> MalformedRecordError:
        """The error to raise: what was expected at the position, and what is there."""
        position = self.stream.tell()
        if found is None:
            ahead = self.stream.read(24)
            found = repr(ahead)[1:] if ahead else "the end of the file"
        return MalformedRecordError(f"expected {expected} at byte {position}, found {found}")

    @property
    def is_gzip(self) -> bool:
        return isinstance(self.stream.raw, gzip.GzipFile)

    @property
    def remaining(self) -> int:
        """The bytes behind the position (of a gzip: at most)."""
        return self.limit - self.stream.tell()

    def read_exact(self, size: int, what: str) -> bytearray:
        """Exactly `size` bytes; MalformedRecordError where there are fewer, before memory is taken for them."""
        remaining = self.remaining
        if size > remaining:
            raise MalformedRecordError(f"cut short: {what} takes {size} bytes, at most {max(remaining, 0)} remain")
        data = bytearray()  # piece by piece: `limit` is only a bound where the file is a gzip
        while len(data) < size and (piece := self.stream.read(min(_CHUNK, size - len(data)))):
            data += piece
        if len(data) < size:
            raise MalformedRecordError(f"cut short: {what} takes {size} bytes, {len(data)} remain")
        return data

    def read_line(self) -> bytes:
        """The rest of the line, with its end where there is one; empty at the end of the stream."""
        line = self.stream.readline(MAX_LINE)
        if len(line) == MAX_LINE:
            raise MalformedRecordError(f"a line of text longer than {MAX_LINE} bytes")
        return line

    def skip_space(self) -> None:
        """Moves to the next byte that is not white space, or to the end of the stream."""
        for _ in range(MAX_BLANK):
            if not self._peek_byte().isspace():
                return
            self.stream.read(1)
        raise MalformedRecordError(f"more than {MAX_BLANK} characters of white space where data should follow")

    def verify_checksum(self) -> None:
        """Reads a gzip to its end, where its checksum is: a damaged one must not pass."""
        if self.is_gzip:
            while self.stream.read(1 << 20):
                pass

    def _peek_byte(self) -> bytes:
        """The next byte, empty at the end of the stream. (BufferedReader.peek would copy the whole buffer.)"""
        byte = self.stream.read(1)
        if byte:
            self.stream.seek(-1, os.SEEK_CUR)
        return byte

    def peek(self) -> bytes:
        """The next byte (in text mode: after white space), empty at the end of the stream."""
        if not self.binary:
            self.skip_space()
        return self._peek_byte()

    def read_marker(self) -> bool:
        """Takes Kaldi's binary marker (NUL, `B`) where it comes next; returns, and keeps in `binary`, whether it
        did."""
        self.binary = self._peek_byte() == b"\0"
        if self.binary and (marker := self.stream.read(2)) != b"\0B":
            raise MalformedRecordError(f"expected Kaldi's binary marker b'\\x00B', found {marker!r}")
        return self.binary

    def _peek_word(self) -> tuple[bytes, bool]:
        """The next word up to `_MAX_WORD` bytes, and whether white space ends it; white space before it is taken."""
        self.skip_space()
        position = self.stream.tell()
        ahead = self.stream.read(_MAX_WORD + 1)
        self.stream.seek(position)
        word = ahead.split(None, 1)[0] if ahead else b""
        return word, len(word) < len(ahead)

    def peek_token(self) -> str:
        """The next token, which is not taken; empty where there is none."""
        word, ended = self._peek_word()
        return word.decode("latin-1") if ended else ""

    def token(self) -> str:
        """A word that ends in white space, one character of which is taken with it."""
        token = self.peek_token()
        if not token:
            raise self.error("a token")
        self.stream.read(len(token) + 1)
        return token

    def expect(self, *tokens: str) -> str:
        """One of `tokens`, which is returned."""
        token = self.peek_token()
        if token not in tokens:
            raise self.error(" or ".join(tokens), repr(token) if token else None)
        return self.token()

    def int32(self, what: str = "an integer") -> int:
        if not self.binary:
            word, _ = self._peek_word()
            if not _INTEGER.fullmatch(word) or not INT32.min <= int(word) <= INT32.max:
                raise self.error(f"{what} of 32 bits")
            self.stream.read(len(word))
            return int(word)
        return int(self.int32_block(1, what)[0])

    def int32_block(self, count: int, what: str = "an integer") -> Int32Array:
        """`count` integers that follow each other, each written as a basic type; int32 (count,)."""
        if count < 0 or (not self.binary and 2 * count > self.remaining + 1):
            raise MalformedRecordError(f"cut short: expected {count} values of {what}, {self.remaining} bytes remain")
        if not self.binary:
            return np.array([self.int32(what) for _ in range(count)], np.int32)
        sized = np.frombuffer(self.read_exact(5 * count, what), _SIZED_INT32)
        invalid = np.flatnonzero(sized["size"] != 4)
        if invalid.size:
            found = f"the size {sized['size'][invalid[0]]} at position {invalid[0]}"
            raise MalformedRecordError(f"expected {what} of 4 bytes each, found {found}")
        return sized["value"].astype(np.int32)

    def float32(self, what: str = "a number") -> float:
        if self.binary:
            size = self.read_exact(1, what)[0]
            if size not in (4, 8):
                raise self.error(f"{what} of 4 or 8 bytes", f"the size {size}")
            return float(np.frombuffer(self.read_exact(size, what), f"<f{size}")[0])
        word, _ = self._peek_word()
        try:
            (value,) = to_floats(word)
        except (MalformedRecordError, ValueError):
            raise self.error(what) from None
        self.stream.read(len(word))
        return value

    def int32_vector(self, what: str = "a vector of integers") -> Int32Array:
        if not self.binary:
            return to_integers(self._bracketed(what))
        size, count = struct.unpack("<Bi", self.read_exact(5, what))
        if size != 4 or count < 0:
            raise self.error(f"{what} of 4 bytes each", f"{count} values of {size} bytes")
        return np.frombuffer(self.read_exact(4 * count, what), "<i4").astype(np.int32)

    def float_vector(self, what: str = "a vector") -> AnyArray:
        if not self.binary:
            text = self._bracketed(what)
            if b"\n" in text:
                raise self.error(what, "a line end between [ and ] (is it a matrix?)")
            return np.array(to_floats(text))
        dtype = np.dtype("<f4" if self.expect("FV", "DV") == "FV" else "<f8")
        count = self.int32(f"the dim of {what}")
        if count < 0:
            raise self.error(what, f"the dim {count}")
        return np.frombuffer(self.read_exact(count * dtype.itemsize, what), dtype).astype(dtype.newbyteorder("="))

    def float_matrix(self, what: str = "a matrix") -> AnyArray:
        """float32 (FM, CM, CM2, CM3) or float64 (DM, and text, which does not say), (rows, columns)."""
        try:
            return self.matrix_data(self.matrix_header()) if self.binary else self.text_matrix(ends_line=False)
        except MalformedRecordError as error:
            raise MalformedRecordError(f"expected {what}: {error.message}") from error

    def matrix_header(self) -> MatrixHeader:
        """The header of a binary matrix, held against the bytes that remain."""
        token = self.stream.read(3)
        if token[:2] == b"CM" and token != b"CM ":
            token += self.stream.read(1)
        if token not in _HEADERS:
            found = "a vector" if token in (b"FV ", b"DV ") else repr(token)
            raise MalformedRecordError(f"expected a matrix (FM, DM, CM, CM2 or CM3), found {found}")
        layout = _HEADERS[token]
        fields = self.stream.read(layout.size)
        if len(fields) < layout.size:
            raise MalformedRecordError(
                f"cut short: the header of the matrix takes {layout.size} bytes, {len(fields)} remain"
            )
        *bounds, rows, columns = layout.unpack(fields)
        if not bounds and (fields[0] != 4 or fields[5] != 4):
            raise MalformedRecordError(f"expected two dims of 4 bytes each, found {fields!r}")
        header = MatrixHeader(token[:-1].decode(), rows, columns, *bounds)
        size, remaining = header.data_size, self.remaining
        if (rows <= 0 or columns <= 0 or size > remaining) and (rows or columns):
            claim = f"the header claims {rows} rows and {columns} columns"
            if min(rows, columns) > 0:
                claim = f"cut short: {claim}, {size} bytes, at most {remaining} remain"
            raise MalformedRecordError(claim)
        return header

    def matrix_data(self, header: MatrixHeader) -> AnyArray:
        """The binary matrix of this header, float32 (FM, CM, CM2, CM3) or float64 (DM), (rows, columns)."""
        rows, columns = header.rows, header.columns
        if rows == 0:
            return np.zeros((0, 0), np.float32)
        data = self.read_exact(header.data_size, f"a matrix of {rows} rows and {columns} columns")
        if header.token in compressed.TOKENS:
            return compressed.decode(header, data)
        # kaldiio gets the bytes of this one matrix, whose header is checked: it cannot come to its other formats.
        plain = b"\0B" + header.token.encode() + b" " + struct.pack("<bibi", 4, rows, 4, columns) + data
        matrix: AnyArray = read_matrix_or_vector(BytesIO(plain))
        return matrix

    def text_matrix(self, *, ends_line: bool) -> Float64Array:
        """`[`, rows that end in a line end or `;`, `]`; `ends_line` refuses what is behind `]` in its line."""
        if self.peek() != b"[":
            raise self.error("a Kaldi matrix (binary marker b'\\x00B', or '[')")
        values, columns, rows, blank = array("d"), 0, 0, 0
        for line in self._bracketed_lines("the matrix", ends_line=ends_line):
            for row in line.split(b";"):
                numbers = to_floats(row)
                if numbers and rows and len(numbers) != columns:
                    message = f"row {rows + 1} has {len(numbers)} columns, the rows before it {columns}"
                    raise MalformedRecordError(message)
                if numbers:
                    values.extend(numbers)
                    rows, columns = rows + 1, len(numbers)
                elif (blank := blank + 1) > rows + MAX_BLANK:
                    raise MalformedRecordError(f"more than {MAX_BLANK} rows without numbers in the matrix")
        return np.frombuffer(values, np.float64).reshape(rows, columns) if rows else np.zeros((0, 0))

    def _bracketed(self, what: str) -> bytes:
        """What is between `[` and `]` in text mode."""
        if self.peek() != b"[":
            raise self.error(f"{what} between [ and ]")
        return b"".join(self._bracketed_lines(what, ends_line=False))

    def _bracketed_lines(self, what: str, *, ends_line: bool) -> Iterator[bytes]:
        """The lines between `[`, which comes next, and `]`; what follows `]` in its line is put back, or refused."""
        self.stream.read(1)
        bracket = b""
        while not bracket:
            line = self.read_line()
            if not line:
                raise MalformedRecordError(f"cut short: no ']' ends {what}")
            line, bracket, behind = line.partition(b"]")
            if behind.strip():
                if ends_line:
                    raise MalformedRecordError(f"expected a line end after ']', found {behind[:16]!r}")
                self.stream.seek(-len(behind), os.SEEK_CUR)
            yield line


def split_words(line: bytes) -> Iterator[list[bytes]]:
    """The words of a line, some thousands at a time: a list of all would take twenty times the memory of the line."""
    start = 0
    while len(line) - start > _PIECE:
        space = _SPACE.search(line, start + _PIECE)
        end = len(line) if space is None else space.end()
        yield line[start:end].split()
        start = end
    yield line[start:].split()


def to_floats(row: bytes) -> array[float]:
    if b"_" in row:  # Python's float takes 1_000
        raise MalformedRecordError("expected a number, found one with an underscore")
    try:
        return array("d", chain.from_iterable(map(float, words) for words in split_words(row)))
    except ValueError as error:
        raise MalformedRecordError(f"expected a number: {str(error)[:100]}") from error


def to_integers(text: bytes) -> Int32Array:
    """The words of a text, which are integers of 32 bits."""
    other = text.translate(None, b"0123456789+- \t\n\v\f\r")
    if other:
        raise MalformedRecordError(f"expected integers, found {other[:16]!r}")
    values = np.frombuffer(to_floats(text))  # float64 holds all integers of 32 bits
    if values.size and not (INT32.min <= values.min() and values.max() <= INT32.max):
        raise MalformedRecordError(f"expected 32-bit integers, found {values.min():.0f} to {values.max():.0f}")
    return values.astype(np.int32)


class _BoundedGzip(gzip.GzipFile):
    """A gzip that raises where it decompresses to more than it may."""

    limit = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > self.limit:
            raise MalformedRecordError(f"decompresses to more than {self.limit} bytes, which no table of its size does")
        return data


def open_stream(path: Path) -> BasicTypeReader:
    """Opens a table: a file or gzip. A name that ends in .gz must be a gzip; any gzip is decompressed. DataError: the
    file is missing, no regular file, empty, or not the gzip that its name promises."""
    try:
        if not path.is_file():
            raise DataError("the file does not exist, or is no regular file", location=path, hint="check the path")
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            is_gzip = stream.read(min(size, 2)) == b"\x1f\x8b"  # nothing of a file in /proc, which might wait
        if size == 0 or (path.suffix == ".gz" and not is_gzip):
            message = "the file is empty" if size == 0 else "expected a gzip, found other bytes"
            raise DataError(message, location=path, hint=HINT_REMAKE)
        if not is_gzip:
            return BasicTypeReader(path.open("rb"), size)
        unzipped = _BoundedGzip(path, "rb")
        unzipped.limit = min(size * _DEFLATE_LIMIT, max(_LARGE, size * _LARGE_LIMIT))
        return BasicTypeReader(BufferedReader(cast(RawIOBase, unzipped), 1 << 16), unzipped.limit)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path) from error


@contextmanager
def open_kaldi_file(path: Path, kind: str, *, hint_missing: str = "check the path") -> Iterator[BasicTypeReader]:
    """Opens the file `path`, to be read as `kind` ("a Kaldi transition model"), its binary marker taken. DataError: the
    file is missing, no regular file, empty, compressed, or larger than 8 GiB; or the block finds something malformed.
    """
    size = 0
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {MAX_FILE_BYTES}")
            if size == 0:
                raise DataError(f"not {kind}: the file is empty", location=path, hint="copy it or make it again")
            reader = BasicTypeReader(cast(BufferedReader, stream), size)
            if reader.stream.peek(2)[:2] == b"\x1f\x8b":
                raise DataError(f"not {kind}: the file is compressed by gzip", location=path, hint="gunzip it first")
            reader.read_marker()
            yield reader
    except MalformedRecordError as error:
        hint = f"check that this is the right file and that it was copied completely (it has {size} bytes)"
        raise DataError(f"not {kind}: {error.message}", location=path, hint=hint) from error
    except OSError as error:
        hint = hint_missing if isinstance(error, FileNotFoundError) else "check the path"
        raise DataError(f"cannot read {kind}: {error.strerror}", location=path, hint=hint) from error


class BasicTypeWriter:
    """Writes binary values as Kaldi does, byte for byte."""

    def __init__(self, handle: BinaryIO) -> None:
        self.handle = handle

    def marker(self) -> None:
        self.handle.write(b"\0B")

    def end_line(self) -> None:
        """Ends a line, in text mode."""

    def token(self, *tokens: str) -> None:
        """Words, each with the space that ends it."""
        self.handle.write(b"".join(token.encode() + b" " for token in tokens))

    def int32(self, value: int) -> None:
        self.handle.write(struct.pack("<bi", 4, value))

    def float32(self, value: float) -> None:
        self.handle.write(b"\x04" + np.float32(value).astype("<f4").tobytes())

    def int32_block(self, values: NDArray[np.integer[Any]]) -> None:
        """Integers that follow each other, each as a basic type."""
        sized = np.empty(values.size, _SIZED_INT32)
        sized["size"] = 4
        sized["value"] = values.reshape(-1)
        self.handle.write(sized.tobytes())

    def int32_vector(self, values: Int32Array) -> None:
        self.int32(len(values))
        self.handle.write(values.astype("<i4").tobytes())

    def float_vector(self, values: Float32Array) -> None:
        self.token("FV")
        self.int32(len(values))
        self.handle.write(values.astype("<f4").tobytes())

    def float_matrix(self, values: NDArray[np.floating[Any]]) -> None:
        """(rows, columns): float64 as double (DM), everything else as float (FM)."""
        rows, columns = values.shape
        token, dtype = ("DM", "<f8") if values.dtype == np.float64 else ("FM", "<f4")
        self.token(token)
        self.int32(rows)
        self.int32(columns if rows else 0)
        self.handle.write(np.ascontiguousarray(values, dtype).tobytes())


class TextWriter(BasicTypeWriter):
    """Writes values as Kaldi does in text mode, byte for byte; numbers have 7 digits, as those of a C++ stream."""

    def marker(self) -> None:
        pass

    def end_line(self) -> None:
        self.handle.write(b"\n")

    def int32(self, value: int) -> None:
        self.handle.write(b"%d " % value)

    def float32(self, value: float) -> None:
        self.handle.write(b"%.7g " % float(np.float32(value)))

    def int32_block(self, values: NDArray[np.integer[Any]]) -> None:
        self.handle.write(b"".join(b"%d " % value for value in values.reshape(-1).tolist()))

    def int32_vector(self, values: Int32Array) -> None:
        self.handle.write(b"[ ")
        self.int32_block(values)
        self.handle.write(b"]\n")

    def float_vector(self, values: Float32Array) -> None:
        self.handle.write(b" [ " + self._row(values) + b"]\n")

    def float_matrix(self, values: NDArray[np.floating[Any]]) -> None:
        """(rows, columns), as float."""
        self.handle.write(b" [" + (b"" if values.shape[1] else b" "))
        for row in values:
            self.handle.write(b"\n  " + self._row(row))
        self.handle.write(b"]\n")

    @staticmethod
    def _row(row: NDArray[np.floating[Any]]) -> bytes:
        return b"".join(b"%.7g " % value for value in row.astype(np.float32).tolist())
