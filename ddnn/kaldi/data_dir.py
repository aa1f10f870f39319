"""A Kaldi data dir: `feats.scp`, and `utt2spk`, `cmvn.scp`, `text` where there are; CMVN and deltas of its features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddnn.kaldi.archive import MatrixReader, ScpEntry, check_finite, read_keyed_lines, read_scp
from ddnn.util.arrays import AnyArray, Float32Array, Float64Array
from ddnn.util.errors import DataError

FRAMES_PER_HOUR = 360_000  # at Kaldi's usual 10 ms a frame
_VARIANCE_FLOOR = 1e-20  # Kaldi's
# Of a mean, and of a mean square, whose product with the largest scale a single-precision number still holds.
_MAX_STATS = np.array([[1e18], [1e36]])
_HINT_SPEAKERS = "write utt2spk: on each line an utterance and its speaker; utils/fix_data_dir.sh makes them agree"


@dataclass(frozen=True)
class DataDir:
    """A data dir, its features not yet read."""

    path: Path
    entries: tuple[ScpEntry, ...]  # the features of each utterance, in the order of feats.scp
    speakers: dict[str, str] | None  # utterance -> speaker, for every entry; None where there is no utt2spk
    cmvn: dict[str, ScpEntry] | None  # speaker -> its CMVN statistics; None where there is no cmvn.scp

    def speaker_of(self, purpose: str) -> dict[str, str]:
        """`speakers`; DataError saying that they are needed for `purpose` where there is no `utt2spk`."""
        if self.speakers is None:
            message = f"utt2spk does not exist; it is needed for {purpose}"
            raise DataError(message, location=self.path, hint=_HINT_SPEAKERS)
        return self.speakers


def read_data_dir(path: Path, *, allow_pipes: bool = False) -> DataDir:
    """Reads the tables of a data dir, not the features. DataError: the directory or `feats.scp` is missing; a table is
    malformed; an utterance lacks a speaker."""
    if path.is_file():
        raise DataError("the data dir is a file", location=path, hint=f"name its directory: {path.parent}")
    if not path.is_dir():
        raise DataError("the data dir does not exist, or is no directory", location=path, hint="check the path")
    nested = [] if (path / "feats.scp").exists() else [file.parent.name for file in sorted(path.glob("*/feats.scp"))]
    if nested:
        message = f"there is no feats.scp; data dirs in it are {', '.join(nested[:5])}"
        raise DataError(message, location=path, hint=f"name one of them, such as {path / nested[0]}")
    if (path / "wav.scp").exists() and not (path / "feats.scp").exists():
        hint = "make features first, with Kaldi's steps/make_mfcc.sh or steps/make_fbank.sh"
        raise DataError("there is a wav.scp, but no feats.scp", location=path, hint=hint)
    entries = tuple(read_scp(path / "feats.scp", allow_pipes=allow_pipes))
    speakers = None
    if (path / "utt2spk").exists():
        speaker_of = read_utt2spk(path / "utt2spk")
        missing = [entry.key for entry in entries if entry.key not in speaker_of]
        if missing:
            counts = f"{len(missing)} of {len(entries)} utterances of feats.scp"
            message = f"{counts} have no speaker; the first is {missing[0]}"
            raise DataError(message, location=path / "utt2spk", hint=_HINT_SPEAKERS)
        speakers = {entry.key: speaker_of[entry.key] for entry in entries}
    cmvn = None
    if (path / "cmvn.scp").exists():
        cmvn = {entry.key: entry for entry in read_scp(path / "cmvn.scp", allow_pipes=allow_pipes)}
    return DataDir(path, entries, speakers, cmvn)


def read_utt2spk(path: Path) -> dict[str, str]:
    """utterance -> speaker, in the file's order; DataError: a line has not two words, or an utterance two lines."""
    speakers = {}
    for number, key, rest in read_keyed_lines(path, "utt2spk"):
        if len(rest.encode().split()) != 1:  # as bytes: white space is ASCII's
            message = f"line {number}: expected an utterance and its speaker, found {f'{key} {rest}'[:100]!r}"
            raise DataError(message, location=path, hint=_HINT_SPEAKERS)
        speakers[key] = rest
    return speakers


def read_text(path: Path) -> dict[str, list[str]]:
    """utterance -> words, in the file's order; an utterance may have none. DataError where an utterance comes twice."""
    lines = read_keyed_lines(path, "the transcripts")
    return {key: [word.decode() for word in rest.encode().split()] for _, key, rest in lines}


def read_cmvn_stats(cmvn: Mapping[str, ScpEntry], speakers: Mapping[str, str]) -> dict[str, Float64Array]:
    """CMVN statistics of the speakers of these utterances (utterance -> speaker), from `cmvn.scp` (speaker -> where
    they are stored): float64 (2, dim + 1), see `accumulate_cmvn_stats`. DataError: a speaker has no statistics, or too
    few frames; statistics are damaged, not finite, or of different dims."""
    stats: dict[str, Float64Array] = {}
    with MatrixReader() as reader:
        for utterance, speaker in speakers.items():
            if speaker in stats:
                continue
            if speaker not in cmvn:
                message = f"no CMVN statistics of speaker {speaker} (utterance {utterance})"
                hint = "run steps/compute_cmvn_stats.sh again, or remove cmvn.scp"
                raise DataError(message, location=next(iter(cmvn.values())).scp, hint=hint)
            entry = cmvn[speaker]
            sums = reader.read(entry, np.float64)
            check_finite(speaker, sums, entry.location)
            expected = f"speaker {speaker}: expected CMVN statistics of"
            columns = next(iter(stats.values()), sums).shape[1]
            if sums.shape != (2, columns):
                message = f"{expected} 2 rows and {columns} columns, found {sums.shape}"
                raise DataError(message, location=entry.location, hint="run steps/compute_cmvn_stats.sh again")
            frames = sums[0, -1]
            if not frames >= 1.0:
                hint = "remove the speaker, or compute its statistics again"
                raise DataError(f"{expected} 1 frame or more, found {frames:g}", location=entry.scp, hint=hint)
            if not (np.abs(sums) / frames <= _MAX_STATS).all():
                hint = "compute the statistics again from valid features"
                raise DataError(f"{expected} features within 1e18, found larger ones", location=entry.scp, hint=hint)
            stats[speaker] = sums
    return stats


def compute_cmvn_stats(
    speakers: Mapping[str, Sequence[ScpEntry]], dim: int, reader: MatrixReader
) -> dict[str, Float64Array]:
    """speaker -> CMVN statistics, from the features of its utterances; without speakers of no frame at all. DataError:
    features are damaged, not finite, or not of `dim` dims."""
    stats: dict[str, Float64Array] = {}
    for speaker, entry in ((name, entry) for name, entries in speakers.items() for entry in entries):
        features = reader.read(entry)
        if len(features) == 0:  # Kaldi writes an empty matrix without columns
            continue
        check_finite(entry.key, features, entry.location)
        if features.shape[1] != dim:
            message = f"utterance {entry.key}: expected features of {dim} dims, found {features.shape[1]}"
            raise DataError(message, location=entry.location, hint="all features must come from one set-up")
        sums = accumulate_cmvn_stats(features)
        stats[speaker] = stats[speaker] + sums if speaker in stats else sums
    return stats


def accumulate_cmvn_stats(features: AnyArray) -> Float64Array:
    """CMVN statistics of `features` (frames, dim), float64 (2, dim + 1): the sums, then the number of frames; the sums
    of squares, then 0. They add up over utterances (kaldi `transform/cmvn.cc`)."""
    sums = features.sum(axis=0, dtype=np.float64), np.square(features, dtype=np.float64).sum(axis=0)
    return np.column_stack([sums, [len(features), 0]])


def apply_cmvn(features: AnyArray, stats: Float64Array, *, variance: bool) -> Float32Array:
    """Takes the mean away; with `variance` divides by the standard deviation (kaldi `transform/cmvn.cc`), at least
    1e-10. `features` (frames, dim), `stats` as of `accumulate_cmvn_stats`; float32 (frames, dim), a new array."""
    dim = features.shape[1]
    count = stats[0, dim]
    mean = stats[0, :dim] / count
    normalized: Float32Array
    if not variance:
        normalized = np.asarray(features, np.float32) - mean.astype(np.float32)
        return normalized
    scale = 1.0 / np.sqrt(np.maximum(stats[1, :dim] / count - mean * mean, _VARIANCE_FLOOR))
    normalized = np.asarray(features, np.float32) * scale.astype(np.float32)
    normalized += (-mean * scale).astype(np.float32)
    return normalized


def add_deltas(features: AnyArray, order: int, window: int = 2) -> Float32Array:
    """Appends the time derivatives up to `order` to features (frames, dim): float32 (frames, dim * (order + 1)) (kaldi
    `feat/feature-functions.cc`, DeltaFeatures). `window`: frames on each side that one order looks at. A frame before
    the first or behind the last repeats it, for each order on the features themselves."""
    frames, dim = features.shape
    result = np.zeros((frames, dim * (order + 1)), np.float32)
    if frames == 0:
        return result
    edge = order * window
    padded = np.pad(np.asarray(features, np.float32), ((edge, edge), (0, 0)), mode="edge")
    # The taps of each order convolve those of the order before with the slope over the window.
    slope, taps = np.arange(-window, window + 1, dtype=np.float32), np.ones(1, np.float32)
    for number in range(order + 1):
        if number:
            taps = np.convolve(taps, slope).astype(np.float32) / np.float32(np.square(slope).sum())
        target = result[:, number * dim : (number + 1) * dim]
        first = edge - (len(taps) - 1) // 2
        for tap, weight in enumerate(taps):
            if weight != 0.0:
                target += weight * padded[first + tap : first + tap + frames]
    return result
