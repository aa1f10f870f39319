"""One record of an archive: a matrix or a vector of integers, binary or text, from a stream that nobody has to trust.

Follows kaldi `matrix/kaldi-matrix.cc` (`Read`) and `util/kaldi-holder-inl.h` (`BasicVectorHolder`).
What a record claims to hold is held against the bytes that are there before any memory is taken.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import chain
from typing import Any

import numpy as np
from kaldiio.matio import read_matrix_or_vector
from numpy.typing import NDArray

from ddnn.kaldi import compressed

# A line of text: a row of 100,000 numbers, or the alignment of 10 hours.
MAX_LINE = 16 << 20
# White space where a record should begin, and empty rows of a text matrix: nobody writes as much.
MAX_BLANK = 1 << 16
_PIECE = 1 << 16
# More than any integer of 64 bits has. Python refuses 4,300, and early versions take hours for millions.
_DIGITS = 24
_SPACE = re.compile(rb"\s")
_CHUNK = 4 << 20
_INT32 = np.iinfo(np.int32)
_SIZED_INT32 = np.dtype([("size", "u1"), ("value", "<i4")])


class RecordError(Exception):
    """What is wrong with a record; whoever reads the table adds file and key."""


@dataclass
class Source:
    """A stream of records. `limit`: the bytes it can hold at most (of a gzip: once decompressed)."""

    stream: BufferedReader
    limit: int

    def take(self, size: int, what: str) -> bytes | bytearray:
        """Exactly `size` bytes; RecordError where there are fewer."""
        left = self.limit - self.stream.tell()
        if size > left:
            raise RecordError(f"cut short: {what} takes {size} bytes, at most {max(left, 0)} are left")
        data: bytes | bytearray = self.stream.read(min(size, _CHUNK))
        if size > _CHUNK:  # piece by piece: `limit` is only a bound where the file is a gzip
            whole = bytearray(data)
            while data and len(whole) < size:
                data = self.stream.read(min(_CHUNK, size - len(whole)))
                whole += data
            data = whole
        if len(data) < size:
            raise RecordError(f"cut short: {what} takes {size} bytes, {len(data)} are left")
        return data

    def line(self) -> bytes:
        """The rest of the line, with its end where there is one; empty at the end of the stream."""
        line = self.stream.readline(MAX_LINE)
        if len(line) == MAX_LINE:
            raise RecordError(f"a line of text longer than {MAX_LINE} bytes")
        return line

    def first_byte(self) -> bytes:
        """The next byte that is no white space, which is taken; empty at the end of the stream."""
        for _ in range(MAX_BLANK):
            byte = self.stream.read(1)
            if not byte.isspace():
                return byte
        raise RecordError(f"{MAX_BLANK} characters of white space where a record should begin")

    def is_binary(self) -> bool:
        """Whether Kaldi's binary marker comes next; the marker is taken."""
        if self.stream.peek(1)[:1] != b"\0":
            return False
        marker = self.take(2, "Kaldi's binary marker")
        if marker != b"\0B":
            raise RecordError(f"expected Kaldi's binary marker b'\\x00B', found {marker!r}")
        return True


@dataclass(frozen=True)
class MatrixHeader:
    """What a binary matrix says of itself. `raw`: its bytes from the token on."""

    token: str
    rows: int
    columns: int
    data_size: int
    raw: bytes | bytearray


def read_matrix_header(source: Source) -> MatrixHeader | None:
    """The header of the matrix that comes next; None where it is text. RecordError where it cannot be true."""
    if not source.is_binary():
        return None
    token = source.take(3, "the type of the matrix")
    if token in (b"FM ", b"DM "):
        raw = token + source.take(10, "the dims of the matrix")
        if raw[3] != 4 or raw[8] != 4:
            raise RecordError(f"expected two dims of 4 bytes each, found {raw[3:]!r}")
        (rows,), (columns,) = struct.unpack("<i", raw[4:8]), struct.unpack("<i", raw[9:13])
        size = (4 if token == b"FM " else 8) * rows * columns
    elif token[:2] == b"CM":
        if token != b"CM ":
            token += source.take(1, "the type of the matrix")
        if token not in (b"CM ", b"CM2 ", b"CM3 "):
            raise RecordError(f"expected a matrix of type CM, CM2 or CM3, found {token!r}")
        raw = token + source.take(16, "the header of the compressed matrix")
        rows, columns = struct.unpack("<ii", raw[-8:])
        size = compressed.data_size(token.decode().strip(), rows, columns)
    elif token in (b"FV ", b"DV "):
        raise RecordError("expected a matrix, found a vector")
    else:
        raise RecordError(f"expected a matrix (FM, DM, CM, CM2 or CM3), found {token!r}")
    if min(rows, columns) < 0 or (rows == 0) != (columns == 0):
        raise RecordError(f"the header claims {rows} rows and {columns} columns")
    left = source.limit - source.stream.tell()
    if size > left:
        raise RecordError(
            f"cut short: the header claims {rows} rows and {columns} columns, {size} bytes, at most {left} are left"
        )
    return MatrixHeader(token.decode().strip(), rows, columns, size, raw)


def read_matrix(source: Source) -> NDArray[Any]:
    """The matrix that comes next: float32 (FM, CM, CM2, CM3) or float64 (DM, text), (rows, columns)."""
    header = read_matrix_header(source)
    if header is None:
        return _read_text_matrix(source)
    data = source.take(header.data_size, f"a matrix of {header.rows} rows and {header.columns} columns")
    if header.rows == 0:
        return np.zeros((0, 0), np.float32)
    if header.token in compressed.TOKENS:
        minimum, span = struct.unpack("<ff", header.raw[-16:-8])
        return compressed.decode(header.token, minimum, span, header.rows, header.columns, data)
    # kaldiio gets the bytes of this one record, whose header we have checked: it cannot come to its other formats.
    matrix: NDArray[Any] = read_matrix_or_vector(BytesIO(b"\0B" + header.raw + data))
    return matrix


def _read_text_matrix(source: Source) -> NDArray[np.float64]:
    """`[`, rows that end in a line end or `;`, `]`. kaldiio fails on some (`[ 0 0.5 ]`, a space behind `]`)."""
    first = source.first_byte()
    if not first:
        raise RecordError("cut short: no record where one should begin")
    if first != b"[":
        found = first + source.stream.peek(8)[:8]
        raise RecordError(f"expected a Kaldi matrix (binary marker b'\\x00B', or '['), found {found!r}")
    values, columns, rows, blank, closed = array("d"), 0, 0, 0, False
    while not closed:
        line = source.line()
        if not line:
            raise RecordError("cut short: no ']' ends the matrix")
        line, bracket, behind = line.partition(b"]")
        closed = bool(bracket)
        if behind.strip():
            raise RecordError(f"expected a line end after ']', found {behind[:16]!r}")
        for row in line.split(b";"):
            count = _extend(values, row)
            if not count:
                blank += 1
                if blank > rows + MAX_BLANK:
                    raise RecordError(f"more than {MAX_BLANK} rows without numbers in the matrix")
                continue
            if rows and count != columns:
                raise RecordError(f"row {rows + 1} has {count} columns, the rows before it {columns}")
            rows, columns = rows + 1, count
    return np.frombuffer(values, np.float64).reshape(rows, columns) if rows else np.zeros((0, 0))


def _words(line: bytes) -> Iterator[list[bytes]]:
    """The words of a line, some thousands at a time: a list of all would take twenty times the memory of the line."""
    start = 0
    while len(line) - start > _PIECE:
        space = _SPACE.search(line, start + _PIECE)
        end = len(line) if space is None else space.end()
        yield line[start:end].split()
        start = end
    yield line[start:].split()


def _extend(values: array[float], row: bytes) -> int:
    """Appends the numbers of a row; how many there were."""
    if b"_" in row:  # Python's float takes 1_000
        raise RecordError("expected a number, found one with an underscore")
    before = len(values)
    try:
        for numbers in (row.split(),) if len(row) < _PIECE else _words(row):
            values.extend(map(float, numbers))
    except ValueError as error:
        raise RecordError(f"expected a number: {str(error)[:100]}") from error
    return len(values) - before


def read_int_vector(source: Source) -> NDArray[np.int32]:
    """The vector of integers that comes next, int32 (n,): binary, or as text the rest of the line."""
    if not source.is_binary():
        return _read_text_integers(source)
    count = int(_sized_integers(source.take(5, "the length of the vector"), "the length of the vector")[0])
    if count < 0:
        raise RecordError(f"the header claims {count} integers")
    what = f"a vector of {count} integers"
    return _sized_integers(source.take(5 * count, what), what)


def _sized_integers(data: bytes | bytearray, what: str) -> NDArray[np.int32]:
    """kaldiio takes these one by one in Python, a microsecond each: minutes for 300 hours."""
    sized = np.frombuffer(data, _SIZED_INT32)
    wrong = np.flatnonzero(sized["size"] != 4)
    if wrong.size:
        found = sized["size"][wrong[0]]
        raise RecordError(f"expected {what} of 4 bytes each, found the size {found} at position {wrong[0]}")
    return sized["value"].astype(np.int32)


def _to_integers(words: list[bytes]) -> Iterator[int]:
    if max(map(len, words), default=0) > _DIGITS:
        raise ValueError(f"a number of more than {_DIGITS} digits")
    return map(int, words)


def _read_text_integers(source: Source) -> NDArray[np.int32]:
    line = source.line()
    if not line.endswith(b"\n"):
        raise RecordError("cut short: no line end after the integers")
    if b"_" in line:  # Python's int takes 1_000
        raise RecordError("expected integers, found an underscore")
    try:
        values = np.fromiter(chain.from_iterable(map(_to_integers, _words(line))), np.int64)
    except (ValueError, OverflowError) as error:
        raise RecordError(f"expected integers: {str(error)[:100]}") from error
    if values.size and not (_INT32.min <= values.min() and values.max() <= _INT32.max):
        raise RecordError(f"expected 32-bit integers, found {values.min()} to {values.max()}")
    return values.astype(np.int32)


def encode_matrix(matrix: NDArray[Any], *, compress: bool) -> bytes:
    """A binary record of float (FM), double (DM, where the matrix is float64), or compressed as copy-feats does."""
    rows, columns = matrix.shape
    if compress and rows:
        return b"\0B" + compressed.encode(np.ascontiguousarray(matrix, np.float32))
    token, dtype = (b"DM ", "<f8") if matrix.dtype == np.float64 and not compress else (b"FM ", "<f4")
    dims = struct.pack("<BiBi", 4, rows, 4, columns if rows else 0)
    return b"\0B" + token + dims + np.ascontiguousarray(matrix, dtype).tobytes()


def encode_int_vector(values: NDArray[np.integer[Any]]) -> bytes:
    """A binary record of integers, each with its size byte."""
    sized = np.empty(len(values) + 1, _SIZED_INT32)
    sized["size"] = 4
    sized["value"][0] = len(values)
    sized["value"][1:] = values
    return b"\0B" + sized.tobytes()
