"""Features into the store, utterance after utterance: read, checked, CMVN, deltas, repeated edges.

Nothing here needs torch: loading processes (`ddnn.data.loader_process`) start in a fraction of a second without it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.kaldi.features import add_deltas, apply_cmvn
from ddnn.kaldi.tables import MatrixReader, ScpEntry, check_finite

CHUNK_BYTES = 4 << 20
"""Of features, at least, in a chunk: small enough for a processor's cache."""

Stats = Mapping[str, NDArray[np.float64]]
"""Speaker -> CMVN statistics."""


@dataclass(frozen=True)
class Preparation:
    """What happens to features on their way into the store.

    Attributes:
        data: the data dir, for messages.
        like: its first utterance, of which the dims are those expected of all; for messages.
        dim: feature dimension in the archives.
        cmvn: `none`, `mean` or `mean-variance`.
        deltas: order of the appended deltas.
        context: repeated edge frames on each side.
        dtype: `float32` or `float16`, of the store.
    """

    data: Path
    like: str
    dim: int
    cmvn: str
    deltas: int
    context: int
    dtype: str

    @property
    def width(self) -> int:
        """Dims in the store."""
        return self.dim * (self.deltas + 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a store row."""
        return self.width * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Chunk:
    """Utterances that lie one after another in the store.

    Attributes:
        row: the first store row, which is a repeated edge frame where there is context.
        rows: store rows of all its utterances, edges among them.
        entries: where their features lie.
        num_frames: how many of their frames to take.
        speakers: of each, for CMVN; None without.
    """

    row: int
    rows: int
    entries: tuple[ScpEntry, ...]
    num_frames: tuple[int, ...]
    speakers: tuple[str, ...] | None


def chunks(
    entries: Sequence[ScpEntry], num_frames: NDArray[np.int64], speakers: Sequence[str] | None, preparation: Preparation
) -> list[Chunk]:
    """All utterances, in chunks of `CHUNK_BYTES` or more; segments of one recording stay together, as it is read once
    for all of them."""
    found, start, row = [], 0, 0
    edges, lengths = 2 * preparation.context, num_frames.tolist()
    rows = 0
    for u, entry in enumerate(entries):
        rows += lengths[u] + edges
        following = entries[u + 1] if u + 1 < len(entries) else None
        same = following is not None and entry.offset is not None
        same = same and following is not None and (following.path, following.offset) == (entry.path, entry.offset)
        if following is None or (4 * rows * preparation.width >= CHUNK_BYTES and not same):
            part = slice(start, u + 1)
            of_speakers = None if speakers is None else tuple(speakers[part])
            found.append(Chunk(row, rows, tuple(entries[part]), tuple(lengths[part]), of_speakers))
            start, row, rows = u + 1, row + rows, 0
    return found


def fill(out: NDArray[Any], chunk: Chunk, stats: Stats, preparation: Preparation, reader: MatrixReader) -> None:
    """Fills `out` (chunk.rows, width), of the store's dtype, with the chunk's frames and their repeated edges.

    Raises:
        DataError: damaged or unfit features, or values that the store's dtype does not hold.
    """
    context, row = preparation.context, preparation.context
    for u, (entry, frames) in enumerate(zip(chunk.entries, chunk.num_frames, strict=True)):
        features = _read(entry, frames, preparation, reader)
        if chunk.speakers is not None:
            own = stats[chunk.speakers[u]]
            _check_stats(entry.key, own, preparation)
            features = apply_cmvn(features, own, variance=preparation.cmvn == "mean-variance")
        if preparation.deltas:
            features = add_deltas(features, preparation.deltas)
        features = features[:frames]
        end = row + frames
        with np.errstate(over="ignore"):  # what float16 does not hold becomes Inf, which is looked for
            out[row:end] = features
        _check_held(entry, out[row:end], features, preparation)
        out[row - context : row] = out[row]
        out[end : end + context] = out[end - 1]
        row = end + 2 * context


def write_chunk(
    descriptor: int, start: int, chunk: Chunk, stats: Stats, preparation: Preparation, reader: MatrixReader
) -> int:
    """Writes the chunk's rows into an open file, of which the store begins at byte `start`; returns their CRC-32.

    Raises:
        DataError: as `fill`. OSError: the file cannot be written.
    """
    out = np.empty((chunk.rows, preparation.width), preparation.dtype)
    fill(out, chunk, stats, preparation, reader)
    write_at(descriptor, out, start + chunk.row * preparation.row_bytes)
    return zlib.crc32(out.data.cast("B")) if out.size else 0


def write_at(descriptor: int, array: NDArray[Any], position: int) -> None:
    """Writes the array's bytes at `position` of an open file."""
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while len(left):
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written


def _read(entry: ScpEntry, frames: int, preparation: Preparation, reader: MatrixReader) -> NDArray[Any]:
    """The utterance's features, of which the plan takes the first `frames`."""
    features = reader.read(entry)
    if features.shape[1] != preparation.dim:
        raise DataError(
            f"utterance {entry.key}: {features.shape[1]} dims found, {preparation.dim} expected as in "
            f"{preparation.like}",
            where=preparation.data / "feats.scp",
            mend="all utterances of a data dir must have features of one kind",
        )
    if len(features) < frames:
        raise DataError(
            f"utterance {entry.key}: {len(features)} frames found, {frames} or more expected as when the corpus was "
            "planned",
            where=entry.where,
            mend="leave the archives alone while they are read, and give every host the same ones",
        )
    check_finite(entry.key, features, entry.where)
    return features


def _check_stats(utterance: str, own: NDArray[np.float64], preparation: Preparation) -> None:
    if own.shape[1] != preparation.dim + 1:
        raise DataError(
            f"utterance {utterance}: CMVN statistics of {own.shape[1] - 1} dims found, features of {preparation.dim}",
            where=preparation.data / "cmvn.scp",
            mend="run steps/compute_cmvn_stats.sh again, or remove cmvn.scp",
        )


def _check_held(entry: ScpEntry, held: NDArray[Any], features: NDArray[Any], preparation: Preparation) -> None:
    """DataError where the store holds something that is not finite."""
    # A sum is finite only if all terms are, and needs no array of truth values; it may overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(held.sum(dtype=np.float32)) or np.isfinite(held).all():
            return
        largest = np.abs(features).max()
    raise DataError(
        f"utterance {entry.key}: values up to {largest:g} after CMVN and deltas, which data.store {preparation.dtype} "
        "does not hold",
        where=entry.where,
        mend="set data.store: float32, or look for frames that are no speech features",
    )


def of_speakers(entries: Sequence[ScpEntry], speakers: Mapping[str, str]) -> Iterator[tuple[str, list[ScpEntry]]]:
    """Speaker by speaker, in the order of their first utterances: all utterances of each, in order."""
    grouped: dict[str, list[ScpEntry]] = {}
    for entry in entries:
        grouped.setdefault(speakers[entry.key], []).append(entry)
    yield from grouped.items()
