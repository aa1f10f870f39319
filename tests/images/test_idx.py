"""IDX files: what was written is read again, and damaged ones are refused with a sentence."""

from __future__ import annotations

import gzip
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from idx import MAX_PIXELS, open_images, read_labels, write_idx

from ddnn.util.errors import DataError

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def header(*dims: int, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(dims))) + struct.pack(f">{len(dims)}I", *dims)


def read_all(path: Path, step: int = 7) -> np.ndarray:
    """All images, `step` at a time, (n, rows, columns)."""
    with open_images(path) as images:
        starts = range(0, images.count, step)
        parts = [images.read(min(step, images.count - start)) for start in starts]
        images.finish()
        return np.concatenate(parts).reshape(images.count, images.rows, images.columns)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 12)] * 3),
    step=st.integers(1, 5),
    name=st.sampled_from(["x.idx", "x.gz"]),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read(shape: tuple[int, int, int], step: int, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    labels = rng.integers(0, 256, shape[0], dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write_idx(path, images)
        assert np.array_equal(read_all(path, step), images)
        write_idx(path, labels)
        assert np.array_equal(read_labels(path, len(labels)), labels)


def test_the_format_is_lecuns(tmp_path: Path) -> None:
    write_idx(tmp_path / "x", IMAGES)
    assert (tmp_path / "x").read_bytes() == bytes.fromhex("00000803 00000002 00000003 00000004") + bytes(range(24))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x89PNG\r\n", "begins with 00 00 08 03, found 89 50 4e 47"),
        (b"\0\0", "cut short: the magic number takes 4 bytes"),
        (header(2, 3, 4)[:9], "cut short: the header takes 12 bytes"),
        (header(24) + bytes(24), "found unsigned bytes of 1 dims"),
        (header(2, 3, 4, kind=13) + bytes(96), "found floats of 3 dims"),
        (header(2, 3, 4) + bytes(23), "promises 2 x 3 x 4 bytes, at most 23 remain"),
        (header(*[2**32 - 1] * 3) + bytes(9), "promises 4294967295 x 4294967295 x 4294967295 bytes"),
        (header(2, 3, 4) + bytes(25), "more bytes follow"),
        (header(0, 3, 4), "expected images, found none"),
        (header(2, 0, 4), "found 0 x 4"),
        (header(1, 257, 256) + bytes(257 * 256), f"1 to {MAX_PIXELS} pixels, found 257 x 256"),
        (
            gzip.compress(header(2, 3, 4) + bytes(23), mtime=0),
            "cut short: a block of 2 images takes 24 bytes, 23 remain",
        ),
        (gzip.compress(header(2, 3, 4) + bytes(24), mtime=0)[:-6], "damaged or cut gzip"),
        (gzip.compress(header(2**31, 28, 28) + bytes(1 << 20), mtime=0), "the header promises"),
        (gzip.compress(header(2, 3, 4) + bytes(1 << 20), mtime=0), "more bytes follow"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError) as refusal:
        read_all(tmp_path / "x")
    assert said in refusal.value.message and str(tmp_path / "x") in str(refusal.value)


def test_a_wrong_checksum_is_noticed(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(header(2, 3, 4) + IMAGES.tobytes()))
    packed[-8] ^= 1
    (tmp_path / "x.gz").write_bytes(packed)
    with pytest.raises(DataError, match="CRC"):
        read_all(tmp_path / "x.gz")


def test_files_the_wrong_way_round(tmp_path: Path) -> None:
    write_idx(tmp_path / "x", IMAGES)
    with pytest.raises(DataError, match="the other way round"):
        read_labels(tmp_path / "x", 2)


def test_other_numbers_of_images_and_labels(tmp_path: Path) -> None:
    write_idx(tmp_path / "x", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="each of 2 images, found 3 labels"):
        read_labels(tmp_path / "x", 2)
