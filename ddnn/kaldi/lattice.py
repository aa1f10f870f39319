"""Lattices: archives and files of one lattice, compact and state-level, binary and text.

Follows kaldi `lat/kaldi-lattice.cc`, `fstext/lattice-weight.h` and `lat/lattice-functions.cc` (`TopSortLatticeIfNeeded`,
`CompactLatticeStateTimes`), and OpenFst 1.7 `vector-fst.h`. Everything that could upset a forward-backward is an error here."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import RecordReader, ScpEntry, iterate_records, write_table
from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, MalformedRecordError, to_floats, to_integers
from ddnn.kaldi.fst import HEADER_NUMBERS, MAGIC
from ddnn.util.arrays import AnyArray, Float32Array, Int32Array, Int64Array

_VECTOR = struct.pack("<ii6s", MAGIC, 6, b"vector")
_ARC_TYPES = {
    b"lattice4": (1, False),
    b"lattice8": (2, False),
    b"compactlattice44": (1, True),
    b"compactlattice84": (2, True),
}
"""Words of four bytes of a cost, and whether arcs and final states have strings."""
_SMALL = 1 << 16


@dataclass(frozen=True, eq=False)
class Lattice:
    """An acyclic lattice of A arcs and S states, each of which can be reached. A state-level lattice is one whose strings
    have one transition-id or none.

    States are numbered in topological order from the start, 0, to the end, S - 1: ending in a final state is an arc to the
    end, with the final weight and string and word 0. Costs are negated logs and finite. What has no states in the file has
    the end alone.

    Attributes:
        levels: int64 (L + 1,): arcs into states `levels[k]:levels[k + 1]` come from states before `levels[k]`.
        times: int64 (S,), the frame that begins in each state; of the end the number of frames.
        source, destination: int64 (A,), states; sources ascend.
        word: int32 (A,), 0 for none.
        graph_cost, acoustic_cost: float32 (A,).
        tids: int32 (N,), the transition-ids of arc a at `offsets[a]:offsets[a + 1]`; the first is that of frame
            `times[source[a]]`.
        offsets: int64 (A + 1,).
    """

    levels: Int64Array
    times: Int64Array
    source: Int64Array
    destination: Int64Array
    word: Int32Array
    graph_cost: Float32Array
    acoustic_cost: Float32Array
    tids: Int32Array
    offsets: Int64Array

    @property
    def num_frames(self) -> int:
        return int(self.times[-1])


@dataclass(frozen=True, eq=False)
class Arcs:
    """Arcs as they are in the file, and final weights as arcs that are `final`, whatever their destination says."""

    start: int
    num_states: int
    source: Int64Array
    destination: AnyArray
    final: NDArray[np.bool_]
    word: AnyArray
    costs: AnyArray  # (A, 2): graph, acoustic
    tids: Int32Array
    lengths: Int64Array


def _spans(first: Int64Array, lengths: Int64Array) -> Int64Array:
    """The numbers first[0], first[0] + 1, ..., `lengths[0]` of them, then those from first[1] on, and so on."""
    ends = np.cumsum(lengths)
    return np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def _offsets(lengths: AnyArray) -> Int64Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _read_binary(reader: BasicTypeReader) -> Arcs:
    def take(size: int) -> bytes | bytearray:
        if size > _SMALL:
            return reader.read_exact(size, "a string of transition-ids")
        data = reader.stream.read(size)
        if len(data) < size:
            raise MalformedRecordError(f"cut short: the lattice goes on for {size} bytes or more, {len(data)} remain")
        return data

    begin = take(len(_VECTOR) + 4)
    arc_type = bytes(take(begin[-4]))
    if begin[:-4] != _VECTOR or arc_type not in _ARC_TYPES:
        expected = "a lattice (vector FST, arc type lattice4 or compactlattice44, or with 8)"
        raise MalformedRecordError(f"expected {expected}, found {bytes(begin + arc_type)[:64]!r}")
    version, flags, _, start, num_states, _ = struct.unpack(HEADER_NUMBERS, take(struct.calcsize(HEADER_NUMBERS)))
    cost_words, compact = _ARC_TYPES[arc_type]
    weight_size = 4 * (2 * cost_words + compact)
    int32, int64 = struct.Struct("<i").unpack_from, struct.Struct("<q").unpack_from
    pieces, lengths, counts = list[bytes | bytearray](), list[int](), list[int]()

    def take_weight(before: int, behind: int) -> bytes | bytearray:
        pieces.append(take(before + weight_size))
        lengths.append(int32(pieces[-1], before + weight_size - 4)[0] if compact else 0)
        if lengths[-1] < 0:
            raise MalformedRecordError(f"the lattice claims a string of {lengths[-1]} transition-ids")
        pieces.append(take(4 * lengths[-1] + behind))
        return pieces[-1]

    for _ in range(num_states):
        counts.append(int64(take_weight(0, 8), 4 * lengths[-1])[0])
        for _ in range(counts[-1]):
            take_weight(8, 4)
    if version != 2 or flags or num_states < 0 or min(counts, default=0) < 0:
        raise MalformedRecordError(
            f"version {version}, flags {flags}, {num_states} states: expected 2, 0, no number under 0"
        )
    words, strings = np.frombuffer(b"".join(pieces), "<i4"), np.array(lengths, np.int64)
    source = np.repeat(np.arange(num_states), np.array(counts, np.int64) + 1)
    is_arc = np.diff(source, prepend=-1) == 0
    costs_at = np.cumsum(weight_size // 4 + strings + np.where(is_arc, 3, 2))
    costs_at += 2 * is_arc - np.diff(costs_at, prepend=0)
    string_at = costs_at + weight_size // 4
    costs = words[costs_at[:, None] + np.arange(2 * cost_words)].view(f"<f{4 * cost_words}")
    destination = words[string_at + strings]
    tids, labels = words[_spans(string_at, strings)], words[costs_at - 2 * is_arc]
    if not compact:
        strings = (is_arc & (labels != 0)).astype(np.int64)
        tids, labels = labels[strings == 1], words[costs_at - is_arc]
    return Arcs(start, num_states, source, destination, ~is_arc, np.where(is_arc, labels, 0), costs, tids, strings)


def _read_text(reader: BasicTypeReader) -> Arcs:
    if line := reader.read_line().strip():
        raise MalformedRecordError(f"expected a lattice: a binary one, or a line end and its arcs; found {line[:24]!r}")
    labels, costs, tids, lengths = bytearray(), bytearray(), bytearray(), list[int]()
    while words := (line := reader.read_line()).split():
        *ids, weight = words if b"," in words[-1] else (*words, b"0,0")
        graph, acoustic, *string = weight.split(b",", 2)
        if len(ids) == 1:
            ids = [ids[0], b"-1", b"0"]
        elif len(ids) == 4 and not string:
            *ids, tid, word = ids
            ids, string = [*ids, word], [tid] if tid != b"0" else []
        if len(ids) != 3:
            raise MalformedRecordError(f"expected an arc or a final state, found {line[:80]!r}")
        labels += b" ".join([*ids, b""])
        costs += b"%b %b " % (graph, acoustic)
        tids += b"".join(string).replace(b"_", b" ") + b" "
        lengths.append(sum(part.count(b"_") + 1 for part in string if part))
    if not line:
        raise MalformedRecordError("cut short: no empty line ends the lattice")
    source, destination, word = to_integers(bytes(labels)).reshape(-1, 3).T
    final = destination == -1
    ids_of, numbers = np.unique(np.concatenate([source, np.where(final, source, destination)]), return_inverse=True)
    strings, values = to_integers(bytes(tids)), np.array(to_floats(bytes(costs)))
    if len(strings) != sum(lengths) or len(values) != 2 * len(lengths) or len(np.unique(source[final])) != final.sum():
        raise MalformedRecordError("expected two costs and transition-ids with _ between, and a final weight per state")
    arcs = numbers[: len(source)], numbers[len(source) :], final, word, values.reshape(-1, 2), strings
    return Arcs(int(numbers[0]) if lengths else -1, len(ids_of), *arcs, np.array(lengths, np.int64))


def _check(arcs: Arcs) -> None:
    """Raises MalformedRecordError where a state, a cost or a transition-id cannot be."""
    if not 0 <= arcs.start < arcs.num_states and (arcs.start, arcs.num_states) != (-1, 0):
        raise MalformedRecordError(f"start state {arcs.start} of a lattice with {arcs.num_states} states")
    valid = arcs.final | (arcs.destination >= 0) & (arcs.destination < arcs.num_states)
    valid &= np.isfinite(arcs.costs).all(axis=1) | np.isposinf(arcs.costs).all(axis=1)
    for bad in np.flatnonzero(~valid)[:1]:
        found = f"an arc of state {arcs.source[bad]} has costs {arcs.costs[bad]}, next state {arcs.destination[bad]}"
        raise MalformedRecordError(f"{found}: expected numbers (or both inf), a state under {arcs.num_states}")
    if len(arcs.tids) and arcs.tids.min() < 1:
        raise MalformedRecordError(f"expected transition-ids from 1 on, found {arcs.tids.min()}")


def _walk(start: int, first: Int64Array, destination: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Of each state the frame, -1 where it cannot be reached, and the largest number of arcs before it. Arcs
    `first[s]:first[s + 1]` leave state s."""
    bounds, to, frames = first.tolist(), destination.tolist(), lengths.tolist()
    incoming = np.bincount(destination, minlength=len(bounds) - 1)
    states: list[int] = np.flatnonzero(incoming == 0).tolist()
    missing, times, levels = incoming.tolist(), [-1] * len(incoming), [0] * len(incoming)
    times[start] = 0
    for state in states:  # grows by those whose predecessors are all done: Kahn's algorithm
        time, level = times[state], levels[state] + 1
        for arc in range(bounds[state], bounds[state + 1]):
            other = to[arc]
            if time >= 0:
                times[other] = time + frames[arc]
            if levels[other] < level:
                levels[other] = level
            missing[other] -= 1
            if not missing[other]:
                states.append(other)
    if len(states) < len(times):
        raise MalformedRecordError(f"the lattice has a cycle: {len(times) - len(states)} states are on it or behind it")
    return np.array(times), np.array(levels)


def sort_arcs(arcs: Arcs) -> Lattice:
    """The lattice of these arcs, without what cannot be reached."""
    _check(arcs)
    end = arcs.num_states
    possible = np.flatnonzero(np.isfinite(arcs.costs[:, 0]))
    possible = possible[np.argsort(arcs.source[possible], kind="stable")]
    source, lengths = arcs.source[possible], arcs.lengths[possible]
    destination = np.where(arcs.final, end, arcs.destination)[possible]
    times, level = _walk(arcs.start, _offsets(np.bincount(source, minlength=end + 1)), destination, lengths)
    if times[end] < 0:
        raise MalformedRecordError("no final state can be reached")
    reachable = times[source] >= 0
    ambiguous = destination[reachable & (times[destination] != times[source] + lengths)]
    if len(ambiguous):
        where = (
            "the end, from final states at different frames" if (ambiguous == end).all() else f"state {ambiguous[0]}"
        )
        raise MalformedRecordError(f"paths of different numbers of frames lead to {where}")
    if times[end] != times.max():
        raise MalformedRecordError(f"the final states come after {times[end]} frames, before the end of {times.max()}")
    level[end] = level.max() + 1
    states = np.flatnonzero(times >= 0)
    states = states[np.argsort(level[states], kind="stable")]
    number = np.zeros(end + 1, np.int64)
    number[states] = np.arange(len(states))
    keep = np.flatnonzero(reachable)
    keep = keep[np.argsort(number[source[keep]], kind="stable")]
    chosen = possible[keep]
    levels = np.concatenate([[0], np.flatnonzero(np.diff(level[states])) + 1, [len(states)]])
    tids = arcs.tids[_spans(_offsets(arcs.lengths)[chosen], lengths[keep])].astype(np.int32)
    graph, acoustic = arcs.costs[chosen].astype(np.float32).T
    word, ends = arcs.word[chosen].astype(np.int32), number[destination[keep]]
    return Lattice(
        levels, times[states], number[source[keep]], ends, word, graph, acoustic, tids, _offsets(lengths[keep])
    )


def parse_lattice(reader: BasicTypeReader) -> Lattice:
    binary = not reader.stream.peek(1)[:1].isspace()
    arcs = _read_binary(reader) if binary else _read_text(reader)
    with np.errstate(over="ignore", invalid="ignore"):
        return sort_arcs(arcs)


def iterate_lattices(path: Path) -> Iterator[tuple[str, Lattice]]:
    """Every (utterance, lattice) of an archive, plain or gzip. DataError: the file is missing, empty, damaged or cut
    short; a lattice has a cycle, no final state that can be reached, paths of different lengths into a state or to the
    end, a state that is not there, or a cost that is NaN or -Infinity; names the last complete record."""
    return iterate_records(path, parse_lattice)


def read_lattice(reader: RecordReader, entry: ScpEntry) -> Lattice:
    """The lattice of an scp entry. DataError: as `iterate_lattices`."""
    return reader.read_record(entry, parse_lattice)


def _write(handle: BinaryIO, items: Iterable[tuple[str, Lattice]]) -> Iterator[str]:
    writer = BasicTypeWriter(handle)
    for key, lattice in items:
        writer.token(key)
        yield key
        states, tids = len(lattice.times) - 1, lattice.tids.astype("<i4").tobytes()
        numbers = struct.pack(HEADER_NUMBERS, 2, 0, 3, 0 if states else -1, states, len(lattice.source))
        parts = [_VECTOR, struct.pack("<i16s", 16, b"compactlattice44"), numbers]
        final = struct.pack("<ffi", np.inf, np.inf, 0)
        finals, arcs = [final] * states, [list[bytes]() for _ in range(states)]
        columns: list[Any] = [
            lattice.source,
            lattice.destination,
            lattice.word,
            lattice.graph_cost,
            lattice.acoustic_cost,
        ]
        strings = zip(lattice.offsets[:-1].tolist(), lattice.offsets[1:].tolist(), strict=True)
        for *arc, (first, last) in zip(*(column.tolist() for column in columns), strings, strict=True):
            source, destination, word, graph, acoustic = arc
            weight = struct.pack("<ffi", graph, acoustic, last - first) + tids[4 * first : 4 * last]
            if destination == states:
                finals[source] = weight
            else:
                arcs[source].append(struct.pack("<ii", word, word) + weight + struct.pack("<i", destination))
        for final, leaving in zip(finals, arcs, strict=True):
            parts += [final, struct.pack("<q", len(leaving)), *leaving]
        handle.write(b"".join(parts))


def write_lattices(ark: Path, scp: Path, items: Iterable[tuple[str, Lattice]], *, relative: bool = False) -> None:
    """Writes compact lattices as a binary archive and its scp, from which each can be read by itself: also what a
    training makes, once, of archives in gzips. Both appear complete or not at all. `relative`: as `write_matrices`.
    UserError: the files cannot be written."""
    write_table(ark, scp, lambda handle: _write(handle, items), relative=relative)
