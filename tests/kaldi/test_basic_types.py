"""Kaldi's basic types: values of every kind survive a round trip, damaged bytes end in DataError."""

from __future__ import annotations

import io
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, TextWriter, open_kaldi_file
from ddnn.util.errors import DataError

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def written(method: str, *values: Any, binary: bool) -> bytes:
    handle = io.BytesIO()
    getattr((BasicTypeWriter if binary else TextWriter)(handle), method)(*values)
    return handle.getvalue()


def reader(data: bytes, *, binary: bool) -> BasicTypeReader:
    return BasicTypeReader.from_bytes(data, binary=binary)


@given(st.lists(INT32, max_size=20), st.booleans())
def test_integers(values: list[int], binary: bool) -> None:
    array = np.array(values, np.int32)
    data = written("int32_vector", array, binary=binary)
    data += b"".join(written("int32", value, binary=binary) for value in values)
    source = reader(data, binary=binary)
    np.testing.assert_array_equal(source.int32_vector(), array)
    np.testing.assert_array_equal(source.int32_block(len(values)), array)
    assert not source.stream.read().strip()


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=FLOAT32), st.booleans())
def test_floats(matrix: np.ndarray, binary: bool) -> None:
    data = written("float_matrix", matrix, binary=binary)
    data += written("float_vector", matrix[0], binary=binary)
    data += written("float32", float(matrix[0, 0]), binary=binary)
    source = reader(data, binary=binary)
    read = source.float_matrix(), source.float_vector(), np.float32(source.float32())
    for value, expected in zip(read, (matrix, matrix[0], matrix[0, 0]), strict=True):
        if binary:
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, expected)
        else:  # 7 digits
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-44)
    assert source.remaining == (0 if binary else 1)


def test_text_floats_as_a_cpp_stream_writes_them() -> None:
    values = np.array([1, 0.1, 1e-5, 123456789, -1 / 3, 0, 1e20, np.inf, -np.inf, np.nan], np.float32)
    text = b" [ 1 0.1 1e-05 1.234568e+08 -0.3333333 0 1e+20 inf -inf nan ]\n"
    assert written("float_vector", values, binary=False) == text
    np.testing.assert_array_equal(reader(text, binary=False).float_vector()[7:], values[7:])


def test_kaldis_text_matrices_are_written_again_byte_for_byte(golden: Path) -> None:
    text = (golden / "tables" / "float.txt").read_bytes()
    archive = (golden / "tables" / "float.ark").read_bytes()
    source, binary, again = reader(text, binary=False), reader(archive, binary=True), b""
    for _ in range(3):
        key = source.token()
        matrix = source.float_matrix()
        again += key.encode() + b" " + written("float_matrix", matrix, binary=False)
        assert binary.token() == key
        assert binary.read_marker()
        np.testing.assert_allclose(matrix, binary.float_matrix(), rtol=1e-6)
    assert again == text
    assert binary.remaining == 0


def test_double_matrices(golden: Path) -> None:
    with open_kaldi_file(
        golden / "tables" / "double_stats.mat", "a matrix"
    ) as statistics:  # CMVN statistics, in fact an FM
        single = statistics.float_matrix()
        assert (single.dtype, single.shape, single[0, -1], statistics.remaining) == (np.float32, (2, 31), 108, 0)
    matrix = single.astype("<f8") / 3
    binary = b"DM \x04\2\0\0\0\x04\x1f\0\0\0" + matrix.tobytes()
    np.testing.assert_array_equal(reader(binary, binary=True).float_matrix(), matrix)
    counts = b" [ 1234567891 0.1 ]\n"
    np.testing.assert_array_equal(reader(counts, binary=False).float_vector(), [1234567891, 0.1])


def test_tokens() -> None:
    source = reader(b"<A>  <B>\tT", binary=False)
    assert source.expect("<A>") == "<A>"
    assert source.peek_token() == "<B>"
    assert source.expect("<C>", "<B>") == "<B>"
    assert source.peek() == b"T" and source.peek_token() == ""  # nothing ends it
    with pytest.raises(DataError, match=r"expected <C> at byte 9, found 'T'"):
        source.expect("<C>")


def test_a_token_across_the_buffer_of_the_stream() -> None:
    for length in (8190, 8191, 8192):
        source = reader(b" " * length + b"<Token> 123 [ 1 2 ]\n <B> ", binary=False)
        assert (source.token(), source.int32(), source.float_vector().tolist()) == ("<Token>", 123, [1.0, 2.0])
        assert source.token() == "<B>"


def test_a_wrong_token_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\0B<A> <Wrong> ")
    said = r"not a test: expected <B> at byte 6, found '<Wrong>'"
    with pytest.raises(DataError, match=said) as caught, open_kaldi_file(tmp_path / "x", "a test") as source:
        source.expect("<A>")
        source.expect("<B>")
    assert caught.value.location == str(tmp_path / "x")
    assert caught.value.hint and "14 bytes" in caught.value.hint


HUGE = (2**31 - 1).to_bytes(4, "little")
NEGATIVE = (-1).to_bytes(4, "little", signed=True)


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("int32_vector", b"\x04" + HUGE + b"1234"),
        ("int32_vector", b"\x04" + NEGATIVE),
        ("int32_vector", b"\x08" + b"\1\0\0\0" + b"12345678"),
        ("int32_vector", b"\x04\1"),
        ("float_vector", b"FV \x04" + HUGE),
        ("float_vector", b"DV \x04" + NEGATIVE),
        ("float_vector", b"CM \x04\1\0\0\0"),
        ("float_vector", b"FV \x04\2\0\0\0" + b"1234567"),
        ("float_matrix", b"FM \x04" + HUGE + b"\x04" + HUGE),
        ("float_matrix", b"FM \x04" + HUGE + b"\x04\0\0\0\0"),
        ("float_matrix", b"FM \x04" + NEGATIVE + b"\x04" + NEGATIVE),
        ("float_matrix", b"DM \x04\1\0\0\0\x04\1\0\0\0" + b"1234567"),
        ("float32", b"\x05abcd"),
        ("float32", b"\x08abcdefg"),
        ("int32", b"\x04abc"),
        ("int32", b"\x08abcdefgh"),
        ("token", b"<Cut"),
    ],
)
def test_binary_claims_are_checked_before_memory_is_taken(method: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"expected|cut short: |the header claims"):
            getattr(reader(data, binary=True), method)()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("int32", b"2147483648 "),
        ("int32", b"12345678901234 "),
        ("int32", b"1.5 "),
        ("int32", b""),
        ("float32", b"1,5 "),
        ("float32", b"1e "),
        ("float32", b"0x10 "),
        ("int32_vector", b"[ 1 2.5 ]"),
        ("int32_vector", b"[ 1 2147483648 ]"),
        ("int32_vector", b"[ 1 2"),
        ("float_vector", b"[ 1 2"),
        ("float_vector", b"1 2 ]"),
        ("float_vector", b"[ 1\n 2 ]"),
        ("float_vector", b"[ 1 1_0 ]"),
        ("float_vector", b"[ 1 0x1p3 ]"),
        ("float_vector", b"[ 1 --2 ]"),
        ("float_vector", b"[ 1 e ]"),
        ("float_matrix", b"[ 1 2\n 3 ]"),
        ("float_matrix", b"[ 1 2\n 3 \xff ]"),
    ],
)
def test_bad_text(method: str, data: bytes) -> None:
    with pytest.raises(DataError, match=r"expected|cut short: |the header claims"):
        getattr(reader(data, binary=False), method)()


METHODS = ["int32", "float32", "token", "int32_vector", "float_vector", "float_matrix"]


@given(st.binary(max_size=40), st.sampled_from(METHODS), st.booleans())
def test_any_bytes_give_a_value_or_a_data_error(data: bytes, method: str, binary: bool) -> None:
    source = reader(data, binary=binary)
    try:
        getattr(source, method)()
    except DataError:
        return
    assert 0 < source.stream.tell() <= len(data)


def test_files_that_cannot_be_read_whole(tmp_path: Path) -> None:
    empty, packed, other, pipe = (tmp_path / name for name in ("empty", "packed file.gz", "ö", "pipe"))
    empty.touch()
    packed.write_bytes(b"\x1f\x8b\x08\0")
    other.write_bytes(b"\0C")
    os.mkfifo(pipe)
    cases = {empty: "is empty", packed: "gzip", other: "binary marker", tmp_path: "not a regular file"}
    cases |= {pipe: "not a regular file", tmp_path / "none": "No such file"}
    for path, message in cases.items():
        with pytest.raises(DataError, match=message) as caught, open_kaldi_file(path, "a test"):
            pass
        assert caught.value.location == str(path)
