"""The corpus: every frame of a data dir, or of a worker's shard of it, with its pdf-id, held in memory once.

Utterances lie one after another in `store`, each with `context` copies of its first and last frame around it. The
input of frame t, spliced over t-context .. t+context, is then one contiguous piece of memory: no splice is ever
stored, and a frame outside the utterance repeats the first or last one, as in Kaldi nnet1's <Splice>.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddnn.data.fill import Preparation
from ddnn.data.loaders import usable_processes
from ddnn.data.loading import Loading, Progress, load_into_memory
from ddnn.data.memory import require_memory
from ddnn.data.plan import CorpusPlan, plan_corpus
from ddnn.kaldi.alignments import Alignments
from ddnn.parallel.exchange import Exchange


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
    progress: Progress = iter,
    processes: int | None = None,
) -> Corpus:
    """Loads a whole Kaldi data dir, with its alignment where given: `plan_corpus`, then `load_planned`.

    Args:
        alignments: pdf-ids per utterance; None leaves all labels at -1.
        context: frames of context on each side.
        max_missing: largest share of utterances that may be skipped (`data.max_missing`); None: all but one.
        progress: wraps the utterances while they are read.
        processes: as `load_planned`; None: as many as there are cores, up to 8.

    Raises:
        DataError: damaged or unfit input, too much of it skipped, not enough memory.
    """
    plan = plan_corpus(data, alignments, allow_pipes=allow_pipes, max_missing=max_missing)
    return load_planned(
        plan,
        alignments,
        context=context,
        pipeline=pipeline,
        store_dtype=store_dtype,
        progress=progress,
        processes=usable_processes() if processes is None else processes,
    )


def load_planned(
    plan: CorpusPlan,
    alignments: Alignments | None,
    *,
    utterances: Sequence[int] | None = None,
    context: int,
    pipeline: FeaturePipeline,
    store_dtype: torch.dtype = torch.float32,
    progress: Progress = iter,
    workers_on_host: int = 1,
    processes: int = 1,
    exchange: Exchange | None = None,
) -> Corpus:
    """Loads the planned utterances, or a shard of them: to the same frames and labels, whoever loads the others.

    CMVN statistics are those of all utterances of a speaker in the data dir. Where there is no `cmvn.scp` to read them
    from, all features of the shard's speakers are read for them; with `exchange`, of a share of all speakers.

    Args:
        alignments: those of the plan.
        utterances: indices into the plan, ascending; None: all. There may be none.
        context: frames of context on each side.
        progress: wraps the utterances while they are read.
        workers_on_host: workers that load shards of about this size on this machine at the same time. All must have
            finished earlier loads before one begins this (`Exchange.barrier`): they ask for memory together.
        processes: how many may load; there are fewer where the features do not pay for their start.
        exchange: the workers, all of whom load shards of this plan now: they share the work on CMVN statistics.
            Collective where there are several.

    Raises:
        DataError: damaged or unfit input, not what the plan says (so on another host), not enough memory.
        UserError: a loading process died.
    """
    entries = plan.entries if utterances is None else tuple(plan.entries[u] for u in utterances)
    num_frames = plan.num_frames if utterances is None else plan.num_frames[np.asarray(utterances, dtype=np.int64)]
    speakers = plan.speakers
    if speakers is not None and utterances is not None:
        speakers = tuple(speakers[u] for u in utterances)
    preparation = preparation_of(plan, pipeline, context, store_dtype)
    loading = Loading(
        plan.directory,
        entries,
        num_frames,
        speakers,
        preparation,
        processes=processes,
        progress=progress,
        exchange=exchange,
        cmvn_of=None if plan.speakers is None else frozenset(plan.speakers),
    )
    require_memory(
        loading.rows * (preparation.row_bytes + 4),
        what=f"{int(num_frames.sum())} frames of {preparation.width} dims",
        where=plan.directory.path,
        workers=workers_on_host,
    )
    names = tuple(entry.key for entry in entries)
    labels = labels_of(alignments, names, num_frames, context)
    store = load_into_memory(loading)
    return Corpus(store, labels, names, speakers, first_rows(num_frames, context), num_frames, context, plan.counts)


def preparation_of(plan: CorpusPlan, pipeline: FeaturePipeline, context: int, store_dtype: torch.dtype) -> Preparation:
    """What happens to the plan's features on their way into the store."""
    dtype = str(store_dtype).removeprefix("torch.")
    like = plan.entries[0].key
    return Preparation(plan.directory.path, like, plan.dim, pipeline.cmvn, pipeline.deltas, context, dtype)


def first_rows(num_frames: np.ndarray, context: int) -> np.ndarray:
    """(utterances,) int64, the store row of each utterance's first frame."""
    ends = np.cumsum(num_frames + 2 * context)
    return np.asarray(ends - num_frames - context, dtype=np.int64)


def labels_of(alignments: Alignments | None, utterances: Sequence[str], num_frames: np.ndarray, context: int) -> Tensor:
    """The pdf-id of each store row, int32; -1 on the repeated edges, and everywhere without an alignment."""
    labels = torch.full((int(num_frames.sum()) + 2 * context * len(utterances),), -1, dtype=torch.int32)
    if alignments is not None:
        rows = labels.numpy()
        for name, row, frames in zip(utterances, first_rows(num_frames, context), num_frames, strict=True):
            rows[row : row + frames] = _pdfs(alignments, name, int(frames))
    return labels


def _pdfs(alignments: Alignments, utterance: str, frames: int) -> np.ndarray:
    """The pdf-ids of the utterance's first `frames` frames."""
    found = alignments.pdfs.get(utterance, np.zeros(0, np.int32))
    if len(found) < frames:
        raise ValueError(f"utterance {utterance}: {len(found)} pdf-ids, the plan of another alignment wants {frames}")
    return found[:frames]
