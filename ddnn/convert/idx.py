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

from ddnn.errors import DataError
from ddnn.files import written_whole
from ddnn.kaldi.archives import MEND, UNREADABLE, explain, open_source
from ddnn.kaldi.records import RecordError, Source

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
    source: Source

    def read(self, count: int) -> NDArray[np.uint8]:
        """The next `count` images, uint8 (count, rows * columns), row by row.

        Raises:
            DataError: the file is damaged or cut short.
        """
        size = count * self.rows * self.columns
        with _reading(self.path):
            data = self.source.take(size, f"a block of {count} images")
        return np.frombuffer(data, np.uint8).reshape(count, self.rows * self.columns)

    def finish(self) -> None:
        """To be called behind the last image: DataError where more follows, or a gzip's checksum is wrong."""
        _finish(self.source, self.path, "images")


@contextmanager
def open_images(path: Path) -> Iterator[IdxImages]:
    """An IDX file of images, its header checked against its size.

    Raises:
        DataError: the file is missing, damaged, or no IDX file of images (unsigned bytes, images x rows x columns); an
            image has no pixel, or more than `MAX_PIXELS`.
    """
    source = open_source(path)
    with source.stream:
        count, rows, columns = _read_header(source, path, "images", 3)
        if not 0 < rows * columns <= MAX_PIXELS:
            what = f"expected images of 1 to {MAX_PIXELS} pixels, found {rows} x {columns}"
            raise DataError(what, where=path, mend="scale the images down" if rows * columns else MEND)
        yield IdxImages(path, count, rows, columns, source)


def read_labels(path: Path, expected: int) -> NDArray[np.uint8]:
    """The `expected` labels of an IDX file, uint8 (expected,).

    Raises:
        DataError: the file is missing, damaged, no IDX file of labels (unsigned bytes, one dim), or has more or fewer.
    """
    source = open_source(path)
    with source.stream:
        (count,) = _read_header(source, path, "labels", 1)
        if count != expected:
            what = f"expected a label of each of {expected} images, found {count} labels"
            raise DataError(what, where=path, mend="give the images and the labels that belong to each other")
        with _reading(path):
            data = source.take(count, f"a block of {count} labels")
        _finish(source, path, "labels")
    return np.frombuffer(data, np.uint8)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Writes unsigned bytes of 1 to 3 dims, each below 2^32, as an IDX file; as gzip where `path` ends in .gz.

    Raises:
        UserError: the file cannot be written.
    """
    header = bytes((0, 0, _UNSIGNED_BYTES, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    with written_whole(path) as handle:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, handle, 0) as packed:
                packed.write(header + values.tobytes())
        else:
            handle.write(header + values.tobytes())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise DataError(explain(error), where=path, mend=MEND) from error


def _read_header(source: Source, path: Path, kind: str, dims: int) -> tuple[int, ...]:
    """The dims. DataError where the type is another, there is nothing, or more is promised than can be there."""
    with _reading(path):
        magic = source.take(4, "the magic number")
        if magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
            expected = bytes((0, 0, _UNSIGNED_BYTES, dims)).hex(" ")
            raise RecordError(f"expected an IDX file of {kind}, which begins with {expected}, found {magic.hex(' ')}")
        if (magic[2], magic[3]) != (_UNSIGNED_BYTES, dims):
            found = f"{_TYPES[magic[2]]} of {magic[3]} dims"
            swapped = magic[2] == _UNSIGNED_BYTES and magic[3] == 4 - dims
            mend = "give --images and --labels the other way round" if swapped else f"give the file of the {kind}"
            what = f"expected an IDX file of {kind}, {_TYPES[_UNSIGNED_BYTES]} of {dims} dims, found {found}"
            raise DataError(what, where=path, mend=mend)
        shape = struct.unpack(f">{dims}I", source.take(4 * dims, "the header"))
        promised, left = math.prod(shape), source.limit - source.stream.tell()
        if promised > left:
            said = " x ".join(map(str, shape))
            raise RecordError(f"cut short: the header promises {said} bytes, at most {left} are left")
    if not shape[0]:
        raise DataError(f"expected {kind}, found none", where=path, mend=MEND)
    return shape


def _finish(source: Source, path: Path, kind: str) -> None:
    """Nothing may follow. Of a gzip this also reads the checksum."""
    with _reading(path):
        if source.stream.read(1):
            raise RecordError(f"more bytes follow than the header promises {kind}")
