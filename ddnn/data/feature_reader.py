"""Features as rows of a dataset: read, checked, CMVN, deltas or Kaldi's transforms, edges repeated. Nothing
here imports torch: a loading process starts in a fraction of a second."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import MatrixReader, ScpEntry, check_finite, is_finite
from ddnn.kaldi.data_dir import add_deltas, apply_cmvn
from ddnn.kaldi.transforms import Matrix, TransformConfig
from ddnn.util.arrays import AnyArray, Float64Array
from ddnn.util.errors import DataError
from ddnn.util.files import write_all

CHUNK_BYTES = 4 << 20  # minimum of features in a chunk: small enough for a processor's cache


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

    def bytes(self, num_frames: NDArray[np.int64], dim: int) -> int:
        """Of the rows of utterances of so many frames, whose features have `dim` dims."""
        return self.rows(num_frames) * self.width(dim) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class FeatureSpec:
    """The features of a data dir, and what is made of them."""

    config: FeatureConfig
    dim: int  # feature dimension in the archives
    final_mat: Matrix | None = None  # of `config.transforms`

    @property
    def width(self) -> int:
        return self.config.width(self.dim)


class Utterance(NamedTuple):
    """One utterance to read."""

    entry: ScpEntry  # where its features are stored
    num_frames: int  # how many of its frames to take
    cmvn: Float64Array | None  # statistics of its speaker, (2, dim + 1); None without
    transform: Matrix | None  # its own or its speaker's; None without


def make_chunks(utterances: Iterable[Utterance], spec: FeatureSpec) -> Iterator[list[Utterance]]:
    """Consecutive utterances that have `CHUNK_BYTES` of features or more. Segments of one recording stay together,
    because it is read once for all of them."""
    chunk, size, recording = list[Utterance](), 0, None
    for utterance in utterances:
        entry = utterance.entry
        if size >= CHUNK_BYTES and (entry.offset is None or (entry.path, entry.offset) != recording):
            yield chunk
            chunk, size = [], 0
        chunk.append(utterance)
        size += 4 * spec.width * (utterance.num_frames + 2 * spec.config.splice)
        recording = entry.path, entry.offset
    if chunk:
        yield chunk


def read_chunk(chunk: Sequence[Utterance], spec: FeatureSpec, reader: MatrixReader) -> AnyArray:
    """The frames of a chunk, (rows, width), each utterance with its repeated edges, in the config's dtype. DataError:
    damaged or unsuitable features, or values that the dtype cannot hold."""
    edge = spec.config.splice
    out = np.empty((sum(u.num_frames + 2 * edge for u in chunk), spec.width), spec.config.dtype)
    # NaN and Inf survive CMVN and everything after it: one check of the chunk costs less than one for each utterance.
    for check in (False, True):
        row = edge
        for utterance in chunk:
            end = row + utterance.num_frames
            _read(utterance, spec, reader, out[row:end], check=check)
            out[row - edge : row], out[end : end + edge] = out[row], out[end - 1]
            row = end + 2 * edge
        if is_finite(out):
            break
    return out


def _read(utterance: Utterance, spec: FeatureSpec, reader: MatrixReader, out: AnyArray, *, check: bool) -> None:
    """Fills `out` (num_frames, width). Only with `check` it looks for NaN and Inf in the frames that it takes."""
    (entry, frames, stats, transform), config = utterance, spec.config
    features = reader.read(entry)
    if features.shape[1] != spec.dim:
        message = (
            f"utterance {entry.key}: {features.shape[1]} dims found, {spec.dim} expected as in the first utterance"
        )
        hint = "all utterances of a data dir must have features of one kind"
        raise DataError(message, location=entry.scp, hint=hint)
    if len(features) < frames:
        expected = f"{frames} or more expected as when the headers were read"
        message = f"utterance {entry.key}: {len(features)} frames found, {expected}"
        hint = "do not change the archives while they are read, and give every host the same ones"
        raise DataError(message, location=entry.location, hint=hint)
    if check or len(features) > frames:
        check_finite(entry.key, features, entry.location)
    if stats is not None:
        dims = stats.shape[1] - 1
        if dims != spec.dim:
            message = f"utterance {entry.key}: CMVN statistics of {dims} dims found, features of {spec.dim}"
            hint = "run steps/compute_cmvn_stats.sh again, or remove cmvn.scp"
            raise DataError(message, location=entry.scp.with_name("cmvn.scp"), hint=hint)
        features = apply_cmvn(features, stats, variance=config.cmvn == "mean-variance")
    if config.transforms is not None:
        features = config.transforms.apply(features, spec.final_mat, transform)
    elif config.deltas:
        features = add_deltas(features, config.deltas)
    with np.errstate(over="ignore", invalid="ignore"):  # what float16 cannot hold becomes Inf, which is looked for
        out[:] = features[:frames]
    if check and not is_finite(out):
        after = "deltas" if config.transforms is None else "transforms"
        message = f"values up to {np.abs(features[:frames]).max():g} after CMVN and {after}"
        raise DataError(
            f"utterance {entry.key}: {message}, which data.feature_dtype {config.dtype} cannot hold",
            location=entry.location,
            hint="set data.feature_dtype: float32, or look for frames that are not speech features",
        )


def store_chunk(
    target: int | memoryview, start: int, chunk: Sequence[Utterance], spec: FeatureSpec, reader: MatrixReader
) -> tuple[int, int]:
    """Writes the chunk's rows from byte `start` on into memory, or into an open file; returns their size and, for a
    file, their CRC-32. DataError: as `read_chunk`. OSError: the file cannot be written."""
    data = read_chunk(chunk, spec, reader).reshape(-1).view(np.uint8).data
    if isinstance(target, int):
        write_all(target, data, start)
        return len(data), zlib.crc32(data)
    target[start : start + len(data)] = data
    return len(data), 0


def with_own_reader(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a loading process: calls the function with the process's reader, which keeps archives open between tasks."""
    return function(*arguments, _own_reader())


@cache
def _own_reader() -> MatrixReader:
    return MatrixReader()
