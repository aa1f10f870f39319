"""A Kaldi data dir: `feats.scp`, and `utt2spk`, `cmvn.scp`, `text` where there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.kaldi.features import accumulate_cmvn_stats
from ddnn.kaldi.scp import ScpEntry, decode_utf8, read_lines, read_scp
from ddnn.kaldi.tables import MatrixReader, check_finite

# Of a mean, and of a mean square, whose product with the largest scale a single-precision number still holds.
_LARGEST = np.array([[1e18], [1e36]])
_MEND_SPEAKERS = "write utt2spk: on each line an utterance and its speaker; utils/fix_data_dir.sh makes them agree"


@dataclass(frozen=True)
class DataDir:
    """A data dir, its features not yet read.

    Attributes:
        path: the directory.
        entries: where the features of each utterance lie, in the order of `feats.scp`.
        speakers: utterance -> speaker, for every entry; None where there is no `utt2spk`.
        cmvn: speaker -> where its CMVN statistics lie; None where there is no `cmvn.scp`.
    """

    path: Path
    entries: tuple[ScpEntry, ...]
    speakers: dict[str, str] | None
    cmvn: dict[str, ScpEntry] | None

    @property
    def utterances(self) -> tuple[str, ...]:
        """The utterances' ids, in the order of `feats.scp`."""
        return tuple(entry.key for entry in self.entries)

    def speaker_of(self, purpose: str) -> dict[str, str]:
        """`speakers`; DataError saying that they are needed for `purpose` where there is no `utt2spk`."""
        if self.speakers is None:
            raise DataError(f"utt2spk does not exist; it is needed for {purpose}", where=self.path, mend=_MEND_SPEAKERS)
        return self.speakers


def read_data_dir(path: Path, *, allow_pipes: bool = False) -> DataDir:
    """Reads the tables of a data dir, not the features.

    Raises:
        DataError: the directory or `feats.scp` is missing; a table is malformed; an utterance lacks a speaker.
    """
    if not path.is_dir():
        raise DataError("the data dir does not exist, or is no directory", where=path, mend="check the path")
    entries = tuple(read_scp(path / "feats.scp", allow_pipes=allow_pipes))
    speakers = None
    if (path / "utt2spk").exists():
        every = read_utt2spk(path / "utt2spk")
        missing = [entry.key for entry in entries if entry.key not in every]
        if missing:
            what = (
                f"{len(missing)} of {len(entries)} utterances of feats.scp have no speaker; the first is {missing[0]}"
            )
            raise DataError(what, where=path / "utt2spk", mend=_MEND_SPEAKERS)
        speakers = {entry.key: every[entry.key] for entry in entries}
    cmvn = None
    if (path / "cmvn.scp").exists():
        cmvn = {entry.key: entry for entry in read_scp(path / "cmvn.scp", allow_pipes=allow_pipes)}
    return DataDir(path, entries, speakers, cmvn)


def _read_pairs(path: Path, kind: str) -> list[tuple[int, str, str]]:
    """(line number, first word, the rest) of each line; DataError where a first word occurs twice."""
    pairs = []
    seen: dict[str, int] = {}
    for number, parts in read_lines(path, kind):
        key = decode_utf8(parts[0], path, number)
        if key in seen:
            what = f"utterance {key} occurs twice, in lines {seen[key]} and {number}"
            raise DataError(what, where=path, mend="utterance ids must be unique; remove or rename one")
        seen[key] = number
        pairs.append((number, key, decode_utf8(parts[1].strip(), path, number) if len(parts) > 1 else ""))
    return pairs


def read_utt2spk(path: Path) -> dict[str, str]:
    """utterance -> speaker, in the file's order; DataError: a line has not two words, or an utterance two lines."""
    speakers = {}
    for number, key, rest in _read_pairs(path, "utt2spk"):
        if len(rest.encode().split()) != 1:
            what = f"line {number}: expected an utterance and its speaker, found {f'{key} {rest}'[:100]!r}"
            raise DataError(what, where=path, mend=_MEND_SPEAKERS)
        speakers[key] = rest
    return speakers


def read_text(path: Path) -> dict[str, list[str]]:
    """utterance -> words, in the file's order; an utterance may have none. DataError where an utterance comes twice."""
    return {
        key: [word.decode() for word in rest.encode().split()] for _, key, rest in _read_pairs(path, "the transcripts")
    }


def speaker_cmvn_stats(data: DataDir) -> dict[str, NDArray[np.float64]]:
    """CMVN statistics of every speaker: from `cmvn.scp` where the data dir has one, else from the features.

    Returns:
        speaker -> float64 (2, dim + 1), see `features.accumulate_cmvn_stats`; without speakers of no frame at all.

    Raises:
        DataError: there is no `utt2spk`; a speaker has no statistics, or too few frames; features or statistics are
            damaged, not finite, or of different dims.
    """
    speakers = data.speaker_of("CMVN per speaker")
    stats = _read_stats(data.cmvn, speakers) if data.cmvn is not None else compute_cmvn_stats(data.entries, speakers)
    source = data.path / ("cmvn.scp" if data.cmvn is not None else "feats.scp")
    for speaker, found in stats.items():
        dim = found.shape[1] - 1
        if not found[0, dim] >= 1.0:
            what = f"speaker {speaker}: expected CMVN statistics of 1 frame or more, found {found[0, dim]:g}"
            raise DataError(what, where=source, mend="leave the speaker out, or compute its statistics again")
        if not (np.abs(found) / found[0, dim] <= _LARGEST).all():
            what = f"speaker {speaker}: expected CMVN statistics of features within 1e18, found larger ones"
            raise DataError(what, where=source, mend="compute the statistics again from sound features")
    return stats


def _read_stats(cmvn: dict[str, ScpEntry], speakers: dict[str, str]) -> dict[str, NDArray[np.float64]]:
    stats: dict[str, NDArray[np.float64]] = {}
    first: NDArray[Any] | None = None
    with MatrixReader() as reader:
        for utterance, speaker in speakers.items():
            if speaker in stats:
                continue
            if speaker not in cmvn:
                where = next(iter(cmvn.values())).scp if cmvn else None
                what = f"no CMVN statistics of speaker {speaker} (utterance {utterance})"
                raise DataError(what, where=where, mend="run steps/compute_cmvn_stats.sh again, or remove cmvn.scp")
            entry = cmvn[speaker]
            found = reader.read(entry, np.float64)
            check_finite(speaker, found, entry.where)
            if first is None:
                first = found
            if len(found) != 2 or found.shape != first.shape:
                expected = f"2 rows and {first.shape[1]} columns"
                what = f"speaker {speaker}: expected CMVN statistics of {expected}, found {found.shape}"
                raise DataError(what, where=entry.where, mend="run steps/compute_cmvn_stats.sh again")
            stats[speaker] = found
    return stats


def compute_cmvn_stats(entries: Sequence[ScpEntry], speakers: Mapping[str, str]) -> dict[str, NDArray[np.float64]]:
    """CMVN statistics of the speakers of these utterances, from their features; as `speaker_cmvn_stats`."""
    stats: dict[str, NDArray[np.float64]] = {}
    dim: int | None = None
    with MatrixReader() as reader:
        for entry in entries:
            features = reader.read(entry)
            if len(features) == 0:  # Kaldi writes an empty matrix without columns
                continue
            check_finite(entry.key, features, entry.where)
            dim = features.shape[1] if dim is None else dim
            if features.shape[1] != dim:
                what = f"utterance {entry.key}: expected features of {dim} dims, found {features.shape[1]}"
                raise DataError(what, where=entry.where, mend="all features must come from one set-up")
            found = accumulate_cmvn_stats(features)
            speaker = speakers[entry.key]
            stats[speaker] = stats[speaker] + found if speaker in stats else found
    return stats
