"""All features of some utterances into memory or into a file, read by this process or by several.

Loading processes are started from scratch, never forked (MPI and CUDA may be in use), and get their tasks over pipes:
`ddnn.data.feature_reader` says how. They are ended together with the block that uses them.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddnn.data.feature_reader import (
    Chunk,
    FeatureConfig,
    FeatureSpec,
    Stats,
    chunk_message,
    error_from_answer,
    make_chunks,
    read_chunk,
    setup_message,
    stats_from_answer,
    stats_message,
    write_chunk,
)
from ddnn.data.index import UtteranceIndex
from ddnn.data.partition import assign_shards
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.archive import MatrixReader
from ddnn.kaldi.data_dir import DataDir, compute_cmvn_stats, speaker_cmvn_stats
from ddnn.kaldi.scp import ScpEntry
from ddnn.util.errors import DataError, UserError

log = logging.getLogger(__name__)

SPEAKERS_PER_TASK = 4
"""Whose CMVN statistics a loading process computes before it answers."""

BYTES_PER_PROCESS = 512 << 20
"""Of float32 features: what makes up for the start of a process, a third of a second."""

MAX_PROCESSES = 8
"""Unless the recipe says another number."""

ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # nothing in the working directory is a module of ours
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc keeps memory that was used: asking the system for it again for each utterance costs more than decompressing
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Of a loading process."""

Progress = Callable[[Sequence[ScpEntry]], Iterable[ScpEntry]]
"""Wraps the utterances while they are read."""


@dataclass(frozen=True)
class LoadRequest:
    """What to load and how.

    Attributes:
        index: the utterances to load, whose data dir gives the CMVN statistics.
        processes: how many may load; fewer are used where there are not enough features for them.
        progress: wraps the utterances while they are read.
        comm: divides the work on CMVN statistics among the workers, who all load at the same time. Collective.
        cmvn_speakers: of several workers, the speakers whose statistics any of them needs.
    """

    index: UtteranceIndex
    features: FeatureConfig
    processes: int = 1
    progress: Progress = iter
    comm: Communicator = field(default_factory=SingleProcess)
    cmvn_speakers: tuple[str, ...] | None = None

    @property
    def spec(self) -> FeatureSpec:
        """What is made of the features."""
        index = self.index
        return FeatureSpec(index.directory.path, index.reference_utterance, index.dim, self.features)

    @property
    def rows(self) -> int:
        """Number of rows, edges included."""
        return int(self.index.num_frames.sum()) + 2 * self.features.splice * len(self.index.entries)

    def chunks(self) -> list[Chunk]:
        """The utterances in chunks, each of which is read at once."""
        speakers = None if self.features.cmvn == "none" else self.index.speakers
        return make_chunks(self.index.entries, self.index.num_frames, speakers, self.spec)

    @property
    def effective_processes(self) -> int:
        """The processes that are worth their start; 1: only this one."""
        return effective_processes(self.processes, 4 * self.rows * self.spec.width)


def default_processes(workers_on_host: int = 1) -> int:
    """Default of `data.loader_processes`: the usable cores, up to 8, divided among the workers of the host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_PROCESSES) // workers_on_host)


def effective_processes(wanted: int, float32_bytes: int) -> int:
    """How many of the wanted processes are worth their start for this amount of features."""
    return max(1, min(wanted, float32_bytes // BYTES_PER_PROCESS))


def load_into_memory(request: LoadRequest) -> NDArray[Any]:
    """All rows, (rows, width), of the config's dtype.

    Several processes fill anonymous memory, which is freed with its last user.

    Raises:
        DataError: damaged or unsuitable features. UserError: a loading process died.
    """
    spec, rows = request.spec, request.rows
    if request.effective_processes == 1:
        features = np.empty((rows, spec.width), spec.config.dtype)
        _load(request, features, None, 0)
        return features
    with _anonymous_shared_memory() as descriptor:
        os.ftruncate(descriptor, rows * spec.row_bytes)
        _load(request, None, descriptor, 0)
        mapped = mmap.mmap(descriptor, rows * spec.row_bytes)
    return np.frombuffer(mapped, spec.config.dtype).reshape(rows, spec.width)


def load_into_file(request: LoadRequest, descriptor: int, start: int) -> list[tuple[int, int]]:
    """Writes all rows into an open file, from byte `start` on; returns (bytes, CRC-32) of one block after another.

    Raises:
        DataError: damaged or unsuitable features. UserError: a loading process died. OSError: the file cannot be
            written.
    """
    return _load(request, None, descriptor, start)


@contextmanager
def _anonymous_shared_memory() -> Iterator[int]:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("ddnn features")
    else:
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)  # noqa: PTH108 (there is no Path yet)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _load(request: LoadRequest, out: NDArray[Any] | None, descriptor: int | None, start: int) -> list[tuple[int, int]]:
    started, spec = time.perf_counter(), request.spec
    chunks = request.chunks()
    advance = _progress_callback(request)
    checksums = [0] * len(chunks)
    with ExitStack() as stack:
        pool = None
        if request.effective_processes > 1:
            pool = stack.enter_context(LoaderPool(request.effective_processes, spec, descriptor, start))
        stats = {} if spec.config.cmvn == "none" else _cmvn_stats(request, pool)
        if pool is not None:
            for n, answer in pool.run(chunk_message(chunk, stats) for chunk in chunks):
                checksums[n] = answer["crc"]
                advance(chunks[n])
        else:
            reader = stack.enter_context(MatrixReader())
            for n, chunk in enumerate(chunks):
                if out is not None:
                    read_chunk(out[chunk.row : chunk.row + chunk.rows], chunk, stats, spec, reader)
                elif descriptor is not None:
                    checksums[n] = write_chunk(descriptor, start, chunk, stats, spec, reader)
                advance(chunk)
    advance(None)
    _log_speed(request, time.perf_counter() - started)
    return [(chunk.rows * spec.row_bytes, crc) for chunk, crc in zip(chunks, checksums, strict=True)]


def _log_speed(request: LoadRequest, seconds: float) -> None:
    size, processes = 4e-9 * request.rows * request.spec.width, request.effective_processes
    log.log(
        logging.INFO if seconds > 1 or processes > 1 else logging.DEBUG,
        "%s: loaded %.2f GB of float32 in %.1f s by %d process(es), %.2f GB/s",
        *(request.index.directory.path, size, seconds, processes, size / max(seconds, 1e-9)),
    )


def _progress_callback(request: LoadRequest) -> Callable[[Chunk | None], None]:
    """Advances the progress bar by a chunk; None: to its end."""
    steps = iter(request.progress(request.index.entries))

    def advance(chunk: Chunk | None) -> None:
        for _ in range(len(chunk.entries) if chunk is not None else 1):
            next(steps, None)

    return advance


def _cmvn_stats(request: LoadRequest, pool: LoaderPool | None) -> Stats:
    """Of all speakers of `request.index` at least."""
    directory, comm = request.index.directory, request.comm
    wanted = set(request.index.speakers or ())
    speaker_of = directory.speaker_of("data.cmvn")
    if directory.cmvn is not None:
        selected = {utterance: speaker for utterance, speaker in speaker_of.items() if speaker in wanted}
        entries = tuple(entry for entry in directory.entries if entry.key in selected)
        return speaker_cmvn_stats(DataDir(directory.path, entries, selected, directory.cmvn))
    if comm.world_size > 1:
        wanted = set(request.cmvn_speakers or ())
    by_speaker: dict[str, list[ScpEntry]] = {}
    for entry in directory.entries:
        if speaker_of[entry.key] in wanted:
            by_speaker.setdefault(speaker_of[entry.key], []).append(entry)
    if comm.world_size == 1:
        return _compute_stats(by_speaker, pool, request)
    names = list(by_speaker)
    utterances = np.array([len(by_speaker[name]) for name in names], np.int64)
    share = assign_shards(utterances, range(len(names)), comm.world_size)[comm.rank]
    local = _compute_stats({names[n]: by_speaker[names[n]] for n in share}, pool, request)
    return sum_over_workers(names, local, request.spec.dim, comm)


def sum_over_workers(names: list[str], local: Stats, dim: int, comm: Communicator) -> Stats:
    """Every worker's statistics, of speakers that no other worker has: a sum with zeros changes no bit. Collective."""
    total = torch.zeros(len(names), 2, dim + 1, dtype=torch.float64)
    for n, name in enumerate(names):
        if name in local:
            total[n] = torch.from_numpy(local[name])
    comm.all_reduce(total)
    return {name: stats for name, stats in zip(names, total.numpy(), strict=True) if stats[0, dim]}


def _compute_stats(by_speaker: dict[str, list[ScpEntry]], pool: LoaderPool | None, request: LoadRequest) -> Stats:
    """CMVN statistics of these speakers from their features."""
    stats: dict[str, NDArray[np.float64]] = {}
    if pool is None:
        speaker_of = {entry.key: speaker for speaker, entries in by_speaker.items() for entry in entries}
        entries = [entry for entry in request.index.directory.entries if entry.key in speaker_of]
        stats.update(compute_cmvn_stats(entries, speaker_of))
    else:
        names = list(by_speaker)
        groups = (names[first : first + SPEAKERS_PER_TASK] for first in range(0, len(names), SPEAKERS_PER_TASK))
        for _, answer in pool.run(stats_message({name: by_speaker[name] for name in group}) for group in groups):
            stats.update(stats_from_answer(answer))
    for speaker, rows in stats.items():
        if rows.shape[1] != request.spec.dim + 1:
            raise DataError(
                f"speaker {speaker}: features of {rows.shape[1] - 1} dims found, {request.spec.dim} expected",
                location=request.index.directory.path / "feats.scp",
                hint="all utterances of a data dir must have features of one kind",
            )
    return stats


class LoaderPool:
    """Loading processes; a context manager that leaves none behind, however its block ends.

    Args:
        descriptor: the open file that they write into; None where they only read.
        start: byte of the file where row 0 begins.
    """

    def __init__(self, processes: int, spec: FeatureSpec, descriptor: int | None = None, start: int = 0) -> None:
        self._processes, self._descriptor = processes, descriptor
        self._setup = setup_message(descriptor, start, spec)
        self.children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LoaderPool:
        try:
            for _ in range(self._processes):
                child = subprocess.Popen(
                    [sys.executable, "-m", "ddnn.data.feature_reader"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=() if self._descriptor is None else (self._descriptor,),
                    start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
                    env={**os.environ, **ENVIRONMENT},
                )
                self.children.append(child)
                _send(child, self._setup)
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                message = f"cannot start a loading process: {error.strerror}"
                raise UserError(message, hint="set data.loader_processes: 1") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, tasks: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Hands out the tasks in order, one to each process at a time; yields (index of the task, answer) as they come.

        Raises:
            DataError, UserError, MemoryError, OSError: that of the first task that failed, as if there were one
                process.
            UserError: a process died.
        """
        remaining = iter(enumerate(tasks))
        failed: dict[int, Exception] = {}
        with selectors.DefaultSelector() as answering:

            def hand_out(child: subprocess.Popen[bytes]) -> None:
                index, task = next(remaining, (-1, b""))
                if index >= 0:
                    answering.register(_pipe(child.stdout), selectors.EVENT_READ, (child, index))
                    _send(child, task)

            for child in self.children:
                hand_out(child)
            while answering.get_map():
                for key, _ in answering.select():
                    child, index = key.data
                    answering.unregister(key.fileobj)
                    answer = _receive(child)
                    error = error_from_answer(answer)
                    if error is not None:
                        failed[index] = error
                    else:
                        yield index, answer
                    if not failed:  # else only earlier tasks are waited for, which may fail too
                        hand_out(child)
        if failed:
            raise failed[min(failed)]

    def _end(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()
            _pipe(child.stdout).close()
            try:
                _pipe(child.stdin).close()
            except BrokenPipeError:  # of a message that was never read
                continue
        self.children.clear()


def _send(child: subprocess.Popen[bytes], line: bytes) -> None:
    try:
        _pipe(child.stdin).write(line)
        _pipe(child.stdin).flush()
    except BrokenPipeError:
        raise _died(child) from None


def _receive(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    line = _pipe(child.stdout).readline()
    if not line.endswith(b"\n"):
        raise _died(child)
    answer: dict[str, Any] = json.loads(line)
    return answer


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _died(child: subprocess.Popen[bytes]) -> UserError:
    code = child.wait()
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return UserError(
        f"a loading process {how}",
        hint="read the messages before this one, and check whether memory was short; data.loader_processes: 1 loads "
        "without such processes",
    )
