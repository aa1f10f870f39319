"""Kaldi's basic types, text and binary, read from a buffer; no claim of a size is believed unchecked.

Follows kaldi `base/io-funcs.cc`, `base/io-funcs-inl.h`, `matrix/kaldi-vector.cc` and `matrix/kaldi-matrix.cc`.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.files import read_regular

# A network of 500 million parameters as text; more is not a model but a mistake.
MAX_FILE_BYTES = 8 << 30

_TOKEN = re.compile(rb"\s*(\S{1,256})(?=\s)")
_INTEGER = re.compile(rb"[+-]?\d{1,10}")
_NUMBER = re.compile(rb"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,6})?|[+-]?(?:inf|infinity|nan)", re.IGNORECASE)
_SPACE = re.compile(rb"\s*")
_NUMBER_CHARACTERS = b"0123456789+-.eE \t\r\n\v\f"
_INT32 = np.iinfo(np.int32)

# One binary int32 as Kaldi writes it: a byte that says 4, then the value.
SIZED_INT32 = np.dtype([("size", "u1"), ("value", "<i4")])


class Reader:
    """A position in a file's bytes. Each method reads a value there and moves behind it, or raises DataError.

    Args:
        data: the file's bytes.
        where: the file's name, for messages.
        kind: what the file should be, for messages ("a Kaldi transition model").
        binary: the mode; None: binary if `data` begins with Kaldi's header (NUL, `B`), which is then skipped.
    """

    def __init__(self, data: bytes, where: str | PathLike[str], kind: str, *, binary: bool | None = None) -> None:
        self.data = data
        self.where = where
        self.kind = kind
        self.position = 0
        self.binary = False
        if binary is not None:
            self.binary = binary
        elif data[:1] == b"\0":
            if data[:2] != b"\0B":
                raise self.error("Kaldi's binary header (NUL, 'B')")
            self.binary = True
            self.position = 2

    @property
    def remaining(self) -> int:
        """Bytes left behind the position."""
        return len(self.data) - self.position

    def error(self, expected: str, found: str | None = None) -> DataError:
        """The error to raise: what was expected at the position, and what is there."""
        if found is None:
            ahead = self.data[self.position : self.position + 24]
            found = repr(ahead)[1:] if ahead else "the end of the file"
        return DataError(
            f"not {self.kind}: expected {expected} at byte {self.position}, found {found}",
            where=self.where,
            mend=f"check that this is the right file and that it was copied whole (it has {len(self.data)} bytes)",
        )

    def _skip_space(self) -> None:
        match = _SPACE.match(self.data, self.position)
        if match is not None:
            self.position = match.end()

    def peek(self) -> bytes:
        """The next byte (in text mode: after white space), empty at the end of the file."""
        if not self.binary:
            self._skip_space()
        return self.data[self.position : self.position + 1]

    def peek_token(self) -> str:
        """The next token, position unchanged; empty where there is none."""
        match = _TOKEN.match(self.data, self.position)
        return "" if match is None else match.group(1).decode("latin-1")

    def token(self, expected: str = "a token") -> str:
        """A word that ends in white space, one character of which is taken with it."""
        match = _TOKEN.match(self.data, self.position)
        if match is None:
            raise self.error(expected)
        self.position = match.end() + 1
        return match.group(1).decode("latin-1")

    def expect(self, *tokens: str) -> str:
        """One of `tokens`, which is returned."""
        start = self.position
        names = " or ".join(tokens)
        token = self.token(names)
        if token not in tokens:
            self.position = start
            raise self.error(names, repr(token))
        return token

    def int32(self, what: str = "an integer") -> int:
        """A signed 32-bit integer."""
        return int(self.int32_block(1, what)[0])

    def int32_block(self, count: int, what: str = "an integer") -> NDArray[np.int32]:
        """`count` integers that follow each other, each written as a basic type; int32 (count,)."""
        if self.binary:
            if not 0 <= count * 5 <= self.remaining:
                raise self.error(f"{what} ({count} values, {count * 5} bytes)", f"{self.remaining} bytes")
            block = np.frombuffer(self.data, SIZED_INT32, count, self.position)
            bad = np.flatnonzero(block["size"] != 4)
            if bad.size:
                self.position += int(bad[0]) * 5
                raise self.error(f"{what} of 4 bytes")
            self.position += count * 5
            return block["value"].astype(np.int32)
        if not 0 <= count * 2 <= self.remaining + 1:
            raise self.error(f"{what} ({count} values)", f"{self.remaining} bytes")
        return np.array([self._text_int32(what) for _ in range(count)], dtype=np.int32)

    def _text_int32(self, what: str) -> int:
        self._skip_space()
        match = _INTEGER.match(self.data, self.position)
        if match is None or not (match.end() == len(self.data) or self.data[match.end() : match.end() + 1].isspace()):
            raise self.error(what)
        value = int(match.group())
        if not _INT32.min <= value <= _INT32.max:
            raise self.error(f"{what} of 32 bits")
        self.position = match.end()
        return value

    def float32(self, what: str = "a number") -> float:
        """A floating-point number (binary: of 4 or 8 bytes)."""
        if self.binary:
            size = self.data[self.position : self.position + 1]
            if size not in (b"\x04", b"\x08") or self.remaining < 1 + size[0]:
                raise self.error(f"{what} of 4 or 8 bytes")
            value = np.frombuffer(self.data, f"<f{size[0]}", 1, self.position + 1)[0]
            self.position += 1 + size[0]
            return float(value)
        self._skip_space()
        match = _NUMBER.match(self.data, self.position)
        if match is None or not (match.end() == len(self.data) or self.data[match.end() : match.end() + 1].isspace()):
            raise self.error(what)
        self.position = match.end()
        return float(match.group())

    def boolean(self, what: str = "T or F") -> bool:
        """A truth value."""
        character = self.peek()
        if character not in (b"T", b"F"):
            raise self.error(what)
        self.position += 1
        return character == b"T"

    def int32_vector(self, what: str = "a vector of integers") -> NDArray[np.int32]:
        """int32 (n,)."""
        if not self.binary:
            parts = self._bracketed(what).split()
            if not all(_INTEGER.fullmatch(part) and _INT32.min <= int(part) <= _INT32.max for part in parts):
                raise self.error(what, "something that is no 32-bit integer between [ and ]")
            return np.array([int(part) for part in parts], dtype=np.int32)
        if self.data[self.position : self.position + 1] != b"\x04" or self.remaining < 5:
            raise self.error(f"{what} of 4 bytes each")
        count = int.from_bytes(self.data[self.position + 1 : self.position + 5], "little", signed=True)
        return self._raw(np.dtype("<i4"), (count,), 5, what)

    def float_vector(self, what: str = "a vector") -> NDArray[Any]:
        """float32 (FV) or float64 (DV, and text, which does not say), (n,)."""
        if not self.binary:
            segment = self._bracketed(what)
            if b"\n" in segment:
                raise self.error(what, "a line end between [ and ] (is it a matrix?)")
            return self._text_floats(segment, what)
        dtype = np.dtype("<f4" if self.expect("FV", "DV") == "FV" else "<f8")
        return self._raw(dtype, (self.int32(f"the dim of {what}"),), 0, what)

    def float_matrix(self, what: str = "a matrix") -> NDArray[Any]:
        """float32 (FM) or float64 (DM, and text, which does not say), (rows, columns)."""
        if not self.binary:
            lines = self._bracketed(what).replace(b";", b"\n").split(b"\n")
            rows = [self._text_floats(line, what) for line in lines if not line.isspace() and line]
            if not rows:
                return np.zeros((0, 0))
            if any(len(row) != len(rows[0]) for row in rows):
                lengths = sorted({len(row) for row in rows})
                raise self.error(f"{what} with rows of one length", f"rows of {lengths[0]} to {lengths[-1]} numbers")
            return np.stack(rows)
        dtype = np.dtype("<f4" if self.expect("FM", "DM") == "FM" else "<f8")
        rows_claimed, columns = self.int32(f"the rows of {what}"), self.int32(f"the columns of {what}")
        if (rows_claimed == 0) != (columns == 0):
            raise self.error(what, f"the dims {rows_claimed} x {columns}")
        return self._raw(dtype, (rows_claimed, columns), 0, what)

    def _raw(self, dtype: np.dtype[Any], shape: tuple[int, ...], skip: int, what: str) -> NDArray[Any]:
        """Values without size bytes, `skip` bytes ahead; a copy in native byte order."""
        count = 1
        for dim in shape:
            count *= dim
        claimed = " x ".join(map(str, shape))
        if min(shape) < 0 or skip + count * dtype.itemsize > self.remaining:
            raise self.error(f"{what} of {claimed} values of {dtype.itemsize} bytes", f"{self.remaining} bytes")
        values = np.frombuffer(self.data, dtype, count, self.position + skip).reshape(shape)
        self.position += skip + count * dtype.itemsize
        return values.astype(dtype.newbyteorder("="))

    def _bracketed(self, what: str) -> bytes:
        """What stands between `[` and `]` in text mode; the line end behind is taken too."""
        self._skip_space()
        end = self.data.find(b"]", self.position)
        if self.data[self.position : self.position + 1] != b"[" or end < 0:
            raise self.error(f"{what} between [ and ]")
        segment = self.data[self.position + 1 : end]
        self.position = end + 1
        if self.data[self.position : self.position + 1] == b"\n":
            self.position += 1
        return segment

    def _text_floats(self, segment: bytes, what: str) -> NDArray[np.float64]:
        parts = segment.split()
        plain = not segment.translate(None, _NUMBER_CHARACTERS)
        if not plain and not all(_NUMBER.fullmatch(part) for part in parts):
            bad = next(part for part in parts if not _NUMBER.fullmatch(part))
            raise self.error(what, f"{bad[:24]!r} where a number should be")
        try:
            values = np.array([float(part) for part in parts], np.float64)
        except ValueError:
            bad = next(part for part in parts if not _NUMBER.fullmatch(part))
            raise self.error(what, f"{bad[:24]!r} where a number should be") from None
        if plain and not np.isfinite(values).all():
            raise self.error(f"{what} of numbers within range", "a number that is too large")
        return values


def read_whole(path: str | PathLike[str], kind: str) -> Reader:
    """Reads the file `path` into memory, ready to be parsed as `kind` ("a Kaldi transition model").

    Raises:
        DataError: the file is missing, no regular file, empty, compressed, or larger than 8 GiB.
    """
    try:
        data = read_regular(Path(path), MAX_FILE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {kind}: {error.strerror}", where=path, mend="check the path") from error
    if not data:
        raise DataError(f"not {kind}: the file is empty", where=path, mend="copy or make it again")
    if data[:2] == b"\x1f\x8b":
        raise DataError(f"not {kind}: the file is compressed by gzip", where=path, mend="gunzip it first")
    return Reader(data, path, kind)
