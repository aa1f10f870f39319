"""Kaldi's basic types, text and binary, read and written; no size that a file claims is believed unchecked.

Follows kaldi `base/io-funcs.cc`, `base/io-funcs-inl.h`, `matrix/kaldi-vector.cc` and `matrix/kaldi-matrix.cc`. Archives
and models are read by the same `BasicTypeReader`, from a stream whose length is known.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from kaldiio.matio import read_matrix_or_vector
from numpy.typing import NDArray

from ddnn.kaldi import compressed
from ddnn.kaldi.stream import MAX_BLANK, BoundedStream, MalformedRecordError, to_floats
from ddnn.util.errors import DataError
from ddnn.util.files import open_regular

# A network of 500 million parameters as text; a larger file is no model.
MAX_FILE_BYTES = 8 << 30
_MAX_WORD = 256
_WORD = re.compile(rb"\S+")
_INTEGER = re.compile(rb"[+-]?\d{1,10}")
_INT32 = np.iinfo(np.int32)
_SIZED_INT32 = np.dtype([("size", "u1"), ("value", "<i4")])
"""One binary int32 as Kaldi writes it: a byte that says 4, then the value."""


@dataclass(frozen=True)
class MatrixHeader:
    """What a binary matrix claims. `raw`: its bytes from the token on."""

    token: str
    rows: int
    columns: int
    data_size: int
    raw: bytes | bytearray


class BasicTypeReader(BoundedStream):
    """Reads values from a stream. Each method reads a value at the position, or raises MalformedRecordError.

    Attributes:
        binary: the mode; set by `read_marker`.
    """

    def __init__(self, stream: BufferedReader, limit: int, *, binary: bool = False) -> None:
        super().__init__(stream, limit)
        self.binary = binary

    @classmethod
    def from_bytes(cls, data: bytes, *, binary: bool = False) -> BasicTypeReader:
        """A reader of bytes in memory."""
        return cls(BufferedReader(BytesIO(data)), len(data), binary=binary)

    def read_marker(self) -> bool:
        """Takes Kaldi's binary marker (NUL, `B`) where it comes next; returns, and keeps in `binary`, whether it did."""
        self.binary = self.peek_byte() == b"\0"
        if self.binary:
            marker = self.read_exact(2, "Kaldi's binary marker")
            if marker != b"\0B":
                raise MalformedRecordError(f"expected Kaldi's binary marker b'\\x00B', found {bytes(marker)!r}")
        return self.binary

    def error(self, expected: str, found: str | None = None) -> MalformedRecordError:
        """The error to raise: what was expected at the position, and what is there."""
        position = self.stream.tell()
        if found is None:
            ahead = self.stream.read(24)
            found = repr(ahead)[1:] if ahead else "the end of the file"
        return MalformedRecordError(f"expected {expected} at byte {position}, found {found}")

    def peek(self) -> bytes:
        """The next byte (in text mode: after white space), empty at the end of the stream."""
        if not self.binary:
            self.skip_space()
        return self.peek_byte()

    def _peek_word(self) -> tuple[bytes, bool]:
        """The next word up to `_MAX_WORD` bytes, and whether white space ends it; white space before it is taken."""
        self.skip_space()
        position = self.stream.tell()
        ahead = self.stream.read(_MAX_WORD + 1)
        self.stream.seek(position)
        match = _WORD.match(ahead)
        word = b"" if match is None else match.group()
        return word, len(word) < len(ahead)

    def peek_token(self) -> str:
        """The next token, which is not taken; empty where there is none."""
        word, ended = self._peek_word()
        return word.decode("latin-1") if ended else ""

    def token(self, expected: str = "a token") -> str:
        """A word that ends in white space, one character of which is taken with it."""
        token = self.peek_token()
        if not token:
            raise self.error(expected)
        self.stream.read(len(token) + 1)
        return token

    def expect(self, *tokens: str) -> str:
        """One of `tokens`, which is returned."""
        token, names = self.peek_token(), " or ".join(tokens)
        if token not in tokens:
            raise self.error(names, repr(token) if token else None)
        return self.token()

    def int32(self, what: str = "an integer") -> int:
        """A signed 32-bit integer."""
        return int(self.int32_block(1, what)[0])

    def int32_block(self, count: int, what: str = "an integer") -> NDArray[np.int32]:
        """`count` integers that follow each other, each written as a basic type; int32 (count,)."""
        if count < 0 or (not self.binary and 2 * count > self.remaining + 1):
            raise MalformedRecordError(f"cut short: expected {count} values of {what}, {self.remaining} bytes remain")
        if not self.binary:
            return np.array([self._text_int32(what) for _ in range(count)], dtype=np.int32)
        sized = np.frombuffer(self.read_exact(5 * count, what), _SIZED_INT32)
        invalid = np.flatnonzero(sized["size"] != 4)
        if invalid.size:
            size = sized["size"][invalid[0]]
            raise MalformedRecordError(
                f"expected {what} of 4 bytes each, found the size {size} at position {invalid[0]}"
            )
        return sized["value"].astype(np.int32)

    def _text_int32(self, what: str) -> int:
        word, _ = self._peek_word()
        value = int(word) if _INTEGER.fullmatch(word) else None
        if value is None or not _INT32.min <= value <= _INT32.max:
            raise self.error(f"{what} of 32 bits")
        self.stream.read(len(word))
        return value

    def float32(self, what: str = "a number") -> float:
        """A floating-point number (binary: of 4 or 8 bytes)."""
        if self.binary:
            size = self.read_exact(1, what)[0]
            if size not in (4, 8):
                raise self.error(f"{what} of 4 or 8 bytes", f"the size {size}")
            return float(np.frombuffer(self.read_exact(size, what), f"<f{size}")[0])
        word, _ = self._peek_word()
        try:
            values = to_floats(array("d"), word)
        except MalformedRecordError:
            values = 0
        if values != 1:
            raise self.error(what)
        self.stream.read(len(word))
        return float(word)

    def int32_vector(self, what: str = "a vector of integers") -> NDArray[np.int32]:
        """int32 (n,)."""
        if not self.binary:
            words = self._bracketed(what).split()
            if not all(_INTEGER.fullmatch(word) and _INT32.min <= int(word) <= _INT32.max for word in words):
                raise self.error(what, "an item that is not a 32-bit integer between [ and ]")
            return np.array([int(word) for word in words], dtype=np.int32)
        head = self.read_exact(5, what)
        count = int.from_bytes(head[1:], "little", signed=True)
        if head[0] != 4 or count < 0:
            raise self.error(f"{what} of 4 bytes each", f"{count} values of {head[0]} bytes")
        return np.frombuffer(self.read_exact(4 * count, what), "<i4").astype(np.int32)

    def float_vector(self, what: str = "a vector") -> NDArray[Any]:
        """float32 (FV) or float64 (DV, and text, which does not say), (n,)."""
        if not self.binary:
            text = self._bracketed(what)
            if b"\n" in text:
                raise self.error(what, "a line end between [ and ] (is it a matrix?)")
            values = array("d")
            to_floats(values, text)
            return np.array(values)
        dtype = np.dtype("<f4" if self.expect("FV", "DV") == "FV" else "<f8")
        count = self.int32(f"the dim of {what}")
        if count < 0:
            raise self.error(what, f"the dim {count}")
        values_read = np.frombuffer(self.read_exact(count * dtype.itemsize, what), dtype)
        return values_read.astype(dtype.newbyteorder("="))

    def float_matrix(self, what: str = "a matrix") -> NDArray[Any]:
        """float32 (FM, CM, CM2, CM3) or float64 (DM, and text, which does not say), (rows, columns)."""
        try:
            return self.matrix_data(self.matrix_header()) if self.binary else self.text_matrix(ends_line=False)
        except MalformedRecordError as error:
            raise MalformedRecordError(f"expected {what}: {error.message}") from error

    def matrix_header(self) -> MatrixHeader:
        """The header of a binary matrix, held against the bytes that remain."""
        token = self.read_exact(3, "the type of the matrix")
        if token[:2] == b"CM" and token != b"CM ":
            token += self.read_exact(1, "the type of the matrix")
        name = token.decode("latin-1").removesuffix(" ")
        if token in (b"FM ", b"DM "):
            raw = token + self.read_exact(10, "the dims of the matrix")
            if raw[3] != 4 or raw[8] != 4:
                raise MalformedRecordError(f"expected two dims of 4 bytes each, found {bytes(raw[3:])!r}")
            rows, columns = struct.unpack("<xixi", raw[3:])
            size = (4 if name == "FM" else 8) * rows * columns
        elif token in (b"CM ", b"CM2 ", b"CM3 "):
            raw = token + self.read_exact(16, "the header of the compressed matrix")
            rows, columns = struct.unpack("<ii", raw[-8:])
            size = compressed.data_size(name, rows, columns)
        else:
            found = "a vector" if token in (b"FV ", b"DV ") else repr(bytes(token))
            raise MalformedRecordError(f"expected a matrix (FM, DM, CM, CM2 or CM3), found {found}")
        claim = f"the header claims {rows} rows and {columns} columns"
        if min(rows, columns) < 0 or (rows == 0) != (columns == 0):
            raise MalformedRecordError(claim)
        if size > self.remaining:
            raise MalformedRecordError(f"cut short: {claim}, {size} bytes, at most {self.remaining} remain")
        return MatrixHeader(name, rows, columns, size, raw)

    def matrix_data(self, header: MatrixHeader) -> NDArray[Any]:
        """The binary matrix of this header: float32 (FM, CM, CM2, CM3) or float64 (DM), (rows, columns)."""
        data = self.read_exact(header.data_size, f"a matrix of {header.rows} rows and {header.columns} columns")
        if header.rows == 0:
            return np.zeros((0, 0), np.float32)
        if header.token in compressed.TOKENS:
            minimum, span = struct.unpack("<ff", header.raw[-16:-8])
            return compressed.decode(header.token, minimum, span, header.rows, header.columns, data)
        # kaldiio gets the bytes of this one matrix, whose header is checked: it cannot come to its other formats.
        matrix: NDArray[Any] = read_matrix_or_vector(BytesIO(b"\0B" + header.raw + data))
        return matrix

    def text_matrix(self, *, ends_line: bool) -> NDArray[np.float64]:
        """`[`, rows that end in a line end or `;`, `]`. kaldiio fails on some (`[ 0 0.5 ]`, a space behind `]`).

        Args:
            ends_line: refuse anything behind `]` in its line (else it is read next).
        """
        first = self.peek()
        if not first:
            raise MalformedRecordError("cut short: no record where one should begin")
        if first != b"[":
            start = bytes(self.stream.read(9))
            raise MalformedRecordError(f"expected a Kaldi matrix (binary marker b'\\x00B', or '['), found {start!r}")
        values, columns, rows, blank = array("d"), 0, 0, 0
        for line in self._bracketed_lines("the matrix", ends_line=ends_line):
            for row in line.split(b";"):
                count = to_floats(values, row)
                if not count:
                    blank += 1
                    if blank > rows + MAX_BLANK:
                        raise MalformedRecordError(f"more than {MAX_BLANK} rows without numbers in the matrix")
                    continue
                if rows and count != columns:
                    raise MalformedRecordError(f"row {rows + 1} has {count} columns, the rows before it {columns}")
                rows, columns = rows + 1, count
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


@contextmanager
def open_model(path: str | PathLike[str], kind: str) -> Iterator[BasicTypeReader]:
    """Opens the file `path`, to be read as `kind` ("a Kaldi transition model"), its binary marker taken.

    Raises:
        DataError: the file is missing, no regular file, empty, compressed, or larger than 8 GiB; or the block finds
            something malformed.
    """
    size = 0
    try:
        with open_regular(Path(path)) as stream:
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
        raise DataError(f"cannot read {kind}: {error.strerror}", location=path, hint="check the path") from error


class BasicTypeWriter:
    """Writes values as Kaldi does, byte for byte; text numbers have 7 digits, as those of a C++ stream.

    Args:
        handle: what is written to.
        binary: the mode. `marker` writes the header that says so.
    """

    def __init__(self, handle: BinaryIO, *, binary: bool) -> None:
        self.handle = handle
        self.binary = binary

    def marker(self) -> None:
        """What a file begins with: NUL and `B` in binary mode, nothing in text mode."""
        if self.binary:
            self.handle.write(b"\0B")

    def token(self, *tokens: str) -> None:
        """Words, each with the space that ends it."""
        self.handle.write(b"".join(token.encode() + b" " for token in tokens))

    def line_end(self) -> None:
        """A line end, in text mode only."""
        if not self.binary:
            self.handle.write(b"\n")

    def token_line(self, token: str) -> None:
        """A word, then in text mode a line end."""
        self.token(token)
        self.line_end()

    def int32(self, value: int) -> None:
        """A signed 32-bit integer."""
        self.handle.write(b"\x04" + int(value).to_bytes(4, "little", signed=True) if self.binary else b"%d " % value)

    def float32(self, value: float) -> None:
        """A 32-bit floating-point number."""
        single = np.float32(value)
        self.handle.write(b"\x04" + single.astype("<f4").tobytes() if self.binary else b"%.7g " % float(single))

    def int32_vector(self, values: NDArray[np.int32]) -> None:
        """int32 (n,)."""
        if self.binary:
            self.handle.write(b"\x04" + len(values).to_bytes(4, "little") + values.astype("<i4").tobytes())
        else:
            self.handle.write(b"[ " + b"".join(b"%d " % value for value in values.tolist()) + b"]\n")

    def float_vector(self, values: NDArray[np.float32]) -> None:
        """float32 (n,)."""
        if self.binary:
            self.token("FV")
            self.int32(len(values))
            self.handle.write(values.astype("<f4").tobytes())
        else:
            self.handle.write(b" [ " + _text_row(values) + b"]\n")

    def float_matrix(self, values: NDArray[np.float32]) -> None:
        """float32 (rows, columns)."""
        rows, columns = values.shape
        if self.binary:
            self.token("FM")
            self.int32(rows)
            self.int32(columns)
            self.handle.write(np.ascontiguousarray(values, "<f4").tobytes())
        elif columns == 0:
            self.handle.write(b" [ ]\n")
        else:
            self.handle.write(b" [" + b"".join(b"\n  " + _text_row(row) for row in values) + b"]\n")


def _text_row(row: NDArray[np.float32]) -> bytes:
    return b"".join(b"%.7g " % value for value in row.tolist())


def encode_sized_int32(values: NDArray[np.integer[Any]]) -> bytes:
    """Integers that follow each other, each as a binary basic type."""
    sized = np.empty(values.size, _SIZED_INT32)
    sized["size"] = 4
    sized["value"] = values.reshape(-1)
    return sized.tobytes()
