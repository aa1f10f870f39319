"""The decision tree: AN4's to the byte, what maps choose, and files that are none."""

from __future__ import annotations

import tracemalloc
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kaldi_files import tree_bytes

from ddnn.kaldi.transition_model import read_transition_model
from ddnn.kaldi.tree import ContextDependency, EventMap, read_tree
from ddnn.util.errors import DataError

# Phone 1 has a pdf for each of its two classes; phone 2 is split by its left, then by its right neighbor; 0 has none.
TEXT = b"""ContextDependency 3 1 ToPdf TE 1 3 ( NULL TE -1 2 ( CE 0 CE 1 )
SE -1 [ 0 ]
{ SE 0 [ 0 2 ]
{ CE 2 CE 3 }
SE 2 [ 1 ]
{ CE 4 CE 5 }
}
)
EndContextDependency """


def read_bytes(data: bytes, path: Path) -> ContextDependency:
    path.write_bytes(data)
    return read_tree(path)


@pytest.fixture
def tree(tmp_path: Path) -> ContextDependency:
    return read_bytes(TEXT, tmp_path / "small")


@pytest.mark.parametrize(
    ("window", "pdf_class", "pdf"),
    [
        ((0, 1, 2), 0, 0), ((2, 1, 0), 1, 1), ((2, 1, 0), 2, None),
        ((0, 2, 1), 0, 2), ((2, 2, 1), 0, 2), ((1, 2, 1), 0, 3),
        ((0, 2, 1), 1, 4), ((1, 2, 2), 1, 5), ((1, 2, 0), 2, 5),
        ((1, 0, 1), 0, None), ((1, 3, 1), 0, None),
    ],
)  # fmt: skip
def test_what_maps_choose(tree: ContextDependency, window: tuple[int, ...], pdf_class: int, pdf: int | None) -> None:
    assert tree.pdf(window, pdf_class) == pdf
    assert (tree.context_width, tree.central_position, tree.num_pdfs) == (3, 1, 6)


@pytest.mark.parametrize("binary", [True, False])
def test_both_forms_round_trip(tree: ContextDependency, tmp_path: Path, binary: bool) -> None:
    data = tree_bytes(tree, binary=binary)
    again = read_bytes(data, tmp_path / "again")
    assert (again.nodes, again.num_pdfs) == (tree.nodes, tree.num_pdfs)
    assert tree_bytes(again, binary=binary) == data
    old = data.replace(b"ToPdf ", b"ToLength " + data[data.index(b"TE ") : data.index(b"EndC")] + b"ToPdf ", 1)
    assert read_bytes(old, tmp_path / "old").nodes == tree.nodes


def test_an4s_tree_is_read_whole(an4: Path, tmp_path: Path) -> None:
    tree = read_tree(an4 / "ali" / "tree")
    assert (tree.context_width, tree.central_position, tree.num_pdfs) == (3, 1, 616)
    assert tree_bytes(tree, binary=True) == (an4 / "ali" / "tree").read_bytes()
    assert read_bytes(tree_bytes(tree, binary=False), tmp_path / "text").nodes == tree.nodes


def test_every_transition_state_of_an4_comes_from_its_tree(an4: Path) -> None:
    """Kaldi makes the transition-states of a model by asking the tree for every window, and keeps what it answers."""
    tree, model = read_tree(an4 / "ali" / "tree"), read_transition_model(an4 / "ali" / "final.mdl")
    phones = range(model.num_phones + 1)
    for phone in (1, 11, 61, 142):
        expected = {(state, pdf) for of, state, pdf in model.tuples[:, :3].tolist() if of == phone}
        states = [s for s, state in enumerate(model.topology.states(phone)) if state.transitions]
        found = {(s, tree.pdf((left, phone, right), s)) for left, right in product(phones, phones) for s in states}
        assert found == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"ContextDependency 3 1", b"ContextDependency 3 3", "a position in it at byte .* 3 and 3"),
        (b"ContextDependency 3 1", b"ContextDependency 0 0", "a context width"),
        (b"ContextDependency 3 1", b"ContextDependency 8 1", "at most 7"),
        (b"ToPdf", b"ToPhone", "ToLength or ToPdf"),
        (b"TE 1 3", b"TE 3 3", "a position from -1 to 2 in the window at byte .* 3"),
        (b"TE 1 3", b"TE -2 3", "a position from -1 to 2"),
        (b"TE 1 3", b"TE 1 4", "NULL or CE or TE or SE"),
        (b"TE 1 3", b"TE 1 2", r"expected \)"),
        (b"TE 1 3", b"TE 1 -1", "the size of a table that fits"),
        (b"TE 1 3", b"TE 1 2000000000", "the size of a table that fits"),
        (b"CE 5", b"CE -1", "a pdf from 0 to"),
        (b"CE 5", b"CE 2000000000", "a pdf from 0 to"),
        (b"EndContextDependency", b"End", "EndContextDependency"),
        (TEXT[TEXT.index(b"TE") : TEXT.index(b"EndC")], b"NULL ", "a tree at byte .* an empty one"),
        (TEXT[TEXT.index(b"TE") : TEXT.index(b"EndC")], b"TE 0 0 ( ) ", "has no pdf"),
        (b"CE 5", b"SE 0 [ 1 ] { " * 301 + b"CE 5", "at most 300 maps in each other"),
    ],
)
def test_files_that_are_none(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(DataError, match=message) as caught:
        read_bytes(TEXT.replace(old, new), tmp_path / "tree")
    assert caught.value.location == str(tmp_path / "tree")


def test_as_many_maps_in_each_other_as_may_be(tmp_path: Path) -> None:
    deep = b"SE 0 [ 1 ] { CE 6 " * 297 + b"CE 5" + b" }" * 297
    tree = read_bytes(TEXT.replace(b"CE 5", deep), tmp_path / "tree")
    assert (tree.pdf((1, 2, 2), 1), tree.pdf((2, 2, 2), 1)) == (6, 5)


def test_no_tree(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read a Kaldi tree") as caught:
        read_tree(tmp_path / "tree")
    assert caught.value.hint is not None and "beside final.mdl" in caught.value.hint


@pytest.mark.parametrize("binary", [True, False])
def test_cut_or_changed_at_every_byte(tree: ContextDependency, tmp_path: Path, binary: bool) -> None:
    data = tree_bytes(tree, binary=binary)
    for length in range(len(data) - 1):
        with pytest.raises(DataError):
            read_bytes(data[:length], tmp_path / "cut")
    refused = 0
    for position in range(len(data)):
        damaged = data[:position] + bytes([data[position] ^ (0x01, 0x80, 0xFF)[position % 3]]) + data[position + 1 :]
        try:
            other = read_bytes(damaged, tmp_path / "changed")
        except DataError:
            refused += 1
            continue
        assert all(isinstance(node, int | EventMap) for node in other.nodes)
        for window in product(range(3), repeat=other.context_width if other.context_width < 4 else 0):
            pdf = other.pdf(window, 1)
            assert pdf is None or 0 <= pdf < other.num_pdfs
    assert refused > 0.4 * len(data)


@given(st.binary(max_size=60), st.sampled_from([b"", b"\0B", b"ContextDependency ", TEXT[:40]]))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes) -> None:
    with pytest.raises(DataError, match="not a Kaldi tree"):
        read_bytes(head + data, tmp_path_factory.getbasetemp() / "any.tree")


def test_huge_claims_take_no_memory(tmp_path: Path) -> None:
    head = b"\0BContextDependency \x04\3\0\0\0\x04\1\0\0\0ToPdf "
    tracemalloc.start()
    try:
        for body in (b"TE \4\1\0\0\0\xfc\xff\xff\xff\xff( ", b"SE \4\1\0\0\0\4\xff\xff\xff\x7f"):
            with pytest.raises(DataError, match=r"a table|cut short"):
                read_bytes(head + body + b"NULL " * 1000, tmp_path / "huge")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
