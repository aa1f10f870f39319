"""Tables: archives (`ark`) of matrices and of integer vectors, read in sequence or through an scp, and written.

This is the one door to kaldiio 2.18.1, and it is guarded. On its own kaldiio runs a shell for an entry that begins or
ends with `|`, unpickles a record that begins with `PKL`, reads a missing or cut gzip as an empty or partial table,
clips a range past the end, and fails on text vectors that begin with 0 or 1e-05. Here files are opened and headers
checked by `records`; kaldiio then decodes single records of plain floats.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ddnn.errors import DataError
from ddnn.kaldi.archives import (
    MEND,
    UNREADABLE,
    drain,
    explain,
    iterate_int_vectors,
    iterate_matrices,
    open_source,
    write_int_vectors,
    write_matrices,
)
from ddnn.kaldi.records import RecordError, Source, read_matrix_header
from ddnn.kaldi.records import read_matrix as read_matrix_record
from ddnn.kaldi.scp import ScpEntry, read_scp

__all__ = [
    "MatrixReader",
    "ScpEntry",
    "check_finite",
    "iterate_int_vectors",
    "iterate_matrices",
    "matrix_shape",
    "read_matrix",
    "read_scp",
    "write_int_vectors",
    "write_matrices",
]

_T = TypeVar("_T")


def _run_pipe(entry: ScpEntry) -> Source:
    """The output of a shell command, whole; the caller has been asked whether commands may run."""
    done = subprocess.run(
        ["/bin/sh", "-c", entry.pipe or "false"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["(no message)"]
        what = f"utterance {entry.key}: the command ended with exit status {done.returncode}: {said[0][:500]}"
        raise DataError(what, where=entry.where, mend="run the command by hand to see why")
    return Source(io.BufferedReader(cast("io.RawIOBase", io.BytesIO(done.stdout))), len(done.stdout))


class MatrixReader:
    """Reads matrices by scp entry; keeps the last file open, as neighbouring entries share an archive.

    A context manager. One reader per thread.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._source: Source | None = None
        self._whole: tuple[tuple[Path, int | None], NDArray[Any]] | None = None

    def __enter__(self) -> MatrixReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file that is open, if one is."""
        if self._source is not None:
            self._source.stream.close()
        self._path, self._source, self._whole = None, None, None

    def shape(self, entry: ScpEntry) -> tuple[int, int]:
        """(rows, columns) of the entry's matrix, its range applied. Reads the header alone, unless the matrix is text.

        Raises:
            DataError: as `read`, but for damage that only shows in the data.
        """

        def measure(source: Source) -> tuple[int, int] | None:
            header = read_matrix_header(source)
            if header is None:
                return None
            rows, columns = _ranges(entry, (header.rows, header.columns))
            return rows.stop - rows.start, columns.stop - columns.start

        shape = self._at(entry, measure)
        if shape is None:  # text: its size is known only once it is read
            rows, columns = self.read(entry, np.float64).shape
            return rows, columns
        return shape

    def read(self, entry: ScpEntry, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """The entry's matrix, `dtype` (rows, columns), C-contiguous, its range applied. NaN and Inf are not looked for.

        Raises:
            DataError: the file cannot be read, the offset lies past its end, the record is damaged or cut short or no
                matrix, the range goes past the matrix; a command failed.
        """
        whole = self._read_whole(entry)
        if entry.rows is not None or entry.columns is not None:
            try:
                whole = whole[_ranges(entry, whole.shape)].copy()
            except RecordError as error:
                raise _entry_error(entry, error) from error
        # A double too large for a float becomes Inf, which check_finite finds; NaN may be of the kind that signals.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.require(whole, dtype, ["C", "W"])

    def _read_whole(self, entry: ScpEntry) -> NDArray[Any]:
        """The matrix before its range is applied. Segments of one recording follow each other: the last one is kept."""
        if entry.path is None or (entry.rows is None and entry.columns is None):
            return self._at(entry, read_matrix_record)
        place = (entry.path, entry.offset)
        if self._whole is None or self._whole[0] != place:
            self._whole = None
            self._whole = (place, self._at(entry, read_matrix_record))
        return self._whole[1]

    def _at(self, entry: ScpEntry, read: Callable[[Source], _T]) -> _T:
        """Runs `read` where the entry's record begins."""
        try:
            source = self._find(entry)
            value = read(source)
            if entry.offset is None:
                drain(source)
            return value
        except UNREADABLE as error:
            raise _entry_error(entry, error) from error

    def _find(self, entry: ScpEntry) -> Source:
        if entry.path is None:
            return _run_pipe(entry)
        if entry.path != self._path or self._source is None:
            self.close()
            try:
                self._source = open_source(entry.path)
            except DataError as error:
                raise RecordError(error.what) from error
            self._path = entry.path
        source, offset = self._source, entry.offset or 0
        if offset >= source.limit:
            raise RecordError(f"the offset {offset} lies past the end of the file, which has {source.limit} bytes")
        if entry.offset is not None and isinstance(source.stream.raw, gzip.GzipFile):
            raise RecordError("the file is a gzip, into which no offset can point")
        source.stream.seek(offset)
        return source


def _entry_error(entry: ScpEntry, error: Exception) -> DataError:
    return DataError(f"utterance {entry.key}: {explain(error)}", where=entry.where, mend=MEND)


def _ranges(entry: ScpEntry, shape: tuple[int, ...]) -> tuple[slice, slice]:
    """The entry's range as slices. Kaldi would let rows go 3 past the end; here that is an error."""
    slices = []
    for name, wanted, there in (("rows", entry.rows, shape[0]), ("columns", entry.columns, shape[1])):
        first, last = wanted if wanted is not None else (0, there - 1)
        if last >= there > 0 or (wanted is not None and there == 0):
            raise RecordError(f"the range takes {name} {first} to {last}, the matrix has {there} {name}")
        slices.append(slice(first, last + 1))
    return slices[0], slices[1]


def matrix_shape(entry: ScpEntry) -> tuple[int, int]:
    """(rows, columns) of one entry; for many, use a `MatrixReader`."""
    with MatrixReader() as reader:
        return reader.shape(entry)


def read_matrix(entry: ScpEntry, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """The matrix of one entry, (rows, columns); for many, use a `MatrixReader`."""
    with MatrixReader() as reader:
        return reader.read(entry, dtype)


def check_finite(key: str, matrix: NDArray[Any], where: str | os.PathLike[str]) -> None:
    """Raises DataError naming utterance, row and column of the first NaN or Inf in `matrix` (rows, columns)."""
    # A sum is finite only if all terms are, and needs no array of truth values; it may overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(matrix.sum()):
            return
    wrong = np.argwhere(~np.isfinite(matrix))
    if wrong.size:
        row, column = wrong[0]
        what = (
            f"utterance {key}: {matrix[row, column]} in row {row}, column {column}, and {len(wrong) - 1} more like it"
        )
        raise DataError(what, where=where, mend="make the features of this utterance again, or leave it out")
