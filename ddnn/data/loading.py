"""All features of some utterances into memory or into a file, read by this process or by several."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.dataset import frame_labels
from ddnn.data.feature_reader import (
    Chunk,
    FeatureConfig,
    FeatureSpec,
    Stats,
    Utterance,
    make_chunks,
    read_chunk,
    with_own_reader,
    write_chunk,
)
from ddnn.data.index import MAX_SKIPPED_FRACTION, UtteranceIndex, assign_shards, build_index
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.archive import MatrixReader, ScpEntry
from ddnn.kaldi.data_dir import DataDir, compute_cmvn_stats, read_cmvn_stats
from ddnn.kaldi.transforms import Transforms, mismatched_options, read_transforms, transforms_digest
from ddnn.util.errors import DataError
from ddnn.util.pool import Task, WorkerPool, worker_pool
from ddnn.util.system import usable_cores

log = logging.getLogger(__name__)

SPEAKERS_PER_TASK = 4  # whose CMVN statistics a loading process computes before it answers
BYTES_PER_PROCESS = 512 << 20  # of float32 features: what makes up for the start of a process, a third of a second
MAX_PROCESSES = 8  # unless the recipe says another number

Run = Callable[[Iterable[Task]], Iterator[Any]]
"""Does tasks, here or in loading processes, and gives the results in order. A task lacks its last argument, a `MatrixReader`."""


@dataclass(frozen=True)
class Corpus:
    """A Kaldi data dir, its alignment dir or archive of pdf-ids, and the Kaldi dir of its transforms, if any; `keys`:
    what names the first two in the recipe."""

    data: Path
    alignments: Path
    keys: tuple[str, str] = ("data.train", "data.alignments")
    transforms: Path | None = None


@dataclass(frozen=True)
class DataConfig:
    """How a data dir is read."""

    features: FeatureConfig
    num_pdfs: int | None = None  # of the alignments; None: as they say themselves
    allow_pipes: bool = False  # run shell commands in an scp
    max_skipped_fraction: float | None = MAX_SKIPPED_FRACTION  # of utterances; None: all but one may be skipped
    cache_dir: Path | None = None  # directory of cache files; None: none
    loader_processes: int | None = None  # how many may load for each worker; None: `default_processes`
    progress: Callable[[Sequence[ScpEntry]], Iterable[ScpEntry]] = iter  # wraps the utterances while they are read

    def processes(self, comm: Communicator) -> int:
        return self.loader_processes or default_processes(comm.local_size)


def default_processes(workers_on_host: int = 1) -> int:
    """Default of `data.loader_processes`: the usable cores, up to 8, divided among the workers of the host."""
    return max(1, min(usable_cores(), MAX_PROCESSES) // workers_on_host)


def effective_processes(wanted: int, float32_bytes: int) -> int:
    """How many of the wanted processes are worth their start for this amount of features; 1: only this one."""
    return max(1, min(wanted, float32_bytes // BYTES_PER_PROCESS))


def index_corpus(
    corpus: Corpus,
    directory: DataDir,
    alignments: Alignments | None,
    config: DataConfig,
    comm: Communicator | None = None,
) -> UtteranceIndex:
    """`build_index` of a corpus whose tables were read, with its transforms. Collective. DataError: as there; a transform
    is missing or does not fit; those of another worker's host differ, on that one."""
    index = build_index(directory, alignments, comm, max_skipped_fraction=config.max_skipped_fraction)
    if corpus.transforms is None or config.features.transforms is None:
        return index
    names = index.utterances, index.speakers
    read = read_transforms(corpus.transforms, config.features.transforms, index.dim, *names, directory.path)
    if comm is not None and comm.world_size > 1:
        everyone = comm.all_gather_object([comm.host, transforms_digest(read)])
        if everyone[comm.rank][1] != everyone[0][1]:
            where = f"on host {comm.host} (worker {comm.rank}) differ from those of worker 0 on {everyone[0][0]}"
            hint = "give every host the same files, from one shared file system or from a new copy"
            raise DataError(f"the transforms {where}", location=corpus.transforms, hint=hint)
    return replace(index, transforms=read)


def warn_of_contradictions(corpus: Corpus, config: DataConfig, index: UtteranceIndex) -> None:
    """Logs how the options in the Kaldi dirs of transforms and alignments differ from how features are read, and where the
    labels of an archive of pdf-ids look like transition-ids: with ten frames for each pdf, a tree's first one has some."""
    features, counts = config.features, index.pdf_counts
    for message in mismatched_options(corpus.transforms, corpus.alignments, features.cmvn, features.deltas, index.dim):
        log.warning("%s", message)
    if corpus.alignments.is_file() and len(counts) > 1 and not counts[0] and counts.sum() >= 10 * len(counts):
        log.warning("%s: no frame has pdf-id 0: are these transition-ids, which begin at 1?", corpus.alignments)


class FeatureRows(Protocol):
    """Some utterances of one data dir whose rows, edges included, can be loaded: from archives or a cache file."""

    rows: int
    processes: int

    def fill(self, out: NDArray[Any], descriptor: int | None, start: int) -> None:
        """Fills `out` (rows, width). Where several processes do so, it is the file `descriptor` from byte `start` on.
        DataError: damaged or unsuitable features. UserError: a loading process died."""

    def labels(self) -> Tensor:
        """As `frame_labels`, once the features are loaded."""


def load_rows(sources: Sequence[FeatureRows], width: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Features (rows, width) and labels (rows,) of one source after another, in memory once. Several processes fill
    anonymous memory, which is freed with its last user. Raises as `FeatureRows.fill`."""
    ends, row_bytes = list(accumulate(source.rows for source in sources)), width * np.dtype(dtype).itemsize
    shape = ends[-1], width
    with ExitStack() as stack:
        descriptor = None
        if all(source.processes == 1 for source in sources):
            features: NDArray[Any] = np.empty(shape, dtype)
        else:
            memory = stack.enter_context(_anonymous_memory())
            descriptor, size = memory.fileno(), ends[-1] * row_bytes
            memory.truncate(size)
            features = np.frombuffer(mmap.mmap(descriptor, size), dtype).reshape(shape)
        for source, end in zip(sources, ends, strict=True):
            first = end - source.rows
            source.fill(features[first:end], descriptor, first * row_bytes)
    labels = [source.labels() for source in sources]
    return torch.from_numpy(features), labels[0] if len(labels) == 1 else torch.cat(labels)


class FeatureLoader:
    """Loads all features of an index: `rows` rows, edges included, in `chunks` that are read at once. `processes` may
    load, or fewer where there are not enough features for them. `comm`, collective, divides the work on CMVN statistics
    among workers who all load at the same time; `cmvn_speakers`: those whose statistics any of them needs."""

    def __init__(
        self,
        index: UtteranceIndex,
        config: DataConfig,
        processes: int,
        comm: Communicator | None = None,
        cmvn_speakers: Sequence[str] | None = None,
    ) -> None:
        self.index, self.config, self.comm = index, config, comm or SingleProcess()
        data, first, transforms = index.directory.path, index.reference_utterance, index.transforms or Transforms()
        self.spec = FeatureSpec(data, first, index.dim, config.features, transforms.final_mat)
        self.rows = config.features.rows(index.num_frames)
        self.cmvn = config.features.cmvn != "none"
        speakers = index.speakers if self.cmvn and index.speakers is not None else repeat(None)
        fmllr = transforms.adapted or {}
        utterances = [
            Utterance(entry, num_frames, speaker, fmllr.get(entry.key))
            for entry, num_frames, speaker in zip(index.entries, index.num_frames.tolist(), speakers, strict=False)
        ]
        self.chunks = make_chunks(utterances, self.spec)
        self.processes = effective_processes(processes, 4 * self.rows * self.spec.width)
        self.speakers = set((index.speakers if self.comm.world_size == 1 else cmvn_speakers) or ())

    def fill(self, out: NDArray[Any], descriptor: int | None, start: int) -> None:
        """See `FeatureRows`."""
        if self.processes == 1:
            self._load(lambda chunk: (read_chunk, out[chunk.row : chunk.row + chunk.rows]))
        else:
            self._load(lambda chunk: (write_chunk, descriptor, start), descriptor)

    def labels(self) -> Tensor:
        return frame_labels(self.index, self.config.features.splice)

    def into_file(self, descriptor: int) -> list[int]:
        """Writes all rows into an open file; returns the CRC-32 of one chunk after another. DataError, UserError: as
        `fill`. OSError: the file cannot be written."""
        return self._load(lambda chunk: (write_chunk, descriptor, 0), descriptor)

    def _load(self, task: Callable[[Chunk], Task], descriptor: int | None = None) -> list[Any]:
        """Does a task for each chunk; gives the results. `task`: the function, and its arguments before the chunk.
        `descriptor`: an open file that they write."""
        started = time.perf_counter()
        steps, results = iter(self.config.progress(self.index.entries)), list[Any]()
        with ExitStack() as stack:
            if self.processes > 1:
                pool = worker_pool(self.processes, "a loading process", "data.loader_processes: 1", descriptor)
                run = partial(_run_in, stack.enter_context(pool))
            else:
                run = partial(_run_here, reader=stack.enter_context(MatrixReader()))
            stats = self._cmvn_stats(run) if self.cmvn else {}
            tasks = (
                (*task(chunk), chunk, {u.speaker: stats[u.speaker] for u in chunk.utterances if u.speaker}, self.spec)
                for chunk in self.chunks
            )
            for chunk, result in zip(self.chunks, run(tasks), strict=True):
                results.append(result)
                for _ in chunk.utterances:
                    next(steps, None)
        next(steps, None)  # to the end of the progress bar
        size, seconds = 4e-9 * self.rows * self.spec.width, time.perf_counter() - started
        by = "1 process" if self.processes == 1 else f"{self.processes} processes"
        level = logging.INFO if seconds > 1 or self.processes > 1 else logging.DEBUG
        figures = self.index.directory.path, size, seconds, by, size / max(seconds, 1e-9)
        log.log(level, "%s: loaded %.2f GB of float32 in %.1f s by %s, %.2f GB/s", *figures)
        return results

    def _cmvn_stats(self, run: Run) -> Stats:
        """Of all speakers of the index at least."""
        directory, comm, dim = self.index.directory, self.comm, self.spec.dim
        speaker_of = directory.speaker_of("data.cmvn")
        if directory.cmvn is not None:
            wanted = set(self.index.speakers or ())
            selected = {utterance: speaker for utterance, speaker in speaker_of.items() if speaker in wanted}
            return read_cmvn_stats(directory.cmvn, selected)
        by_speaker: dict[str, list[ScpEntry]] = {}
        for entry in directory.entries:
            if speaker_of[entry.key] in self.speakers:
                by_speaker.setdefault(speaker_of[entry.key], []).append(entry)
        names = list(by_speaker)
        utterances = np.array([len(by_speaker[name]) for name in names], np.int64)
        share = assign_shards(utterances, range(len(names)), comm.world_size)[comm.rank]
        groups = (share[first : first + SPEAKERS_PER_TASK] for first in range(0, len(share), SPEAKERS_PER_TASK))
        tasks = ((compute_cmvn_stats, {names[n]: by_speaker[names[n]] for n in group}, dim) for group in groups)
        local = {speaker: sums for stats in run(tasks) for speaker, sums in stats.items()}
        return sum_over_workers(names, local, dim, comm)


def sum_over_workers(names: list[str], local: Stats, dim: int, comm: Communicator) -> Stats:
    """Every worker's statistics, of speakers that no other worker has: a sum with zeros changes no bit. Collective."""
    total = torch.zeros(len(names), 2, dim + 1, dtype=torch.float64)
    for n, name in enumerate(names):
        if name in local:
            total[n] = torch.from_numpy(local[name])
    comm.all_reduce(total)
    return {name: stats for name, stats in zip(names, total.numpy(), strict=True) if stats[0, dim]}


def _anonymous_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("ddnn features"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _run_in(pool: WorkerPool, tasks: Iterable[Task]) -> Iterator[Any]:
    return pool.run((with_own_reader, *task) for task in tasks)


def _run_here(tasks: Iterable[Task], reader: MatrixReader) -> Iterator[Any]:
    return (function(*arguments, reader) for function, *arguments in tasks)
