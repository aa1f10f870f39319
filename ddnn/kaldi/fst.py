"""OpenFst binary files, as far as decoding graphs need: FST types `vector` and `const`, arc type `standard`, after
OpenFst 1.7 `fst.cc` (FstHeader), `vector-fst.h` and `const-fst.h`. Everything is checked here, because the C++ decoder
that walks a graph checks nothing."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import read_keyed_lines
from ddnn.util.arrays import Float32Array, Int64Array
from ddnn.util.errors import DataError
from ddnn.util.files import atomic_write, read_bytes_limited

ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("nextstate", "<i4")])
"""One arc as it is in the file. Weights are costs (negated logs); label 0 is epsilon."""

_CONST_STATE = np.dtype(
    [("final", "<f4"), ("pos", "<u4"), ("narcs", "<u4"), ("niepsilons", "<u4"), ("noepsilons", "<u4")]
)
MAGIC = 2125659606
MAX_FST_BYTES = 256 << 30
_HAS_SYMBOLS = 3
_IS_ALIGNED = 4
_ALIGNMENT = 16  # bytes: kArchAlignment of OpenFst
_EXPANDED, _ERROR = 1, 4  # property bits that hold whatever the labels are
HEADER_NUMBERS = "<iiQqqq"  # of a header, after the two types: version, flags, properties, start, states, arcs

_DAMAGED = "the file is damaged or cut: make it again with utils/mkgraph.sh, or copy it again"


@dataclass(frozen=True, eq=False)
class Fst:
    """A weighted finite-state transducer over the tropical semiring; arcs `offsets[s]:offsets[s + 1]` leave state s."""

    start: int  # -1 for the empty FST
    final: Float32Array  # [states], cost of ending in each state; inf where it is not final
    offsets: Int64Array  # [states + 1]
    arcs: NDArray[np.void]  # `ARC` [arcs], ordered by the state they leave

    @property
    def num_states(self) -> int:
        return len(self.final)

    @property
    def num_arcs(self) -> int:
        return len(self.arcs)

    def sources(self) -> Int64Array:
        """The state that each arc leaves: int64 [arcs]."""
        return np.repeat(np.arange(self.num_states), np.diff(self.offsets))


def _bad(message: str, hint: str = _DAMAGED) -> DataError:
    """An error to which `read_fst` adds the file."""
    return DataError(message, hint=hint)


def _header(fst_type: str) -> bytes:
    """The beginning of a file of this FST type, up to its numbers."""
    return struct.pack(f"<ii{len(fst_type)}si8s", MAGIC, len(fst_type), fst_type.encode(), 8, b"standard")


def _parse(data: bytes) -> Fst:
    if data[:4] != struct.pack("<i", MAGIC):
        hint = "give a binary FST such as HCLG.fst; fstcompile makes one from text"
        raise _bad(f"not an OpenFst binary file: it begins with {data[:4]!r}", hint)
    header = next((header for header in map(_header, ("vector", "const")) if data.startswith(header)), None)
    if header is None:
        found = ", ".join(word.decode() for word in re.findall(rb"\w{3,64}", data[4:200])[:2])
        message = f"FST type and arc type {found}: expected vector or const, standard"
        raise _bad(message, "convert it: fstconvert --fst_type=const IN OUT")
    position = len(header) + struct.calcsize(HEADER_NUMBERS)
    if position > len(data):
        raise _bad(f"the FST ends within its header: {len(data)} bytes in all")
    version, flags, properties, start, num_states, num_arcs = struct.unpack_from(HEADER_NUMBERS, data, len(header))
    if flags & _HAS_SYMBOLS:
        hint = "fstsymbols --clear_isymbols --clear_osymbols IN OUT"
        raise _bad("the FST carries symbol tables, which are not read", hint)
    is_vector = header == _header("vector")
    versions = (2,) if is_vector else (1, 2)
    if version not in versions or flags & ~_IS_ALIGNED or properties & _ERROR:
        found = f"FST version {version}, flags {flags}, properties {properties:#x}"
        raise _bad(f"{found}: expected version 2 without errors")
    if is_vector:
        return _read_vector(data, position, start, num_states)
    alignment = _ALIGNMENT if version == 1 or flags & _IS_ALIGNED else 1
    return _read_const(data, position, start, num_states, num_arcs, alignment)


def _read_const(data: bytes, position: int, start: int, num_states: int, num_arcs: int, alignment: int) -> Fst:
    states_at = position + -position % alignment
    arcs_at = states_at + num_states * _CONST_STATE.itemsize
    arcs_at += -arcs_at % alignment
    expected = arcs_at + num_arcs * ARC.itemsize
    if min(num_states, num_arcs) < 0 or expected != len(data):
        message = f"the FST claims {num_states} states and {num_arcs} arcs, which make {expected} bytes"
        raise _bad(f"{message}, found {len(data)}")
    states = np.frombuffer(data, _CONST_STATE, num_states, states_at)
    offsets = np.concatenate([[0], np.cumsum(states["narcs"], dtype=np.int64)])
    unequal = np.flatnonzero(np.append(states["pos"], num_arcs) != offsets)
    if len(unequal):
        raise _bad(f"the arcs of state {unequal[0]} do not begin where those of the state before end")
    return Fst(start, states["final"].astype(np.float32), offsets, np.frombuffer(data, ARC, num_arcs, arcs_at))


def _read_vector(data: bytes, first: int, start: int, num_states: int) -> Fst:
    counts: list[int] = []
    unpack, position, end = struct.Struct("<4xq").unpack_from, first, len(data)
    while position < end and len(counts) != num_states:
        narcs = unpack(data, position)[0] if position + 12 <= end else -1
        position += 12 + narcs * 16
        if narcs < 0 or position > end:
            raise _bad(f"state {len(counts)} claims {narcs} arcs, more than the file's {len(data)} bytes hold")
        counts.append(narcs)
    # OpenFst writes -1 states where it could not seek back: then they extend to the end of the file.
    if position != end or num_states not in (-1, len(counts)):
        found = f"{len(counts)} states end at byte {position} of {end}"
        raise _bad(f"{found}; the header claims {num_states} states")
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    # Three words per state are between the arcs (four words each): what remains without them is the arcs.
    values = np.frombuffer(data, "<i4", offset=first)
    heads = offsets[:-1] * 4 + np.arange(len(counts)) * 3
    arcs = np.delete(values, heads[:, None] + np.arange(3))
    return Fst(start, values[heads].view("<f4").astype(np.float32), offsets, arcs.view(ARC))


def check_fst(fst: Fst) -> None:
    """Raises DataError unless the FST can be walked: states in range, labels >= 0, finite costs (or inf: not final)."""
    states, arcs = fst.num_states, fst.arcs
    if not (0 <= fst.start < states or (fst.start == -1 and states == 0)):
        raise _bad(f"start state {fst.start} of an FST with {states} states")
    final_ok = np.isfinite(fst.final) | np.isposinf(fst.final)
    if not final_ok.all():
        state = int(np.argmin(final_ok))
        raise _bad(f"state {state} has the final cost {fst.final[state]}, expected a number or inf")
    arc_ok = (arcs["nextstate"] >= 0) & (arcs["nextstate"] < states) & (arcs["ilabel"] >= 0) & (arcs["olabel"] >= 0)
    arc_ok &= np.isfinite(arcs["weight"])
    if not arc_ok.all():
        bad = int(np.argmin(arc_ok))
        expected = f"expected labels >= 0, a finite cost, a next state under {states}"
        raise _bad(f"arc {bad} (ilabel, olabel, cost, next state) is {arcs[bad]}: {expected}")


def read_fst(path: Path) -> Fst:
    """Reads a `vector` or `const` FST file with arcs of type `standard`. DataError: the file is missing, is no such
    FST, is cut, or has states, labels or weights that cannot be."""
    try:
        fst = _parse(read_bytes_limited(path, MAX_FST_BYTES))
        check_fst(fst)
    except OSError as error:
        message = f"cannot read the FST {path.name}: {error.strerror}"
        hint = f"name its directory: {path.parent.parent}" if path.parent.is_file() else "check the path"
        raise DataError(message, location=path, hint=hint) from error
    except DataError as error:
        raise DataError(error.message, location=path, hint=error.hint) from error
    return fst


def write_fst(path: Path, fst: Fst) -> None:
    """Writes a `const` FST (version 2, no symbols, not aligned) to `path`, complete or not at all. DataError: as
    `check_fst`. UserError: it cannot be written."""
    check_fst(fst)
    numbers = struct.pack(HEADER_NUMBERS, 2, 0, _EXPANDED, fst.start, fst.num_states, fst.num_arcs)
    states = np.zeros(fst.num_states, _CONST_STATE)
    states["final"], states["pos"], states["narcs"] = fst.final, fst.offsets[:-1], np.diff(fst.offsets)
    for field, label in (("niepsilons", "ilabel"), ("noepsilons", "olabel")):
        states[field] = np.bincount(fst.sources()[fst.arcs[label] == 0], minlength=fst.num_states)
    with atomic_write(path) as handle:
        for part in (_header("const"), numbers, states.tobytes(), fst.arcs.astype(ARC).tobytes()):
            handle.write(part)


def read_symbols(path: Path) -> dict[int, str]:
    """Reads a symbol table (`words.txt`, `phones.txt`): one `symbol id` a line, to id -> symbol. DataError: missing,
    not UTF-8, a line of another form, an id or a symbol that occurs twice."""
    symbols: dict[int, str] = {}
    for number, symbol, rest in read_keyed_lines(path, "the symbol table", "symbol"):
        if not re.fullmatch("[0-9]{1,10}", rest):
            message = f"line {number} is {f'{symbol} {rest}'[:80]!r}, expected a symbol and its id"
            raise DataError(message, location=path, hint="correct the line")
        if int(rest) in symbols:
            message = f"line {number}: the id {int(rest)} occurs twice"
            raise DataError(message, location=path, hint="remove one of the two lines")
        symbols[int(rest)] = symbol
    return symbols
