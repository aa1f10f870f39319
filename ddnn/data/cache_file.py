"""A corpus in one file that is mapped instead of loaded: plain numbers and JSON, and a checksum over every byte.

    0          a page: MAGIC, the key (`ddnn.data.cache_key`), a line end, zeros
    4096       kept        int64 (utterances,)   which utterances of the data dir
               num_frames  int64 (utterances,)
               pdf_counts  int64 (pdfs,)         frames of each pdf in the alignments of these utterances
               labels      int32 (rows,)         `Corpus.labels`
               zeros, to the next page
    store      float32 or float16 (rows, width)  `Corpus.store`
    footer     JSON, see `Footer`: sizes, and the CRC-32 of one piece after another from byte 0 on
    the end    length of the footer (uint64), its CRC-32 (uint32), END

The sums notice damage, not malice: who may write into the cache directory may also write other frames. All sizes are
held against the length of the file, and all indices against what they point into, before any of them is used.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAGIC = b"ddnn corpus cache 1\n"
END = b"ddnnend\n"
PAGE = 4096
_TRAILER = struct.Struct("<QI8s")
_LONGEST_FOOTER = 256 << 20
_READ = 4 << 20

Size = Annotated[int, Field(ge=0, lt=2**48)]


class CacheDamaged(Exception):
    """What is wrong with a cache file."""


class Footer(BaseModel):
    """What the file holds; `counts`: what was skipped or trimmed; `pieces`: [bytes, CRC-32] of each, from byte 0 on."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    data: str
    dim: Annotated[int, Field(ge=1, lt=2**31)]
    width: Annotated[int, Field(ge=1, lt=2**31)]
    context: Annotated[int, Field(ge=0, le=10_000)]
    dtype: Literal["float32", "float16"]
    utterances: Annotated[int, Field(ge=1, lt=2**40)]
    rows: Size
    pdfs: Annotated[int, Field(ge=1, lt=2**31)]
    counts: dict[str, int]
    pieces: list[tuple[Size, Annotated[int, Field(ge=0, lt=2**32)]]]

    @property
    def store_start(self) -> int:
        """Byte where the store begins."""
        index = PAGE + 8 * (2 * self.utterances + self.pdfs) + 4 * self.rows
        return -(-index // PAGE) * PAGE

    @property
    def store_bytes(self) -> int:
        """Bytes of the store."""
        return self.rows * self.width * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Index:
    """All of a cached corpus but its frames; see the module for shapes and dtypes."""

    kept: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    pdf_counts: NDArray[np.int64]
    labels: NDArray[np.int32]


def write_cache(
    path: Path, key: str, footer: Footer, index: Index, write_store: Callable[[int, int], list[tuple[int, int]]]
) -> None:
    """Writes a cache file, whole or not at all; two that write the same at once do not disturb each other.

    Args:
        footer: without pieces.
        write_store: writes the store into a file (descriptor, first byte); its pieces.

    Raises:
        OSError: the directory cannot be written into, or has no space left. What `write_store` raises.
    """
    front = (MAGIC + key.encode() + b"\n").ljust(PAGE, b"\0")
    start = footer.store_start
    with _appearing(path) as descriptor:
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < start + footer.store_bytes + (64 << 20):
            needed = (start + footer.store_bytes) / 1e9
            raise OSError(f"{needed:.1f} GB are needed, {room.f_bavail * room.f_frsize / 1e9:.1f} GB are free")
        crc = position = 0
        arrays: list[NDArray[np.signedinteger]] = [index.kept, index.num_frames, index.pdf_counts, index.labels]
        for part in (front, *(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)):
            position += _put(descriptor, part, position)
            crc = zlib.crc32(part, crc)
        gap = b"\0" * (start - position)
        _put(descriptor, gap, position)
        pieces = [(start, zlib.crc32(gap, crc)), *write_store(descriptor, start)]
        text = footer.model_copy(update={"pieces": pieces}).model_dump_json().encode()
        text += _TRAILER.pack(len(text), zlib.crc32(text), END)
        _put(descriptor, text, start + footer.store_bytes)


def _put(descriptor: int, data: bytes, position: int) -> int:
    left = memoryview(data)
    while len(left):
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written
    return len(data)


@contextmanager
def _appearing(path: Path) -> Iterator[int]:
    """A file without its name yet; gets it when the block ends well. Those that a killed process left are removed."""
    for left in path.parent.glob(".*.writing"):
        with suppress(OSError):
            _remove_unless_written(left)
    descriptor, name = tempfile.mkstemp(".writing", f".{path.name}.", path.parent)
    try:
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
        os.fchmod(descriptor, 0o666 & ~_umask())  # mkstemp lets nobody else read it
        os.fsync(descriptor)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _remove_unless_written(left: Path) -> None:
    descriptor = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds it while it lives
        left.unlink()
    finally:
        os.close(descriptor)


class CacheFile:
    """A cache file, open and mapped. Its sizes and indices are sound; its frames and labels once `check` said so.

    The file stays mapped as long as anything looks at its arrays, also when it is removed or replaced meanwhile.

    Raises:
        FileNotFoundError: there is none. OSError: it cannot be read. CacheDamaged: it is not what was written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.size = _size(descriptor)
            self.footer = _footer(descriptor, self.size)
            front = os.pread(descriptor, PAGE, 0)
            if front != (MAGIC + key.encode() + b"\n").ljust(PAGE, b"\0"):
                raise CacheDamaged("it begins otherwise than it should")
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        of, position = self.footer, PAGE
        arrays = []
        for length, dtype in ((of.utterances, "<i8"), (of.utterances, "<i8"), (of.pdfs, "<i8"), (of.rows, "<i4")):
            arrays.append(np.frombuffer(mapped, dtype, length, position))
            position += arrays[-1].nbytes
        self.index = Index(*arrays)
        flat = np.frombuffer(mapped, of.dtype, of.rows * of.width, of.store_start)
        self.store: NDArray[np.generic] = flat.reshape(of.rows, of.width)

    def close(self) -> None:
        """Closes the file; the arrays stay as they are."""
        os.close(self._descriptor)

    def check(self, entries: int, threads: int, share: int = 0, of: int = 1) -> None:
        """Reads every byte (or the pieces that are `share` of `of`) against its checksum, then looks at the indices.

        Args:
            entries: utterances of the data dir.

        Raises:
            CacheDamaged: something is not what was written. OSError: the disk failed.
        """
        places, start = [], 0
        for size, crc in self.footer.pieces:
            places.append((start, size, crc))
            start += size
        with ThreadPoolExecutor(threads) as pool:  # pread and crc32 leave the interpreter to the other threads
            for place, right in zip(places[share::of], pool.map(self._is_whole, places[share::of]), strict=True):
                if not right:
                    raise CacheDamaged(f"the bytes from {place[0]} on are not those that were written")
        _check_index(self.index, self.footer, entries)

    def _is_whole(self, place: tuple[int, int, int]) -> bool:
        position, left, expected = place
        crc, buffer = 0, bytearray(min(_READ, left))
        while left:
            view = memoryview(buffer)[: min(len(buffer), left)]
            read = os.preadv(self._descriptor, [view], position)
            if not read:
                return False
            crc = zlib.crc32(view[:read], crc)
            position, left = position + read, left - read
        return crc == expected

    def copy_rows(self, first: int, out: NDArray[np.generic]) -> None:
        """Fills `out` (n, width) with the store's rows from `first` on; CacheDamaged where the file was cut."""
        position = self.footer.store_start + first * out.shape[1] * out.itemsize
        left = out.reshape(-1).view(np.uint8).data
        while len(left):
            read = os.preadv(self._descriptor, [left], position)
            if not read:
                raise CacheDamaged("it was cut while it was read")
            left, position = left[read:], position + read


def _size(descriptor: int) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise CacheDamaged("it is no regular file")
    return found.st_size


def _footer(descriptor: int, size: int) -> Footer:
    """The footer, its checksum right, and the sizes it claims those of the file."""
    if size < PAGE + _TRAILER.size:
        raise CacheDamaged(f"{size} bytes are too few")
    length, crc, end = _TRAILER.unpack(os.pread(descriptor, _TRAILER.size, size - _TRAILER.size))
    start = size - _TRAILER.size - length
    if end != END or length > _LONGEST_FOOTER or start < PAGE:
        raise CacheDamaged("it is cut, or ends otherwise than it should")
    text = os.pread(descriptor, length, start)
    if len(text) != length or zlib.crc32(text) != crc:
        raise CacheDamaged("its footer is not what was written")
    try:
        footer = Footer.model_validate_json(text)
    except ValidationError as error:
        raise CacheDamaged("its footer says something that cannot be") from error
    if footer.store_start + footer.store_bytes != start or sum(size for size, _ in footer.pieces) != start:
        raise CacheDamaged(f"its footer speaks of another length than {size} bytes")
    return footer


def _check_index(index: Index, footer: Footer, entries: int) -> None:
    """Nothing points out of anything: not an utterance, a frame or a pdf-id."""
    kept, frames, labels = index.kept, index.num_frames, index.labels
    edges = 2 * footer.context
    sound = bool((np.diff(kept) > 0).all()) and kept[0] >= 0 and kept[-1] < entries
    sound = sound and frames.min() >= 1 and frames.max() <= footer.rows and footer.rows * len(frames) < 2**62
    sound = sound and int(frames.sum()) + edges * footer.utterances == footer.rows
    if sound:
        starts = np.cumsum(frames + edges) - frames - edges
        around = [labels[starts + n] for n in range(footer.context)]
        around += [labels[starts + footer.context + frames + n] for n in range(footer.context)]
        sound = all(bool((edge == -1).all()) for edge in around)
        sound = sound and labels.min(initial=0) >= -1 and labels.max(initial=-1) < footer.pdfs
        sound = sound and int(np.count_nonzero(labels >= 0)) == int(frames.sum())
        sound = sound and index.pdf_counts.min() >= 0 and footer.width % footer.dim == 0
    if not sound:
        raise CacheDamaged("its indices do not fit each other")
