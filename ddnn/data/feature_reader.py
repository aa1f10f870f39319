"""Features as rows of a dataset: read, checked, CMVN, deltas or Kaldi's transforms, edges repeated. Nothing
here imports torch: a loading process starts in a fraction of a second."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import MatrixReader, ScpEntry, check_finite, is_finite
from ddnn.kaldi.data_dir import add_deltas, apply_cmvn
from ddnn.kaldi.transforms import Matrix, TransformConfig
from ddnn.util.errors import DataError
from ddnn.util.files import write_all

CHUNK_BYTES = 4 << 20  # minimum of features in a chunk: small enough for a processor's cache
Stats = Mapping[str, NDArray[np.float64]]  # speaker -> CMVN statistics, (2, dim + 1)


@dataclass(frozen=True)
class FeatureConfig:
    """What happens to features between Kaldi's archive and the network; a trained model keeps it."""

    cmvn: str = "none"  # `none`, `mean` or `mean-variance`, per speaker
    deltas: int = 0  # order of the appended delta features
    splice: int = 0  # frames of context on each side
    dtype: str = "float32"  # `float32` or `float16`, of the frames in memory
    transforms: TransformConfig | None = None  # instead of deltas

    def width(self, dim: int) -> int:
        return dim * (self.deltas + 1) if self.transforms is None else self.transforms.width(dim)

    def dim_of_width(self, width: int) -> int | None:
        """Dimension of the features that have become `width` dims; None after final.mat, which does not say it."""
        if self.transforms is None:
            return width // (self.deltas + 1)
        return None if self.transforms.final_mat else width // (self.transforms.delta_order + 1)

    def __str__(self) -> str:
        after = f"deltas {self.deltas}"
        if self.transforms is not None:
            after = f"{self.transforms.as_text()} (final.mat {self.transforms.final_mat[:12] or 'none'})"
        return f"cmvn {self.cmvn}, {after}"

    def rows(self, num_frames: NDArray[np.int64]) -> int:
        """Number of rows of utterances of so many frames, edges included."""
        return int(num_frames.sum()) + 2 * self.splice * len(num_frames)


@dataclass(frozen=True)
class FeatureSpec:
    """The features of one data dir, and what is made of them."""

    data: Path  # the data dir, for messages
    reference_utterance: str  # the first one, whose dimension all others must have; for messages
    dim: int  # feature dimension in the archives
    config: FeatureConfig
    final_mat: Matrix | None = None  # of `config.transforms`

    @property
    def width(self) -> int:
        return self.config.width(self.dim)

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.config.dtype).itemsize


class Utterance(NamedTuple):
    """One utterance to read."""

    entry: ScpEntry  # where its features are stored
    num_frames: int  # how many of its frames to take
    speaker: str | None  # for CMVN; None without
    transform: Matrix | None  # its own or its speaker's; None without


@dataclass(frozen=True)
class Chunk:
    """Consecutive utterances of a dataset."""

    row: int  # the first row, which is a repeated edge frame where there is context
    rows: int  # number of rows of all its utterances, edges included
    utterances: tuple[Utterance, ...]


def make_chunks(utterances: Sequence[Utterance], spec: FeatureSpec) -> list[Chunk]:
    """All utterances, in chunks of `CHUNK_BYTES` or more; segments of one recording stay together, because it is read
    once for all of them."""
    chunks, start, row, rows = [], 0, 0, 0
    for end, (utterance, following) in enumerate(zip_longest(utterances, utterances[1:]), start=1):
        rows += utterance.num_frames + 2 * spec.config.splice
        if following is not None:
            entry, path, offset = utterance.entry, following.entry.path, following.entry.offset
            same_recording = entry.offset is not None and (path, offset) == (entry.path, entry.offset)
            if same_recording or 4 * rows * spec.width < CHUNK_BYTES:
                continue
        chunks.append(Chunk(row, rows, tuple(utterances[start:end])))
        start, row, rows = end, row + rows, 0
    return chunks


def read_chunk(out: NDArray[Any], chunk: Chunk, stats: Stats, spec: FeatureSpec, reader: MatrixReader) -> None:
    """Fills `out` (chunk.rows, width), of the config's dtype, with the chunk's frames and their repeated edges.
    DataError: damaged or unsuitable features, or values that the dtype cannot hold."""
    _fill(out, chunk, stats, spec, reader)
    # NaN or Inf in features is still there behind CMVN and all else. To look once costs less than at each utterance.
    if not is_finite(out):
        _fill(out, chunk, stats, spec, reader, check=True)


def _fill(
    out: NDArray[Any], chunk: Chunk, stats: Stats, spec: FeatureSpec, reader: MatrixReader, *, check: bool = False
) -> None:
    """As `read_chunk`; only with `check` it looks for NaN and Inf in the frames that it takes."""
    config, row = spec.config, spec.config.splice
    for entry, frames, speaker, transform in chunk.utterances:
        features = _read(entry, frames, spec, reader)
        if check or len(features) > frames:
            check_finite(entry.key, features, entry.location)
        if speaker is not None:
            speaker_stats = stats[speaker]
            dims = speaker_stats.shape[1] - 1
            if dims != spec.dim:
                message = f"utterance {entry.key}: CMVN statistics of {dims} dims found, features of {spec.dim}"
                hint = "run steps/compute_cmvn_stats.sh again, or remove cmvn.scp"
                raise DataError(message, location=spec.data / "cmvn.scp", hint=hint)
            features = apply_cmvn(features, speaker_stats, variance=config.cmvn == "mean-variance")
        if config.transforms is not None:
            features = config.transforms.apply(features, spec.final_mat, transform)
        elif config.deltas:
            features = add_deltas(features, config.deltas)
        end = row + frames
        with np.errstate(over="ignore", invalid="ignore"):  # what float16 cannot hold becomes Inf, which is looked for
            out[row:end] = features[:frames]
        if check and not is_finite(out[row:end]):
            after = "deltas" if config.transforms is None else "transforms"
            message = (
                f"values up to {np.abs(features[:frames]).max():g} after CMVN and {after}, which data.feature_dtype"
            )
            raise DataError(
                f"utterance {entry.key}: {message} {config.dtype} cannot hold",
                location=entry.location,
                hint="set data.feature_dtype: float32, or look for frames that are not speech features",
            )
        out[row - config.splice : row] = out[row]
        out[end : end + config.splice] = out[end - 1]
        row = end + 2 * config.splice


def write_chunk(
    descriptor: int, start: int, chunk: Chunk, stats: Stats, spec: FeatureSpec, reader: MatrixReader
) -> int:
    """Writes the chunk's rows into an open file, whose row 0 is at byte `start`; returns their CRC-32. DataError: as
    `read_chunk`. OSError: the file cannot be written."""
    out = np.empty((chunk.rows, spec.width), spec.config.dtype)
    read_chunk(out, chunk, stats, spec, reader)
    data = out.reshape(-1).view(np.uint8).data
    write_all(descriptor, data, start + chunk.row * spec.row_bytes)
    return zlib.crc32(data)


def with_own_reader(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a loading process: calls the function with the process's reader, which keeps archives open between tasks."""
    return function(*arguments, _own_reader())


@cache
def _own_reader() -> MatrixReader:
    return MatrixReader()


def _read(entry: ScpEntry, frames: int, spec: FeatureSpec, reader: MatrixReader) -> NDArray[Any]:
    """The utterance's features, of which the index takes the first `frames`."""
    features = reader.read(entry)
    if features.shape[1] != spec.dim:
        expected = f"{spec.dim} expected as in {spec.reference_utterance}"
        message = f"utterance {entry.key}: {features.shape[1]} dims found, {expected}"
        hint = "all utterances of a data dir must have features of one kind"
        raise DataError(message, location=spec.data / "feats.scp", hint=hint)
    if len(features) < frames:
        expected = f"{frames} or more expected as when the headers were read"
        message = f"utterance {entry.key}: {len(features)} frames found, {expected}"
        hint = "do not change the archives while they are read, and give every host the same ones"
        raise DataError(message, location=entry.location, hint=hint)
    return features
