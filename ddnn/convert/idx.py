"""IDX files of images and of labels (Yann LeCun's format), plain or gzip, from a disk that nobody has to trust.

A file is a magic number (two zero bytes, the type of a value, the number of dims), each dim as a big-endian unsigned
integer of 32 bits, then the values, the last dim fastest. Images are unsigned bytes of three dims, labels of one.
"""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.stream import (
    HINT_REMAKE,
    READ_ERRORS,
    BoundedStream,
    MalformedRecordError,
    describe_read_error,
    open_stream,
)
from ddnn.util.errors import DataError
from ddnn.util.files import atomic_write

MAX_PIXELS = 1 << 16
"""Of an image: 256 x 256. Each is an input of the network."""
_TYPES = {
    8: "unsigned bytes",
    9: "signed bytes",
    11: "16-bit integers",
    12: "32-bit integers",
    13: "floats",
    14: "doubles",
}
_UNSIGNED_BYTES = 8


@dataclass(frozen=True)
class IdxImages:
    """The images of an open IDX file, read from the first to the last.

    Attributes:
        path: the file.
        count: images that its header promises, 1 or more.
        rows, columns: pixels of each image, 1 or more.
    """

    path: Path
    count: int
    rows: int
    columns: int
    source: BoundedStream

    def read(self, count: int) -> NDArray[np.uint8]:
        """The next `count` images, uint8 (count, rows * columns), row by row.

        Raises:
            DataError: the file is damaged or cut short.
        """
        size = count * self.rows * self.columns
        with _reading(self.path):
            data = self.source.read_exact(size, f"a block of {count} images")
        return np.frombuffer(data, np.uint8).reshape(count, self.rows * self.columns)

    def finish(self) -> None:
        """To be called after the last image: DataError where more follows, or a gzip's checksum does not match."""
        _finish(self.source, self.path, "images")


@contextmanager
def open_images(path: Path) -> Iterator[IdxImages]:
    """An IDX file of images, its header checked against its size.

    Raises:
        DataError: the file is missing, damaged, or no IDX file of images (unsigned bytes, images x rows x columns); an
            image has no pixel, or more than `MAX_PIXELS`.
    """
    source = open_stream(path)
    with source.stream:
        count, rows, columns = _read_header(source, path, "images", 3)
        if not 0 < rows * columns <= MAX_PIXELS:
            message = f"expected images of 1 to {MAX_PIXELS} pixels, found {rows} x {columns}"
            raise DataError(message, location=path, hint="scale the images down" if rows * columns else HINT_REMAKE)
        yield IdxImages(path, count, rows, columns, source)


def read_labels(path: Path, expected: int) -> NDArray[np.uint8]:
    """The `expected` labels of an IDX file, uint8 (expected,).

    Raises:
        DataError: the file is missing, damaged, no IDX file of labels (unsigned bytes, one dim), or has more or fewer.
    """
    source = open_stream(path)
    with source.stream:
        (count,) = _read_header(source, path, "labels", 1)
        if count != expected:
            message = f"expected a label of each of {expected} images, found {count} labels"
            raise DataError(message, location=path, hint="give the images and the labels that belong to each other")
        with _reading(path):
            data = source.read_exact(count, f"a block of {count} labels")
        _finish(source, path, "labels")
    return np.frombuffer(data, np.uint8)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Writes unsigned bytes of 1 to 3 dims, each below 2^32, as an IDX file; as gzip where `path` ends in .gz.

    Raises:
        UserError: the file cannot be written.
    """
    header = bytes((0, 0, _UNSIGNED_BYTES, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    with atomic_write(path) as handle:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, handle, 0) as packed:
                packed.write(header + values.tobytes())
        else:
            handle.write(header + values.tobytes())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except READ_ERRORS as error:
        raise DataError(describe_read_error(error), location=path, hint=HINT_REMAKE) from error


def _read_header(source: BoundedStream, path: Path, kind: str, dims: int) -> tuple[int, ...]:
    """The dims. DataError where the type is another, there is nothing, or more is promised than can be there."""
    with _reading(path):
        magic = source.read_exact(4, "the magic number")
        if magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
            expected = bytes((0, 0, _UNSIGNED_BYTES, dims)).hex(" ")
            raise MalformedRecordError(
                f"expected an IDX file of {kind}, which begins with {expected}, found {magic.hex(' ')}"
            )
        if (magic[2], magic[3]) != (_UNSIGNED_BYTES, dims):
            found = f"{_TYPES[magic[2]]} of {magic[3]} dims"
            swapped = magic[2] == _UNSIGNED_BYTES and magic[3] == 4 - dims
            hint = "give --images and --labels the other way round" if swapped else f"give the file of the {kind}"
            message = f"expected an IDX file of {kind}, {_TYPES[_UNSIGNED_BYTES]} of {dims} dims, found {found}"
            raise DataError(message, location=path, hint=hint)
        shape = struct.unpack(f">{dims}I", source.read_exact(4 * dims, "the header"))
        promised, remaining = math.prod(shape), source.remaining
        if promised > remaining:
            dims_text = " x ".join(map(str, shape))
            raise MalformedRecordError(f"cut short: the header promises {dims_text} bytes, at most {remaining} remain")
    if not shape[0]:
        raise DataError(f"expected {kind}, found none", location=path, hint=HINT_REMAKE)
    return shape


def _finish(source: BoundedStream, path: Path, kind: str) -> None:
    """Nothing may follow. Of a gzip this also reads the checksum."""
    with _reading(path):
        if source.stream.read(1):
            raise MalformedRecordError(f"more bytes follow than the header promises {kind}")
