"""Datasets in cache files, which are mapped instead of loaded: found, verified by all workers of a host together, and
created if missing. A file is named after a digest of everything that its content depends on.

A file contains the features, the labels, an index in JSON with the sizes and CRC-32s of both, and the length and CRC-32 of
the index.
The checksums find damage, not malice: whoever may write into the cache directory may also write other frames.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import struct
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from ddnn.data.dataset import frame_labels
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import UtteranceIndex, check_skipped
from ddnn.data.loading import Corpus, DataConfig, effective_processes, index_corpus, load_features
from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.alignments import Alignments, read_alignments
from ddnn.kaldi.data_dir import DataDir, read_data_dir
from ddnn.kaldi.transforms import fmllr_files
from ddnn.util.errors import DataError
from ddnn.util.files import is_locked, open_regular, write_all
from ddnn.util.system import available_memory

log = logging.getLogger(__name__)

VERSION = 5  # of the file's format, and of what loading makes of the same input
SUFFIX = ".features"
MAX_INDEX_BYTES = 1 << 28
READ_BYTES = 4 << 20

_ALIGNMENT_FILE = re.compile(r"ali\.[0-9]+\.gz|final\.mdl|num_jobs")
_TRAILER = struct.Struct("<QL")  # length and CRC-32 of the index before it


class CorruptCacheError(Exception):
    """What is wrong with a cache file."""


class CacheIndex(BaseModel):
    """What a cache file holds besides features (rows, width) and labels (rows,) int32; see `UtteranceIndex`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    key: str  # `cache_key`
    dim: PositiveInt
    selected: list[int]  # which utterances of the data dir are used
    num_frames: list[PositiveInt]  # of each
    pdf_counts: list[NonNegativeInt]
    counts: dict[str, int]
    mismatch: str
    blocks: list[
        tuple[NonNegativeInt, NonNegativeInt]
    ]  # bytes and CRC-32 of the parts of the features, and of the labels

    def encode(self) -> bytes:
        """The end of a file, from the byte after the labels on."""
        text = self.model_dump_json().encode()
        return text + _TRAILER.pack(len(text), zlib.crc32(text))


def cache_key(directory: DataDir, corpus: Corpus, config: DataConfig) -> str | None:
    """SHA-256, in hexadecimal, over: the utterances of `feats.scp` with path, offset and range of each; speakers;
    `cmvn.scp`; size and modification time of each archive that they name; the alignment's files, byte for byte; and
    what the config says about features and pdfs; of Kaldi's transforms the values of final.mat, the options, and the
    files trans.*, byte for byte.

    None where an entry is a shell command, or a file cannot be read (whoever reads it next says why).
    """
    digest = hashlib.sha256()
    try:
        for fact in _facts(directory, corpus, config):
            digest.update(f"{fact}\n".encode(errors="surrogateescape"))
    except OSError:
        return None
    return digest.hexdigest()


def _facts(directory: DataDir, corpus: Corpus, config: DataConfig) -> Iterator[str]:
    yield json.dumps({"version": VERSION, **asdict(config.features), "num_pdfs": config.num_pdfs}, sort_keys=True)
    archives: dict[Path, str] = {}
    for entry in (*directory.entries, *(directory.cmvn or {}).values()):
        if entry.path is None:
            raise OSError("a shell command")
        if entry.path not in archives:
            status = entry.path.stat()
            archives[entry.path] = f"{entry.path.absolute()} {status.st_size} {status.st_mtime_ns}"
        yield f"{entry.key} {entry.offset} {entry.rows} {entry.columns} {archives[entry.path]}"
    yield f"cmvn.scp {directory.cmvn is not None}, utt2spk {directory.speakers is not None}"
    for utterance, speaker in (directory.speakers or {}).items():
        yield f"{utterance} {speaker}"
    files = [corpus.alignments]
    if corpus.alignments.is_dir():
        files = sorted(path for path in corpus.alignments.iterdir() if _ALIGNMENT_FILE.fullmatch(path.name))
    if corpus.transforms is not None:
        files += fmllr_files(corpus.transforms)
    for path in files:
        content = hashlib.sha256()
        with open_regular(path) as stream:
            while block := stream.read(1 << 20):
                content.update(block)
        yield f"{path.name} {content.hexdigest()}"


def open_or_create_cache(
    directory: DataDir, corpus: Corpus, config: DataConfig, comm: Communicator
) -> tuple[UtteranceIndex, CacheFile] | tuple[None, None]:
    """The index of a cache file, which is created first if it is missing; None on all workers if any has no valid file.
    Collective. DataError: damaged or unsuitable input. What is wrong with the cache is a warning."""
    assert config.cache_dir is not None
    key = cache_key(directory, corpus, config)
    keys = comm.all_gather_object(key)
    if key is None or any(other != key for other in keys):
        if comm.rank == 0:
            reason = "shell commands" if key is None else "hosts whose archives have other paths, sizes or times"
            log.warning("%s: no cache for %s", directory.path, reason)
        return None, None
    path = config.cache_dir / f"{key[:32]}{SUFFIX}"
    # Where a host has none, rank 0 creates it, which serves all hosts if they share the directory, and then the first
    # worker of each host that still has none.
    created = False
    for creates in (comm.rank == 0, comm.local_rank == 0, False):
        cache = _open_checked(path, key, directory, config, comm)
        hosts = comm.all_gather_object([comm.host, cache is not None])
        if cache is not None and all(valid for _, valid in hosts):
            index = cache.index(directory, corpus)
            check_skipped(index, config.max_skipped_fraction, quiet=comm.rank != 0 or created)
            return index, cache
        if creates and not created and [comm.host, False] in hosts:
            created = True
            _create(path, key, directory, corpus, config, comm)
        comm.barrier()
    return None, None


def _open_checked(path: Path, key: str, directory: DataDir, config: DataConfig, comm: Communicator) -> CacheFile | None:
    """Maps the file and verifies this worker's share of it. None if there is no file or, with a warning, no valid one."""
    started, cache = time.perf_counter(), None
    try:
        cache = CacheFile(path, key, len(directory.entries), config.features)
        cache.check(config.processes(comm), comm.local_rank, comm.local_size)
        log.info("cache: mapped %s (%.2f GB in %.2f s)", path, cache.size / 1e9, time.perf_counter() - started)
        return cache
    except FileNotFoundError:
        return None
    except (CorruptCacheError, OSError) as error:
        problem = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"is damaged ({error})"
        log.warning("cache: %s %s; loading from the archives", path, problem)
    if cache is not None:
        cache.close()
    return None


def _create(path: Path, key: str, directory: DataDir, corpus: Corpus, config: DataConfig, comm: Communicator) -> None:
    """Loads the whole data dir into a cache file, whole or not at all; two writers of the same file do not disturb each
    other. Where it cannot be written, a warning says why."""
    started, features = time.perf_counter(), config.features
    aligned = read_alignments(corpus.alignments, num_pdfs=config.num_pdfs)
    index = index_corpus(corpus, directory, aligned, config)
    labels = frame_labels(index, features.splice).numpy().tobytes()
    place = {entry.key: n for n, entry in enumerate(directory.entries)}
    feature_bytes = features.bytes(index.num_frames, index.dim)
    processes = effective_processes(config.processes(comm) * comm.local_size, feature_bytes)  # the others wait
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_file(path) as descriptor:
            room, needed = os.fstatvfs(descriptor), feature_bytes + len(labels)
            free = room.f_bavail * room.f_frsize
            if free < needed + (64 << 20):
                raise OSError(f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
            blocks = load_features(index, config, descriptor, 0, processes)
            if cache_key(read_data_dir(directory.path, allow_pipes=config.allow_pipes), corpus, config) != key:
                raise OSError("the data changed while they were read")
            stored = CacheIndex(
                key=key,
                dim=index.dim,
                selected=[place[name] for name in index.utterances],
                num_frames=index.num_frames.tolist(),
                pdf_counts=index.pdf_counts.tolist(),
                counts=index.counts,
                mismatch=index.mismatch,
                blocks=[*blocks, (len(labels), zlib.crc32(labels))],
            )
            write_all(descriptor, labels + stored.encode(), feature_bytes)
        log.info("cache: wrote %s in %.1f s", path, time.perf_counter() - started)
    except OSError as error:
        log.warning("cache: cannot write %s (%s); loading without it", path, error.strerror or error)


@contextmanager
def _temporary_file(path: Path) -> Iterator[int]:
    """A file that gets its name when the block ends without an error. Those of killed processes are removed."""
    for stale in path.parent.glob(".*.tmp"):
        with suppress(OSError):
            if is_locked(stale) is False:  # its writer holds the lock while it lives
                stale.unlink()
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            with suppress(OSError):  # a file system without locks: nothing is removed there either
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file.fileno()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class CacheFile:
    """A cache file, open and mapped, also when it is removed or replaced meanwhile. Its frames and labels are those that
    were written once `check` has passed. `entries`: utterances of the data dir. FileNotFoundError: there is none. OSError:
    it cannot be read. CorruptCacheError: it is not what was written."""

    def __init__(self, path: Path, key: str, entries: int, features: FeatureConfig) -> None:
        self.path, self.context = path, features.splice
        with open_regular(path, follow_symlinks=False) as file:
            self.size = os.fstat(file.fileno()).st_size
            self._descriptor = os.dup(file.fileno())
        try:
            self.stored, end = self._read_index()
            if self.stored.key != key:
                raise CorruptCacheError("it was made from other data")
            selected, lengths = self.stored.selected, [frames + 2 * self.context for frames in self.stored.num_frames]
            if selected != sorted(set(selected) & set(range(entries))):
                raise CorruptCacheError("its utterances are not those of the data dir")
            width = features.width(self.stored.dim)
            self.rows, self._row_bytes = sum(lengths), width * np.dtype(features.dtype).itemsize
            length = sum(size for size, _ in self.stored.blocks)
            if len(lengths) != len(selected) or not (self._row_bytes + 4) * self.rows == length == end:
                raise CorruptCacheError(f"its index describes another length than {self.size} bytes")
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            self.close()
            raise
        self.features = np.frombuffer(self._map, features.dtype, self.rows * width).reshape(self.rows, width)
        self.labels: NDArray[np.int32] = np.frombuffer(self._map, np.int32, self.rows, self.features.nbytes)
        self._starts = list(accumulate(lengths, initial=0))

    def close(self) -> None:
        """Closes the file; the arrays stay as they are."""
        os.close(self._descriptor)

    def _read_index(self) -> tuple[CacheIndex, int]:
        """The index, and the byte at which it begins."""
        trailer_start = self.size - _TRAILER.size
        if trailer_start < 0:
            raise CorruptCacheError(f"{self.size} bytes are too few")
        trailer = bytearray(_TRAILER.size)
        self.read_into(memoryview(trailer), trailer_start)
        length, crc = _TRAILER.unpack(trailer)
        if length > min(MAX_INDEX_BYTES, trailer_start):
            raise CorruptCacheError(f"an index of {length} bytes in a file of {self.size}")
        text = bytearray(length)
        self.read_into(memoryview(text), trailer_start - length)
        if zlib.crc32(text) != crc:
            raise CorruptCacheError("its index is not what was written")
        try:
            return CacheIndex.model_validate_json(text), trailer_start - length
        except ValidationError as error:
            raise CorruptCacheError("its index says something that cannot be") from error

    def index(self, directory: DataDir, corpus: Corpus) -> UtteranceIndex:
        """The utterances, whose alignments are the labels of the file."""
        stored, entries = self.stored, [directory.entries[n] for n in self.stored.selected]
        pdf_counts, starts = np.array(stored.pdf_counts, np.int64), (start + self.context for start in self._starts)
        pdfs = {
            entry.key: self.labels[start : start + frames]
            for entry, start, frames in zip(entries, starts, stored.num_frames, strict=False)
        }
        return UtteranceIndex(
            directory,
            tuple(entries),
            np.array(stored.num_frames, np.int64),
            stored.dim,
            pdf_counts,
            Alignments(pdfs, len(pdf_counts), corpus.alignments),
            stored.counts,
            stored.mismatch,
        )

    def mapped_rows(self) -> tuple[Tensor, Tensor]:
        """Features (rows, width) and labels (rows,) as they are in the file, which nobody writes into."""
        available = available_memory()
        if available is not None and self.features.nbytes > available:
            log.warning(
                "cache: %.1f GiB of frames, %.1f GiB of memory are available: they will be read from disk again and "
                "again; data.feature_dtype: float16 needs half",
                *(self.features.nbytes / 2**30, available / 2**30),
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.features), torch.from_numpy(self.labels)

    def copy_rows(self, utterances: Sequence[int], out: memoryview) -> None:
        """Fills `out` with the features of these utterances of the file. DataError: it failed while it was read."""
        at = 0
        try:
            for u in utterances:
                first, end = (row * self._row_bytes for row in self._starts[u : u + 2])
                self.read_into(out[at : at + end - first], first)
                at += end - first
        except (CorruptCacheError, OSError) as error:
            message = f"the cache file failed while it was read: {error}"
            hint = "start again; do not change the cache while it is read"
            raise DataError(message, location=self.path, hint=hint) from error

    def check(self, threads: int, share: int = 0, of: int = 1) -> None:
        """Compares every byte (or the blocks that are `share` of `of`) with its checksum. CorruptCacheError: something is
        not what was written. OSError: the disk failed."""
        starts = accumulate((size for size, _ in self.stored.blocks), initial=0)
        blocks = [(start, *block) for start, block in zip(starts, self.stored.blocks, strict=False)]
        with ThreadPoolExecutor(threads) as pool:  # preadv and crc32 release the interpreter lock
            list(pool.map(self._check_block, blocks[share::of]))

    def _check_block(self, block: tuple[int, int, int]) -> None:
        first, size, expected = block
        crc, buffer = 0, memoryview(bytearray(min(READ_BYTES, size)))
        for position in range(first, first + size, READ_BYTES):
            piece = buffer[: first + size - position]
            self.read_into(piece, position)
            crc = zlib.crc32(piece, crc)
        if crc != expected:
            raise CorruptCacheError(f"the bytes from {first} on are not those that were written")

    def read_into(self, remaining: memoryview, position: int) -> None:
        """Reads instead of using the map, where a disk that fails or a file that is cut would kill the process."""
        while len(remaining):
            read = os.preadv(self._descriptor, [remaining], position)
            if not read:
                raise CorruptCacheError("it was cut while it was read")
            remaining, position = remaining[read:], position + read
