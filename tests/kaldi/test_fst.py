"""OpenFst files: what Kaldi made, what we write and OpenFst reads, and everything a damaged file can claim."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kaldi_files import fst_bytes

from ddnn.kaldi.fst import ARC, Fst, read_fst, read_symbols
from ddnn.util.errors import DataError

Kind = Literal["vector", "const"]
KINDS: tuple[Kind, ...] = ("vector", "const")


def random_fst(rng: np.random.Generator, states: int, arcs: int) -> Fst:
    counts = np.bincount(rng.integers(0, states, arcs), minlength=states)
    values = np.zeros(arcs, ARC)
    values["ilabel"], values["olabel"] = rng.integers(0, 5, arcs), rng.integers(0, 3, arcs)
    values["weight"], values["nextstate"] = rng.normal(size=arcs), rng.integers(0, states, arcs)
    final = np.where(rng.random(states) < 0.5, np.inf, rng.normal(size=states)).astype(np.float32)
    return Fst(int(rng.integers(states)), final, np.concatenate([[0], np.cumsum(counts)]), values)


def same(one: Fst, other: Fst) -> bool:
    arrays = ("final", "offsets", "arcs")
    return one.start == other.start and all(np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays)


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 60), st.sampled_from(KINDS))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, seed: int, states: int, arcs: int, kind: Kind
) -> None:
    fst = random_fst(np.random.default_rng(seed), states, arcs)
    path = tmp_path_factory.mktemp("fst") / "a graph é.fst"
    path.write_bytes(fst_bytes(fst, kind))
    assert same(read_fst(path), fst)


@pytest.mark.parametrize("kind", KINDS)
def test_openfst_reads_what_is_written(tmp_path: Path, kind: Kind) -> None:
    kaldifst = pytest.importorskip("kaldifst")
    fst = random_fst(np.random.default_rng(1), 20, 50)
    (tmp_path / "a.fst").write_bytes(fst_bytes(fst, kind))
    theirs = kaldifst.StdFst.read(str(tmp_path / "a.fst"))
    assert (theirs.type, theirs.start) == (kind, fst.start)
    epsilons = np.bincount(fst.sources()[fst.arcs["ilabel"] == 0], minlength=20)
    for state in range(20):
        assert theirs.num_arcs(state) == fst.offsets[state + 1] - fst.offsets[state]
        assert theirs.num_input_epsilons(state) == epsilons[state]
        assert theirs.final(state).value == pytest.approx(float(fst.final[state]))
    vector = kaldifst.StdVectorFst(theirs)
    assert vector.write(str(tmp_path / "b.fst"))
    assert same(read_fst(tmp_path / "b.fst"), fst)


def test_kaldis_graphs(an4: Path) -> None:
    fst = read_fst(an4 / "graph" / "HCLG.fst")
    assert (fst.num_states, fst.num_arcs, fst.start) == (38708, 96162, 0)
    assert read_fst(an4 / "graph_ug" / "HCLG.fst").num_states == 1527
    symbols = read_symbols(an4 / "graph" / "words.txt")
    assert (symbols[0], symbols[3], len(symbols)) == ("<eps>", "A", 107)
    assert set(np.unique(fst.arcs["olabel"]).tolist()) <= set(symbols)


def test_a_file_in_place_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "HCLG.fst").touch()
    with pytest.raises(DataError, match="name its directory") as caught:
        read_fst(tmp_path / "HCLG.fst" / "HCLG.fst")
    assert caught.value.hint == f"name its directory: {tmp_path}"


def test_aligned_const_file(tmp_path: Path) -> None:
    fst = random_fst(np.random.default_rng(2), 7, 9)
    plain = bytearray(fst_bytes(fst, "const"))
    plain[29:33] = struct.pack("<i", 4)
    head, states, arcs = plain[:65], plain[65 : 65 + 140], plain[65 + 140 :]
    aligned = head + b"\0" * 15 + states + b"\0" * 4 + arcs
    (tmp_path / "a.fst").write_bytes(aligned)
    assert same(read_fst(tmp_path / "a.fst"), fst)


def test_vector_of_unknown_size(tmp_path: Path) -> None:
    fst = random_fst(np.random.default_rng(3), 7, 9)
    data = bytearray(fst_bytes(fst, "vector"))
    data[50:58] = struct.pack("<q", -1)
    (tmp_path / "a.fst").write_bytes(data)
    assert same(read_fst(tmp_path / "a.fst"), fst)


def test_a_million_arcs_within_seconds(tmp_path: Path) -> None:
    (tmp_path / "a.fst").write_bytes(fst_bytes(random_fst(np.random.default_rng(4), 400_000, 1_000_000), "vector"))
    start = time.process_time()
    assert read_fst(tmp_path / "a.fst").num_arcs == 1_000_000
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_is_an_error(tmp_path: Path, kind: Kind) -> None:
    data = fst_bytes(random_fst(np.random.default_rng(5), 5, 8), kind)
    for size in range(len(data)):
        (tmp_path / "a.fst").write_bytes(data[:size])
        with pytest.raises(DataError, match=r"a\.fst"):
            read_fst(tmp_path / "a.fst")
    (tmp_path / "a.fst").write_bytes(data + b"\0\0\0\0")
    with pytest.raises(DataError):
        read_fst(tmp_path / "a.fst")


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.data())
def test_damaged_bytes_give_an_fst_that_can_be_walked_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: Kind, data: st.DataObject
) -> None:
    raw = bytearray(fst_bytes(random_fst(np.random.default_rng(seed), 5, 8), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fst") / "a.fst"
    path.write_bytes(raw)
    try:
        fst = read_fst(path)
    except DataError:
        return
    assert 0 <= fst.start < fst.num_states or fst.num_states == 0
    assert fst.offsets[-1] == fst.num_arcs and (np.diff(fst.offsets) >= 0).all()
    assert np.isfinite(fst.arcs["weight"]).all() and not np.isnan(fst.final).any()
    for field, most in (("nextstate", fst.num_states), ("ilabel", 2**31), ("olabel", 2**31)):
        assert ((fst.arcs[field] >= 0) & (fst.arcs[field] < most)).all()


IMPOSSIBLE = [
    ("nextstate", 5),
    ("nextstate", -1),
    ("ilabel", -1),
    ("olabel", -9),
    ("weight", np.nan),
    ("weight", np.inf),
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_arcs_that_cannot_be(tmp_path: Path, field: str, value: float) -> None:
    fst = random_fst(np.random.default_rng(6), 5, 8)
    data = fst_bytes(fst, "const")
    fst.arcs[field][3] = value
    with pytest.raises(DataError, match="arc 3"):
        fst_bytes(fst)
    (tmp_path / "a.fst").write_bytes(data[: -8 * 16] + fst.arcs.tobytes())
    with pytest.raises(DataError, match="arc 3"):
        read_fst(tmp_path / "a.fst")


def test_sizes_that_the_file_cannot_hold(tmp_path: Path) -> None:
    for kind, position in (("vector", 50), ("const", 49), ("const", 57)):
        data = bytearray(fst_bytes(random_fst(np.random.default_rng(7), 5, 8), kind))  # type: ignore[arg-type]
        data[position : position + 8] = struct.pack("<q", 2**62)
        (tmp_path / "a.fst").write_bytes(data)
        with pytest.raises(DataError, match="claims"):
            read_fst(tmp_path / "a.fst")


def test_files_of_another_kind(tmp_path: Path) -> None:
    data = fst_bytes(random_fst(np.random.default_rng(8), 5, 8), "const")
    for wrong, message in (
        (b"0 1 2 3 0.5\n" * 20, "not an OpenFst"),
        (data.replace(b"standard", b"logarith"), "logarith"),
        (data.replace(b"const", b"ngram"), "ngram"),
        (data[:29] + struct.pack("<i", 1) + data[33:], "symbol tables"),
    ):
        (tmp_path / "a.fst").write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            read_fst(tmp_path / "a.fst")
    with pytest.raises(DataError, match="No such file"):
        read_fst(tmp_path / "none.fst")
    with pytest.raises(DataError, match="directory"):
        read_fst(tmp_path)


def test_symbols(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes("<eps> 0\nÄH\t7\nno\u00a0break 2\n".encode())
    assert read_symbols(path) == {0: "<eps>", 7: "ÄH", 2: "no\u00a0break"}
    for wrong, message in (
        (b"a 1\nb 1\n", "line 2"),
        (b"a 1\na 2\n", "symbol a occurs twice, in lines 1 and 2"),
        (b"a\n", "line 1"),
        (b"a -1\n", "line 1"),
        (b"a 1 2\n", "line 1"),
        (b"\xff 1\n", "UTF-8"),
        (b"", "empty"),
        (b"a 99999999999999999999\n", "line 1"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            read_symbols(path)
