"""Kaldi's decision tree (`tree`): which pdf a window of phones has for a pdf class.

Follows kaldi `tree/context-dep.cc` and `tree/event-map.cc`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddnn.kaldi.basic_types import BasicTypeReader, open_kaldi_file
from ddnn.kaldi.transition_model import MAX_PDF
from ddnn.util.errors import DataError

MAX_DEPTH = 300  # of maps in each other; splits of one leaf after another, as Kaldi's, make some tens
MAX_CONTEXT_WIDTH = 7  # more than anyone trains; strings of phones that may follow a state grow exponentially
_SMALLEST_MAP = len("NULL ")


@dataclass(frozen=True, slots=True)
class EventMap:
    """One inner node: takes a map by the value at `key`, the position in the window, or -1 for the pdf class."""

    key: int
    yes_set: frozenset[int] | None  # None: the map with the number of the value; else the first where it is in the set
    maps: tuple[int | None, ...]  # positions in `ContextDependency.nodes`; None where Kaldi has no map


@dataclass(frozen=True, eq=False)
class ContextDependency:
    """A decision tree over windows of `context_width` phones, the phone itself at `central_position`."""

    context_width: int  # N: 3 for triphones
    central_position: int  # P: 1 for triphones
    nodes: tuple[EventMap | int, ...]  # an int is a pdf; the last is the root
    num_pdfs: int  # greatest pdf-id plus one

    def pdf(self, window: Sequence[int], pdf_class: int) -> int | None:
        """The pdf of a window of N phone-ids, 0 outside the utterance; None where the tree has none."""
        node: EventMap | int | None = self.nodes[-1]
        while isinstance(node, EventMap):
            value = pdf_class if node.key < 0 else window[node.key]
            number = value if node.yes_set is None else int(value not in node.yes_set)
            position = node.maps[number] if 0 <= number < len(node.maps) else None
            node = None if position is None else self.nodes[position]
        return node


def read_tree(path: Path) -> ContextDependency:
    """Reads a tree, binary or text. DataError: the file is missing, damaged, or no tree."""
    hint = "Kaldi's training leaves tree beside final.mdl: give that of the system of --model"
    with open_kaldi_file(path, "a Kaldi tree", hint_missing=hint) as reader:
        reader.expect("ContextDependency")
        width, central = reader.int32("the context width"), reader.int32("the central position")
        if not 0 <= central < width <= MAX_CONTEXT_WIDTH:
            expected = f"a context width of at most {MAX_CONTEXT_WIDTH} and a position in it"
            raise reader.error(expected, f"{width} and {central}")
        if reader.expect("ToLength", "ToPdf") == "ToLength":  # of old files: the number of pdf classes of a phone
            _read_map(reader, width, [], 0)
            reader.expect("ToPdf")
        nodes: list[EventMap | int] = []
        if _read_map(reader, width, nodes, 0) is None:
            raise reader.error("a tree", "an empty one")
        reader.expect("EndContextDependency")
    pdfs = [node for node in nodes if isinstance(node, int)]
    if not pdfs:
        raise DataError("the tree has no pdf", location=path, hint=hint)
    return ContextDependency(width, central, tuple(nodes), max(pdfs) + 1)


def _read_map(reader: BasicTypeReader, width: int, nodes: list[EventMap | int], depth: int) -> int | None:
    """Appends the map that comes next, behind those that it refers to; its position, None for an empty one."""
    if depth > MAX_DEPTH:
        raise reader.error(f"at most {MAX_DEPTH} maps in each other", "more")
    kind = reader.expect("NULL", "CE", "TE", "SE")
    if kind == "NULL":
        return None
    number = reader.int32("a pdf" if kind == "CE" else "a position in the window")
    node: EventMap | int = number
    if kind != "CE":
        if not -1 <= number < width:
            raise reader.error(f"a position from -1 to {width - 1} in the window", str(number))
        yes_set = frozenset(reader.int32_vector("a set of phones").tolist()) if kind == "SE" else None
        size = 2 if kind == "SE" else _read_size(reader)
        reader.expect("{" if kind == "SE" else "(")
        maps = tuple(_read_map(reader, width, nodes, depth + 1) for _ in range(size))
        reader.expect("}" if kind == "SE" else ")")
        node = EventMap(number, yes_set, maps)
    elif not 0 <= number <= MAX_PDF:
        raise reader.error(f"a pdf from 0 to {MAX_PDF}", str(number))
    nodes.append(node)
    return len(nodes) - 1


def _read_size(reader: BasicTypeReader) -> int:
    """The number of maps of a table: an unsigned integer, before which binary files have the byte 252."""
    if reader.binary:
        sign, size = struct.unpack("<BI", reader.read_exact(5, "the size of a table"))
        if sign != 252:
            raise reader.error("an unsigned integer of 4 bytes", f"the size {sign}")
    else:
        size = reader.int32("the size of a table")
    if not 0 <= size * _SMALLEST_MAP <= reader.remaining:
        raise reader.error("the size of a table that fits into the file", str(size))
    return int(size)
