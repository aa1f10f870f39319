"""Lattices: Kaldi's own, every form of what is written, and everything that cannot be one."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kaldi_files import State, lattice_bytes, lattice_text

from ddnn.kaldi.archive import RecordReader, read_scp
from ddnn.kaldi.lattice import Lattice, iterate_lattices, read_lattice, write_lattices
from ddnn.util.errors import DataError

Path_ = tuple[float, float, tuple[int, ...], tuple[int, ...]]


def paths(lattice: Lattice, digits: int = 2) -> list[Path_]:
    """All paths, whatever states they go through: costs, words and transition-ids."""
    found: list[Path_] = []

    def walk(state: int, graph: float, acoustic: float, words: tuple[int, ...], tids: tuple[int, ...]) -> None:
        if state == len(lattice.times) - 1:
            found.append((round(graph, digits), round(acoustic, digits), words, tids))
        for arc in np.flatnonzero(lattice.source == state):
            word = int(lattice.word[arc])
            string = lattice.tids[lattice.offsets[arc] : lattice.offsets[arc + 1]].tolist()
            more = (word,) if word else ()
            costs = graph + float(lattice.graph_cost[arc]), acoustic + float(lattice.acoustic_cost[arc])
            walk(int(lattice.destination[arc]), *costs, words + more, tids + tuple(string))

    walk(0, 0.0, 0.0, (), ())
    return sorted(found)


def check_invariants(lattice: Lattice) -> None:
    """What the docstring of `Lattice` promises."""
    arcs, states = len(lattice.source), len(lattice.times)
    assert lattice.offsets[0] == 0 and lattice.offsets[-1] == len(lattice.tids) and len(lattice.offsets) == arcs + 1
    assert (np.diff(lattice.source) >= 0).all() and (lattice.source < lattice.destination).all()
    assert lattice.levels[0] == 0 and lattice.levels[-1] == states and (np.diff(lattice.levels) > 0).all()
    level = np.searchsorted(lattice.levels, np.arange(states), side="right")
    assert (level[lattice.source] < level[lattice.destination]).all()
    assert set(lattice.destination.tolist()) == set(range(1, states))
    lengths = np.diff(lattice.offsets)
    assert (lattice.times[lattice.destination] == lattice.times[lattice.source] + lengths).all()
    assert lattice.times[0] == 0 and lattice.times.max() == lattice.num_frames
    assert np.isfinite(lattice.graph_cost).all() and np.isfinite(lattice.acoustic_cost).all()


def read(path: Path, record: bytes) -> Lattice:
    path.write_bytes(b"utt " + record)
    ((key, lattice),) = iterate_lattices(path)
    assert key == "utt"
    check_invariants(lattice)
    return lattice


def test_text_and_binary_of_kaldi_are_the_same(golden: Path) -> None:
    binary = dict(iterate_lattices(golden / "smbr/small/lat.1.gz"))
    text = dict(iterate_lattices(golden / "smbr/small/lat.txt.gz"))
    assert list(binary) == list(text) and len(binary) == 11
    for key, lattice in binary.items():
        check_invariants(lattice)
        other = text[key]
        assert (lattice.times == other.times).all() and (lattice.source == other.source).all()
        for arrays in ((lattice, other), (other, lattice)):  # a final weight comes first in binary, last in text
            order = [np.lexsort((x.word, x.destination, x.source)) for x in arrays]
            for name in ("destination", "word", "graph_cost", "acoustic_cost"):
                one, two = (getattr(x, name)[o] for x, o in zip(arrays, order, strict=True))
                np.testing.assert_allclose(one, two, rtol=1e-5)  # text has 6 digits
        assert sorted(lattice.tids) == sorted(other.tids)


def test_state_level_lattices_have_the_paths_of_compact_ones(golden: Path) -> None:
    compact = dict(iterate_lattices(golden / "smbr/small/lat.1.gz"))
    for key, lattice in iterate_lattices(golden / "smbr/small/lat_state.txt.gz"):
        check_invariants(lattice)
        assert np.diff(lattice.offsets).max() == 1
        one, two = paths(lattice), paths(compact[key])
        assert sorted(path[2:] for path in one) == sorted(path[2:] for path in two)
        assert sum(p[0] + p[1] for p in one) == pytest.approx(sum(p[0] + p[1] for p in two), rel=1e-5)


# Out of order, with an empty string, a string on a final weight, a start that is not 0, a dead end, and what cannot be reached.
SMALL: list[State] = [
    ((0.5, 0.25, [7]), []),
    (None, [(3, 1.0, -2.0, [1, 2], 0), (4, 1.5, -3.0, [5], 3), (9, 0.0, 0.0, [], 4)]),
    (None, [(8, 0.0, 0.0, [1], 0)]),
    (None, [(0, 0.25, -1.0, [6], 0)]),
    (None, [(2, 1.0, 1.0, [3], 5)]),
    (None, []),
]
SMALL_PATHS = [(1.5, -1.75, (3,), (1, 2, 7)), (2.25, -3.75, (4,), (5, 6, 7))]


@pytest.mark.parametrize("kind", ["compactlattice44", "compactlattice84"])
def test_out_of_order_states_dead_ends_and_what_cannot_be_reached(tmp_path: Path, kind: str) -> None:
    lattice = read(tmp_path / "a.ark", lattice_bytes(SMALL, kind, start=1))
    assert paths(lattice) == SMALL_PATHS
    assert lattice.num_frames == 3 and len(lattice.times) == 6  # state 2 is gone


def state_level(states: list[State]) -> list[State]:
    """Each string cut to one transition-id."""
    return [
        (None if final is None else (*final[:2], []), [(w, g, a, s[:1], to) for w, g, a, s, to in arcs])
        for final, arcs in states
    ]


@pytest.mark.parametrize("kind", ["lattice4", "lattice8"])
def test_state_level_lattices(tmp_path: Path, kind: str) -> None:
    states: list[State] = [
        (None, [(3, 1.0, -2.0, [1], 1), (0, 0.5, 0.0, [], 2)]),
        ((0.25, 0.5, []), []),
        (None, [(4, 0.0, -1.0, [2], 1)]),
    ]
    expected = [(0.75, -0.5, (4,), (2,)), (1.25, -1.5, (3,), (1,))]
    assert paths(read(tmp_path / "a.ark", lattice_bytes(states, kind))) == expected
    assert paths(read(tmp_path / "a.ark", lattice_text(states, compact=False))) == expected


@st.composite
def lattices(draw: st.DrawFn) -> list[State]:
    """Random compact lattices in which all paths have as many frames as states have been passed by, times two."""
    count = draw(st.integers(1, 7))
    cost = st.integers(-40, 40).map(lambda n: n / 8)
    words = st.integers(0, 5)
    states: list[State] = []
    times = [0, *sorted(draw(st.lists(st.integers(0, 6), min_size=count - 1, max_size=count - 1)))]
    for state, time in enumerate(times):
        later = range(state + 1, count)
        targets = sorted(draw(st.lists(st.sampled_from(later), max_size=4))) if later else []
        arcs = [
            (draw(words), draw(cost), draw(cost), [draw(st.integers(1, 9)) for _ in range(times[to] - time)], to)
            for to in targets
        ]
        final = None
        if state == count - 1 or draw(st.integers(0, 3)) == 0:
            final = (draw(cost), draw(cost), [draw(st.integers(1, 9)) for _ in range(7 - time)])
        states.append((final, arcs))
    if all(final is None for final, _ in states[:1]) and not states[0][1]:
        states[0] = ((0.0, 0.0, [1] * 7), [])
    # Something must lead from the start to the end.
    reached = {0}
    for state, (_, arcs) in enumerate(states):
        if state in reached:
            reached |= {to for *_, to in arcs}
    if not any(states[state][0] is not None for state in reached):
        states[0] = ((0.0, 1.0, [2] * 7), states[0][1])
    return states


@settings(max_examples=60, deadline=None)
@given(lattices())
def test_every_form_and_what_is_written_have_the_same_paths(
    tmp_path_factory: pytest.TempPathFactory, states: list[State]
) -> None:
    folder = tmp_path_factory.mktemp("lattice")
    lattice = read(folder / "a.ark", lattice_bytes(states))
    assert paths(lattice) == paths(read(folder / "b.ark", lattice_text(states)))
    write_lattices(folder / "c.ark", folder / "c.scp", [("x", lattice), ("y", lattice)], relative=True)
    with RecordReader() as reader:
        for entry in read_scp(folder / "c.scp"):
            again = read_lattice(reader, entry)
            check_invariants(again)
            assert paths(again) == paths(lattice)
            assert (again.times == lattice.times).all()


def test_the_writer_writes_kaldis_headers_and_sizes(golden: Path, tmp_path: Path) -> None:
    """States are in another order, so that no more can be compared byte for byte."""
    original = gzip.decompress((golden / "smbr/small/lat.1.gz").read_bytes())
    items = dict(iterate_lattices(golden / "smbr/small/lat.1.gz"))
    write_lattices(tmp_path / "a.ark", tmp_path / "a.scp", items.items())
    written = (tmp_path / "a.ark").read_bytes()
    assert len(written) == len(original)  # the states are in another order
    header = len(b"mmsh-cen5-mmsh-b ") + 34
    assert written[: header + 8] == original[: header + 8]  # to version and flags; then the properties


def test_no_states(tmp_path: Path) -> None:
    for record in (lattice_bytes([]), b"\n\n"):
        lattice = read(tmp_path / "a.ark", record)
        assert len(lattice.source) == 0 and lattice.num_frames == 0
    write_lattices(tmp_path / "b.ark", tmp_path / "b.scp", [("utt", lattice)])
    assert (tmp_path / "b.ark").read_bytes()[4:] == lattice_bytes([])


def test_places_of_an_scp(golden: Path, tmp_path: Path) -> None:
    """A file with offset, a file of one lattice, and a gzip of one by the command that Kaldi's scripts write."""
    (tmp_path / "a.lat").write_bytes(lattice_bytes(SMALL, start=1))
    (tmp_path / "a.gz").write_bytes(gzip.compress(lattice_bytes(SMALL, start=1)))
    (tmp_path / "a.ark").write_bytes(b"x " + lattice_bytes(SMALL, start=1))
    scp = tmp_path / "lat.scp"
    scp.write_text(f"a {tmp_path}/a.lat\nb gunzip -c {tmp_path}/a.gz |\nc {tmp_path}/a.ark:2\n")
    entries = read_scp(scp)
    assert [entry.pipe for entry in entries] == [None] * 3
    with RecordReader() as reader:
        for entry in [*entries, *entries]:
            assert paths(read_lattice(reader, entry)) == SMALL_PATHS
    (tmp_path / "a.gz").write_bytes(gzip.compress(lattice_bytes(SMALL, start=1))[:-6])
    with RecordReader() as reader, pytest.raises(DataError, match="utterance b: damaged or cut gzip"):
        read_lattice(reader, entries[1])
    for command in (
        "gunzip -c a.gz; rm b.gz |",
        "gunzip -c $(x).gz |",
        "gunzip -c a.gz | cat |",
        "gunzip -c a.gz.sh |",
    ):
        scp.write_text(f"a {command}\n")
        with pytest.raises(DataError, match="is a shell command, which is not run"):
            read_scp(scp)


def arc(to: int, graph: float = 1.0, acoustic: float = 1.0, tids: list[int] | None = None) -> State:
    return None, [(1, graph, acoustic, [1] if tids is None else tids, to)]


END: State = ((0.0, 0.0, []), [])


@pytest.mark.parametrize(
    ("states", "start", "message"),
    [
        ([arc(1), arc(0), END], 0, "has a cycle"),
        ([arc(2), arc(1), END], 0, "has a cycle"),  # that cannot be reached
        ([arc(1), (None, [])], 0, "no final state can be reached"),
        ([arc(1), arc(1)], 0, "has a cycle"),
        ([(None, [(1, 0, 0, [1], 1), (1, 0, 0, [1, 2], 1)]), END], 0, "different numbers of frames lead to state 1"),
        ([(END[0], arc(1)[1]), END], 0, "lead to the end, from final states at different frames"),
        ([(END[0], arc(1)[1]), (None, [])], 0, "come after 0 frames, before the end of 1"),
        ([arc(2), END], 0, "next state 2: expected numbers .or both inf., a state under 2"),
        ([arc(-1), END], 0, "next state -1"),
        ([arc(1, graph=np.nan), END], 0, "an arc of state 0 has costs .nan"),
        ([arc(1, acoustic=-np.inf), END], 0, "an arc of state 0 has costs .* -inf"),
        ([arc(1, graph=np.inf), END], 0, "expected numbers"),
        ([arc(1), ((np.nan, 0.0, []), [])], 0, "an arc of state 1 has costs .nan"),
        ([arc(1, tids=[0]), END], 0, "expected transition-ids from 1 on, found 0"),
        ([arc(1), END], 2, "start state 2 of a lattice with 2 states"),
        ([arc(1), END], -1, "start state -1 of a lattice with 2 states"),
    ],
)
def test_what_cannot_be_a_lattice(tmp_path: Path, states: list[State], start: int, message: str) -> None:
    records = [lattice_bytes(states, start=start)]
    if (
        start == 0
        and not any(to < 0 or to == len(states) for _, arcs in states for *_, to in arcs)
        and "nan" not in message
    ):
        records.append(lattice_text(states))
    for record in records:
        path = tmp_path / "a.ark"
        path.write_bytes(b"first " + lattice_bytes([END]) + b"utt " + record)
        with pytest.raises(DataError, match=message) as caught:
            list(iterate_lattices(path))
        assert caught.value.location == str(path) and caught.value.message.startswith("utterance utt: ")


def test_an_arc_of_infinite_cost_is_none(tmp_path: Path) -> None:
    impossible = (5, np.inf, np.inf, [1, 1], 1)
    lattice = read(tmp_path / "a.ark", lattice_bytes([(None, [impossible, *arc(1)[1]]), END]))
    assert len(lattice.source) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"0 1 5 1,2,3_4\n1\n", "no empty line ends the lattice"),
        (b"0 1 5 1,2,3\n1 0 0\n", "no empty line ends the lattice"),
        (b"0 1 5 1,2,3\n1\n2\n0 1 2 3 4\n\n", "expected an arc or a final state"),
        (b"0 1 5 1,2,3\n1\n1 0,0\n\n", "a final weight per state"),
        (b"0 1 5 1,2,3__4\n1\n\n", "transition-ids with _ between"),
        (b"0 1 5 x,2,3\n1\n\n", "expected a number"),
        (b"0 1 5 1,2,3_99999999999\n1\n\n", "expected 32-bit integers"),
        (b"0 1.5 5 1,2,3\n1\n\n", "expected integers"),
        (b"x\n", "a binary one, or a line end and its arcs"),
    ],
)
def test_text_that_is_no_lattice(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(b"utt \n" + text if text != b"x\n" else b"utt  x\n")
    with pytest.raises(DataError, match=message):
        list(iterate_lattices(tmp_path / "a"))


@pytest.mark.parametrize("kind", ["compactlattice44", "lattice8"])
def test_cut_anywhere(tmp_path: Path, kind: str) -> None:
    states = SMALL if kind[0] == "c" else [arc(1), END]
    whole = b"utt " + lattice_bytes(states, kind, start=1 if kind[0] == "c" else 0)
    path = tmp_path / "a.ark"
    path.write_bytes(whole)
    assert len(list(iterate_lattices(path))) == 1
    for end in reversed(range(1, len(whole))):
        os.truncate(path, end)
        with pytest.raises(DataError, match="cut short"):
            list(iterate_lattices(path))


def test_lies_of_the_header(tmp_path: Path) -> None:
    sound = lattice_bytes([arc(1), END])
    path = tmp_path / "a.ark"
    for at, new, message in (
        (18, b"compactlattice99", "expected a lattice"),
        (8, b"const!", "expected a lattice"),
        (14, b"\xff\xff", "cut short"),
        (34, b"\3", "version 3, flags 0, 2 states: expected 2"),
        (38, b"\1", "version 2, flags 1"),
        (58, b"\xff" * 8, "-1 states"),
        (58, b"\xff" * 7 + b"\x7f", "cut short"),
        (134, b"\xff" * 8, "no number under 0"),
        (86, b"\xff" * 7 + b"\x7f", "cut short"),
        (110, b"\xff\xff\xff\x7f", "cut short: a string of transition-ids takes"),
        (110, b"\xff" * 4, "claims a string of -1 transition-ids"),
        (82, b"\xff" * 4, "claims a string of -1 transition-ids"),
        (82, b"\xfe\xff\xff\xff", "claims a string of -2 transition-ids"),
    ):
        path.write_bytes(b"utt " + sound[:at] + new + sound[at + len(new) :])
        with pytest.raises(DataError, match=message):
            list(iterate_lattices(path))


def test_all_of_an4(shared: Path, tmp_path: Path) -> None:
    """The lattices of a whole training set become an archive from which each is read by itself."""
    source = tmp_path / "lat.1.gz"
    shutil.copy(shared / "golden/smbr/an4_denlat.1.gz", source)
    lattices = dict(iterate_lattices(source))
    assert len(lattices) == 948 and sum(lattice.num_frames for lattice in lattices.values()) == 253_682
    write_lattices(tmp_path / "all.ark", tmp_path / "all.scp", lattices.items())
    with RecordReader() as reader:
        for entry in read_scp(tmp_path / "all.scp")[::-37]:
            np.testing.assert_array_equal(read_lattice(reader, entry).tids, lattices[entry.key].tids)
