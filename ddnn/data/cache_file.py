"""A dataset in one file that is mapped instead of loaded: safetensors, with checksums of every byte in its header.

    labels      int32 (rows,)                  `AcousticDataset.labels`
    selected    int64 (utterances,)            which utterances of the data dir are used
    num_frames  int64 (utterances,)
    pdf_counts  int64 (pdfs,)                  `UtteranceIndex.pdf_counts`
    features    float32 or float16 (rows, dim) `AcousticDataset.features`, at the start of a page

The metadata of the header is `CacheMetadata`, and the CRC-32 of the header itself. The checksums find damage, not
malice: whoever may write into the cache directory may also write other frames. The header must be exactly the one that
its metadata gives and the sizes those of the file, and all indices are checked against what they point into, before
any of them is used.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddnn.data.feature_reader import write_all

PAGE = 4096
MAX_HEADER_BYTES = 100_000_000
"""As in safetensors."""
READ_BYTES = 4 << 20
NO_CRC = "00000000"

_LENGTH = struct.Struct("<Q")

Size = Annotated[int, Field(ge=0, lt=2**48)]
Crc = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class CorruptCacheError(Exception):
    """What is wrong with a cache file."""


class CacheMetadata(BaseModel):
    """What the file holds.

    Attributes:
        key: `cache_key`. dim: feature dimension in the archives; `width`: in the file. counts: what was skipped or
            trimmed. blocks: [bytes, CRC-32] of each, from the first byte after the header on.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    key: str
    data: str
    dim: Annotated[int, Field(ge=1, lt=2**31)]
    width: Annotated[int, Field(ge=1, lt=2**31)]
    context: Annotated[int, Field(ge=0, le=10_000)]
    dtype: Literal["float32", "float16"]
    utterances: Annotated[int, Field(ge=1, lt=2**40)]
    rows: Size
    pdfs: Annotated[int, Field(ge=1, lt=2**31)]
    counts: dict[str, int]
    blocks: list[tuple[Size, Crc]]

    def tensors(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Name -> (dtype in safetensors, in numpy, shape), in the order of the file."""
        features = ("F32", "<f4") if self.dtype == "float32" else ("F16", "<f2")
        return {
            "labels": ("I32", "<i4", (self.rows,)),
            "selected": ("I64", "<i8", (self.utterances,)),
            "num_frames": ("I64", "<i8", (self.utterances,)),
            "pdf_counts": ("I64", "<i8", (self.pdfs,)),
            "features": (*features, (self.rows, self.width)),
        }

    @property
    def index_bytes(self) -> int:
        """Of all tensors before the features."""
        return 8 * (2 * self.utterances + self.pdfs) + 4 * self.rows

    @property
    def feature_bytes(self) -> int:
        """Of the features."""
        return self.rows * self.width * np.dtype(self.dtype).itemsize

    def header(self) -> bytes:
        """The length and the header of the file, padded so that the features start at a page."""
        entries: dict[str, Any] = {"__metadata__": {"crc32": NO_CRC, "ddnn": self.model_dump_json()}}
        position = 0
        for name, (dtype, numpy_dtype, shape) in self.tensors().items():
            end = position + int(np.prod(shape, dtype=object)) * np.dtype(numpy_dtype).itemsize
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(entries).encode()
        text += b" " * (-(_LENGTH.size + len(text) + self.index_bytes) % PAGE)
        crc = f'"crc32": "{zlib.crc32(text):08x}"'.encode()
        return _LENGTH.pack(len(text)) + text.replace(f'"crc32": "{NO_CRC}"'.encode(), crc, 1)


def write_cache(
    path: Path,
    metadata: CacheMetadata,
    arrays: Sequence[NDArray[np.signedinteger[Any]]],
    write_features: Callable[[int, int], list[tuple[int, int]]],
) -> None:
    """Writes a cache file, whole or not at all; two writers of the same file do not disturb each other.

    Args:
        metadata: with blocks of the right number and sizes, whose checksums are filled in.
        arrays: labels, selected, num_frames, pdf_counts.
        write_features: writes the features into a file (descriptor, first byte); returns (bytes, CRC-32) of its blocks.

    Raises:
        OSError: the directory cannot be written into, or has no space left. What `write_features` raises.
    """
    start = len(metadata.header()) + metadata.index_bytes
    with _temporary_file(path) as descriptor:
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < start + metadata.feature_bytes + (64 << 20):
            needed = (start + metadata.feature_bytes) / 1e9
            raise OSError(f"{needed:.1f} GB are needed, {room.f_bavail * room.f_frsize / 1e9:.1f} GB are free")
        index = b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)
        write_all(descriptor, index, start - len(index))
        blocks = [(len(index), zlib.crc32(index)), *write_features(descriptor, start)]
        metadata = metadata.model_copy(update={"blocks": [(size, f"{crc:08x}") for size, crc in blocks]})
        header = metadata.header()
        if len(header) + len(index) != start:
            raise ValueError("the blocks that were written are not those of the metadata")
        write_all(descriptor, header, 0)


@contextmanager
def _temporary_file(path: Path) -> Iterator[int]:
    """A file that gets its name when the block ends without an error. Those of killed processes are removed."""
    for stale in path.parent.glob(".*.tmp"):
        with suppress(OSError):
            _remove_unless_locked(stale)
    descriptor, name = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
    try:
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
        mask = os.umask(0o077)
        os.umask(mask)
        os.fchmod(descriptor, 0o666 & ~mask)  # mkstemp lets nobody else read it
        os.fsync(descriptor)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(descriptor)


def _remove_unless_locked(stale: Path) -> None:
    descriptor = os.open(stale, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds it while it lives
        stale.unlink()
    finally:
        os.close(descriptor)


class CacheFile:
    """A cache file, open and mapped. Its sizes are valid; its frames, labels and indices once `check` has passed.

    The file stays mapped as long as anything uses its arrays, also when it is removed or replaced meanwhile.

    Raises:
        FileNotFoundError: there is none. OSError: it cannot be read. CorruptCacheError: it is not what was written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CorruptCacheError("it is not a regular file")
            self.size = found.st_size
            self.metadata, self._start = _read_header(descriptor, self.size)
            if self.metadata.key != key:
                raise CorruptCacheError("it was made from other data")
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, position = descriptor, self._start
        arrays: dict[str, NDArray[Any]] = {}
        for name, (_, dtype, shape) in self.metadata.tensors().items():
            arrays[name] = np.frombuffer(mapped, dtype, int(np.prod(shape)), position).reshape(shape)
            position += arrays[name].nbytes
        self.labels: NDArray[np.int32] = arrays["labels"]
        self.selected: NDArray[np.int64] = arrays["selected"]
        self.num_frames: NDArray[np.int64] = arrays["num_frames"]
        self.pdf_counts: NDArray[np.int64] = arrays["pdf_counts"]
        self.features: NDArray[np.generic] = arrays["features"]

    def close(self) -> None:
        """Closes the file; the arrays stay as they are."""
        os.close(self._descriptor)

    def check(self, entries: int, threads: int, share: int = 0, of: int = 1) -> None:
        """Compares every byte (or the blocks that are `share` of `of`) with its checksum, then checks the indices.

        Args:
            entries: utterances of the data dir.

        Raises:
            CorruptCacheError: something is not what was written. OSError: the disk failed.
        """
        blocks, position = [], self._start
        for size, crc in self.metadata.blocks:
            blocks.append((position, size, int(crc, 16)))
            position += size
        with ThreadPoolExecutor(threads) as pool:  # preadv and crc32 release the interpreter lock
            for block, whole in zip(blocks[share::of], pool.map(self._is_whole, blocks[share::of]), strict=True):
                if not whole:
                    raise CorruptCacheError(f"the bytes from {block[0]} on are not those that were written")
        self._check_indices(entries)

    def _is_whole(self, block: tuple[int, int, int]) -> bool:
        position, remaining, expected = block
        crc, buffer = 0, bytearray(min(READ_BYTES, remaining))
        while remaining:
            view = memoryview(buffer)[: min(len(buffer), remaining)]
            read = os.preadv(self._descriptor, [view], position)
            if not read:
                return False
            crc = zlib.crc32(view[:read], crc)
            position, remaining = position + read, remaining - read
        return crc == expected

    def copy_rows(self, first: int, out: NDArray[np.generic]) -> None:
        """Fills `out` (n, width) with the features from row `first` on; CorruptCacheError where the file was cut."""
        position = self._start + self.metadata.index_bytes + first * out.shape[1] * out.itemsize
        remaining = out.reshape(-1).view(np.uint8).data
        while len(remaining):
            read = os.preadv(self._descriptor, [remaining], position)
            if not read:
                raise CorruptCacheError("it was cut while it was read")
            remaining, position = remaining[read:], position + read

    def _check_indices(self, entries: int) -> None:
        """Nothing points outside of anything: not an utterance, a frame or a pdf-id."""
        metadata, selected, frames, labels = self.metadata, self.selected, self.num_frames, self.labels
        edges = 2 * metadata.context
        valid = bool((np.diff(selected) > 0).all()) and selected[0] >= 0 and selected[-1] < entries
        valid = valid and frames.min() >= 1 and frames.max() <= metadata.rows and metadata.rows * len(frames) < 2**62
        valid = valid and int(frames.sum()) + edges * metadata.utterances == metadata.rows
        if valid:
            starts = np.cumsum(frames + edges) - frames - edges
            around = [labels[starts + n] for n in range(metadata.context)]
            around += [labels[starts + metadata.context + frames + n] for n in range(metadata.context)]
            valid = all(bool((edge == -1).all()) for edge in around)
            valid = valid and labels.min(initial=0) >= -1 and labels.max(initial=-1) < metadata.pdfs
            valid = valid and int(np.count_nonzero(labels >= 0)) == int(frames.sum())
            valid = valid and self.pdf_counts.min() >= 0 and metadata.width % metadata.dim == 0
        if not valid:
            raise CorruptCacheError("its indices do not fit each other")


def _read_header(descriptor: int, size: int) -> tuple[CacheMetadata, int]:
    """The metadata, from a header that is exactly theirs, and the byte after it; the sizes are those of the file."""
    if size < _LENGTH.size:
        raise CorruptCacheError(f"{size} bytes are too few")
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    start = _LENGTH.size + length
    if length > min(MAX_HEADER_BYTES, size):
        raise CorruptCacheError(f"a header of {length} bytes in a file of {size}")
    header = os.pread(descriptor, start, 0)
    try:
        metadata = CacheMetadata.model_validate_json(json.loads(header[_LENGTH.size :])["__metadata__"]["ddnn"])
        as_written = header == metadata.header()
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CorruptCacheError("its header says something that cannot be") from error
    if not as_written:
        raise CorruptCacheError("its header is not what was written")
    data = metadata.index_bytes + metadata.feature_bytes
    if start + data != size or sum(block for block, _ in metadata.blocks) != data:
        raise CorruptCacheError(f"its header describes another length than {size} bytes")
    return metadata, start
