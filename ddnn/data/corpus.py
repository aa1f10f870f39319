"""The corpus: every frame of a data dir, or of a worker's shard of it, with its pdf-id, held in memory once.

Utterances lie one after another in `store`, each with `context` copies of its first and last frame around it. The
input of frame t, spliced over t-context .. t+context, is then one contiguous piece of memory: no splice is ever
stored, and a frame outside the utterance repeats the first or last one, as in Kaldi nnet1's <Splice>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddnn.data.memory import require_memory
from ddnn.data.plan import CorpusPlan, plan_corpus
from ddnn.errors import DataError
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.datadir import DataDir, speaker_cmvn_stats
from ddnn.kaldi.features import add_deltas, apply_cmvn
from ddnn.kaldi.tables import MatrixReader, ScpEntry, check_finite


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
    """Loads a whole Kaldi data dir, with its alignment where given: `plan_corpus`, then `load_planned`.

    Args:
        alignments: pdf-ids per utterance; None leaves all labels at -1.
        context: frames of context on each side.
        max_missing: largest share of utterances that may be skipped (`data.max_missing`); None: all but one.
        progress: wraps the utterances while they are read.

    Raises:
        DataError: damaged or unfit input, too much of it skipped, not enough memory.
    """
    plan = plan_corpus(data, alignments, allow_pipes=allow_pipes, max_missing=max_missing)
    return load_planned(
        plan, alignments, context=context, pipeline=pipeline, store_dtype=store_dtype, progress=progress
    )


def load_planned(
    plan: CorpusPlan,
    alignments: Alignments | None,
    *,
    utterances: Sequence[int] | None = None,
    context: int,
    pipeline: FeaturePipeline,
    store_dtype: torch.dtype = torch.float32,
    progress: Callable[[Sequence[ScpEntry]], Iterable[ScpEntry]] = iter,
    workers_on_host: int = 1,
) -> Corpus:
    """Loads the planned utterances, or a shard of them: to the same frames and labels, whoever loads the others.

    CMVN statistics are those of all utterances of a speaker in the data dir. Where there is no `cmvn.scp` to read them
    from, all features of the shard's speakers are read for them.

    Args:
        alignments: those of the plan.
        utterances: indices into the plan, ascending; None: all. There may be none.
        context: frames of context on each side.
        progress: wraps the utterances while they are read.
        workers_on_host: workers that load shards of about this size on this machine at the same time. All must have
            finished earlier loads before one begins this (`Exchange.barrier`): they ask for memory together.

    Raises:
        DataError: damaged or unfit input, not what the plan says (so on another host), not enough memory.
    """
    entries = plan.entries if utterances is None else tuple(plan.entries[u] for u in utterances)
    num_frames = plan.num_frames if utterances is None else plan.num_frames[np.asarray(utterances, dtype=np.int64)]
    speakers = plan.speakers
    if speakers is not None and utterances is not None:
        speakers = tuple(speakers[u] for u in utterances)
    width = plan.dim * (pipeline.deltas + 1)
    rows = int(num_frames.sum()) + 2 * context * len(entries)
    require_memory(
        rows * (width * store_dtype.itemsize + 4),
        what=f"{int(num_frames.sum())} frames of {width} dims",
        where=plan.directory.path,
        workers=workers_on_host,
    )
    store = torch.empty((rows, width), dtype=store_dtype)
    labels = torch.full((rows,), -1, dtype=torch.int32)
    prepare = _feature_preparation(plan.directory, pipeline, None if utterances is None else speakers)
    first_row = np.zeros(len(entries), dtype=np.int64)
    row = context
    with MatrixReader() as reader:
        for u, entry in enumerate(progress(entries)):
            features = _read_features(plan, entry, reader, int(num_frames[u]))
            frames = torch.from_numpy(prepare(entry.key, features))[: num_frames[u]]
            end = row + int(num_frames[u])
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
                labels[row:end] = torch.from_numpy(_pdfs(alignments, entry.key, int(num_frames[u])))
            first_row[u] = row
            row = end + 2 * context
    names = tuple(entry.key for entry in entries)
    return Corpus(store, labels, names, speakers, first_row, num_frames, context, plan.counts)


def _read_features(plan: CorpusPlan, entry: ScpEntry, reader: MatrixReader, frames: int) -> np.ndarray:
    """The utterance's features, of which the plan takes the first `frames`."""
    features = reader.read(entry)
    if features.shape[1] != plan.dim:
        raise DataError(
            f"utterance {entry.key}: {features.shape[1]} dims found, {plan.dim} expected as in {plan.entries[0].key}",
            where=plan.directory.path / "feats.scp",
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


def _pdfs(alignments: Alignments, utterance: str, frames: int) -> np.ndarray:
    """The pdf-ids of the utterance's first `frames` frames."""
    found = alignments.pdfs.get(utterance, np.zeros(0, np.int32))
    if len(found) < frames:
        raise ValueError(f"utterance {utterance}: {len(found)} pdf-ids, the plan of another alignment wants {frames}")
    return found[:frames]


def _feature_preparation(
    directory: DataDir, pipeline: FeaturePipeline, speakers_needed: Iterable[str] | None
) -> Callable[[str, np.ndarray], np.ndarray]:
    """utterance, features -> features with CMVN and deltas, for utterances of these speakers; None: of all."""
    normalised = pipeline.cmvn != "none"
    speakers = directory.speaker_of("data.cmvn") if normalised else {}
    if normalised and speakers_needed is not None:
        directory = _of_speakers(directory, set(speakers_needed))
    stats = speaker_cmvn_stats(directory) if normalised else {}

    def prepare(utterance: str, features: np.ndarray) -> np.ndarray:
        if normalised:
            own = stats[speakers[utterance]]
            if own.shape[1] != features.shape[1] + 1:
                raise DataError(
                    f"utterance {utterance}: CMVN statistics of {own.shape[1] - 1} dims found, features of "
                    f"{features.shape[1]}",
                    where=directory.path / "cmvn.scp",
                    mend="run steps/compute_cmvn_stats.sh again, or remove cmvn.scp",
                )
            features = apply_cmvn(features, own, variance=pipeline.cmvn == "mean-variance")
        return add_deltas(features, pipeline.deltas) if pipeline.deltas else features

    return prepare


def _of_speakers(directory: DataDir, wanted: set[str]) -> DataDir:
    """The data dir as if it had these speakers alone."""
    of_utterance = directory.speaker_of("CMVN per speaker")
    entries = tuple(entry for entry in directory.entries if of_utterance[entry.key] in wanted)
    return replace(directory, entries=entries, speakers={entry.key: of_utterance[entry.key] for entry in entries})
