"""All features of some utterances into memory or into a file, read by this process or by several. Loading processes are
started from scratch, never forked (MPI and CUDA may be in use), and get their tasks over sockets. They are ended
together with the block that uses them."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.dataset import AcousticDataset, frame_labels, make_dataset
from ddnn.data.feature_reader import FeatureConfig, FeatureSpec, Stats, make_chunks, read_chunk, write_chunk
from ddnn.data.index import MAX_SKIPPED_FRACTION, UtteranceIndex, assign_shards, build_index
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.archive import MatrixReader, ScpEntry
from ddnn.kaldi.data_dir import DataDir, compute_cmvn_stats, read_cmvn_stats
from ddnn.kaldi.transforms import Transforms, mismatched_options, read_transforms, transforms_digest
from ddnn.util.errors import DataError, UserError
from ddnn.util.process import WITHOUT_CWD
from ddnn.util.system import usable_cores

log = logging.getLogger(__name__)

SPEAKERS_PER_TASK = 4  # whose CMVN statistics a loading process computes before it answers
BYTES_PER_PROCESS = 512 << 20  # of float32 features: what makes up for the start of a process, a third of a second
MAX_PROCESSES = 8  # unless the recipe says another number

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc keeps memory that was used: asking the system for it again for each utterance costs more than decompressing
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Of a loading process."""

Task = tuple[Any, ...]  # a function that needs no torch, and its arguments but for the last, a `MatrixReader`

Run = Callable[[Iterable[Task]], Iterator[tuple[int, Any]]]
"""Does tasks, here or in loading processes; gives the index and the result of each."""


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


def load_dataset(
    index: UtteranceIndex,
    config: DataConfig,
    *,
    utterances: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> AcousticDataset:
    """Loads indexed utterances, all or some (ascending), from their archives: the same frames and labels, whoever loads
    the others. `comm`: the workers, who all load shards of this index now, and divide the work on CMVN statistics.
    Collective.

    CMVN statistics are those of all utterances of a speaker in the data dir. Where there is no `cmvn.scp` to read them
    from, all features of these speakers are read for them. DataError: damaged or unsuitable input, not what the index
    says (such as on another host). UserError: a loading process died.
    """
    chosen = index if utterances is None else index.subset(utterances)
    comm = comm or SingleProcess()
    loader = FeatureLoader(chosen, config, config.processes(comm), comm, index.speakers)
    return make_dataset(chosen, *load_rows([loader]), config.features.splice)


class RowSource(Protocol):
    """Some utterances of one data dir whose rows, edges included, can be loaded: from archives or a cache file."""

    rows: int
    width: int
    dtype: str
    processes: int

    def fill(self, out: NDArray[Any] | None, descriptor: int, start: int) -> None:
        """Fills `out` (rows, width), or where it is None the open file `descriptor` from byte `start` on. DataError:
        damaged or unsuitable features. UserError: a loading process died."""

    def labels(self) -> Tensor:
        """As `frame_labels`, once the features are loaded."""


def load_rows(sources: Sequence[RowSource]) -> tuple[Tensor, Tensor]:
    """Features (rows, width) and labels (rows,) of one source after another, in memory once. Several processes fill
    anonymous memory, which is freed with its last user. Raises as `RowSource.fill`."""
    width, dtype, ends = sources[0].width, np.dtype(sources[0].dtype), list(accumulate(s.rows for s in sources))
    shape, row_bytes = (ends[-1], width), width * dtype.itemsize
    if all(source.processes == 1 for source in sources):
        features = np.empty(shape, dtype)
        for source, end in zip(sources, ends, strict=True):
            source.fill(features[end - source.rows : end], -1, 0)
    else:
        with _anonymous_memory() as memory:
            memory.truncate(ends[-1] * row_bytes)
            for source, end in zip(sources, ends, strict=True):
                source.fill(None, memory.fileno(), (end - source.rows) * row_bytes)
            mapped = mmap.mmap(memory.fileno(), ends[-1] * row_bytes)
        features = np.frombuffer(mapped, dtype).reshape(shape)
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
        speakers = index.speakers if self.cmvn else None
        self.chunks = make_chunks(index.entries, index.num_frames, speakers, self.spec, transforms.adapted)
        self.width, self.dtype = self.spec.width, config.features.dtype
        self.processes = effective_processes(processes, 4 * self.rows * self.spec.width)
        self.speakers = set((index.speakers if self.comm.world_size == 1 else cmvn_speakers) or ())

    def fill(self, out: NDArray[Any] | None, descriptor: int, start: int) -> None:
        """See `RowSource`."""
        self._load(out, descriptor, start)

    def labels(self) -> Tensor:
        return frame_labels(self.index, self.config.features.splice)

    def into_file(self, descriptor: int, start: int) -> list[int]:
        """Writes all rows into an open file, from byte `start` on; returns the CRC-32 of one chunk after another.
        DataError, UserError: as `fill`. OSError: the file cannot be written."""
        return self._load(None, descriptor, start)

    def _load(self, out: NDArray[Any] | None, descriptor: int = -1, start: int = 0) -> list[Any]:
        """Fills `out`, or the file where it is None; what each chunk's task returned."""
        started = time.perf_counter()
        steps = iter(self.config.progress(self.index.entries))
        results: list[Any] = [None] * len(self.chunks)
        with ExitStack() as stack:
            if self.processes > 1:
                run = stack.enter_context(loader_pool(self.processes, descriptor)).run
            else:
                run = partial(_run_here, reader=stack.enter_context(MatrixReader()))
            stats = self._cmvn_stats(run) if self.cmvn else {}
            for n, result in run(self._tasks(stats, out, descriptor, start)):
                results[n] = result
                for _ in self.chunks[n].entries:
                    next(steps, None)
        next(steps, None)  # to the end of the progress bar
        size, seconds = 4e-9 * self.rows * self.spec.width, time.perf_counter() - started
        log.log(
            logging.INFO if seconds > 1 or self.processes > 1 else logging.DEBUG,
            "%s: loaded %.2f GB of float32 in %.1f s by %d process%s, %.2f GB/s",
            *(
                self.index.directory.path,
                size,
                seconds,
                self.processes,
                "es" * (self.processes > 1),
                size / max(seconds, 1e-9),
            ),
        )
        return results

    def _tasks(self, stats: Stats, out: NDArray[Any] | None, descriptor: int, start: int) -> Iterator[Task]:
        for chunk in self.chunks:
            needed = {speaker: stats[speaker] for speaker in chunk.speakers or ()}
            if out is None:
                yield write_chunk, descriptor, start, chunk, needed, self.spec
            else:
                yield read_chunk, out[chunk.row : chunk.row + chunk.rows], chunk, needed, self.spec

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
        local = {speaker: sums for _, stats in run(tasks) for speaker, sums in stats.items()}
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


def _run_here(tasks: Iterable[Task], reader: MatrixReader) -> Iterator[tuple[int, Any]]:
    for n, (function, *arguments) in enumerate(tasks):
        yield n, function(*arguments, reader)


@contextmanager
def loader_pool(
    processes: int, descriptor: int = -1, name: str = "a loading process", alone: str = "data.loader_processes: 1"
) -> Iterator[LoaderPool]:
    """Loading processes that end with the block. They inherit the open file `descriptor`, unless it is -1. `name`,
    `alone`: for messages, what a process is and what does without them."""
    pool = LoaderPool(name, alone)
    try:
        try:
            for _ in range(processes):
                pool.start(() if descriptor < 0 else (descriptor,))
        except OSError as error:
            raise UserError(f"cannot start {name}: {error.strerror}", hint=f"set {alone}") from error
        yield pool
    finally:
        for child in pool.children.values():
            child.kill()
        for connection, child in pool.children.items():
            child.wait()
            connection.close()


class LoaderPool:
    """Loading processes, each with the connection over which it gets tasks."""

    def __init__(self, name: str, alone: str) -> None:
        self.name, self.alone = name, alone
        self.children: dict[Connection, subprocess.Popen[bytes]] = {}

    def start(self, inherited: tuple[int, ...]) -> None:
        connection, theirs = Pipe()
        with theirs:
            serve = f"from ddnn.data.feature_reader import serve; serve({theirs.fileno()})"
            self.children[connection] = subprocess.Popen(
                [sys.executable, "-c", WITHOUT_CWD + serve],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what is printed goes to standard error
                pass_fds=(theirs.fileno(), *inherited),
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
                env={**os.environ, **ENVIRONMENT},
            )

    def broadcast(self, task: Task) -> None:
        """Has every process do the task. Exception, UserError: as of `run`."""
        for connection in self.children:
            with self._alive(connection):
                connection.send(task)
        for connection in self.children:
            with self._alive(connection):
                answer = connection.recv()
            if isinstance(answer, Exception):
                raise answer

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Any]]:
        """Hands out the tasks in order, one to each process at a time; yields (index of the task, answer) as they come.
        Exception: that of the first task that failed, as if there were one process. UserError: a process died."""
        remaining = iter(enumerate(tasks))
        busy: dict[Connection, int] = {}
        failed: dict[int, Exception] = {}

        def hand_out(connection: Connection) -> None:
            index, task = next(remaining, (-1, None))
            if task is not None:
                busy[connection] = index
                with self._alive(connection):
                    connection.send(task)

        for connection in self.children:
            hand_out(connection)
        while busy:
            for connection in cast(list[Connection], wait(busy)):
                with self._alive(connection):
                    answer = connection.recv()
                index = busy.pop(connection)
                if isinstance(answer, Exception):
                    failed[index] = answer
                else:
                    yield index, answer
                if not failed:  # else only earlier tasks are waited for, which may fail too
                    hand_out(connection)
        if failed:
            raise failed[min(failed)]

    def run_in_order(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """As `run`, the answers in the order of the tasks; those that come too early are kept."""
        early: dict[int, Any] = {}
        number = 0
        for index, answer in self.run(tasks):
            early[index] = answer
            while number in early:
                yield early.pop(number)
                number += 1

    @contextmanager
    def _alive(self, connection: Connection) -> Iterator[None]:
        """UserError where the process at the other end has died."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            code = self.children[connection].wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
            hint = "read the messages before this one, and check whether memory was short; "
            raise UserError(f"{self.name} {how}", hint=f"{hint}{self.alone} does without such processes") from error
