"""All features of some utterances into a store, by this process or by several."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.fill import Chunk, Preparation, Stats, chunks, fill, of_speakers, write_chunk
from ddnn.data.loader_process import fill_line, stats_line, stats_of_answer
from ddnn.data.loaders import Loaders, worthwhile_processes
from ddnn.data.shards import shards
from ddnn.errors import DataError
from ddnn.kaldi.datadir import DataDir, compute_cmvn_stats, speaker_cmvn_stats
from ddnn.kaldi.tables import MatrixReader, ScpEntry
from ddnn.parallel.exchange import Exchange

log = logging.getLogger(__name__)

SPEAKERS_OF_A_TASK = 4
"""Whose CMVN statistics a loading process takes before it answers."""

Progress = Callable[[Sequence[ScpEntry]], Iterable[ScpEntry]]
"""Wraps the utterances while they are read."""


@dataclass(frozen=True)
class Loading:
    """What to load and how.

    Attributes:
        directory: the data dir, whose utterances give the CMVN statistics.
        entries: the utterances to load.
        num_frames: (utterances,) int64, of each.
        speakers: of each; None where they are not known.
        preparation: what happens to the features.
        processes: how many may load; there are fewer where the features do not pay for them.
        progress: wraps the utterances while they are read.
        exchange: shares the work on CMVN statistics with the other workers, who load at the same time. Collective.
        cmvn_of: the speakers whose statistics any worker needs; None: all of the data dir's.
    """

    directory: DataDir
    entries: tuple[ScpEntry, ...]
    num_frames: NDArray[np.int64]
    speakers: tuple[str, ...] | None
    preparation: Preparation
    processes: int = 1
    progress: Progress = iter
    exchange: Exchange | None = None
    cmvn_of: frozenset[str] | None = None

    @property
    def rows(self) -> int:
        """Store rows, edges among them."""
        return int(self.num_frames.sum()) + 2 * self.preparation.context * len(self.entries)

    @property
    def worthwhile(self) -> int:
        """The processes that pay."""
        return worthwhile_processes(self.processes, 4 * self.rows * self.preparation.width)


def load_into_memory(loading: Loading) -> Tensor:
    """The store: (rows, width), of the store's dtype.

    Several processes fill memory that has no name anywhere and is gone with its last user.

    Raises:
        DataError: damaged or unfit features. UserError: a loading process died.
    """
    preparation, rows = loading.preparation, loading.rows
    if loading.worthwhile == 1:
        store = torch.empty((rows, preparation.width), dtype=getattr(torch, preparation.dtype))
        _load(loading, store.numpy(), None, 0)
        return store
    with _nameless_file() as descriptor:
        os.ftruncate(descriptor, rows * preparation.row_bytes)
        _load(loading, None, descriptor, 0)
        mapped = mmap.mmap(descriptor, rows * preparation.row_bytes)
    return torch.from_numpy(np.frombuffer(mapped, preparation.dtype).reshape(rows, preparation.width))


def load_into_file(loading: Loading, descriptor: int, start: int) -> list[tuple[int, int]]:
    """Writes the store into an open file, from byte `start` on; (bytes, CRC-32) of one piece after another.

    Raises:
        DataError: damaged or unfit features. UserError: a loading process died. OSError: the file cannot be written.
    """
    return _load(loading, None, descriptor, start)


class _nameless_file:
    """Descriptor of memory that processes can share."""

    def __enter__(self) -> int:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("ddnn store")
        else:
            self.descriptor, name = tempfile.mkstemp()
            os.unlink(name)  # noqa: PTH108 (there is no Path yet)
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def _load(
    loading: Loading, out: NDArray[np.generic] | None, descriptor: int | None, start: int
) -> list[tuple[int, int]]:
    preparation, started = loading.preparation, time.perf_counter()
    with_cmvn = preparation.cmvn != "none"
    speakers = loading.speakers if with_cmvn else None
    todo = chunks(loading.entries, loading.num_frames, speakers, preparation)
    sums = [0] * len(todo)
    advance = _advancing(loading)
    with ExitStack() as block:
        loaders = None
        if loading.worthwhile > 1:
            loaders = block.enter_context(Loaders(loading.worthwhile, preparation, descriptor, start))
        stats = _cmvn_stats(loading, loaders) if with_cmvn else {}
        if loaders is not None:
            for index, answer in loaders.run(fill_line(chunk, stats) for chunk in todo):
                sums[index] = answer["crc"]
                advance(todo[index])
        else:
            reader = block.enter_context(MatrixReader())
            for index, chunk in enumerate(todo):
                if out is not None:
                    fill(out[chunk.row : chunk.row + chunk.rows], chunk, stats, preparation, reader)
                else:
                    assert descriptor is not None
                    sums[index] = write_chunk(descriptor, start, chunk, stats, preparation, reader)
                advance(chunk)
    advance(None)
    seconds, size = time.perf_counter() - started, 4 * loading.rows * preparation.width
    level = logging.INFO if seconds > 1 or loading.worthwhile > 1 else logging.DEBUG
    log.log(
        level,
        "%s: loaded %.2f GB of float32 in %.1f s by %d process(es), %.2f GB/s",
        *(loading.directory.path, size / 1e9, seconds, loading.worthwhile, size / 1e9 / max(seconds, 1e-9)),
    )
    return [(chunk.rows * preparation.row_bytes, crc) for chunk, crc in zip(todo, sums, strict=True)]


def _advancing(loading: Loading) -> Callable[[Chunk | None], None]:
    """Moves the bar on by a chunk; None: to its end."""
    ticks = iter(loading.progress(loading.entries))

    def advance(chunk: Chunk | None) -> None:
        for _ in range(len(chunk.entries) if chunk is not None else 1):
            next(ticks, None)

    return advance


def _cmvn_stats(loading: Loading, loaders: Loaders | None) -> Stats:
    """Of all speakers of `loading.entries` at least."""
    directory, exchange = loading.directory, loading.exchange
    wanted = set(loading.speakers or ())
    speaker_of = directory.speaker_of("data.cmvn")
    if directory.cmvn is not None:
        kept = {utterance: speaker for utterance, speaker in speaker_of.items() if speaker in wanted}
        entries = tuple(entry for entry in directory.entries if entry.key in kept)
        return speaker_cmvn_stats(DataDir(directory.path, entries, kept, directory.cmvn))
    if loading.cmvn_of is not None and exchange is not None and exchange.size > 1:
        wanted = set(loading.cmvn_of)
    of = {speaker: entries for speaker, entries in of_speakers(directory.entries, speaker_of) if speaker in wanted}
    names = list(of)
    if exchange is None or exchange.size == 1 or loading.cmvn_of is None:
        return _computed(of, loaders, loading)
    utterances = np.array([len(of[name]) for name in names], np.int64)
    mine = {names[n]: of[names[n]] for n in shards(utterances, range(len(names)), exchange.size)[exchange.rank]}
    return _of_all_workers(names, _computed(mine, loaders, loading), loading.preparation.dim, exchange)


def _of_all_workers(names: list[str], mine: Stats, dim: int, exchange: Exchange) -> Stats:
    """Every worker's statistics, of speakers that no other has: a sum with zeros changes no bit."""
    together = torch.zeros(len(names), 2, dim + 1, dtype=torch.float64)
    for n, name in enumerate(names):
        if name in mine:
            together[n] = torch.from_numpy(mine[name])
    exchange.sum_in_place(together)
    return {name: stats for name, stats in zip(names, together.numpy(), strict=True) if stats[0, dim]}


def _computed(of: dict[str, list[ScpEntry]], loaders: Loaders | None, loading: Loading) -> Stats:
    """CMVN statistics of these speakers from their features."""
    found: dict[str, NDArray[np.float64]] = {}
    if loaders is None:
        speaker_of = {entry.key: speaker for speaker, entries in of.items() for entry in entries}
        entries = [entry for entry in loading.directory.entries if entry.key in speaker_of]
        found.update(compute_cmvn_stats(entries, speaker_of))
    else:
        names = list(of)
        groups = (names[first : first + SPEAKERS_OF_A_TASK] for first in range(0, len(names), SPEAKERS_OF_A_TASK))
        for _, answer in loaders.run(stats_line({name: of[name] for name in group}) for group in groups):
            found.update(stats_of_answer(answer))
    for speaker, stats in found.items():
        if stats.shape[1] != loading.preparation.dim + 1:
            raise DataError(
                f"speaker {speaker}: features of {stats.shape[1] - 1} dims found, {loading.preparation.dim} expected",
                where=loading.directory.path / "feats.scp",
                mend="all utterances of a data dir must have features of one kind",
            )
    return found
