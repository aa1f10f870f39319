"""All features of some utterances into memory or into a file, read by this process or by several."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddnn.data.feature_reader import (
    FeatureConfig,
    FeatureSpec,
    Utterance,
    make_chunks,
    store_chunk,
    with_own_reader,
)
from ddnn.data.index import LENGTH_TOLERANCE, MAX_SKIPPED_FRACTION, UtteranceIndex, build_index
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.archive import MatrixReader, ScpEntry
from ddnn.kaldi.data_dir import DataDir, compute_cmvn_stats, read_cmvn_stats
from ddnn.kaldi.transforms import Transforms, mismatched_options, read_transforms, transforms_digest
from ddnn.util.arrays import Float64Array
from ddnn.util.errors import DataError
from ddnn.util.pool import Task, worker_pool
from ddnn.util.system import usable_cores

log = logging.getLogger(__name__)

SPEAKERS_PER_TASK = 4  # whose CMVN statistics a loading process computes before it answers
BYTES_PER_PROCESS = 512 << 20  # of float32 features: what makes up for the start of a process, a third of a second
MAX_PROCESSES = 8  # unless the recipe says another number

Run = Callable[[Iterable[Task]], Iterator[Any]]
"""Does tasks, here or in loading processes, and gives the results in order. A task lacks its last argument, a `MatrixReader`."""
Stats = Mapping[str, Float64Array]  # speaker -> CMVN statistics, (2, dim + 1)


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
    length_tolerance: int = LENGTH_TOLERANCE  # an utterance whose alignment differs by so many frames is skipped
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
    index = build_index(
        *(directory, alignments, comm),
        max_skipped_fraction=config.max_skipped_fraction, length_tolerance=config.length_tolerance,
    )  # fmt: skip
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


@contextmanager
def allocate(size: int, *, shared: bool) -> Iterator[tuple[NDArray[np.uint8], int | memoryview]]:
    """So many bytes of memory, and what `load_features` writes there. `shared`: several processes do so, into an anonymous
    file, which is freed with its last user."""
    if not shared:
        memory = np.empty(size, np.uint8)
        yield memory, memory.data
        return
    with _anonymous_file() as file:
        file.truncate(size)
        yield np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8), file.fileno()


def _anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("ddnn features"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def load_features(
    index: UtteranceIndex,
    config: DataConfig,
    target: int | memoryview,
    start: int,
    processes: int,
    comm: Communicator | None = None,
    cmvn_speakers: Sequence[str] | None = None,
) -> list[tuple[int, int]]:
    """Writes the rows of all utterances, edges included, from byte `start` on into memory, or into an open file, as only
    one process can do with memory. Returns size and, for a file, CRC-32 of one part after another. `comm`, collective,
    divides the work on CMVN statistics among workers who all load at the same time; `cmvn_speakers`: those whose
    statistics any of them needs. DataError: damaged or unsuitable features. UserError: a loading process died. OSError:
    the file cannot be written."""
    started, features, comm = time.perf_counter(), config.features, comm or SingleProcess()
    transforms = index.transforms or Transforms()
    fmllr, spec = transforms.fmllr or {}, FeatureSpec(features, index.dim, transforms.final_mat)
    steps, blocks = iter(config.progress(index.entries)), list[tuple[int, int]]()
    with _runner(processes, target) as run:
        cmvn: Iterable[Float64Array | None] = repeat(None)
        if features.cmvn != "none":
            stats = _cmvn_stats(index, cmvn_speakers if comm.world_size > 1 else index.speakers, run, comm)
            cmvn = [stats[speaker] for speaker in index.speakers or ()]
        own_transforms = (fmllr.get(entry.key) for entry in index.entries)
        utterances = map(Utterance, index.entries, index.num_frames.tolist(), cmvn, own_transforms)
        chunks = list(make_chunks(utterances, spec))
        sizes = (features.bytes(np.array([u.num_frames for u in chunk]), index.dim) for chunk in chunks)
        tasks = (
            (store_chunk, target, at, chunk, spec)
            for at, chunk in zip(accumulate(sizes, initial=start), chunks, strict=False)
        )
        for chunk, block in zip(chunks, run(tasks), strict=True):
            blocks.append(block)
            for _ in chunk:
                next(steps, None)
    next(steps, None)  # to the end of the progress bar
    size, seconds = 4e-9 * features.rows(index.num_frames) * spec.width, time.perf_counter() - started
    level = logging.INFO if seconds > 1 or processes > 1 else logging.DEBUG
    figures = index.directory.path, size, seconds, size / max(seconds, 1e-9), processes
    log.log(level, "%s: loaded %.2f GB of float32 in %.1f s, %.2f GB/s, processes: %d", *figures)
    return blocks


@contextmanager
def _runner(processes: int, target: int | memoryview) -> Iterator[Run]:
    if processes == 1:
        with MatrixReader() as reader:
            yield lambda tasks: (function(*arguments, reader) for function, *arguments in tasks)
        return
    inherited = target if isinstance(target, int) else None
    with worker_pool(processes, "a loading process", "data.loader_processes: 1", inherited) as pool:
        yield lambda tasks: pool.run((with_own_reader, *task) for task in tasks)


def _cmvn_stats(index: UtteranceIndex, speakers: Iterable[str] | None, run: Run, comm: Communicator) -> Stats:
    """Of all speakers of the index at least, from `cmvn.scp` or from all utterances of `speakers` in the data dir.
    Collective."""
    directory, dim = index.directory, index.dim
    speaker_of, wanted = directory.speaker_of("data.cmvn"), set(speakers or ())
    if directory.cmvn is not None:
        return read_cmvn_stats(directory.cmvn, dict(zip(index.utterances, index.speakers or (), strict=True)))
    by_speaker: dict[str, list[ScpEntry]] = {}
    for entry in directory.entries:
        if speaker_of[entry.key] in wanted:
            by_speaker.setdefault(speaker_of[entry.key], []).append(entry)
    names = list(by_speaker)
    share = names[comm.rank :: comm.world_size]
    groups = (share[first : first + SPEAKERS_PER_TASK] for first in range(0, len(share), SPEAKERS_PER_TASK))
    tasks = ((compute_cmvn_stats, {name: by_speaker[name] for name in group}, dim) for group in groups)
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
