"""Which utterances a corpus has and how long they are, from headers: what workers agree on before they load."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.datadir import DataDir, read_data_dir
from ddnn.kaldi.tables import MatrixReader, ScpEntry
from ddnn.parallel.exchange import Exchange

log = logging.getLogger(__name__)

LENGTH_TOLERANCE = 5
"""Frames by which features and alignment may differ (nnet1's --length-tolerance); the longer is trimmed."""


@dataclass(frozen=True)
class CorpusPlan:
    """The utterances to load from a data dir, none of their features read.

    Attributes:
        directory: the data dir, with the utterances that are skipped.
        entries: where the features of each utterance that is kept lie, in the order of the data dir.
        num_frames: (utterances,) int64, after trimming.
        speakers: speaker of each utterance; None where the data dir has no utt2spk.
        dim: feature dimension in the archives, before deltas.
        counts: what is used, skipped (by reason) and trimmed.
    """

    directory: DataDir
    entries: tuple[ScpEntry, ...]
    num_frames: NDArray[np.int64]
    speakers: tuple[str, ...] | None
    dim: int
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def utterances(self) -> tuple[str, ...]:
        """The ids of the utterances that are kept."""
        return tuple(entry.key for entry in self.entries)


def plan_corpus(
    data: Path, alignments: Alignments | None, *, allow_pipes: bool = False, max_missing: float | None = 0.05
) -> CorpusPlan:
    """Joins a Kaldi data dir with its alignment where given; reads tables and headers, no frames.

    Utterances without an alignment, or of which the number of frames differs by more than `LENGTH_TOLERANCE`, are
    skipped and counted; smaller differences are trimmed to the shorter one and counted (nnet1's nnet-train-frmshuff).

    Args:
        max_missing: largest share of utterances that may be skipped (`data.max_missing`); None: all but one.

    Raises:
        DataError: damaged input, or too much of it skipped.
    """
    return plan_directory(read_data_dir(data, allow_pipes=allow_pipes), alignments, max_missing)


def shared_plan(
    exchange: Exchange,
    data: Path,
    alignments: Alignments | None,
    *,
    allow_pipes: bool = False,
    max_missing: float | None = 0.05,
) -> CorpusPlan:
    """`plan_corpus`, the same on every worker; only the first one reads the headers. Collective.

    All workers at once would send hundreds of thousands of small reads each to one file server. The others read the
    tables only, and check that theirs are those of the first.

    Raises:
        DataError: as `plan_corpus`, on the first worker; the tables or alignments of another worker's host differ, on
            that one. Run under `ddnn.parallel.failures.all_stop_on_error`: the others wait meanwhile.
    """
    if exchange.size == 1:
        return plan_corpus(data, alignments, allow_pipes=allow_pipes, max_missing=max_missing)
    directory = read_data_dir(data, allow_pipes=allow_pipes)
    _check_same_tables(exchange, directory, alignments)
    plan = plan_directory(directory, alignments, max_missing) if exchange.rank == 0 else None
    summary = None if plan is None else {"utterances": len(plan.entries), "dim": plan.dim, "counts": plan.counts}
    of_first: dict[str, Any] = exchange.gather(summary)[0]
    kept_and_frames = torch.empty(2, of_first["utterances"], dtype=torch.int64)
    if plan is not None:
        index = {entry.key: n for n, entry in enumerate(directory.entries)}
        kept_and_frames[0] = torch.tensor([index[entry.key] for entry in plan.entries])
        kept_and_frames[1] = torch.from_numpy(plan.num_frames)
    exchange.broadcast(kept_and_frames)
    if plan is not None:
        return plan
    kept, num_frames = kept_and_frames[0].numpy(), kept_and_frames[1].numpy().copy()
    return plan_of(directory, kept, num_frames, of_first["dim"], of_first["counts"])


def plan_of(
    directory: DataDir, kept: NDArray[np.int64], num_frames: NDArray[np.int64], dim: int, counts: dict[str, int]
) -> CorpusPlan:
    """The plan that somebody else made: `kept` are indices into the data dir's utterances."""
    entries = tuple(directory.entries[n] for n in kept.tolist())
    return CorpusPlan(directory, entries, num_frames, _speakers(directory, entries), dim, counts)


def plan_directory(directory: DataDir, alignments: Alignments | None, max_missing: float | None) -> CorpusPlan:
    """`plan_corpus` of a data dir of which the tables are read."""
    with MatrixReader() as reader:
        kept, lengths, counts = _join(directory, alignments, reader)
        check_missing(directory, None if alignments is None else alignments.path, kept, counts, max_missing)
        dim = reader.shape(kept[0])[1]
    entries = tuple(kept)
    return CorpusPlan(
        directory, entries, np.asarray(lengths, dtype=np.int64), _speakers(directory, entries), dim, counts
    )


def _speakers(directory: DataDir, entries: tuple[ScpEntry, ...]) -> tuple[str, ...] | None:
    return None if directory.speakers is None else tuple(directory.speakers[entry.key] for entry in entries)


def _join(
    directory: DataDir, alignments: Alignments | None, reader: MatrixReader
) -> tuple[list[ScpEntry], list[int], dict[str, int]]:
    """The utterances to keep, their numbers of frames, and what was skipped or trimmed."""
    counts = Counter({"used": 0, "no_alignment": 0, "length_differs": 0, "trimmed": 0, "empty": 0})
    kept, lengths = [], []
    for entry in directory.entries:
        frames = reader.shape(entry)[0]
        length = frames
        if alignments is not None:
            labels = alignments.pdfs.get(entry.key)
            if labels is None:
                counts["no_alignment"] += 1
                continue
            if abs(len(labels) - frames) > LENGTH_TOLERANCE:
                log.warning(
                    "utterance %s skipped: %d frames of features, %d of alignment", entry.key, frames, len(labels)
                )
                counts["length_differs"] += 1
                continue
            length = min(frames, len(labels))
            counts["trimmed"] += len(labels) != frames
        if length == 0:
            log.warning("utterance %s skipped: it has no frames", entry.key)
            counts["empty"] += 1
            continue
        kept.append(entry)
        lengths.append(length)
    counts["used"] = len(kept)
    return kept, lengths, dict(counts)


def check_missing(
    directory: DataDir,
    alignments: Path | None,
    kept: Iterable[ScpEntry],
    counts: dict[str, int],
    max_missing: float | None,
) -> None:
    """Says what is skipped or trimmed; DataError where it is more than `max_missing` of all, or everything."""
    total = len(directory.entries)
    skipped = total - counts["used"]
    described = (
        f"{counts['no_alignment']} without an alignment, {counts['length_differs']} differing from theirs by more than "
        f"{LENGTH_TOLERANCE} frames, {counts['empty']} without frames"
    )
    if counts["used"] == 0 or (max_missing is not None and skipped > max_missing * total):
        aligned_in = f"; alignments are from {alignments}" if alignments is not None else ""
        used = {entry.key for entry in kept}
        first = next(entry.key for entry in directory.entries if entry.key not in used)
        raise DataError(
            f"{skipped} of {total} utterances cannot be used ({described}); the first is {first}{aligned_in}",
            where=directory.path,
            mend="check that features and alignments belong together"
            + (f", or raise data.max_missing (now {max_missing:g})" if max_missing is not None else ""),
        )
    if skipped or counts["trimmed"]:
        log.warning(
            "%s: %d of %d utterances skipped (%s), %d trimmed",
            directory.path,
            skipped,
            total,
            described,
            counts["trimmed"],
        )


def _check_same_tables(exchange: Exchange, directory: DataDir, alignments: Alignments | None) -> None:
    """Raises DataError on a worker whose tables are not those of the first; paths to the archives may differ."""
    everyone = exchange.gather({"host": exchange.host, "tables": _tables(directory, alignments)})
    first = everyone[0]
    for name, mine in everyone[exchange.rank]["tables"].items():
        theirs = first["tables"][name]
        if mine == theirs:
            continue
        found = "there is none" if mine is None else f"{mine[0]} entries, digest {mine[1]}"
        expected = "none" if theirs is None else f"{theirs[0]} entries, digest {theirs[1]}"
        where = directory.path / name if name != "alignments" or alignments is None else alignments.path
        raise DataError(
            f"{name} on host {exchange.host} (worker {exchange.rank}) differs from that of worker 0 on "
            f"{first['host']}: found {found}, expected {expected}",
            where=where,
            mend="give every host the same files, from one shared file system or copied anew",
        )


def _tables(directory: DataDir, alignments: Alignments | None) -> dict[str, tuple[int, str] | None]:
    """Table -> number of its entries and a digest of what all workers must have in common; None where there is none."""
    speakers, cmvn = directory.speakers, directory.cmvn
    aligned = None
    if alignments is not None:
        pdfs = alignments.num_pdfs
        aligned = _digest(f"{name} {len(ids)} frames {pdfs} pdfs" for name, ids in alignments.pdfs.items())
    return {
        "feats.scp": _digest(f"{entry.key} {entry.rows} {entry.columns}" for entry in directory.entries),
        "utt2spk": None if speakers is None else _digest(f"{name} {who}" for name, who in speakers.items()),
        "cmvn.scp": None if cmvn is None else _digest(cmvn),
        "alignments": aligned,
    }


def _digest(lines: Iterable[str]) -> tuple[int, str]:
    digest, count = hashlib.sha256(), 0
    for line in lines:
        digest.update(line.encode() + b"\n")
        count += 1
    return count, digest.hexdigest()[:16]
