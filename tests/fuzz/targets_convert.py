"""Files that recipes/images/idx.py reads, as fuzz targets."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from fuzz import seeds
from fuzz.child import Target
from idx import open_images, read_labels, write_idx

IMAGES = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
LABELS = np.arange(4, dtype=np.uint8)
_TOKENS = (b"\0\0\x08\x03", b"\0\0\x08\x01", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\1", b"\x1f\x8b\x08")


def _images(folder: Path) -> None:
    with open_images(folder / "images.idx") as images:
        for _ in range(images.count):
            images.read(1)
        images.finish()


def _labels(folder: Path) -> None:
    read_labels(folder / "labels.idx", len(LABELS))


def _claims(kind: bytes, dims: int) -> tuple[bytes, ...]:
    """Headers that claim what is not there, alone and before a gzip full of zeros."""
    sizes = (0, 1, 4, 2**16, 2**31, 2**32 - 1)
    headers = [kind + struct.pack(f">{dims}I", *[size] * dims) for size in sizes]
    return (*headers, *(seeds.zipped(header + bytes(1 << 20)) for header in headers))


def convert_targets() -> list[Target]:
    """IDX files of images and of labels, plain and gzip."""
    images, labels = (seeds.file_of(lambda path, values=values: write_idx(path, values)) for values in (IMAGES, LABELS))
    found = []
    for name, read, data, crafted in (
        ("images", _images, images, _claims(b"\0\0\x08\x03", 3)),
        ("labels", _labels, labels, _claims(b"\0\0\x08\x01", 1)),
    ):
        file = f"{name}.idx"
        found.append(Target(f"IDX {name}", file, read, (data, seeds.zipped(data)), crafted, tokens=_TOKENS))
        within = f"IDX {name} within its gzip"
        found.append(
            Target(within, file, read, (data,), crafted[: len(crafted) // 2], pack=seeds.zipped, tokens=_TOKENS)
        )
    return found
