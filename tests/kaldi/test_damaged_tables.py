"""Damaged archives: every cut, every lie of a header, every byte turned gives a DataError or the whole truth."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kaldi_files import matrix_shape, read_matrix

from ddnn.kaldi.archive import (
    MatrixReader,
    ScpEntry,
    iterate_int_vectors,
    iterate_matrices,
    read_scp,
    write_int_vectors,
    write_matrices,
)
from ddnn.util.errors import DataError

MATRICES = ["float.ark", "float.txt", "compressed_1.ark", "compressed_3.ark", "compressed_5.ark"]


def first_records(golden: Path, name: str) -> bytes:
    """The bytes of the first two records, small enough to cut everywhere."""
    data = (golden / "tables" / name).read_bytes()
    return data[: data.index(b"utt2 " if name[0] in "fc" else b"fash-an254")]


def read_all(path: Path, integers: bool) -> dict[str, list[Any]]:
    read: Callable[[Path], Any] = iterate_int_vectors if integers else iterate_matrices
    return {key: values.tolist() for key, values in read(path)}


def cut_everywhere(path: Path, whole: bytes, starts: set[int], integers: bool) -> None:
    """Cut at each byte: an error that names the file, except between two records, where no one can know."""
    path.write_bytes(whole)
    expected = read_all(path, integers)
    for end in reversed(range(len(whole))):
        os.truncate(path, end)  # many times faster than to write the file again
        try:
            found = read_all(path, integers)
        except DataError as error:
            assert error.location == str(path)
            continue
        text_is_whole = whole[end : end + 1] == b"\n" and whole[end - 1 : end] == b"]"
        assert end in starts or end + 1 in starts or text_is_whole, f"cut at {end} went unnoticed"
        assert found == dict(list(expected.items())[: len(found)]), f"a partial result when cut at {end}"


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_cut_at_every_byte(golden: Path, tmp_path: Path, name: str) -> None:
    whole = first_records(golden, name)
    cut_everywhere(tmp_path / "cut.ark", whole, {whole.index(b"utt1 ")}, integers=False)


@pytest.mark.parametrize("name", ["tids.ark", "tids.txt"])
def test_integers_cut_at_every_byte(golden: Path, tmp_path: Path, name: str) -> None:
    whole = first_records(golden, name)
    cut_everywhere(tmp_path / "cut.ark", whole, {whole.index(b"fash-an253")}, integers=True)


@pytest.mark.parametrize(("name", "integers"), [("float.ark", False), ("float.txt", False), ("tids.ark", True)])
def test_gzip_cut_at_every_byte_is_an_error(golden: Path, tmp_path: Path, name: str, integers: bool) -> None:
    whole = gzip.compress(first_records(golden, name))
    path = tmp_path / "cut.gz"
    path.write_bytes(whole)
    for end in reversed(range(len(whole))):
        os.truncate(path, end)  # many times faster than to write the file again
        with pytest.raises(DataError) as error:
            read_all(path, integers)
        assert error.value.location == str(path)


def test_the_error_names_the_last_record(an4: Path, tmp_path: Path) -> None:
    whole = (an4 / "ali/ali.1.gz").read_bytes()
    keys = list(read_all(an4 / "ali/ali.1.gz", integers=True))
    path = tmp_path / "cut.gz"
    path.write_bytes(whole[: len(whole) // 2])
    found = []
    with pytest.raises(DataError, match="damaged or cut gzip") as error:
        for key, _ in iterate_int_vectors(path):
            found.append(key)
    assert 100 < len(found) < len(keys) and found == keys[: len(found)]
    assert f"(the last complete record is {found[-1]})" in error.value.message


@pytest.mark.parametrize("name", ["float.ark.gz", "tids.ark.gz"])
def test_no_byte_of_a_gzip_can_turn_unnoticed(golden: Path, tmp_path: Path, name: str) -> None:
    whole = (golden / "tables" / name).read_bytes()
    path = tmp_path / "x.gz"
    path.write_bytes(whole)
    expected = read_all(path, name[0] == "t")
    header = 10 + (whole.index(b"\0", 10) + 1 - 10 if whole[3] & 8 else 0)
    for position in range(0, len(whole), 7):
        turned = bytearray(whole)
        turned[position] ^= 0x55
        path.write_bytes(turned)
        try:
            found = read_all(path, name[0] == "t")
        except DataError as error:
            assert error.location == str(path)
        else:  # the time and the name of the file in the header mean nothing
            assert position < header and found == expected


@pytest.mark.parametrize("name", MATRICES)
def test_entries_of_an_scp_whose_archive_was_cut(golden: Path, tmp_path: Path, name: str) -> None:
    whole = first_records(golden, name)
    offset = whole.index(b"utt1 ") + 5
    (tmp_path / "x.scp").write_text(f"utt1 cut.ark:{offset}\n")
    path = tmp_path / "cut.ark"
    for end in [1, 3, offset - 1, offset, offset + 1, offset + 2, offset + 4, offset + 8, offset + 14, len(whole) - 3]:
        path.write_bytes(whole[:end])
        (entry,) = read_scp(tmp_path / "x.scp")
        for ask in (read_matrix, matrix_shape):
            with pytest.raises(DataError, match="utterance utt1: ") as error:
                ask(entry)
            assert error.value.location == f"{path}:{offset}"


def test_the_checksum_of_a_gzip_counts_in_an_scp(tmp_path: Path) -> None:
    """The matrix itself is whole; the checksum, behind more bytes than a buffer holds, says that something is not."""
    whole = bytearray(gzip.compress(b" [ 1 2 ]\n" + b"\n" * 500_000))
    whole[-8] ^= 1
    (tmp_path / "x.gz").write_bytes(whole)
    (tmp_path / "x.scp").write_text("utt x.gz\n")
    (entry,) = read_scp(tmp_path / "x.scp")
    with pytest.raises(DataError, match=r"utterance utt: damaged or cut gzip: CRC check failed"):
        read_matrix(entry)


def test_an_offset_past_the_end(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "x.scp").write_text(f"a {golden}/tables/float.ark:2652\nb {golden}/tables/float.ark:{10**17}\n")
    for entry in read_scp(tmp_path / "x.scp"):
        with pytest.raises(DataError, match=r"the offset \d+ is past the end of the file, which has 2652 bytes"):
            read_matrix(entry)


DIMS = struct.Struct("<BiBi")
CM = struct.Struct("<ffii")
LIES = [
    (b"FM " + DIMS.pack(4, 2**31 - 1, 4, 2**31 - 1), "cut short: the header claims 2147483647 rows"),
    (b"DM " + DIMS.pack(4, 2, 4, 2), "cut short: the header claims 2 rows and 2 columns, 32 bytes"),
    (b"FM " + DIMS.pack(4, -(2**31), 4, 40), "the header claims -2147483648 rows"),
    (b"FM " + DIMS.pack(4, -1, 4, -1), "the header claims -1 rows"),
    (b"FM " + DIMS.pack(4, 0, 4, 40), "the header claims 0 rows and 40 columns"),
    (b"FM " + DIMS.pack(4, 40, 4, 0), "the header claims 40 rows and 0 columns"),
    (b"FM " + DIMS.pack(8, 1, 4, 1), "expected two dims of 4 bytes each"),
    (b"DM " + DIMS.pack(4, 1, 8, 1), "expected two dims of 4 bytes each"),
    (b"CM " + CM.pack(0, 1, 2**31 - 1, 2), "cut short: the header claims 2147483647 rows"),
    (b"CM2 " + CM.pack(0, 1, 2**31 - 1, 2**31 - 1), "cut short: the header claims"),
    (b"CM3 " + CM.pack(0, 1, -5, 2), "the header claims -5 rows"),
    (b"CM4 " + CM.pack(0, 1, 1, 1), "expected a matrix (FM, DM, CM, CM2 or CM3), found b'CM4 '"),
    (b"FV \4\2\0\0\0" + bytes(8), "expected a matrix (FM, DM, CM, CM2 or CM3), found a vector"),
    (b"XM " + DIMS.pack(4, 1, 4, 1) + bytes(4), "expected a matrix (FM, DM, CM, CM2 or CM3), found b'XM '"),
]


@pytest.mark.parametrize(("record", "message"), LIES)
@pytest.mark.parametrize("suffix", ["ark", "gz"])
def test_headers_that_lie(tmp_path: Path, record: bytes, message: str, suffix: str) -> None:
    path = tmp_path / f"lie.{suffix}"
    data = b"utt \0B" + record + bytes(16)
    path.write_bytes(gzip.compress(data) if suffix == "gz" else data)
    tracemalloc.start()
    with pytest.raises(DataError) as error:
        list(iterate_matrices(path))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert "utterance utt: " in error.value.message
    assert message in error.value.message or (suffix == "gz" and "cut short" in error.value.message)


@pytest.mark.parametrize("count", [2**31 - 1, -1, 3])
def test_integer_vectors_that_lie(tmp_path: Path, count: int) -> None:
    path = tmp_path / "lie.ark"
    path.write_bytes(b"utt \0B\4" + struct.pack("<i", count) + b"\4\1\0\0\0")
    with pytest.raises(DataError, match=r"utterance utt: (cut short|the header claims -1 integers)"):
        list(iterate_int_vectors(path))
    path.write_bytes(b"utt \0B\4\1\0\0\0\x08\1\0\0\0\0\0\0\0")
    with pytest.raises(DataError, match="found the size 8 at position 0"):
        list(iterate_int_vectors(path))


@pytest.mark.parametrize("record", [b"PKL", b"NPY\1\x0a", b"AUDIO", b"RIFF....WAVE", b"fLaC"])
def test_what_else_kaldiio_would_read(tmp_path: Path, record: bytes) -> None:
    """A record that begins with PKL is unpickled by kaldiio; this one would make a file."""
    bomb = tmp_path / "exploded"
    pickled = b"cos\nsystem\n(S'touch " + str(bomb).encode() + b"'\ntR."
    path = tmp_path / "x.ark"
    path.write_bytes(b"utt " + record + pickled)
    (tmp_path / "x.scp").write_text("utt x.ark:4\n")
    (entry,) = read_scp(tmp_path / "x.scp")
    for ask in (lambda: list(iterate_matrices(path)), lambda: read_matrix(entry), lambda: matrix_shape(entry)):
        with pytest.raises(DataError, match="expected a Kaldi matrix"):
            ask()
    with pytest.raises(DataError, match="expected integers"):
        list(iterate_int_vectors(path))
    assert not bomb.exists()


BAD_TEXT = [
    (b"utt  [\n 1 2\n 3 ]\n", "row 2 has 1 columns, the rows before it 2"),
    (b"utt  [\n 1 2\n 3 x ]\n", "expected a number"),
    (b"utt  [ 1_0 2 ]\n", "underscore"),
    (b"utt  [ 1 2 ] 3\n", "expected a line end after ']'"),
    (b"utt  1 2\n", "expected a Kaldi matrix"),
    (b"utt  [ 1 2\n", "no ']' ends the matrix"),
    (b"utt", "cut short after the utterance id"),
    (b"utt ", "found the end of the file"),
    (b"\xff [ 1 ]\n", "is not UTF-8"),
    (b"utt  [ 1 ]\n" + b"k" * 5000, "expected an utterance id"),
    (b"utt \0C", "expected Kaldi's binary marker"),
]


@pytest.mark.parametrize(("data", "message"), BAD_TEXT)
def test_bad_text(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        list(iterate_matrices(path))
    assert message in error.value.message and error.value.location == str(path)


@pytest.mark.parametrize("line", [b"1 2 3.5", b"1 x", b"1_0", b"2147483648", b"9" * 30, b"9" * 5000, b"[ 1 2 ]"])
def test_bad_integers(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"good 1 2\nutt " + line + b"\n")
    with pytest.raises(DataError, match=r"utterance utt: expected .*integers.*the last complete record is good"):
        list(iterate_int_vectors(path))


def test_missing_empty_or_misnamed(tmp_path: Path) -> None:
    (tmp_path / "empty.ark").touch()
    (tmp_path / "empty.gz").touch()
    (tmp_path / "plain.gz").write_bytes(b"utt 1 2 3\n")
    names = ["missing.ark", "", "empty.ark", "empty.gz", "plain.gz"]
    messages = ["does not exist", "no regular file", "is empty", "is empty", "expected a gzip"]
    for name, message in zip(names, messages, strict=True):
        with pytest.raises(DataError, match=message):
            list(iterate_int_vectors(tmp_path / name))


def test_a_line_without_end_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"utt [ " + b" " * (40 << 20), 1))
    for read in (iterate_matrices, iterate_int_vectors):
        with pytest.raises(DataError, match="a line of text longer than"):
            list(read(path))


SEEDS = st.sampled_from(
    ["float.ark", "float.txt", "compressed_1.ark", "compressed_3.ark", "tids.ark", "tids.txt", "float.ark.gz"]
)


@settings(max_examples=250, deadline=None)
@given(data=st.data(), name=SEEDS, integers=st.booleans())
def test_turned_bytes(
    golden: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str, integers: bool
) -> None:
    """Valid records with bytes overwritten, anywhere: a result of what the file can hold, or a DataError."""
    whole = bytearray((golden / "tables" / name).read_bytes())
    near = st.integers(0, 60) | st.integers(0, len(whole) - 1)
    for position, value in data.draw(st.lists(st.tuples(near, st.integers(0, 255)), min_size=1, max_size=5)):
        whole[position] = value
    path = tmp_path_factory.mktemp("turned") / "x.ark"
    path.write_bytes(whole)
    _read_or_refuse(path, len(whole), integers)


@settings(max_examples=250, deadline=None)
@given(
    integers=st.booleans(),
    data=st.lists(
        st.binary(max_size=12)
        | st.sampled_from(
            [
                b"utt ",
                b"\0B",
                b"FM ",
                b"CM ",
                b"CM2 ",
                b"\4\1\0\0\0",
                b"\4\xff\xff\xff\x7f",
                b"[",
                b"]\n",
                b" 1 ",
                b"\x1f\x8b\x08",
            ]
        )
    ).map(b"".join),
)
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, integers: bool) -> None:
    path = tmp_path_factory.mktemp("random") / "x.ark"
    path.write_bytes(data)
    _read_or_refuse(path, len(data), integers)


def _read_or_refuse(path: Path, size: int, integers: bool) -> None:
    path.with_name("x.scp").write_text(f"a {path}\nb {path}:5\n")
    tracemalloc.start()
    try:
        try:
            for _, values in iterate_int_vectors(path) if integers else iterate_matrices(path):
                assert isinstance(values, np.ndarray) and values.size <= 1032 * size
        except DataError as error:
            assert error.location == str(path)
        for entry in read_scp(path.with_name("x.scp")):
            try:
                assert matrix_shape(entry) == read_matrix(entry).shape
            except DataError as error:
                assert str(path) in str(error.location)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def what_it_reads(entries: list[ScpEntry], *, anew: bool = False) -> list[Any]:
    """Of each entry its shape and its matrix, or the error; read by one reader, or by one that has read nothing else."""
    found: list[Any] = []
    with MatrixReader() as reader:
        for entry in entries:
            for method in ("shape", "read"):
                try:
                    value = getattr(MatrixReader() if anew else reader, method)(entry)
                except DataError as error:
                    value = (error.message, error.location, error.hint)
                found.append((value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value)
    return found


def archive_of(folder: Path, kind: int) -> tuple[Path, list[ScpEntry]]:
    """Three matrices, of the compression method `kind`, 0 for float32 and -1 for float64."""
    made = np.random.default_rng(1).normal(size=(3, 10, 3)).astype(np.float64 if kind < 0 else np.float32)
    items = zip(("a", "b", "c"), made, strict=True)
    write_matrices(folder / "x.ark", folder / "x.scp", items, compress=max(kind, 0))
    return folder / "x.ark", list(read_scp(folder / "x.scp"))


@pytest.mark.parametrize("kind", [-1, 0, 2, 3, 5])
def test_damage_is_named_whatever_was_read_before(tmp_path: Path, kind: int) -> None:
    """Every byte of the second header turned, and every cut of the third record, up to one byte of it."""
    path, entries = archive_of(tmp_path, kind)
    whole = path.read_bytes()
    starts = [entry.offset or 0 for entry in entries]
    for at in (starts[1] + n for n in range(24)):
        for value in (0, 1, 4, 32, 50, 255):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            assert what_it_reads(entries) == what_it_reads(entries, anew=True), (at, value)
    path.write_bytes(whole)
    for end in reversed(range(starts[2] - 2, len(whole))):
        os.truncate(path, end)
        found = what_it_reads(entries)
        assert found == what_it_reads(entries, anew=True), end
        assert len(found[-2]) == len(found[-1]) == 3, "an error also where only the shape is asked for"


def test_an_archive_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    made = {"a": np.ones((4, 3), np.float32), "b": np.ones((9000, 3), np.float32)}  # more than the stream has buffered
    write_matrices(tmp_path / "x.ark", tmp_path / "x.scp", made.items())
    first, second = read_scp(tmp_path / "x.scp")
    with MatrixReader() as reader:
        reader.read(first)
        os.truncate(tmp_path / "x.ark", 50_000)
        with pytest.raises(DataError, match="utterance b: cut short"):
            reader.read(second)


def test_an_offset_into_a_gzip_that_stores_what_it_has(tmp_path: Path) -> None:
    """Whose bytes are those of the archive: Kaldi would count in what it decompresses to."""
    path, entries = archive_of(tmp_path, 0)
    path.write_bytes(gzip.compress(whole := path.read_bytes(), 0))
    moved = path.read_bytes().index(whole)
    entries = [replace(entry, offset=(entry.offset or 0) + moved) for entry in entries]
    found = what_it_reads(entries)
    assert all("the file is a gzip" in error[0] for error in found) and len(found) == 6


@pytest.mark.parametrize("suffix", [".ark", ".gz"])
def test_utterance_ids_across_the_end_of_a_buffer(tmp_path: Path, suffix: str) -> None:
    """Ids and vectors of all lengths, so that some begin in one buffer and end in the next."""
    random = np.random.default_rng(1)
    names = [f"{n}-" + "x" * int(length) for n, length in enumerate(random.integers(1, 600, 1500))]
    vectors = {name: random.integers(-9, 9, int(random.integers(0, 40)), np.int32) for name in names}
    write_int_vectors(tmp_path / f"x{suffix}", vectors.items())
    found = dict(iterate_int_vectors(tmp_path / f"x{suffix}"))
    assert list(found) == names
    assert all(np.array_equal(found[name], vectors[name]) for name in names)
