"""Which utterances of a data dir can be used and how long they are, from headers; which are held out for
cross-validation, and which worker gets which: all agreed on before anything is loaded."""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments, pdf_counts
from ddnn.kaldi.archive import MatrixReader, ScpEntry, read_keyed_lines
from ddnn.kaldi.data_dir import DataDir
from ddnn.kaldi.transforms import Transforms
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import plural

log = logging.getLogger(__name__)

LENGTH_TOLERANCE = 5
"""Features and alignment that differ by fewer frames are cut to the shorter at their end, others are skipped (nnet1's
--length-tolerance)."""

DEFAULT_FRACTION = 0.1
FRACTION_TOLERANCE = 1.2  # factor by which the held-out fraction may differ from what was asked for
MAX_SKIPPED_FRACTION = 0.05  # of utterances, unless the recipe says otherwise
DRAWS = 100  # orders that are tried for `hold_out_fraction`
MAX_NAMED = 10  # skipped utterances in the log; all are counted
MAX_LIST_BYTES = 1 << 30  # of a list of speakers


@dataclass(frozen=True, eq=False)
class UtteranceIndex:
    """The utterances of a data dir that can be used, with their alignments; no features are read."""

    directory: DataDir  # the data dir, skipped utterances included
    entries: tuple[ScpEntry, ...]  # where the features of each utterance are stored, in the order of the data dir
    num_frames: NDArray[np.int64]  # (utterances,) int64, after trimming
    dim: int  # feature dimension in the archives, before deltas
    # (num_pdfs,) int64, frames of each pdf in the alignments of these utterances; empty without alignments
    pdf_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    alignments: Alignments | None = None
    # how many utterances are used, skipped (by reason) and trimmed
    counts: dict[str, int] = field(default_factory=dict)
    mismatch: str = ""  # the length difference that most utterances have, if they do: `describe_length_mismatch`
    transforms: Transforms | None = None  # of Kaldi; None without, or where the features come from a cache file

    @property
    def num_pdfs(self) -> int:
        """Of the alignment's model; 0 without alignments."""
        return len(self.pdf_counts)

    @property
    def utterances(self) -> tuple[str, ...]:
        return tuple(entry.key for entry in self.entries)

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """Speaker of each utterance; None where the data dir has no utt2spk."""
        speakers = self.directory.speakers
        return None if speakers is None else tuple(speakers[entry.key] for entry in self.entries)

    def size(self) -> str:
        """How much there is, in words."""
        speakers = "" if self.speakers is None else f"{plural(len(set(self.speakers)), 'speaker')}, "
        return f"{speakers}{plural(len(self.entries), 'utterance')}, {self.num_frames.sum():,} frames"

    def subset(self, utterances: Sequence[int]) -> UtteranceIndex:
        """Some of the utterances, ascending; there may be none. `pdf_counts` and `counts` remain those of all."""
        entries = tuple(self.entries[u] for u in utterances)
        return replace(self, entries=entries, num_frames=self.num_frames[np.asarray(utterances, dtype=np.int64)])


def concatenate(indices: Sequence[UtteranceIndex]) -> UtteranceIndex:
    """Several corpora as one, in this order, for what does not read features: no utterance is in two of them. Speakers
    of the same name are one speaker, and without `utt2spk` in one of them there are none."""
    return reduce(_joined, indices)


def _joined(first: UtteranceIndex, second: UtteranceIndex) -> UtteranceIndex:
    speakers, utterances = None, first.utterances + second.utterances
    if first.speakers is not None and second.speakers is not None:
        speakers = dict(zip(utterances, first.speakers + second.speakers, strict=True))
    num_pdfs = max(first.num_pdfs, second.num_pdfs)
    return UtteranceIndex(
        replace(first.directory, entries=first.directory.entries + second.directory.entries, speakers=speakers),
        first.entries + second.entries,
        np.concatenate([first.num_frames, second.num_frames]),
        first.dim,
        np.sum([np.pad(index.pdf_counts, (0, num_pdfs - index.num_pdfs)) for index in (first, second)], axis=0),
        counts={key: count + second.counts[key] for key, count in first.counts.items()},
    )


def build_index(
    directory: DataDir,
    alignments: Alignments | None,
    comm: Communicator | None = None,
    *,
    max_skipped_fraction: float | None = MAX_SKIPPED_FRACTION,
    length_tolerance: int = LENGTH_TOLERANCE,
) -> UtteranceIndex:
    """Matches a data dir with its alignments, if any, from tables and headers; the same on every worker. Collective.

    Utterances without an alignment, or whose number of frames differs by `length_tolerance` or more, are skipped and
    counted, up to `max_skipped_fraction` of all (None: all but one); of those that differ by less the longer side loses
    its last frames, and they are counted (nnet1's nnet-train-frmshuff). Only rank 0 reads the headers, because all
    workers at once would send hundreds of thousands of small reads each to one file server. The others check that their
    tables are those of rank 0.

    DataError: damaged input, or too much of it skipped, on rank 0; the tables or alignments of another worker's host
    differ, on that one. Run under `ddnn.distributed.failures`: the others are waiting meanwhile.
    """
    comm = comm or SingleProcess()
    if comm.world_size > 1:
        _check_same_tables(comm, directory, alignments)
    summary, lengths = None, torch.empty(0)
    if comm.rank == 0:
        summary, lengths = _match_alignments(directory, alignments, length_tolerance)
    of_rank_0: dict[str, Any] = comm.all_gather_object(summary)[0]
    if comm.rank != 0:
        lengths = torch.empty(2, of_rank_0["counts"]["used"], dtype=torch.int64)
    comm.broadcast(lengths)
    selected, num_frames = lengths.numpy()
    index = UtteranceIndex(directory, tuple(directory.entries[n] for n in selected), num_frames, **of_rank_0)
    if alignments is not None:
        index = replace(index, pdf_counts=pdf_counts(alignments, index.utterances), alignments=alignments)
    check_skipped(index, max_skipped_fraction, quiet=comm.rank != 0)
    return index


def _match_alignments(
    directory: DataDir, alignments: Alignments | None, length_tolerance: int
) -> tuple[dict[str, Any], Tensor]:
    """`dim`, `counts` and `mismatch` of an `UtteranceIndex`; int64 (2, utterances), which utterances can be used and their
    frames."""
    counts = Counter({"used": 0, "no_alignment": 0, "length_differs": 0, "trimmed": 0, "empty": 0})
    dim, used, lengths = 0, list[tuple[int, int]](), list[tuple[str, int, int]]()
    with MatrixReader() as reader:
        for n, entry in enumerate(directory.entries):
            length = frames = reader.shape(entry)[0]
            if alignments is not None:
                labels = alignments.pdfs.get(entry.key)
                if labels is None:
                    counts["no_alignment"] += 1
                    continue
                lengths.append((entry.key, frames, len(labels)))
                if abs(len(labels) - frames) >= length_tolerance:
                    counts["length_differs"] += 1
                    if counts["length_differs"] <= MAX_NAMED:
                        log.warning("utterance %s skipped: %d frames of features, %d of alignment", *lengths[-1])
                    continue
                length = min(frames, len(labels))
                counts["trimmed"] += len(labels) != frames
            if length == 0:
                log.warning("utterance %s skipped: it has no frames", entry.key)
                counts["empty"] += 1
                continue
            counts["used"] += 1
            used.append((n, length))
        if used:
            dim = reader.shape(directory.entries[used[0][0]])[1]
    summary = {"dim": dim, "counts": dict(counts), "mismatch": describe_length_mismatch(lengths)}
    return summary, torch.tensor(used, dtype=torch.int64).reshape(-1, 2).T.contiguous()


def describe_length_mismatch(lengths: Sequence[tuple[str, int, int]]) -> str:
    """Says so where more than half of the utterances (name, frames of features, of alignment) differ by the same number
    of frames; else empty. A few that differ are edge effects; with most of them the labels are probably shifted."""
    differences = Counter(aligned - frames for _, frames, aligned in lengths)
    difference, count = differences.most_common(1)[0] if lengths else (0, 0)
    if difference == 0 or 2 * count <= len(lengths):
        return ""
    name, frames, aligned = next(item for item in lengths if item[2] - item[1] == difference)
    which = f"{plural(abs(difference), 'frame')} {'longer' if difference > 0 else 'shorter'} than the features"
    example = f"the first is {name} with {frames} frames of features and {aligned} of alignment"
    return f"the alignments of {count} of {len(lengths)} utterances are {which}; {example}"


def check_skipped(index: UtteranceIndex, max_skipped_fraction: float | None, *, quiet: bool = False) -> None:
    """Logs, unless `quiet`, what is skipped or trimmed, and `UtteranceIndex.mismatch`; DataError where more is skipped than
    the fraction allows, or everything."""
    directory, counts, aligned = index.directory, index.counts, index.alignments
    total, skipped = len(directory.entries), len(directory.entries) - counts["used"]
    described = f"{counts['no_alignment']} without an alignment, {counts['length_differs']} differing from theirs by "
    described += f"{LENGTH_TOLERANCE} frames or more, {counts['empty']} without frames"
    if index.mismatch and not quiet:
        message = (
            "%s: %s. This usually means a different frame shift or --snip-edges setting, or a subsampled alignment; "
        )
        log.warning(message + "labels are then assigned to the wrong frames.", directory.path, index.mismatch)
    if counts["used"] == 0 or (max_skipped_fraction is not None and skipped > max_skipped_fraction * total):
        used = set(index.utterances)
        first = next(entry.key for entry in directory.entries if entry.key not in used)
        where = "" if aligned is None else f"; alignments are from {aligned.path}"
        if aligned is not None and first not in aligned.pdfs:
            similar = next((name for name in aligned.pdfs if name.lower() == first.lower()), None)
            other = f", as of {next(iter(aligned.pdfs), None)}"
            where += other if similar is None else f" and have {similar}: upper and lower case differ"
        hint = "check that features and alignments belong together"
        if max_skipped_fraction is not None:
            hint += f", or raise data.max_skipped_fraction (now {max_skipped_fraction:g})"
        message = f"{skipped} of {total} utterances cannot be used ({described}); the first is {first}{where}"
        raise DataError(message, location=directory.path, hint=hint)
    if (skipped or counts["trimmed"]) and not quiet:
        figures = skipped, total, described, counts["trimmed"]
        log.warning("%s: %d of %d utterances skipped (%s), %d trimmed", directory.path, *figures)


def _check_same_tables(comm: Communicator, directory: DataDir, alignments: Alignments | None) -> None:
    """Raises DataError on a worker whose tables are not those of rank 0; paths to the archives may differ."""
    speakers, aligned = directory.speakers, None
    if alignments is not None:
        pdfs = alignments.num_pdfs
        aligned = [f"{name} {len(ids)} frames {pdfs} pdfs" for name, ids in alignments.pdfs.items()]
    tables: dict[str, Iterable[str] | None] = {
        "feats.scp": [f"{entry.key} {entry.rows} {entry.columns}" for entry in directory.entries],
        "utt2spk": None if speakers is None else [f"{name} {speaker}" for name, speaker in speakers.items()],
        "cmvn.scp": directory.cmvn,
        "alignments": aligned,
    }
    own = {name: "none" if lines is None else _digest(lines) for name, lines in tables.items()}
    first_host, first = comm.all_gather_object([comm.host, own])[0]
    for name, found in own.items():
        if found != first[name]:
            where = f"{name} on host {comm.host} (worker {comm.rank}) differs from that of worker 0 on {first_host}"
            location = directory.path / name if name != "alignments" or alignments is None else alignments.path
            hint = "give every host the same files, from one shared file system or from a new copy"
            raise DataError(f"{where}: found {found}, expected {first[name]}", location=location, hint=hint)


def _digest(lines: Iterable[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return f"{text.count(chr(10))} entries, digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def hold_out_listed(index: UtteranceIndex, path: Path, by: str) -> tuple[list[int], list[int]]:
    """Indices of the utterances to train on, and of those that a file lists: by speaker, all words of it; by utterance, the
    first word of each line, so that it may be a Kaldi table. Listed utterances of the data dir that cannot be used are
    skipped. DataError: the file cannot be read, names one that the data does not have, or leaves one side empty."""
    if by == "speaker":
        try:
            listed = set(read_bytes_limited(path, MAX_LIST_BYTES).decode("utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the list of cross-validation speakers: {error}", location=path) from error
        groups = _speakers(index, "give data.cv.utterances in place of data.cv.speakers")
        known = set(groups)
    else:
        lines = read_keyed_lines(path, "the list of cross-validation utterances", unique=False)
        listed = {utterance for _, utterance, _ in lines}
        groups, known = index.utterances, {entry.key for entry in index.directory.entries}
    if unknown := sorted(listed - known):
        message = f"{len(unknown)} of {len(listed)} listed {by}s are not in the data: {', '.join(unknown[:5])}"
        hint = f"list {by}s of the training data, such as {', '.join(sorted(known)[:3])}"
        if by == "utterance" and not listed - set(index.speakers or ()):
            hint = "these are speakers: give the list as data.cv.speakers"
        raise DataError(message, location=path, hint=hint)
    if skipped := len(listed - set(groups)):
        log.info("%s: %d of %d listed utterances are among the skipped ones", path, skipped, len(listed))
    return _split(groups, listed & set(groups), str(path), by)


def hold_out_fraction(
    index: UtteranceIndex, fraction: float, seed: int, by: str = "speaker"
) -> tuple[list[int], list[int]]:
    """Holds out whole speakers, or utterances, whose frames come close to `fraction` of all, at least one and at most
    all but one. In an order drawn with `seed` each that brings the sum closer is held out; of up to `DRAWS` orders the
    first that comes within 1 % of what was asked for is taken, else the closest. The order of the data dir does not
    matter. DataError: one side would be empty, as with a single speaker."""
    groups, sizes = _speakers(index) if by == "speaker" else index.utterances, defaultdict[str, int](int)
    for group, count in zip(groups, index.num_frames.tolist(), strict=True):
        sizes[group] += count
    names, wanted = sorted(sizes), fraction * sum(sizes.values())
    rng, best, closest = np.random.default_rng([seed, 0x5EED]), [""], math.inf
    for _ in range(DRAWS):
        drawn = [names[n] for n in rng.permutation(len(names))]
        held_out, frames = list[str](), 0
        for name in drawn:
            if len(held_out) < len(names) - 1 and abs(frames + sizes[name] - wanted) < abs(frames - wanted):
                held_out.append(name)
                frames += sizes[name]
        if not held_out:  # all have too many frames, in any order
            best = [min(drawn, key=sizes.__getitem__)]
            break
        off = abs(sum(sizes[name] for name in held_out) - wanted)
        if off < closest:
            best, closest = held_out, off
        if closest <= 0.01 * wanted:
            break
    return _split(groups, set(best), f"data.cv.fraction {fraction:g}", by)


def hold_out_by_default(index: UtteranceIndex, fraction: float, seed: int) -> tuple[list[int], list[int], str]:
    """As `hold_out_fraction`, by speakers where they come within `FRACTION_TOLERANCE` of what is asked for, or as close
    as utterances do; else by utterances, with the reason in words."""
    count = len(set(index.speakers or ()))
    train, cv, reason = list[int](), list[int](), "has no utt2spk" if index.speakers is None else "has a single speaker"
    if count > 1:
        train, cv = hold_out_fraction(index, fraction, seed)
        speakers_fraction = fraction_of(index, cv)
        if fraction_reached(speakers_fraction, fraction):
            return train, cv, ""
        reason = f"has too few speakers, {count}: whole ones would be {100 * speakers_fraction:.1f} % of the frames"
    by_utterances = hold_out_fraction(index, fraction, seed, "utterance")
    if cv and abs(fraction_of(index, by_utterances[1]) - fraction) >= abs(speakers_fraction - fraction):
        return train, cv, ""
    return *by_utterances, reason


def fraction_of(index: UtteranceIndex, utterances: Sequence[int]) -> float:
    """What these utterances are of all frames."""
    return float(index.num_frames[list(utterances)].sum() / index.num_frames.sum())


def fraction_reached(fraction: float, wanted: float) -> bool:
    """Whether a held-out fraction is about what was asked for."""
    return 1 / FRACTION_TOLERANCE <= fraction / wanted <= FRACTION_TOLERANCE


def _speakers(index: UtteranceIndex, otherwise: str = "set data.cv.by: utterance") -> tuple[str, ...]:
    if index.speakers is None:
        message = "the training data has no utt2spk; it is needed to hold out speakers for cross-validation"
        hint = f"write utt2spk, {otherwise}, or give data.cv.data and data.cv.alignments"
        raise DataError(message, hint=hint)
    return index.speakers


def _split(groups: Sequence[str], held_out: set[str], rule: str, by: str) -> tuple[list[int], list[int]]:
    """`groups`: the speaker or the id of each utterance."""
    train = [u for u, group in enumerate(groups) if group not in held_out]
    cv = [u for u, group in enumerate(groups) if group in held_out]
    if not train or not cv:
        side = "training" if not train else "cross-validation"
        message = f"{len(held_out)} of {plural(len(set(groups)), by)} held out: no utterance remains for {side}"
        hint = f"hold out other {by}s, "
        hint += "or utterances (data.cv.by: utterance), " if by == "speaker" else ""
        hint += "or give data.cv.data and data.cv.alignments"
        raise DataError(message, location=rule, hint=hint)
    return train, cv


def assign_shards(num_frames: NDArray[np.int64], utterances: Sequence[int], workers: int) -> list[list[int]]:
    """For each rank its utterances, ascending, balanced by frames: the longest utterance to the worker with the fewest
    frames, and so on (the code of arXiv 1507.01239). Ties go to the lowest rank. Two shards differ by no more frames
    than the longest utterance has. With fewer utterances than workers some shards are empty. O(u log u). `utterances`:
    indices into `num_frames`, each once."""
    chosen = np.asarray(utterances, dtype=np.int64)
    longest_first = chosen[np.lexsort((chosen, -num_frames[chosen]))]
    lightest = [(0, rank) for rank in range(workers)]  # a heap of frames and rank
    shards: list[list[int]] = [[] for _ in range(workers)]
    for u, length in zip(longest_first.tolist(), num_frames[longest_first].tolist(), strict=True):
        frames, rank = lightest[0]
        shards[rank].append(u)
        heapq.heapreplace(lightest, (frames + length, rank))
    return [sorted(shard) for shard in shards]


def local_positions(shard: Sequence[int], utterances: Iterable[int]) -> list[int]:
    """Positions in the shard of those of `utterances` that it has, ascending: their indices in the worker's dataset."""
    wanted = set(utterances)
    return [position for position, u in enumerate(shard) if u in wanted]
