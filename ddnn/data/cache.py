"""Datasets in cache files that are mapped instead of loaded: found, checked by all workers of a host together, created
where there is none. The name of a file is a digest of everything that its content depends on.

A file has the features, the labels, an index in JSON, and the length and CRC-32 of the index, which has those of all else.
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
from typing import Any, BinaryIO, Literal
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from ddnn.data.dataset import frame_labels, utterance_offsets
from ddnn.data.index import UtteranceIndex, check_skipped
from ddnn.data.loading import Corpus, DataConfig, FeatureLoader, index_corpus
from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.data_dir import DataDir, read_data_dir
from ddnn.kaldi.transforms import fmllr_files
from ddnn.util.errors import DataError
from ddnn.util.files import is_locked, open_regular, write_all
from ddnn.util.system import available_memory

log = logging.getLogger(__name__)

VERSION = 4  # of the file's format, and of what loading makes of the same input
SUFFIX = ".features"
MAX_INDEX_BYTES = 1 << 28
READ_BYTES = 4 << 20

_ALIGNMENT_FILE = re.compile(r"ali\.[0-9]+\.gz|final\.mdl|num_jobs")
_TRAILER = struct.Struct("<QL")  # length and CRC-32 of the index before it


class CorruptCacheError(Exception):
    """What is wrong with a cache file."""


class CacheIndex(BaseModel):
    """What a cache file holds besides features (rows, width) and labels (rows,) int32."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    key: str  # `cache_key`
    # feature dimension in the archives, and in the file
    dim: PositiveInt
    width: PositiveInt
    context: NonNegativeInt
    dtype: Literal["float32", "float16"]
    selected: list[int]  # which utterances of the data dir are used
    num_frames: list[PositiveInt]  # of each
    pdf_counts: list[NonNegativeInt]
    counts: dict[str, int]  # what was skipped or trimmed
    mismatch: str  # `UtteranceIndex.mismatch`
    blocks: list[
        tuple[NonNegativeInt, NonNegativeInt]
    ]  # bytes and CRC-32 of the parts of the features, and of the labels

    @property
    def rows(self) -> int:
        return sum(self.num_frames) + 2 * self.context * len(self.num_frames)

    @property
    def feature_bytes(self) -> int:
        return self.rows * self.width * np.dtype(self.dtype).itemsize

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
    options = {"version": VERSION, **asdict(config.features), "num_pdfs": config.num_pdfs}
    if options["transforms"] is None:  # as before there were any
        del options["transforms"]
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
        adapted = () if corpus.transforms is None else fmllr_files(corpus.transforms)
        for path in (*_alignment_files(corpus.alignments), *filter(Path.is_file, adapted)):
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
    directory: DataDir, corpus: Corpus, config: DataConfig, comm: Communicator
) -> tuple[UtteranceIndex, CacheFile] | tuple[None, None]:
    """All workers get the same index from a cache file, which is created first where it is missing, or none does.
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
        cache = _open_checked(path, key, len(directory.entries), config, comm)
        found = comm.all_gather_object([comm.host, cache is not None])
        if cache is not None and all(valid for _, valid in found):
            break
        if creates and not created and not all(valid for host, valid in found if host == comm.host):
            created = True
            _create(path, key, directory, corpus, config, comm)
        comm.barrier()
    else:
        return None, None
    stored = cache.index
    entries = tuple(directory.entries[n] for n in stored.selected)
    if comm.rank == 0 and not created:  # the worker that created it has checked
        check_skipped(
            directory, corpus.alignments, entries, stored.counts, config.max_skipped_fraction, stored.mismatch
        )
    index = UtteranceIndex(
        directory,
        entries,
        np.array(stored.num_frames, np.int64),
        stored.dim,
        entries[0].key,
        num_pdfs=len(stored.pdf_counts),
        pdf_counts=np.array(stored.pdf_counts, np.int64),
        counts=dict(stored.counts),
        mismatch=stored.mismatch,
    )
    return index, cache


def _open_checked(path: Path, key: str, entries: int, config: DataConfig, comm: Communicator) -> CacheFile | None:
    """The file mapped, and this worker's share of it checked; None, with a warning where there is a file. `entries`:
    utterances of the data dir."""
    started, cache = time.perf_counter(), None
    try:
        cache = CacheFile(path, key, entries)
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
    started = time.perf_counter()
    aligned = read_alignments(corpus.alignments, num_pdfs=config.num_pdfs)
    index = index_corpus(corpus, directory, aligned, config)
    loader = FeatureLoader(index, config, config.processes(comm) * comm.local_size)  # the others wait
    labels = frame_labels(index, config.features.splice).numpy().tobytes()
    place = {entry.key: n for n, entry in enumerate(directory.entries)}
    feature_bytes = loader.rows * loader.spec.row_bytes
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_file(path) as descriptor:
            room, needed = os.fstatvfs(descriptor), feature_bytes + len(labels)
            free = room.f_bavail * room.f_frsize
            if free < needed + (64 << 20):
                raise OSError(f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
            checksums = loader.into_file(descriptor)
            if cache_key(read_data_dir(directory.path, allow_pipes=config.allow_pipes), corpus, config) != key:
                raise OSError("the data changed while they were read")
            sizes = [chunk.rows * loader.spec.row_bytes for chunk in loader.chunks]
            stored = CacheIndex(
                key=key,
                dim=index.dim,
                width=loader.spec.width,
                context=config.features.splice,
                dtype="float16" if config.features.dtype == "float16" else "float32",
                selected=[place[name] for name in index.utterances],
                num_frames=index.num_frames.tolist(),
                pdf_counts=index.pdf_counts.tolist(),
                counts=index.counts,
                mismatch=index.mismatch,
                blocks=[*zip(sizes, checksums, strict=True), (len(labels), zlib.crc32(labels))],
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

    def __init__(self, path: Path, key: str, entries: int) -> None:
        self.path = path
        with open_regular(path, follow_symlinks=False) as file:
            self.size = os.fstat(file.fileno()).st_size
            self.index = index = _read_index(file, self.size)
            if index.key != key:
                raise CorruptCacheError("it was made from other data")
            if index.selected != sorted(set(index.selected) & set(range(entries))):
                raise CorruptCacheError("its utterances are not those of the data dir")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._descriptor = os.dup(file.fileno())
        features = np.frombuffer(mapped, index.dtype, index.rows * index.width)
        self.features: NDArray[Any] = features.reshape(index.rows, index.width)
        self.labels: NDArray[np.int32] = np.frombuffer(mapped, np.int32, index.rows, index.feature_bytes)

    def close(self) -> None:
        """Closes the file; the arrays stay as they are."""
        os.close(self._descriptor)

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

    def check(self, threads: int, share: int = 0, of: int = 1) -> None:
        """Compares every byte (or the blocks that are `share` of `of`) with its checksum. CorruptCacheError: something is
        not what was written. OSError: the disk failed."""
        starts = accumulate((size for size, _ in self.index.blocks), initial=0)
        blocks = [(start, *block) for start, block in zip(starts, self.index.blocks, strict=False)]
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


def _read_index(file: BinaryIO, size: int) -> CacheIndex:
    """The index of a file of this size, which is what the index says."""
    file.seek(max(0, size - _TRAILER.size))
    trailer = file.read(_TRAILER.size)
    if len(trailer) < _TRAILER.size:
        raise CorruptCacheError(f"{size} bytes are too few")
    length, crc = _TRAILER.unpack(trailer)
    start = size - _TRAILER.size - length
    if start < 0 or length > MAX_INDEX_BYTES:
        raise CorruptCacheError(f"an index of {length} bytes in a file of {size}")
    file.seek(start)
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise CorruptCacheError("its index is not what was written")
    try:
        index = CacheIndex.model_validate_json(text)
    except ValidationError as error:
        raise CorruptCacheError("its index says something that cannot be") from error
    if not index.feature_bytes + 4 * index.rows == sum(size for size, _ in index.blocks) == start:
        raise CorruptCacheError(f"its index describes another length than {size} bytes")
    return index


class CachedRows:
    """The rows of some utterances of an index, copied out of its cache file: a `FeatureRows`."""

    processes = 1

    def __init__(self, cache: CacheFile, index: UtteranceIndex, utterances: Sequence[int]) -> None:
        context, chosen = cache.index.context, np.asarray(utterances, dtype=np.int64)
        self.cache = cache
        starts = (utterance_offsets(index.num_frames, context)[chosen] - context).tolist()
        lengths = (index.num_frames[chosen] + 2 * context).tolist()
        self._stretches, self.rows = list(zip(starts, lengths, strict=True)), sum(lengths)

    def fill(self, out: NDArray[Any], descriptor: int | None, start: int) -> None:
        """See `FeatureRows`. DataError: the file failed while it was read."""
        row, row_bytes = 0, out.strides[0]
        try:
            for first, length in self._stretches:
                self.cache.read_into(out[row : row + length].reshape(-1).view(np.uint8).data, first * row_bytes)
                row += length
        except (CorruptCacheError, OSError) as error:
            message = f"the cache file failed while it was read: {error}"
            hint = "start again; do not change the cache while it is read"
            raise DataError(message, location=self.cache.path, hint=hint) from error

    def labels(self) -> Tensor:
        pieces = [self.cache.labels[first : first + length] for first, length in self._stretches]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *pieces]))
