"""The corpus: every frame of a data dir with its pdf-id, held in memory once.

Utterances lie one after another in `store`, each with `context` copies of its first and last frame around it. The
input of frame t, spliced over t-context .. t+context, is then one contiguous piece of memory: no splice is ever
stored, and a frame outside the utterance repeats the first or last one, as in Kaldi nnet1's <Splice>.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddnn.data.memory import require_memory
from ddnn.errors import DataError
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.datadir import DataDir, read_data_dir, speaker_cmvn_stats
from ddnn.kaldi.features import add_deltas, apply_cmvn
from ddnn.kaldi.tables import MatrixReader, ScpEntry, check_finite

log = logging.getLogger(__name__)

LENGTH_TOLERANCE = 5
"""Frames by which features and alignment may differ (nnet1's --length-tolerance); the longer is trimmed."""


@dataclass(frozen=True)
class FeaturePipeline:
    """What happens to features between Kaldi's archive and the splice; part of a trained model.

    Attributes:
        cmvn: `none`, `mean` or `mean-variance`, per speaker.
        deltas: order of the appended delta features.
    """

    cmvn: str = "none"
    deltas: int = 0


@dataclass(frozen=True)
class Corpus:
    """Utterances in memory.

    Attributes:
        store: (rows, dim) float32 or float16; utterances with their `context` repeated edge frames.
        labels: (rows,) int32, the pdf-id of each frame; -1 on the repeated edges and where there is no alignment.
        utterances: utterance ids in the order of the data dir.
        speakers: speaker of each utterance; None where the data dir has no utt2spk.
        first_row: (utterances,) int64, store row of each utterance's first frame.
        num_frames: (utterances,) int64.
        context: repeated edge frames on each side.
        counts: what was skipped or trimmed while loading.
    """

    store: Tensor
    labels: Tensor
    utterances: tuple[str, ...]
    speakers: tuple[str, ...] | None
    first_row: np.ndarray
    num_frames: np.ndarray
    context: int
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        """Feature dimension before splicing."""
        return int(self.store.shape[1])

    def rows_of(self, utterances: Iterable[int]) -> Tensor:
        """Store rows, (frames,) int64, of all frames of the utterances with these indices."""
        pieces = [np.arange(self.first_row[u], self.first_row[u] + self.num_frames[u]) for u in utterances]
        return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64))

    def to(self, device: torch.device) -> Corpus:
        """The corpus with its frames and labels on `device`."""
        return Corpus(
            self.store.to(device),
            self.labels.to(device),
            self.utterances,
            self.speakers,
            self.first_row,
            self.num_frames,
            self.context,
            self.counts,
        )


def load_corpus(
    data: Path,
    alignments: Alignments | None,
    *,
    context: int,
    pipeline: FeaturePipeline,
    store_dtype: torch.dtype = torch.float32,
    allow_pipes: bool = False,
    max_missing: float | None = 0.05,
    progress: Callable[[Sequence[ScpEntry]], Iterable[ScpEntry]] = iter,
) -> Corpus:
    """Loads a Kaldi data dir, with its alignment where given.

    Utterances without an alignment, or of which the number of frames differs by more than `LENGTH_TOLERANCE`, are
    skipped and counted; smaller differences are trimmed to the shorter one and counted (nnet1's nnet-train-frmshuff).

    Args:
        alignments: pdf-ids per utterance; None leaves all labels at -1.
        context: frames of context on each side.
        max_missing: largest share of utterances that may be skipped (`data.max_missing`); None: all but one.
        progress: wraps the utterances while they are read.

    Raises:
        DataError: damaged or unfit input, too much of it skipped, not enough memory.
    """
    directory = read_data_dir(data, allow_pipes=allow_pipes)
    with MatrixReader() as reader:
        kept, lengths, counts = _join(directory, alignments, reader)
        _check_missing(directory, alignments, kept, counts, max_missing)
        dim = reader.shape(kept[0])[1]
        width = dim * (pipeline.deltas + 1)
        rows = int(sum(lengths)) + 2 * context * len(kept)
        require_memory(
            rows * (width * store_dtype.itemsize + 4), what=f"{int(sum(lengths))} frames of {width} dims", where=data
        )
        store = torch.empty((rows, width), dtype=store_dtype)
        labels = torch.full((rows,), -1, dtype=torch.int32)
        prepare = _feature_preparation(directory, pipeline)
        first_row = np.zeros(len(kept), dtype=np.int64)
        row = context
        for u, entry in enumerate(progress(kept)):
            features = reader.read(entry)
            if features.shape[1] != dim:
                raise DataError(
                    f"utterance {entry.key}: {features.shape[1]} dims found, {dim} expected as in {kept[0].key}",
                    where=directory.path / "feats.scp",
                    mend="all utterances of a data dir must have features of one kind",
                )
            check_finite(entry.key, features, entry.where)
            frames = torch.from_numpy(prepare(entry.key, features))[: lengths[u]]
            end = row + lengths[u]
            store[row:end] = frames
            if not bool(store[row:end].isfinite().all()):
                raise DataError(
                    f"utterance {entry.key}: values up to {frames.abs().max():g} after CMVN and deltas, "
                    f"which data.store {str(store_dtype).removeprefix('torch.')} does not hold",
                    where=entry.where,
                    mend="set data.store: float32, or look for frames that are no speech features",
                )
            store[row - context : row] = frames[0]
            store[end : end + context] = frames[-1]
            if alignments is not None:
                labels[row:end] = torch.from_numpy(alignments.pdfs[entry.key][: lengths[u]])
            first_row[u] = row
            row = end + 2 * context
    speakers = None if directory.speakers is None else tuple(directory.speakers[entry.key] for entry in kept)
    names = tuple(entry.key for entry in kept)
    return Corpus(store, labels, names, speakers, first_row, np.asarray(lengths, dtype=np.int64), context, counts)


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


def _check_missing(
    directory: DataDir,
    alignments: Alignments | None,
    kept: list[ScpEntry],
    counts: dict[str, int],
    max_missing: float | None,
) -> None:
    total = len(directory.entries)
    skipped = total - counts["used"]
    described = (
        f"{counts['no_alignment']} without an alignment, {counts['length_differs']} differing from theirs by more than "
        f"{LENGTH_TOLERANCE} frames, {counts['empty']} without frames"
    )
    if counts["used"] == 0 or (max_missing is not None and skipped > max_missing * total):
        aligned_in = f"; alignments are from {alignments.path}" if alignments is not None else ""
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


def _feature_preparation(directory: DataDir, pipeline: FeaturePipeline) -> Callable[[str, np.ndarray], np.ndarray]:
    """utterance, features -> features with CMVN and deltas."""
    normalised = pipeline.cmvn != "none"
    stats = speaker_cmvn_stats(directory) if normalised else {}
    speakers = directory.speaker_of("data.cmvn") if normalised else {}

    def prepare(utterance: str, features: np.ndarray) -> np.ndarray:
        if normalised:
            features = apply_cmvn(features, stats[speakers[utterance]], variance=pipeline.cmvn == "mean-variance")
        return add_deltas(features, pipeline.deltas) if pipeline.deltas else features

    return prepare
