"""Kaldi's basic types, text and binary, written as Kaldi writes them, byte for byte.

Follows kaldi `base/io-funcs.cc`, `base/io-funcs-inl.h`, `matrix/kaldi-vector.cc` and `matrix/kaldi-matrix.cc`. Text
numbers have 7 digits, as those of a C++ stream of precision 7.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.basic_io import SIZED_INT32


def write_header(handle: BinaryIO, *, binary: bool) -> None:
    """What a Kaldi file begins with: NUL and `B` in binary mode, nothing in text mode."""
    if binary:
        handle.write(b"\0B")


def write_token(handle: BinaryIO, token: str) -> None:
    """A word and the space that ends it."""
    handle.write(token.encode() + b" ")


def write_line_end(handle: BinaryIO, *, binary: bool) -> None:
    """A line end, in text mode only."""
    if not binary:
        handle.write(b"\n")


def write_int32(handle: BinaryIO, value: int, *, binary: bool) -> None:
    """A signed 32-bit integer."""
    handle.write(b"\x04" + int(value).to_bytes(4, "little", signed=True) if binary else b"%d " % value)


def write_int32_block(handle: BinaryIO, values: NDArray[np.int32]) -> None:
    """Integers that follow each other, each as a basic type, in binary mode."""
    block = np.empty(values.size, SIZED_INT32)
    block["size"] = 4
    block["value"] = values.reshape(-1)
    handle.write(block.tobytes())


def write_float32(handle: BinaryIO, value: float, *, binary: bool) -> None:
    """A 32-bit floating-point number."""
    rounded = np.float32(value)
    handle.write(b"\x04" + rounded.astype("<f4").tobytes() if binary else b"%.7g " % float(rounded))


def write_int32_vector(handle: BinaryIO, values: NDArray[np.int32], *, binary: bool) -> None:
    """int32 (n,)."""
    if binary:
        handle.write(b"\x04" + len(values).to_bytes(4, "little", signed=True) + values.astype("<i4").tobytes())
    else:
        handle.write(b"[ " + b"".join(b"%d " % value for value in values.tolist()) + b"]\n")


def write_float_vector(handle: BinaryIO, values: NDArray[np.float32], *, binary: bool) -> None:
    """float32 (n,)."""
    if binary:
        write_token(handle, "FV")
        write_int32(handle, len(values), binary=True)
        handle.write(values.astype("<f4").tobytes())
    else:
        handle.write(b" [ " + _text_row(values) + b"]\n")


def write_float_matrix(handle: BinaryIO, values: NDArray[np.float32], *, binary: bool) -> None:
    """float32 (rows, columns)."""
    rows, columns = values.shape
    if binary:
        write_token(handle, "FM")
        write_int32(handle, rows, binary=True)
        write_int32(handle, columns, binary=True)
        handle.write(np.ascontiguousarray(values, "<f4").tobytes())
    elif columns == 0:
        handle.write(b" [ ]\n")
    else:
        handle.write(b" [" + b"".join(b"\n  " + _text_row(row) for row in values) + b"]\n")


def _text_row(row: NDArray[np.float32]) -> bytes:
    return b"".join(b"%.7g " % value for value in row.tolist())
