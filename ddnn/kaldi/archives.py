"""Archives read from their beginning to their end, and written (kaldi `util/kaldi-table-inl.h`); plain or gzip."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.files import open_regular, written_whole
from ddnn.kaldi.records import (
    RecordError,
    Source,
    encode_int_vector,
    encode_matrix,
    read_int_vector,
    read_matrix,
)

MEND = "make the file again, or copy it again from where it was whole"
_MAX_KEY = 4096
# No deflate stream decompresses to more than 1032 times its size. Alignments come to 10 to 50 times, so that a large
# file that comes to more than so many times is none, but made to fill the memory.
_DEFLATE_LIMIT = 1032
_LARGE, _LARGE_LIMIT = 64 << 20, 250
# What a damaged gzip, a disk error or a directory can raise while it is read.
UNREADABLE = (RecordError, EOFError, OSError, zlib.error)
_T = TypeVar("_T")


class _Unzipped(gzip.GzipFile):
    """A gzip that says so where it decompresses to more than it may."""

    limit = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > self.limit:
            raise RecordError(f"decompresses to more than {self.limit} bytes, which no table of its size does")
        return data


def open_source(path: Path) -> Source:
    """A file or gzip as a stream with a limit. A name that ends in .gz must be a gzip; any gzip is decompressed."""
    try:
        if not path.is_file():
            raise DataError("the file does not exist, or is no regular file", where=path, mend="check the path")
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            is_gzip = stream.read(min(size, 2)) == b"\x1f\x8b"  # nothing of a file in /proc, which might wait
        if size == 0 or (path.suffix == ".gz" and not is_gzip):
            what = "the file is empty" if size == 0 else "expected a gzip, found other bytes"
            raise DataError(what, where=path, mend=MEND)
        if is_gzip:
            unzipped = _Unzipped(path, "rb")
            unzipped.limit = min(size * _DEFLATE_LIMIT, max(_LARGE, size * _LARGE_LIMIT))
            return Source(io.BufferedReader(cast("io.RawIOBase", unzipped), 1 << 16), unzipped.limit)
        return Source(path.open("rb"), size)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=path) from error


def drain(source: Source) -> None:
    """Reads a gzip to its end, where its checksum stands: a damaged one must not pass."""
    if isinstance(source.stream.raw, gzip.GzipFile):
        while source.stream.read(1 << 20):
            pass


def explain(error: Exception) -> str:
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return f"damaged or cut gzip: {error}"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _read_key(source: Source) -> str | None:
    """The key of the next record and the one space behind it; None at the end of the stream."""
    byte = source.first_byte()
    key = bytearray()
    while byte and not byte.isspace():
        key += byte
        if len(key) > _MAX_KEY or byte == b"\0":
            raise RecordError(f"expected an utterance id, found {bytes(key[:24])!r}")
        byte = source.stream.read(1)
    if not byte:
        if key:
            raise RecordError(f"cut short after the utterance id {bytes(key[:60])!r}")
        return None
    if byte == b"\n":  # an empty record: leave the line end to the one who reads the record
        source.stream.seek(-1, os.SEEK_CUR)
    try:
        return key.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"the utterance id {bytes(key[:60])!r} is not UTF-8") from error


def _iterate(path: Path, read: Callable[[Source], _T]) -> Iterator[tuple[str, _T]]:
    last = None
    source = open_source(path)
    with source.stream:
        while True:
            key = None
            try:
                key = _read_key(source)
                if key is None:
                    return
                value = read(source)
            except UNREADABLE as error:
                after = "no record was read" if last is None else f"the last record read whole is {last}"
                whose = f"utterance {key}: " if key is not None else ""
                raise DataError(f"{whose}{explain(error)} ({after})", where=path, mend=MEND) from error
            yield key, value
            last = key


def iterate_matrices(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every (key, matrix) of an archive in its order: binary, text or gzip, each record as its header says.

    The matrices are float32, or float64 where the record is double or text, (rows, columns).

    Raises:
        DataError: the file is missing, empty, damaged or cut short; names the last whole record.
    """
    return _iterate(path, read_matrix)


def iterate_int_vectors(path: Path) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Every (key, vector) of an archive of integers, int32 (n,): binary, text (a line each) or gzip.

    Raises:
        DataError: as `iterate_matrices`.
    """
    return _iterate(path, read_int_vector)


def _encode_key(key: str, where: Path) -> bytes:
    if not key or len(key.split()) != 1 or key != key.strip() or "\0" in key:
        raise DataError(f"an utterance id must be one word, found {key!r}", where=where, mend="rename the utterance")
    return key.encode()


def write_matrices(
    ark: Path,
    scp: Path | None,
    items: Iterable[tuple[str, NDArray[Any]]],
    *,
    compress: bool = False,
    relative: bool = False,
) -> int:
    """Writes matrices (rows, columns) as a binary archive and its scp, both whole or not at all.

    Args:
        ark: the archive.
        scp: the script file; None: none.
        items: key and matrix; float64 becomes double (DM), everything else float (FM).
        compress: compress lossily as `copy-feats --compress=true` does; the matrices must be finite.
        relative: the scp names the archive relative to its own folder, else absolutely.

    Returns:
        the number of matrices.

    Raises:
        UserError: the files cannot be written. DataError: a key is no single word or not new, a matrix is not finite.
    """
    name = os.path.relpath(ark.absolute(), scp.absolute().parent) if relative and scp else str(ark.absolute())
    lines = []

    def write(handle: BinaryIO) -> None:
        position = 0
        for key, matrix in _new_keys(items, ark):
            if compress and not np.isfinite(matrix).all():
                raise DataError(f"utterance {key}: NaN or Inf cannot be compressed", where=ark)
            start = _encode_key(key, ark) + b" "
            record = encode_matrix(matrix, compress=compress)
            lines.append(f"{key} {name}:{position + len(start)}\n")
            position += handle.write(start) + handle.write(record)

    if scp is None:
        with written_whole(ark) as handle:
            write(handle)
    else:
        # The inner file is renamed first: an scp never speaks of an archive that is not there.
        with written_whole(scp) as scp_handle, written_whole(ark) as handle:
            write(handle)
            scp_handle.write("".join(lines).encode())
            scp_handle.flush()  # on a full disk this fails while neither has its name yet
    return len(lines)


def write_int_vectors(path: Path, items: Iterable[tuple[str, NDArray[np.integer[Any]]]]) -> int:
    """Writes vectors of 32-bit integers as a binary archive, as gzip where `path` ends in .gz; whole or not at all.

    Returns:
        the number of vectors.

    Raises:
        UserError: the file cannot be written. DataError: a key is no single word or not new.
    """
    count = 0
    with written_whole(path) as handle:
        # No name and no time in the gzip, so that the same vectors give the same bytes.
        packed = gzip.GzipFile("", "wb", 6, handle, 0) if path.suffix == ".gz" else None
        for key, values in _new_keys(items, path):
            (packed or handle).write(_encode_key(key, path) + b" " + encode_int_vector(values))
            count += 1
        if packed is not None:
            packed.close()
    return count


def _new_keys(items: Iterable[tuple[str, _T]], where: Path) -> Iterator[tuple[str, _T]]:
    seen = set()
    for key, value in items:
        if key in seen:
            raise DataError(f"utterance {key} would be written twice", where=where, mend="utterance ids must be unique")
        seen.add(key)
        yield key, value
