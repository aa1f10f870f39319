"""Features as rows of a dataset: read, checked, CMVN, deltas, edges repeated. Also the process that does so for others.

Nothing here imports torch: a loading process (`python -m ddnn.data.feature_reader`) starts in a fraction of a second.
It reads tasks, one JSON line each, from its standard input and answers each with one line:

    parent: {"descriptor": file, "start": byte, "spec": {...}}             once
    parent: {"chunk": [...], "stats": {speaker: rows}}                     child: {"crc": 123}
    parent: {"speakers": {speaker: [entry, ...]}}                          child: {"stats": {speaker: rows}}
    child, where a task fails:                                             {"error": {"kind", "message", ...}}

Frames go straight into the open file that it inherits. It ends when its input does, so that it never outlives its
parent.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import MatrixReader, check_finite
from ddnn.kaldi.data_dir import add_deltas, apply_cmvn, compute_cmvn_stats
from ddnn.kaldi.scp import ScpEntry
from ddnn.util.errors import DataError, UserError

CHUNK_BYTES = 4 << 20
"""Minimum of features in a chunk: small enough for a processor's cache."""

MAX_ERROR_PART = 20_000
"""Characters of one part of an error: an answer fits into a pipe, so that nobody waits to write it."""

Stats = Mapping[str, NDArray[np.float64]]
"""Speaker -> CMVN statistics, (2, dim + 1)."""


@dataclass(frozen=True)
class FeatureConfig:
    """What happens to features between Kaldi's archive and the network; a trained model keeps it.

    Attributes:
        cmvn: `none`, `mean` or `mean-variance`, per speaker.
        deltas: order of the appended delta features.
        splice: frames of context on each side.
        dtype: `float32` or `float16`, of the frames in memory.
    """

    cmvn: str = "none"
    deltas: int = 0
    splice: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class FeatureSpec:
    """The features of one data dir, and what is made of them.

    Attributes:
        data: the data dir, for messages.
        reference_utterance: the first one, whose dimension all others must have; for messages.
        dim: feature dimension in the archives.
    """

    data: Path
    reference_utterance: str
    dim: int
    config: FeatureConfig

    @property
    def width(self) -> int:
        """Dimension of a row."""
        return self.dim * (self.config.deltas + 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(self.config.dtype).itemsize


@dataclass(frozen=True)
class Chunk:
    """Consecutive utterances of a dataset.

    Attributes:
        row: the first row, which is a repeated edge frame where there is context.
        rows: number of rows of all its utterances, edges included.
        entries: where their features are stored.
        num_frames: how many of their frames to take.
        speakers: of each, for CMVN; None without.
    """

    row: int
    rows: int
    entries: tuple[ScpEntry, ...]
    num_frames: tuple[int, ...]
    speakers: tuple[str, ...] | None


def make_chunks(
    entries: Sequence[ScpEntry], num_frames: NDArray[np.int64], speakers: Sequence[str] | None, spec: FeatureSpec
) -> list[Chunk]:
    """All utterances, in chunks of `CHUNK_BYTES` or more; segments of one recording stay together, because it is read
    once for all of them."""
    chunks, start, row, rows = [], 0, 0, 0
    edges, lengths = 2 * spec.config.splice, num_frames.tolist()
    for u, entry in enumerate(entries):
        rows += lengths[u] + edges
        following = entries[u + 1] if u + 1 < len(entries) else None
        same_recording = (
            following is not None
            and entry.offset is not None
            and (following.path, following.offset) == (entry.path, entry.offset)
        )
        if following is None or (4 * rows * spec.width >= CHUNK_BYTES and not same_recording):
            part = slice(start, u + 1)
            of_chunk = None if speakers is None else tuple(speakers[part])
            chunks.append(Chunk(row, rows, tuple(entries[part]), tuple(lengths[part]), of_chunk))
            start, row, rows = u + 1, row + rows, 0
    return chunks


def read_chunk(out: NDArray[Any], chunk: Chunk, stats: Stats, spec: FeatureSpec, reader: MatrixReader) -> None:
    """Fills `out` (chunk.rows, width), of the config's dtype, with the chunk's frames and their repeated edges.

    Raises:
        DataError: damaged or unsuitable features, or values that the dtype cannot hold.
    """
    config, row = spec.config, spec.config.splice
    for u, (entry, frames) in enumerate(zip(chunk.entries, chunk.num_frames, strict=True)):
        features = _read(entry, frames, spec, reader)
        if chunk.speakers is not None:
            speaker_stats = stats[chunk.speakers[u]]
            _check_stats(entry.key, speaker_stats, spec)
            features = apply_cmvn(features, speaker_stats, variance=config.cmvn == "mean-variance")
        if config.deltas:
            features = add_deltas(features, config.deltas)
        features = features[:frames]
        end = row + frames
        with np.errstate(over="ignore"):  # what float16 cannot hold becomes Inf, which is looked for
            out[row:end] = features
        _check_stored(entry, out[row:end], features, config)
        out[row - config.splice : row] = out[row]
        out[end : end + config.splice] = out[end - 1]
        row = end + 2 * config.splice


def write_chunk(
    descriptor: int, start: int, chunk: Chunk, stats: Stats, spec: FeatureSpec, reader: MatrixReader
) -> int:
    """Writes the chunk's rows into an open file, whose row 0 is at byte `start`; returns their CRC-32.

    Raises:
        DataError: as `read_chunk`. OSError: the file cannot be written.
    """
    out = np.empty((chunk.rows, spec.width), spec.config.dtype)
    read_chunk(out, chunk, stats, spec, reader)
    data = out.reshape(-1).view(np.uint8).data
    write_all(descriptor, data, start + chunk.row * spec.row_bytes)
    return zlib.crc32(data)


def write_all(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Writes all of `data` at `position` of an open file."""
    remaining = memoryview(data)
    while len(remaining):
        written = os.pwrite(descriptor, remaining, position)
        remaining, position = remaining[written:], position + written


def _read(entry: ScpEntry, frames: int, spec: FeatureSpec, reader: MatrixReader) -> NDArray[Any]:
    """The utterance's features, of which the index takes the first `frames`."""
    features = reader.read(entry)
    if features.shape[1] != spec.dim:
        raise DataError(
            f"utterance {entry.key}: {features.shape[1]} dims found, {spec.dim} expected as in "
            f"{spec.reference_utterance}",
            location=spec.data / "feats.scp",
            hint="all utterances of a data dir must have features of one kind",
        )
    if len(features) < frames:
        raise DataError(
            f"utterance {entry.key}: {len(features)} frames found, {frames} or more expected as when the headers were "
            "read",
            location=entry.location,
            hint="do not change the archives while they are read, and give every host the same ones",
        )
    check_finite(entry.key, features, entry.location)
    return features


def _check_stats(utterance: str, stats: NDArray[np.float64], spec: FeatureSpec) -> None:
    if stats.shape[1] != spec.dim + 1:
        raise DataError(
            f"utterance {utterance}: CMVN statistics of {stats.shape[1] - 1} dims found, features of {spec.dim}",
            location=spec.data / "cmvn.scp",
            hint="run steps/compute_cmvn_stats.sh again, or remove cmvn.scp",
        )


def _check_stored(entry: ScpEntry, stored: NDArray[Any], features: NDArray[Any], config: FeatureConfig) -> None:
    """DataError where a stored value is not finite."""
    # A sum is finite only if all terms are, and needs no array of truth values; it may overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(stored.sum(dtype=np.float32)) or np.isfinite(stored).all():
            return
        largest = np.abs(features).max()
    raise DataError(
        f"utterance {entry.key}: values up to {largest:g} after CMVN and deltas, which data.feature_dtype "
        f"{config.dtype} cannot hold",
        location=entry.location,
        hint="set data.feature_dtype: float32, or look for frames that are not speech features",
    )


def setup_message(descriptor: int | None, start: int, spec: FeatureSpec) -> bytes:
    """The first line that a loading process gets."""
    return _line({"descriptor": descriptor, "start": start, "spec": asdict(spec)})


def chunk_message(chunk: Chunk, stats: Stats) -> bytes:
    """The task to write a chunk into the file, with the statistics of its speakers."""
    needed = {speaker: stats[speaker].tolist() for speaker in set(chunk.speakers or ())}
    return _line({"chunk": asdict(chunk), "stats": needed})


def stats_message(speakers: Mapping[str, list[ScpEntry]]) -> bytes:
    """The task to compute the CMVN statistics of these speakers."""
    return _line({"speakers": {name: [asdict(entry) for entry in entries] for name, entries in speakers.items()}})


def stats_from_answer(answer: Mapping[str, Any]) -> Stats:
    """The statistics in a message of either side."""
    return {speaker: np.array(rows, np.float64) for speaker, rows in answer["stats"].items()}


def error_from_answer(answer: Mapping[str, Any]) -> Exception | None:
    """The error that ended a task in a loading process; None where it did not fail."""
    error = answer.get("error")
    if error is None:
        return None
    if error["kind"] == "memory":
        return MemoryError(error["message"])
    if error["kind"] == "disk":
        return OSError(error["errno"], error["message"])
    kind = DataError if error["kind"] == "data" else UserError
    return kind(error["message"], location=error["location"], hint=error["hint"])


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Does all tasks, one after another."""
    setup = json.loads(tasks.readline())
    spec = setup["spec"]
    setup["spec"] = FeatureSpec(
        Path(spec["data"]), spec["reference_utterance"], spec["dim"], FeatureConfig(**spec["config"])
    )
    with MatrixReader() as reader:
        for line in tasks:
            answers.write(_line(_answer(json.loads(line), setup, reader)))
            answers.flush()


def _answer(task: Mapping[str, Any], setup: Mapping[str, Any], reader: MatrixReader) -> dict[str, Any]:
    try:
        if "speakers" in task:
            entries = [(name, _entry(entry)) for name, given in task["speakers"].items() for entry in given]
            computed = compute_cmvn_stats([entry for _, entry in entries], {entry.key: name for name, entry in entries})
            return {"stats": {speaker: rows.tolist() for speaker, rows in computed.items()}}
        chunk = task["chunk"]
        chunk = Chunk(**{**chunk, "entries": tuple(map(_entry, chunk["entries"]))})
        stats = stats_from_answer(task)
        return {"crc": write_chunk(setup["descriptor"], setup["start"], chunk, stats, setup["spec"], reader)}
    except UserError as error:
        parts = {"message": error.message, "location": error.location, "hint": error.hint}
        kind = "data" if isinstance(error, DataError) else "user"
        return {"error": {"kind": kind, **{name: part and part[:MAX_ERROR_PART] for name, part in parts.items()}}}
    except MemoryError as error:
        return {"error": {"kind": "memory", "message": str(error)[:MAX_ERROR_PART]}}
    except OSError as error:  # of the file that is written: those of the archives are DataErrors
        message = (error.strerror or "")[:MAX_ERROR_PART]
        return {"error": {"kind": "disk", "errno": error.errno or errno.EIO, "message": message}}


def _entry(fields: Mapping[str, Any]) -> ScpEntry:
    """The entry of which `asdict` went through JSON."""
    path, rows, columns = fields["path"], fields["rows"], fields["columns"]
    return ScpEntry(
        **{
            **fields,
            "path": None if path is None else Path(path),
            "rows": rows and tuple(rows),
            "columns": columns and tuple(columns),
            "scp": Path(fields["scp"]),
        }
    )


def _line(value: Any) -> bytes:
    return json.dumps(value, default=str).encode() + b"\n"


def main() -> None:
    """Serves standard input and output; anything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)


if __name__ == "__main__":
    main()
