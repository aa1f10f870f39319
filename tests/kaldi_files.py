"""Kaldi files that ddnn reads but does not write itself: text models, `vector` FSTs, GMMs; and single scp entries."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ddnn.kaldi.archive import MatrixReader, ScpEntry
from ddnn.kaldi.basic_types import BasicTypeWriter, TextWriter
from ddnn.kaldi.fst import ARC, Fst, check_fst, write_fst
from ddnn.kaldi.nnet1 import Component
from ddnn.kaldi.nnet1_file import write_nnet1
from ddnn.kaldi.transition_model import NO_PDF, Topology, TransitionModel, read_transition_model
from ddnn.kaldi.tree import ContextDependency
from ddnn.synth.acoustics import write_diag_gmm


def matrix_shape(entry: ScpEntry) -> tuple[int, int]:
    """(rows, columns) of one entry."""
    with MatrixReader() as reader:
        return reader.shape(entry)


def read_matrix(entry: ScpEntry, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """The matrix of one entry, (rows, columns)."""
    with MatrixReader() as reader:
        return reader.read(entry, dtype)


def nnet1_bytes(components: Sequence[Component], *, binary: bool) -> bytes:
    """A network as Kaldi's nnet1 writes it, byte for byte."""
    with tempfile.TemporaryDirectory() as folder:
        write_nnet1(Path(folder) / "x.nnet", components, text=not binary)
        return (Path(folder) / "x.nnet").read_bytes()


def transitions_of(model: TransitionModel) -> np.ndarray:
    """By transition-id: the phone, and whether it is a self-loop; transition-id 0 is unused."""
    rows = [(-1, False)]
    for phone, state in model.tuples[:, :2].tolist():
        rows += [(phone, to == state) for to, _ in model.topology.states(phone)[state].transitions]
    return np.array(rows, [("phone", np.int32), ("is_self_loop", bool)])


def build_transition_model(topology: Topology, tuples: Iterable[tuple[int, int, int, int]]) -> TransitionModel:
    """A transition model as Kaldi initializes it, with the topology's probabilities; as it is read from a file.

    Args:
        tuples: (phone, HMM state, forward pdf, self-loop pdf) each, in any order.
    """
    rows = np.array(sorted(set(tuples)), np.int32)
    states = [topology.states(phone)[state] for phone, state in rows[:, :2].tolist()]
    log_probs = np.log(np.array([1.0, *(p for state in states for _, p in state.transitions)], np.float32))
    with tempfile.TemporaryDirectory() as folder:
        model = TransitionModel(topology, rows, log_probs, np.zeros(0, np.int32))
        (Path(folder) / "final.mdl").write_bytes(model_bytes(model, binary=True))
        return read_transition_model(Path(folder) / "final.mdl")


def _binary_model(model: TransitionModel) -> bytes:
    handle = io.BytesIO()
    writer = BasicTypeWriter(handle)
    topology, extended = model.topology, not model.topology.is_hmm
    phones = np.array(list(topology.phone_to_entry), np.int32)
    indices = np.full(int(phones.max()) + 1, -1, np.int32)
    indices[phones] = list(topology.phone_to_entry.values())
    writer.marker()
    writer.token("<TransitionModel>", "<Topology>")
    writer.int32_vector(phones)
    writer.int32_vector(indices)
    counts = [-1] * extended + [len(topology.entries)]
    for entry in topology.entries:
        writer.int32_block(np.array([*counts, len(entry)]))
        counts = []
        for state in entry:
            classes = [state.forward_pdf_class] + [state.self_loop_pdf_class] * extended
            writer.int32_block(np.array([*classes, len(state.transitions)]))
            for destination, probability in state.transitions:
                writer.int32(destination)
                writer.float32(probability)
    name, tuples = ("Tuples", model.tuples) if extended else ("Triples", model.tuples[:, :3])
    writer.token("</Topology>", f"<{name}>")
    writer.int32(len(tuples))
    writer.int32_block(tuples)
    writer.token(f"</{name}>", "<LogProbs>")
    writer.float_vector(model.log_probs)
    writer.token("</LogProbs>", "</TransitionModel>")
    return handle.getvalue()


def model_bytes(model: TransitionModel, *, binary: bool) -> bytes:
    """A transition model as Kaldi writes it, byte for byte."""
    if binary:
        return _binary_model(model)
    handle = io.BytesIO()
    writer = TextWriter(handle)
    is_hmm = model.topology.is_hmm
    name, tuples = ("Triples", model.tuples[:, :3]) if is_hmm else ("Tuples", model.tuples)
    handle.write(b"<TransitionModel> \n<Topology> \n")
    for index in range(len(model.topology.entries)):
        _write_text_entry(writer, model.topology, index)
    handle.write(b"</Topology> \n<%s> %d \n" % (name.encode(), len(tuples)))
    handle.write(b"".join(b"".join(b"%d " % value for value in row) + b"\n" for row in tuples.tolist()))
    handle.write(b"</%s> \n<LogProbs> \n" % name.encode())
    writer.float_vector(model.log_probs)
    handle.write(b"</LogProbs> \n</TransitionModel> \n")
    return handle.getvalue()


def _write_text_entry(writer: TextWriter, topology: Topology, index: int) -> None:
    phones = [phone for phone, entry in topology.phone_to_entry.items() if entry == index]
    writer.handle.write(b"<TopologyEntry> \n<ForPhones> \n")
    writer.handle.write(b"".join(b"%d " % phone for phone in phones) + b"\n</ForPhones> \n")
    for number, state in enumerate(topology.entries[index]):
        writer.handle.write(b"<State> %d " % number)
        if state.forward_pdf_class != NO_PDF:
            if topology.is_hmm:
                writer.handle.write(b"<PdfClass> %d " % state.forward_pdf_class)
            else:
                classes = (state.forward_pdf_class, state.self_loop_pdf_class)
                writer.handle.write(b"<ForwardPdfClass> %d <SelfLoopPdfClass> %d " % classes)
        for destination, probability in state.transitions:
            writer.handle.write(b"<Transition> %d " % destination)
            writer.float32(probability)
        writer.handle.write(b"</State> \n")
    writer.handle.write(b"</TopologyEntry> \n")


def write_diag_gmms(
    handle: BinaryIO, means: Sequence[np.ndarray], variances: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> None:
    """The mixtures of a `final.mdl`, behind the transition model: one of each per pdf."""
    writer = BasicTypeWriter(handle)
    writer.token("<DIMENSION>")
    writer.int32(means[0].shape[1])
    writer.token("<NUMPDFS>")
    writer.int32(len(means))
    for mean, variance, weight in zip(means, variances, weights, strict=True):
        write_diag_gmm(writer, mean, variance, weight)


def fst_bytes(fst: Fst, kind: str = "const") -> bytes:
    """The FST as an OpenFst file of type `const` (ddnn's own writer) or `vector`."""
    if kind == "const":
        with tempfile.TemporaryDirectory() as folder:
            write_fst(Path(folder) / "x.fst", fst)
            return (Path(folder) / "x.fst").read_bytes()
    check_fst(fst)
    header = struct.pack("<ii6si8s", 2125659606, 6, b"vector", 8, b"standard")
    header += struct.pack("<iiQqqq", 2, 0, 3, fst.start, fst.num_states, fst.num_arcs)
    counts = np.diff(fst.offsets)
    words = np.empty(fst.num_states * 3 + fst.num_arcs * 4, "<i4")
    heads = fst.offsets[:-1] * 4 + np.arange(fst.num_states) * 3
    is_arc = np.ones(len(words), bool)
    for word, value in enumerate((fst.final.astype("<f4").view("<i4"), counts.astype("<i4"), 0)):
        words[heads + word] = value
        is_arc[heads + word] = False
    words[is_arc] = np.frombuffer(fst.arcs.astype(ARC).tobytes(), "<i4")
    return header + words.tobytes()


def tree_bytes(tree: ContextDependency, *, binary: bool) -> bytes:
    """A decision tree as Kaldi writes it, byte for byte."""
    handle = io.BytesIO()
    writer = BasicTypeWriter(handle) if binary else TextWriter(handle)
    end = b"" if binary else b"\n"

    def write(position: int | None) -> None:
        node = None if position is None else tree.nodes[position]
        if node is None:
            writer.token("NULL")
        elif isinstance(node, int):
            writer.token("CE")
            writer.int32(node)
        else:
            writer.token("TE" if node.yes_set is None else "SE")
            writer.int32(node.key)
            if node.yes_set is not None:
                writer.int32_vector(np.array(sorted(node.yes_set), np.int32))
            elif binary:
                handle.write(struct.pack("<BI", 252, len(node.maps)))
            else:
                writer.int32(len(node.maps))
            opening, closing = "()" if node.yes_set is None else "{}"
            writer.token(opening)
            for child in node.maps:
                write(child)
            writer.token(closing)
            handle.write(end)

    writer.marker()
    writer.token("ContextDependency")
    writer.int32(tree.context_width)
    writer.int32(tree.central_position)
    writer.token("ToPdf")
    write(len(tree.nodes) - 1)
    writer.token("EndContextDependency")
    return handle.getvalue()


State = tuple[tuple[float, float, list[int]] | None, list[tuple[int, float, float, list[int], int]]]
"""A state of a lattice: its final costs and string, or None; arcs as (word, graph cost, acoustic cost, string, next state)."""


def lattice_bytes(states: Sequence[State], kind: str = "compactlattice44", start: int = 0) -> bytes:
    """A binary lattice as Kaldi writes it, without its key. `kind`: also compactlattice84, lattice4 and lattice8, whose
    strings have at most one transition-id, and those of final weights none."""
    compact, real = kind.startswith("compact"), "d" if "8" in kind else "f"
    num_arcs = sum(len(arcs) for _, arcs in states)
    parts = [struct.pack(f"<ii6si{len(kind)}s", 2125659606, 6, b"vector", len(kind), kind.encode())]
    parts.append(struct.pack("<iiQqqq", 2, 0, 3, start if states else -1, len(states), num_arcs))

    def weight(graph: float, acoustic: float, tids: list[int]) -> bytes:
        string = struct.pack(f"<i{len(tids)}i", len(tids), *tids) if compact else b""
        return struct.pack(f"<2{real}", graph, acoustic) + string

    for final, arcs in states:
        parts += [weight(*(final or (np.inf, np.inf, []))), struct.pack("<q", len(arcs))]
        for word, graph, acoustic, tids, to in arcs:
            label = word if compact else sum(tids)
            parts += [struct.pack("<ii", label, word), weight(graph, acoustic, tids), struct.pack("<i", to)]
    return b"".join(parts)


def lattice_text(states: Sequence[State], compact: bool = True) -> bytes:
    """A text lattice as Kaldi writes it, from behind the key and its space; it starts in state 0."""
    lines = [""]
    for state, (final, arcs) in enumerate(states):
        for word, graph, acoustic, tids, to in arcs:
            labels, string = (f"{word}", "," + "_".join(map(str, tids))) if compact else (f"{sum(tids)}\t{word}", "")
            weight = "" if graph == acoustic == 0 and (not compact or not tids) else f"\t{graph!r},{acoustic!r}{string}"
            lines.append(f"{state}\t{to}\t{labels}{weight}")
        if final is not None:
            graph, acoustic, tids = final
            string = "," + "_".join(map(str, tids)) if compact else ""
            weight = "" if graph == acoustic == 0 and not tids else f"\t{graph!r},{acoustic!r}{string}"
            lines.append(f"{state}{weight}")
    return ("\n".join(lines) + "\n\n").encode()
