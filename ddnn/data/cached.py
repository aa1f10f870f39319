"""A corpus from its cache file: found, checked by all workers of a host together, made where there is none."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.cache_file import CacheDamaged, CacheFile, Footer, Index, write_cache
from ddnn.data.cache_key import cache_key
from ddnn.data.corpus import Corpus, FeaturePipeline, first_rows, labels_of, preparation_of
from ddnn.data.loading import Loading, Progress, load_into_file
from ddnn.data.memory import available_memory, require_memory
from ddnn.data.plan import CorpusPlan, check_missing, plan_directory, plan_of
from ddnn.kaldi.alignments import pdf_counts, read_alignments
from ddnn.kaldi.datadir import DataDir, read_data_dir
from ddnn.parallel.exchange import Exchange

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a corpus is read: the keys of a recipe's `data` that concern it.

    Attributes:
        context: `splice`. store: `float32` or `float16`.
        cache: directory of cache files; None: none.
        processes: how many may load for this worker.
    """

    context: int
    pipeline: FeaturePipeline
    store: str
    pdfs: int | None = None
    allow_pipes: bool = False
    max_missing: float = 0.05
    cache: Path | None = None
    processes: int = 1
    progress: Progress = iter


def open_cached(
    data: Path, alignments: Path, options: Options, exchange: Exchange
) -> tuple[CorpusPlan, CacheFile] | None:
    """All workers get the same plan from a cache file, made first where it is missing; or none gets one. Collective.

    Raises:
        DataError: damaged or unfit input. What is wrong with the cache is a warning.
    """
    assert options.cache is not None
    directory = read_data_dir(data, allow_pipes=options.allow_pipes)
    key = _key(directory, alignments, options)
    keys = exchange.gather(key)
    if key is None or any(other != key for other in keys):
        if exchange.rank == 0:
            why = "shell commands" if key is None else "hosts whose archives have other paths, sizes or times"
            log.warning("%s: no cache for %s", data, why)
        return None
    path = options.cache / f"{key[:32]}.corpus"
    cached, made = _find_or_make(path, key, directory, alignments, options, exchange)
    if cached is None:
        return None
    counts, index = dict(cached.footer.counts), cached.index
    plan = plan_of(directory, index.kept, np.array(index.num_frames), cached.footer.dim, counts)
    if exchange.rank == 0 and not made:  # who made the file has said it
        check_missing(directory, alignments, plan.entries, counts, options.max_missing)
    return plan, cached


def _key(directory: DataDir, alignments: Path, options: Options) -> str | None:
    pipeline = options.pipeline
    of: dict[str, str | int | None] = {"cmvn": pipeline.cmvn, "deltas": pipeline.deltas, "context": options.context}
    return cache_key(directory, alignments, {**of, "store": options.store, "pdfs": options.pdfs})


def _find_or_make(
    path: Path, key: str, directory: DataDir, alignments: Path, options: Options, exchange: Exchange
) -> tuple[CacheFile | None, bool]:
    """The cache file, checked by the workers of each host together. Where a host has none the first worker makes it,
    which serves all hosts if they share the directory, and then the first of each host that still lacks one.

    Returns:
        the file, or None where it could not be made; whether this worker made it.
    """
    tried = False
    for builder in (exchange.rank == 0, exchange.local_rank == 0, False):
        cached = _checked(path, key, len(directory.entries), options, exchange)
        found = exchange.gather([exchange.host, cached is not None])
        if all(good for _, good in found):
            return cached, tried
        if builder and not tried and not all(good for host, good in found if host == exchange.host):
            tried = True
            _make(path, key, directory, alignments, options, exchange)
        exchange.barrier()
    return None, tried


def _checked(path: Path, key: str, entries: int, options: Options, exchange: Exchange) -> CacheFile | None:
    """The file mapped, and this worker's share of it found whole; None, with a warning where there is a file."""
    started, cached = time.perf_counter(), None
    try:
        cached = CacheFile(path, key)
        cached.check(entries, options.processes, exchange.local_rank, exchange.local_size)
        seconds = time.perf_counter() - started
        log.info("cache: mapped %s (%.2f GB in %.2f s)", path, cached.size / 1e9, seconds)
        return cached
    except FileNotFoundError:
        return None
    except CacheDamaged as damage:
        log.warning("cache: %s is damaged (%s); loading anew", path, damage)
    except OSError as error:
        log.warning("cache: %s cannot be read (%s); loading anew", path, error.strerror)
    if cached is not None:
        cached.close()
    return None


def _make(path: Path, key: str, directory: DataDir, alignments: Path, options: Options, exchange: Exchange) -> None:
    """Loads the whole data dir into a cache file; where that cannot be written, a warning says why."""
    aligned = read_alignments(alignments, num_pdfs=options.pdfs)
    plan = plan_directory(directory, aligned, options.max_missing)
    preparation = preparation_of(plan, options.pipeline, options.context, getattr(torch, options.store))
    place = {entry.key: n for n, entry in enumerate(directory.entries)}
    index = Index(
        kept=np.array([place[name] for name in plan.utterances], np.int64),
        num_frames=plan.num_frames,
        pdf_counts=pdf_counts(aligned, plan.utterances),
        labels=labels_of(aligned, plan.utterances, plan.num_frames, options.context).numpy(),
    )
    loading = Loading(
        directory,
        plan.entries,
        plan.num_frames,
        plan.speakers,
        preparation,
        processes=options.processes * exchange.local_size,  # the others wait
        progress=options.progress,
    )
    footer = Footer(
        data=str(directory.path),
        dim=plan.dim,
        width=preparation.width,
        context=options.context,
        dtype="float16" if preparation.dtype == "float16" else "float32",
        utterances=len(plan.entries),
        rows=loading.rows,
        pdfs=aligned.num_pdfs,
        counts=plan.counts,
        pieces=[],
    )

    def write_store(file: int, start: int) -> list[tuple[int, int]]:
        pieces = load_into_file(loading, file, start)
        if _key(read_data_dir(directory.path), alignments, options) != key:
            raise OSError("the data changed while they were read")
        return pieces

    started = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cache(path, key, footer, index, write_store)
        log.info("cache: wrote %s in %.1f s", path, time.perf_counter() - started)
    except OSError as error:
        log.warning("cache: cannot write %s (%s); loading without it", path, error.strerror or error)


def from_cache(cached: CacheFile, plan: CorpusPlan, shard: Sequence[int], exchange: Exchange) -> Corpus:
    """The whole corpus as it lies in the file; a shard is copied out of it, to lie as if loaded by itself.

    Raises:
        DataError: not enough memory for the shard. CacheDamaged, OSError: the file failed while it was read.
    """
    of, context = cached.footer, cached.footer.context
    chosen = np.asarray(shard, dtype=np.int64)
    names = tuple(plan.entries[u].key for u in shard)
    speakers = None if plan.speakers is None else tuple(plan.speakers[u] for u in shard)
    num_frames = plan.num_frames[chosen]
    if len(shard) == len(plan.entries):
        available = available_memory()
        if available is not None and of.store_bytes > available:
            log.warning(
                "cache: %.1f GiB of frames, %.1f GiB of memory are available: they will be read from disk again and "
                "again; data.store: float16 needs half",
                *(of.store_bytes / 2**30, available / 2**30),
            )
        store, labels = _as_tensor(cached.store), _as_tensor(cached.index.labels)
    else:
        rows = int(num_frames.sum()) + 2 * context * len(shard)
        require_memory(
            rows * (of.store_bytes // max(of.rows, 1) + 4),
            what=f"{int(num_frames.sum())} frames of {of.width} dims",
            where=plan.directory.path,
            workers=exchange.local_size,
        )
        store = torch.empty((rows, of.width), dtype=getattr(torch, of.dtype))
        labels = torch.empty(rows, dtype=torch.int32)
        _copy_shard(cached, plan, chosen, store, labels)
    first = first_rows(num_frames, context)
    return Corpus(store, labels, names, speakers, first, num_frames, context, plan.counts)


def _copy_shard(cached: CacheFile, plan: CorpusPlan, shard: NDArray[np.int64], store: Tensor, labels: Tensor) -> None:
    """The rows of the shard's utterances, each with its edges, one after another."""
    context = cached.footer.context
    starts = first_rows(plan.num_frames, context)[shard] - context
    lengths = plan.num_frames[shard] + 2 * context
    row = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        cached.copy_rows(start, store.numpy()[row : row + length])
        labels[row : row + length] = torch.from_numpy(cached.index.labels[start : start + length].copy())
        row += length


def _as_tensor(array: NDArray[np.generic]) -> Tensor:
    """The mapped array itself, which nobody writes into."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
