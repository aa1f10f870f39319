"""Datasets in cache files that are mapped instead of loaded: found, checked by all workers of a host together, created
where there is none. The name of a file is a digest of everything that its content depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import re
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from ddnn.data.dataset import AcousticDataset, frame_labels, make_dataset, utterance_offsets
from ddnn.data.index import UtteranceIndex, check_skipped
from ddnn.data.loading import Corpus, DataConfig, FeatureLoader, index_corpus, load_rows
from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.data_dir import DataDir, read_data_dir
from ddnn.kaldi.transforms import fmllr_files
from ddnn.util.errors import DataError
from ddnn.util.files import is_locked, open_regular, write_all
from ddnn.util.system import available_memory

log = logging.getLogger(__name__)

VERSION = 3  # of the file's format, and of what loading makes of the same input
SUFFIX = ".features.safetensors"
PAGE = 4096
MAX_HEADER_BYTES = 100_000_000  # as in safetensors
READ_BYTES = 4 << 20
NO_CRC = "00000000"

_ALIGNMENT_FILE = re.compile(r"ali\.[0-9]+\.gz|final\.mdl|num_jobs")
_LENGTH = struct.Struct("<Q")
_SAFETENSORS = {"<i4": "I32", "<i8": "I64", "<f4": "F32", "<f2": "F16"}  # names of numpy's dtypes in safetensors


class CorruptCacheError(Exception):
    """What is wrong with a cache file."""


class CacheMetadata(BaseModel):
    """What a cache file holds: safetensors, whose header has this and the CRC-32 of the header itself as metadata."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    key: str  # `cache_key`
    data: str
    # feature dimension in the archives, and in the file
    dim: PositiveInt
    width: PositiveInt
    context: NonNegativeInt
    dtype: Literal["float32", "float16"]
    utterances: PositiveInt
    rows: PositiveInt
    pdfs: PositiveInt
    counts: dict[str, int]  # what was skipped or trimmed
    mismatch: str  # `UtteranceIndex.mismatch`
    # [bytes, CRC-32] of each, from the first byte after the header on
    blocks: list[tuple[NonNegativeInt, Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]]]

    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        """Name, dtype, shape, first byte and end of each, in the order of the file."""
        shapes: list[tuple[str, str, tuple[int, ...]]] = [
            ("labels", "<i4", (self.rows,)),
            ("selected", "<i8", (self.utterances,)),  # which utterances of the data dir are used
            ("num_frames", "<i8", (self.utterances,)),
            ("pdf_counts", "<i8", (self.pdfs,)),
            ("features", "<f4" if self.dtype == "float32" else "<f2", (self.rows, self.width)),
        ]
        ends = list(accumulate(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in shapes))
        return [(*tensor, start, end) for tensor, start, end in zip(shapes, [0, *ends], ends, strict=False)]

    @property
    def index_bytes(self) -> int:
        """Of all tensors before the features."""
        return self.tensors()[-1][3]

    @property
    def feature_bytes(self) -> int:
        """Of the features."""
        return self.tensors()[-1][4] - self.index_bytes

    def header(self) -> bytes:
        """The length and the header of the file, padded so that the features start at a page."""
        entries: dict[str, Any] = {"__metadata__": {"crc32": NO_CRC, "ddnn": self.model_dump_json()}}
        for name, dtype, shape, *offsets in self.tensors():
            entries[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(entries).encode()
        text += b" " * (-(_LENGTH.size + len(text) + self.index_bytes) % PAGE)
        crc = f'"crc32": "{zlib.crc32(text):08x}"'.encode()
        return _LENGTH.pack(len(text)) + text.replace(f'"crc32": "{NO_CRC}"'.encode(), crc, 1)


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
    entries = tuple(directory.entries[n] for n in cache.selected.tolist())
    metadata, counts = cache.metadata, dict(cache.metadata.counts)
    if comm.rank == 0 and not created:  # the worker that created it has checked
        check_skipped(directory, corpus.alignments, entries, counts, config.max_skipped_fraction, metadata.mismatch)
    frames, of_pdfs = np.array(cache.num_frames), np.array(cache.pdf_counts)
    dim, first, pdfs = metadata.dim, entries[0].key, metadata.pdfs
    index = UtteranceIndex(directory, entries, frames, dim, first, pdfs, of_pdfs, None, counts, metadata.mismatch)
    return index, cache


def _open_checked(path: Path, key: str, entries: int, config: DataConfig, comm: Communicator) -> CacheFile | None:
    """The file mapped, and this worker's share of it checked; None, with a warning where there is a file."""
    started, cache = time.perf_counter(), None
    try:
        cache = CacheFile(path, key)
        cache.check(entries, config.processes(comm), comm.local_rank, comm.local_size)
        if cache.metadata.width != config.features.width(cache.metadata.dim):
            raise CorruptCacheError("its features have other dims than the recipe says")
        log.info("cache: mapped %s (%.2f GB in %.2f s)", path, cache.size / 1e9, time.perf_counter() - started)
        return cache
    except FileNotFoundError:
        return None
    except (CorruptCacheError, OSError) as error:
        how = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"is damaged ({error})"
        log.warning("cache: %s %s; loading from the archives", path, how)
    if cache is not None:
        cache.close()
    return None


def _create(path: Path, key: str, directory: DataDir, corpus: Corpus, config: DataConfig, comm: Communicator) -> None:
    """Loads the whole data dir into a cache file; where that cannot be written, a warning says why."""
    aligned = read_alignments(corpus.alignments, num_pdfs=config.num_pdfs)
    index = index_corpus(corpus, directory, aligned, config)
    loader = FeatureLoader(index, config, config.processes(comm) * comm.local_size)  # the others wait
    place = {entry.key: n for n, entry in enumerate(directory.entries)}
    selected = np.array([place[name] for name in index.utterances], np.int64)
    labels = frame_labels(index, config.features.splice).numpy()
    arrays = labels, selected, index.num_frames, index.pdf_counts
    sizes = [sum(array.nbytes for array in arrays), *(chunk.rows * loader.spec.row_bytes for chunk in loader.chunks)]
    metadata = CacheMetadata(
        key=key,
        data=str(directory.path),
        dim=index.dim,
        width=loader.spec.width,
        context=config.features.splice,
        dtype="float16" if config.features.dtype == "float16" else "float32",
        utterances=len(index.entries),
        rows=loader.rows,
        pdfs=aligned.num_pdfs,
        counts=index.counts,
        mismatch=index.mismatch,
        blocks=[(size, NO_CRC) for size in sizes],
    )

    def write_features(descriptor: int, start: int) -> list[int]:
        checksums = loader.into_file(descriptor, start)
        if cache_key(read_data_dir(directory.path, allow_pipes=config.allow_pipes), corpus, config) != key:
            raise OSError("the data changed while they were read")
        return checksums

    started = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cache(path, metadata, arrays, write_features)
        log.info("cache: wrote %s in %.1f s", path, time.perf_counter() - started)
    except OSError as error:
        log.warning("cache: cannot write %s (%s); loading without it", path, error.strerror or error)


def write_cache(
    path: Path,
    metadata: CacheMetadata,
    arrays: Sequence[NDArray[np.signedinteger[Any]]],
    write_features: Callable[[int, int], list[int]],
) -> None:
    """Writes a cache file, whole or not at all; two writers of the same file do not disturb each other. OSError: the
    directory cannot be written into, or has no space left.

    `metadata` has blocks of the right number and sizes, whose checksums are filled in; `arrays` are labels, selected,
    num_frames, pdf_counts. `write_features` writes into a file (descriptor, first byte) and returns the blocks' CRC-32.
    """
    start = len(metadata.header()) + metadata.index_bytes
    with _temporary_file(path) as descriptor:
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < start + metadata.feature_bytes + (64 << 20):
            needed = (start + metadata.feature_bytes) / 1e9
            raise OSError(f"{needed:.1f} GB are needed, {room.f_bavail * room.f_frsize / 1e9:.1f} GB are free")
        index = b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)
        write_all(descriptor, index, start - len(index))
        checksums = [zlib.crc32(index), *write_features(descriptor, start)]
        blocks = [(size, f"{crc:08x}") for (size, _), crc in zip(metadata.blocks, checksums, strict=True)]
        write_all(descriptor, metadata.model_copy(update={"blocks": blocks}).header(), 0)


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
    """A cache file, open and mapped, also when it is removed or replaced meanwhile. Its sizes are valid; its frames,
    labels and indices once `check` has passed, which finds damage, not malice: whoever may write into the cache
    directory may also write other frames. FileNotFoundError: there is none. OSError: it cannot be read.
    CorruptCacheError: it is not what was written."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        with open_regular(path, follow_symlinks=False) as file:
            self.size = os.fstat(file.fileno()).st_size
            self.metadata, self._start = _read_header(file, self.size)
            if self.metadata.key != key:
                raise CorruptCacheError("it was made from other data")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._descriptor = os.dup(file.fileno())
        arrays: list[NDArray[Any]] = [
            np.frombuffer(mapped, dtype, math.prod(shape), self._start + start).reshape(shape)
            for _, dtype, shape, start, _ in self.metadata.tensors()
        ]
        self.labels, self.selected, self.num_frames, self.pdf_counts, self.features = arrays

    def close(self) -> None:
        """Closes the file; the arrays stay as they are."""
        os.close(self._descriptor)

    def check(self, entries: int, threads: int, share: int = 0, of: int = 1) -> None:
        """Compares every byte (or the blocks that are `share` of `of`) with its checksum, then checks the indices.
        `entries`: utterances of the data dir. CorruptCacheError: something is not what was written. OSError: the disk
        failed."""
        starts = accumulate((size for size, _ in self.metadata.blocks), initial=self._start)
        blocks = [(start, size, int(crc, 16)) for start, (size, crc) in zip(starts, self.metadata.blocks, strict=False)]
        with ThreadPoolExecutor(threads) as pool:  # preadv and crc32 release the interpreter lock
            list(pool.map(self._check_block, blocks[share::of]))
        self._check_indices(entries)

    def _check_block(self, block: tuple[int, int, int]) -> None:
        first, size, expected = block
        crc, buffer = 0, memoryview(bytearray(min(READ_BYTES, size)))
        for position in range(first, first + size, READ_BYTES):
            piece = buffer[: first + size - position]
            self._read_into(piece, position)
            crc = zlib.crc32(piece, crc)
        if crc != expected:
            raise CorruptCacheError(f"the bytes from {first} on are not those that were written")

    def _check_indices(self, entries: int) -> None:
        """Nothing points outside of anything: not an utterance, a frame or a pdf-id."""
        metadata, selected, frames, labels = self.metadata, self.selected, self.num_frames, self.labels
        context, edges = metadata.context, 2 * metadata.context
        valid = bool((np.diff(selected) > 0).all()) and selected[0] >= 0 and selected[-1] < entries
        valid = valid and frames.min() >= 1 and frames.max() <= metadata.rows and metadata.rows * len(frames) < 2**62
        valid = valid and int(frames.sum()) + edges * metadata.utterances == metadata.rows
        if valid:
            starts = np.cumsum(frames + edges) - frames - edges
            around = [labels[starts + n] for n in range(context)]
            around += [labels[starts + context + frames + n] for n in range(context)]
            valid = all(bool((edge == -1).all()) for edge in around)
            valid = valid and labels.min() >= -1 and labels.max() < metadata.pdfs
            valid = valid and int(np.count_nonzero(labels >= 0)) == int(frames.sum())
            valid = valid and self.pdf_counts.min() >= 0
        if not valid:
            raise CorruptCacheError("its indices do not fit each other")

    def copy_rows(self, starts: list[int], lengths: list[int], features: NDArray[np.generic]) -> NDArray[np.int32]:
        """Fills `features` with these stretches of rows, one after another; returns their labels. CorruptCacheError
        where the file was cut."""
        width, labels, row = self.metadata.width, np.empty(sum(lengths), np.int32), 0
        of_features = self._start + self.metadata.index_bytes
        for start, length in zip(starts, lengths, strict=True):
            out = features[row : row + length]
            self._read_into(out.reshape(-1).view(np.uint8).data, of_features + start * width * features.itemsize)
            labels[row : row + length] = self.labels[start : start + length]
            row += length
        return labels

    def _read_into(self, remaining: memoryview, position: int) -> None:
        """Reads instead of using the map, where a disk that fails or a file that is cut would kill the process."""
        while len(remaining):
            read = os.preadv(self._descriptor, [remaining], position)
            if not read:
                raise CorruptCacheError("it was cut while it was read")
            remaining, position = remaining[read:], position + read


def _read_header(file: BinaryIO, size: int) -> tuple[CacheMetadata, int]:
    """The metadata, from a header that is exactly theirs, and the byte after it; the sizes are those of the file."""
    if size < _LENGTH.size:
        raise CorruptCacheError(f"{size} bytes are too few")
    packed = file.read(_LENGTH.size)
    (length,) = _LENGTH.unpack(packed)
    if length > min(MAX_HEADER_BYTES, size):
        raise CorruptCacheError(f"a header of {length} bytes in a file of {size}")
    header = file.read(length)
    try:
        metadata = CacheMetadata.model_validate_json(json.loads(header)["__metadata__"]["ddnn"])
        as_written = packed + header == metadata.header()
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CorruptCacheError("its header says something that cannot be") from error
    if not as_written:
        raise CorruptCacheError("its header is not what was written")
    start, data = len(packed) + len(header), metadata.index_bytes + metadata.feature_bytes
    if start + data != size or sum(block for block, _ in metadata.blocks) != data:
        raise CorruptCacheError(f"its header describes another length than {size} bytes")
    return metadata, start


class CachedRows:
    """The rows of some utterances of an index, copied out of its cache file: a `RowSource`."""

    processes = 1

    def __init__(self, cache: CacheFile, index: UtteranceIndex, utterances: Sequence[int]) -> None:
        context, chosen = cache.metadata.context, np.asarray(utterances, dtype=np.int64)
        self.cache, self.width, self.dtype = cache, cache.metadata.width, str(cache.metadata.dtype)
        self._starts = (utterance_offsets(index.num_frames, context)[chosen] - context).tolist()
        self._lengths = (index.num_frames[chosen] + 2 * context).tolist()
        self.rows, self._labels = sum(self._lengths), np.zeros(0, np.int32)

    def fill(self, out: NDArray[Any] | None, descriptor: int, start: int) -> None:
        """See `RowSource`. DataError: the file failed while it was read."""
        features = np.empty((self.rows, self.width), self.dtype) if out is None else out
        try:
            self._labels = self.cache.copy_rows(self._starts, self._lengths, features)
        except (CorruptCacheError, OSError) as error:
            message = f"the cache file failed while it was read: {error}"
            hint = "start again; do not change the cache while it is read"
            raise DataError(message, location=self.cache.path, hint=hint) from error

        if out is None:
            write_all(descriptor, features.reshape(-1).view(np.uint8).data, start)

    def labels(self) -> Tensor:
        return torch.from_numpy(self._labels)


def load_from_cache(cache: CacheFile, index: UtteranceIndex, utterances: Sequence[int]) -> AcousticDataset:
    """The whole dataset as it is in the file; a shard is copied out of it, as if loaded by itself. DataError: the file
    failed while it was read."""
    metadata = cache.metadata
    if len(utterances) == len(index.entries):
        available = available_memory()
        if available is not None and metadata.feature_bytes > available:
            log.warning(
                "cache: %.1f GiB of frames, %.1f GiB of memory are available: they will be read from disk again and "
                "again; data.feature_dtype: float16 needs half",
                *(metadata.feature_bytes / 2**30, available / 2**30),
            )
        with warnings.catch_warnings():  # nobody writes into it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            features, labels = torch.from_numpy(cache.features), torch.from_numpy(cache.labels)
    else:
        features, labels = load_rows([CachedRows(cache, index, utterances)])
    return make_dataset(index.subset(utterances), features, labels, metadata.context)
