"""Datasets in cache files: found, checked by all workers of a host together, created where there is none.

The name of a file is a digest of everything that its content depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.cache_file import NO_CRC, CacheFile, CacheMetadata, CorruptCacheError, write_cache
from ddnn.data.dataset import AcousticDataset, DataConfig, frame_labels, make_dataset, utterance_offsets
from ddnn.data.index import UtteranceIndex, build_index, check_skipped
from ddnn.data.loading import LoadRequest, load_into_file
from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.data_dir import DataDir, read_data_dir
from ddnn.util.errors import DataError
from ddnn.util.system import available_memory

log = logging.getLogger(__name__)

VERSION = 2
"""Of the file's format, and of what loading makes of the same input."""
SUFFIX = ".features.safetensors"

_ALIGNMENT_FILE = re.compile(r"ali\.[0-9]+\.gz|final\.mdl|num_jobs")


def cache_key(directory: DataDir, alignments: Path, config: DataConfig) -> str | None:
    """SHA-256, in hexadecimal, over: the utterances of `feats.scp` with path, offset and range of each; speakers;
    `cmvn.scp`; size and modification time of each archive that they name; the alignment's files, byte for byte; and
    what the config says about features and pdfs.

    None where an entry is a shell command, or a file cannot be read (whoever reads it next says why).
    """
    options = {"version": VERSION, **asdict(config.features), "num_pdfs": config.num_pdfs}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    archives: dict[Path, str] = {}
    try:
        for entry in (*directory.entries, *(directory.cmvn or {}).values()):
            if entry.path is None:
                return None
            if entry.path not in archives:
                found = entry.path.stat()
                archives[entry.path] = f"{entry.path.absolute()} {found.st_size} {found.st_mtime_ns}"
            line = f"{entry.key} {entry.offset} {entry.rows} {entry.columns} {archives[entry.path]}\n"
            digest.update(line.encode(errors="surrogateescape"))
        digest.update(f"cmvn.scp {directory.cmvn is not None}, utt2spk {directory.speakers is not None}\n".encode())
        for utterance, speaker in (directory.speakers or {}).items():
            digest.update(f"{utterance} {speaker}\n".encode())
        for path in _alignment_files(alignments):
            content = hashlib.sha256()
            with path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    content.update(block)
            digest.update(f"{path.name} {content.hexdigest()}\n".encode(errors="surrogateescape"))
    except OSError:
        return None
    return digest.hexdigest()


def _alignment_files(path: Path) -> list[Path]:
    """Regular files only: reading a pipe in their place would wait forever."""
    if path.is_dir():
        return sorted(p for p in path.iterdir() if _ALIGNMENT_FILE.fullmatch(p.name) and p.is_file())
    if not path.is_file():
        raise FileNotFoundError(path)
    return [path]


def open_or_create_cache(
    directory: DataDir, alignments: Path, config: DataConfig, comm: Communicator
) -> tuple[UtteranceIndex, CacheFile] | None:
    """All workers get the same index from a cache file, which is created first where it is missing, or none does.
    Collective.

    Raises:
        DataError: damaged or unsuitable input. What is wrong with the cache is a warning.
    """
    assert config.cache_dir is not None
    key = cache_key(directory, alignments, config)
    keys = comm.all_gather_object(key)
    if key is None or any(other != key for other in keys):
        if comm.rank == 0:
            reason = "shell commands" if key is None else "hosts whose archives have other paths, sizes or times"
            log.warning("%s: no cache for %s", directory.path, reason)
        return None
    path = config.cache_dir / f"{key[:32]}{SUFFIX}"
    cache, created = _find_or_create(path, key, directory, alignments, config, comm)
    if cache is None:
        return None
    entries = tuple(directory.entries[n] for n in cache.selected.tolist())
    counts, metadata = dict(cache.metadata.counts), cache.metadata
    if comm.rank == 0 and not created:  # the worker that created it has checked
        check_skipped(directory, alignments, entries, counts, config.max_skipped_fraction)
    index = UtteranceIndex(
        directory,
        entries,
        np.array(cache.num_frames),
        metadata.dim,
        entries[0].key,
        metadata.pdfs,
        np.array(cache.pdf_counts),
        counts=counts,
    )
    return index, cache


def _find_or_create(
    path: Path, key: str, directory: DataDir, alignments: Path, config: DataConfig, comm: Communicator
) -> tuple[CacheFile | None, bool]:
    """The cache file, checked by the workers of each host together. Where a host has none, rank 0 creates it, which
    serves all hosts if they share the directory, and then the first worker of each host that still has none.

    Returns:
        the file, or None where it could not be created; whether this worker created it.
    """
    tried = False
    for builder in (comm.rank == 0, comm.local_rank == 0, False):
        cache = _open_checked(path, key, len(directory.entries), config, comm)
        found = comm.all_gather_object([comm.host, cache is not None])
        if all(valid for _, valid in found):
            return cache, tried
        if builder and not tried and not all(valid for host, valid in found if host == comm.host):
            tried = True
            _create(path, key, directory, alignments, config, comm)
        comm.barrier()
    return None, tried


def _open_checked(path: Path, key: str, entries: int, config: DataConfig, comm: Communicator) -> CacheFile | None:
    """The file mapped, and this worker's share of it checked; None, with a warning where there is a file."""
    started, cache = time.perf_counter(), None
    try:
        cache = CacheFile(path, key)
        cache.check(entries, config.processes(comm), comm.local_rank, comm.local_size)
        log.info("cache: mapped %s (%.2f GB in %.2f s)", path, cache.size / 1e9, time.perf_counter() - started)
        return cache
    except FileNotFoundError:
        return None
    except CorruptCacheError as error:
        log.warning("cache: %s is damaged (%s); loading from the archives", path, error)
    except OSError as error:
        log.warning("cache: %s cannot be read (%s); loading from the archives", path, error.strerror)
    if cache is not None:
        cache.close()
    return None


def _create(path: Path, key: str, directory: DataDir, alignments: Path, config: DataConfig, comm: Communicator) -> None:
    """Loads the whole data dir into a cache file; where that cannot be written, a warning says why."""
    aligned = read_alignments(alignments, num_pdfs=config.num_pdfs)
    index = build_index(directory, aligned, max_skipped_fraction=config.max_skipped_fraction)
    processes = config.processes(comm) * comm.local_size  # the others wait
    request = LoadRequest(index, config.features, processes, config.progress)
    spec, context = request.spec, config.features.splice
    place = {entry.key: n for n, entry in enumerate(directory.entries)}
    selected = np.array([place[name] for name in index.utterances], np.int64)
    labels = frame_labels(index, context).numpy()
    metadata = CacheMetadata(
        key=key,
        data=str(directory.path),
        dim=index.dim,
        width=spec.width,
        context=context,
        dtype="float16" if config.features.dtype == "float16" else "float32",
        utterances=len(index.entries),
        rows=request.rows,
        pdfs=aligned.num_pdfs,
        counts=index.counts,
        blocks=[],
    )
    sizes = [metadata.index_bytes, *(chunk.rows * spec.row_bytes for chunk in request.chunks())]
    metadata = metadata.model_copy(update={"blocks": [(size, NO_CRC) for size in sizes]})

    def write_features(descriptor: int, start: int) -> list[tuple[int, int]]:
        blocks = load_into_file(request, descriptor, start)
        if cache_key(read_data_dir(directory.path, allow_pipes=config.allow_pipes), alignments, config) != key:
            raise OSError("the data changed while they were read")
        return blocks

    started = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cache(path, metadata, (labels, selected, index.num_frames, index.pdf_counts), write_features)
        log.info("cache: wrote %s in %.1f s", path, time.perf_counter() - started)
    except OSError as error:
        log.warning("cache: cannot write %s (%s); loading without it", path, error.strerror or error)


def load_from_cache(cache: CacheFile, index: UtteranceIndex, utterances: Sequence[int]) -> AcousticDataset:
    """The whole dataset as it is in the file; a shard is copied out of it, as if loaded by itself.

    Raises:
        DataError: the file failed while it was read.
    """
    metadata = cache.metadata
    if len(utterances) == len(index.entries):
        available = available_memory()
        if available is not None and metadata.feature_bytes > available:
            log.warning(
                "cache: %.1f GiB of frames, %.1f GiB of memory are available: they will be read from disk again and "
                "again; data.feature_dtype: float16 needs half",
                *(metadata.feature_bytes / 2**30, available / 2**30),
            )
        features, labels = _as_tensor(cache.features), _as_tensor(cache.labels)
    else:
        try:
            features, labels = _copy_shard(cache, index, utterances)
        except (CorruptCacheError, OSError) as error:
            raise DataError(
                f"the cache file failed while it was read: {error}",
                location=cache.path,
                hint="start again; do not change the cache while it is read",
            ) from error
    return make_dataset(index.subset(utterances), features, labels, metadata.context)


def _copy_shard(cache: CacheFile, index: UtteranceIndex, utterances: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows of these utterances, each with its edges, one after another."""
    context, row, chosen = cache.metadata.context, 0, np.asarray(utterances, dtype=np.int64)
    lengths = index.num_frames[chosen] + 2 * context
    starts = utterance_offsets(index.num_frames, context)[chosen] - context
    features = np.empty((int(lengths.sum()), cache.metadata.width), cache.metadata.dtype)
    labels = np.empty(len(features), np.int32)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        cache.copy_rows(start, features[row : row + length])
        labels[row : row + length] = cache.labels[start : start + length]
        row += length
    return torch.from_numpy(features), torch.from_numpy(labels)


def _as_tensor(array: NDArray[np.generic]) -> Tensor:
    """The mapped array itself, which nobody writes into."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
