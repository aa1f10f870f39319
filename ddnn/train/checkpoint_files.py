"""The files of a checkpoint: written so that they are on the disk, read as an adversary's.

Tensors lie in safetensors files, all else in a manifest of JSON; nothing in them can run code. Files are opened below
an open folder, never through a symbolic link, and no more is read than the file system and the manifest both say.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

SHARED = "shared.safetensors"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
}

_OURS = re.compile(r"checkpoint\.json|shared\.safetensors|worker[0-9]{4,}\.safetensors")
_READ = 4 << 20


class Damaged(Exception):
    """What is wrong with a checkpoint; names the file."""


def worker_file(rank: int) -> str:
    """Name of the file of what worker `rank` has of its own."""
    return f"worker{rank:04d}.safetensors"


def folder_name(number: int) -> str:
    """Name of the folder of a checkpoint."""
    return f"{number:08d}"


def folder_number(name: str) -> int:
    """Number of the checkpoint whose folder has this name, from 1; 0 of any other name."""
    number = int(name) if name.isascii() and name.isdigit() and len(name) < 256 else 0
    return number if folder_name(number) == name else 0


@contextmanager
def opened_folder(name: str | Path, parent: int | None = None) -> Iterator[int]:
    """Descriptor of a folder, below another one where given; OSError where it is none, or a symbolic link to one."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        link = error.errno in (errno.ENOTDIR, errno.ELOOP)
        raise OSError(error.errno, "no real folder" if link else error.strerror, str(name)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder, on the disk too, unless something of that name is there; its parent may be a symbolic link."""
    if not os.path.lexists(path):
        path.mkdir()
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_folder(parent)
        finally:
            os.close(parent)


def names_in(folder: int) -> list[str]:
    """What lies in a folder."""
    return os.listdir(folder)


def sync_folder(folder: int) -> None:
    """What was made, renamed or removed in it is on the disk afterwards; some file systems know no such thing."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def remove_folder(name: str, parent: int) -> None:
    """Removes a checkpoint. What is none of its files stays, and so does the folder then: OSError."""
    with opened_folder(name, parent) as inside:
        for entry in names_in(inside):
            if _OURS.fullmatch(entry):
                os.unlink(entry, dir_fd=inside)
    os.rmdir(name, dir_fd=parent)


def write_file(folder: int, name: str, pieces: Iterable[Any]) -> tuple[int, str]:
    """Writes the pieces (buffers of bytes) one after the other, and reads them back from the disk: bytes, sha256.

    Raises:
        OSError: the file cannot be written, or what was read back is something else.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=folder)  # it must not exist yet, not even as a link

    written, size = hashlib.sha256(), 0
    with open(name, "x+b", buffering=0, opener=opener) as file:
        for piece in pieces:
            left = memoryview(piece).cast("B")
            written.update(left)
            size += len(left)
            while len(left):
                left = left[os.write(file.fileno(), left) :]
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, not the memory of what was written
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        if _sha256(file) != written.hexdigest() or os.fstat(file.fileno()).st_size != size:
            raise OSError(errno.EIO, "what was read back is not what was written", name)
    return size, written.hexdigest()


def _sha256(file: Any) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ))
    while read := file.readinto(buffer):
        digest.update(buffer[:read])
    return digest.hexdigest()


@contextmanager
def opened_file(folder: int, name: str) -> Iterator[BinaryIO]:
    """A file to read; whatever hinders that is Damaged."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe shall not be waited for

    try:
        with open(name, "rb", opener=opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Damaged(f"{name} is no regular file")
            yield file
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise Damaged(f"{name} is a symbolic link" if link else f"{name}: {error.strerror}") from error


def check_file(folder: int, name: str, size: int, sha256: str) -> None:
    """Raises Damaged where the file is not the one that was written."""
    with opened_file(folder, name) as file:
        _check_size(file, name, size)
        if _sha256(file) != sha256:
            raise Damaged(f"{name} is not what was written: its sha256 is another one")


def read_tensors(folder: int, name: str, size: int, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file, from the very bytes whose checksum was compared; raises Damaged."""
    with opened_file(folder, name) as file:
        _check_size(file, name, size)
        data = file.read(size)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Damaged(f"{name} is not what was written: its sha256 is another one")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise Damaged(f"{name} is no safetensors file: {error}") from error
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise Damaged(f"{name} holds {tensor.dtype}")
    return tensors


def _check_size(file: BinaryIO, name: str, size: int) -> None:
    found = os.fstat(file.fileno()).st_size
    if found != size:
        raise Damaged(f"{name} has {found} bytes, {size} were written")


def safetensors_bytes(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file, one tensor after the other: nothing is copied but what lies on a GPU.

    Raises:
        TypeError: a dtype that is not in DTYPES.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each aligned for its dtype
    about, end = {}, 0
    for name in names:
        if tensors[name].dtype not in DTYPES:
            raise TypeError(f"{name} is {tensors[name].dtype}, which a checkpoint does not hold")
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        about[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(about).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for name in names:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
