"""Decodes log-likelihoods with Kaldi's own `HCLG.fst`, without Kaldi: the best path by token passing, after kaldi
`decoder/faster-decoder.cc`. The packages of the extra `[decode]` are imported only when something is decoded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from ddnn.kaldi.fst import Fst, read_fst, read_symbols, write_fst
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited

_MAX_CHAIN = 10_000
_MAX_RELAXATIONS = 20_000_000
"""Arcs that are examined for cycles, beside fifty times all epsilons: some tenths of a second."""


@dataclass(frozen=True)
class DecodeOptions:
    """Options of the search; UserError for those that the decoder cannot work with."""

    acoustic_scales: tuple[float, ...] = (0.05, 0.07, 0.1, 0.143)  # of log-likelihoods, one decoding each
    beam: float = 13.0  # cost above the best token at which a token is dropped
    max_active: int = 7000  # tokens retained per frame, at most
    min_active: int = 200  # tokens retained per frame even where the beam would drop them

    def __post_init__(self) -> None:
        scales = self.acoustic_scales
        if not scales or not all(0 < scale < 1e6 for scale in scales) or len(set(scales)) != len(scales):
            message = f"acoustic scales {scales}: expected different numbers above 0"
            raise UserError(message, hint="for example 0.05,0.07,0.1,0.143")
        if not 0 < self.beam < 1e6:
            raise UserError(f"beam {self.beam}: expected a number above 0", hint="13 to 15 is usual")
        if not 0 <= self.min_active < self.max_active < 2**31 or self.max_active < 2:
            message = f"min_active {self.min_active} and max_active {self.max_active}"
            raise UserError(f"{message}: expected 0 <= min_active < max_active", hint="200 and 7000 are usual")


@dataclass(frozen=True, eq=False)
class DecodingGraph:
    """A decoding graph whose input labels are pdf-id + 1 (0 is epsilon), with its words."""

    fst: Fst
    words: dict[int, str]  # by output label; every label on the graph is there
    num_pdfs: int  # columns that a matrix of log-likelihoods must have
    location: Path  # the directory it came from, for messages


@dataclass(frozen=True)
class Hypothesis:
    """The words of the best path at one acoustic scale, none where no path survived; and whether it ends in a final state,
    as it must in a complete utterance."""

    words: tuple[str, ...]
    reached_final: bool


def _import_decoders() -> tuple[ModuleType, ModuleType]:
    try:
        import kaldi_decoder
        import kaldifst
    except ImportError as error:
        hint = "pip install 'ddnn[decode]'"
        raise UserError(f"decoding needs packages that are not installed ({error.name})", hint=hint) from error
    return kaldifst, kaldi_decoder


def _check_epsilon_cycles(fst: Fst, location: Path) -> None:
    """A cycle of input epsilons with a negative cost would keep the decoder in a loop for ever."""
    epsilon = fst.arcs["ilabel"] == 0
    weight = fst.arcs["weight"][epsilon].astype(np.float64)
    if not np.any(weight < 0):
        return
    source, target = fst.sources()[epsilon], fst.arcs["nextstate"][epsilon]
    cost = np.zeros(fst.num_states)
    relaxed, max_relaxed = 0, 50 * len(source) + _MAX_RELAXATIONS
    # Bellman-Ford; on real graphs the chains of epsilons are short, and few arcs matter after the first round.
    for _ in range(min(fst.num_states, _MAX_CHAIN) + 1):
        through = cost[source] + weight
        better = through < cost[target]
        if not better.any():
            return
        np.minimum.at(cost, target[better], through[better])
        relaxed += len(source)
        if relaxed > max_relaxed:
            break
    message = "the graph has a cycle of epsilons with a negative cost, or a chain of them too long to tell"
    raise DataError(message, location=location, hint="make the graph again with utils/mkgraph.sh")


def read_graph(graph_dir: Path, model: Path) -> DecodingGraph:
    """Reads `HCLG.fst` and `words.txt`, and turns the transition-ids on the graph into pdf-id + 1 through the model.
    DataError: a file is missing or damaged; the model lacks a transition-id of the graph, or `words.txt` a word id."""
    location = graph_dir / "HCLG.fst"
    fst, words = read_fst(location), read_symbols(graph_dir / "words.txt")
    transitions = read_transition_model(model)
    hint = "give the graph and the final.mdl that it was made with (utils/mkgraph.sh)"
    if fst.start < 0 or not np.isfinite(fst.final).any():
        message = f"the graph has {fst.num_states} states and no way to a final one"
        raise DataError(message, location=location, hint=hint)
    highest, last = int(fst.arcs["ilabel"].max(initial=0)), transitions.num_transition_ids
    if highest > last:
        message = f"the graph has the transition-id {highest}, but {model.name} has {last}"
        raise DataError(message, location=location, hint=hint)
    stated = graph_dir / "num_pdfs"
    if stated.exists():
        try:
            found = read_bytes_limited(stated, 100).strip()
        except OSError as error:
            raise DataError(f"cannot read num_pdfs: {error.strerror}", location=stated, hint=hint) from error
        if found != str(transitions.num_pdfs).encode():
            message = f"num_pdfs says {found[:20]!r}, but {model.name} has {transitions.num_pdfs} pdfs"
            raise DataError(message, location=stated, hint=hint)
    for label in np.unique(fst.arcs["olabel"]).tolist():
        if label and label not in words:
            message = f"the graph has the word id {label}, which words.txt lacks"
            raise DataError(message, location=graph_dir / "words.txt", hint=hint)
    _check_epsilon_cycles(fst, location)
    arcs = fst.arcs.copy()
    arcs["ilabel"] = transitions.transition_to_pdf[arcs["ilabel"]] + 1  # epsilon stays 0: it has the pdf -1
    return DecodingGraph(Fst(fst.start, fst.final, fst.offsets, arcs), words, transitions.num_pdfs, graph_dir)


def _check_loglikes(utterance: str, matrix: npt.NDArray[np.float32], graph: DecodingGraph) -> npt.NDArray[np.float32]:
    """The matrix as the decoder needs it. The decoder itself reads past the end of a matrix with too few columns."""
    hint = "write it again with ddnn decode-prep, with the model that belongs to this graph"
    if matrix.ndim != 2 or matrix.shape[0] == 0 or matrix.shape[1] != graph.num_pdfs:
        message = f"utterance {utterance}: log-likelihoods of shape {'x'.join(map(str, matrix.shape))} (frames x pdfs)"
        message += f", expected at least one frame and {graph.num_pdfs} pdfs"
        raise DataError(message, location=graph.location, hint=hint)
    with np.errstate(over="ignore", invalid="ignore"):
        matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    possible = np.abs(matrix) < 1e30  # false for NaN too; Kaldi gives a pdf that was never seen -1.8e19
    if not possible.all():
        frame, pdf = np.argwhere(~possible)[0].tolist()
        found = f"utterance {utterance}: the log-likelihood of pdf {pdf} in frame {frame} is {matrix[frame, pdf]}"
        raise DataError(f"{found}, expected a finite number", location=graph.location, hint=hint)
    return matrix


def decode_utterances(
    loglikes: Iterable[tuple[str, npt.NDArray[np.float32]]], graph: DecodingGraph, options: DecodeOptions
) -> Iterator[tuple[str, tuple[Hypothesis, ...]]]:
    """Decodes each utterance at each acoustic scale, one matrix at a time (frames x pdfs, not yet scaled); yields the
    utterance and one hypothesis per scale. UserError: the packages are missing. DataError: a matrix that is empty, has
    another number of pdfs than the graph, or holds NaN or Inf."""
    kaldifst, kaldi_decoder = _import_decoders()
    with tempfile.TemporaryDirectory(prefix="ddnn-graph-") as folder:
        write_fst(Path(folder) / "pdfs.fst", graph.fst)
        fst = kaldifst.StdFst.read(str(Path(folder) / "pdfs.fst"))
    limits = {"beam": options.beam, "max_active": options.max_active, "min_active": options.min_active}
    config = kaldi_decoder.FasterDecoderOptions(**limits)
    # The decoder does not keep the FST alive, nor the decodable its matrix: both names must outlive it.
    decoder = kaldi_decoder.FasterDecoder(fst, config)
    for utterance, matrix in loglikes:
        checked = _check_loglikes(utterance, matrix, graph)
        hypotheses = []
        for scale in options.acoustic_scales:
            scaled = np.ascontiguousarray(checked * np.float32(scale))
            decodable = kaldi_decoder.DecodableCtc(scaled)
            decoder.decode(decodable)
            reached = bool(decoder.reached_final())
            found, path = decoder.get_best_path()
            labels: Sequence[int] = kaldifst.get_linear_symbol_sequence(path)[2] if found else ()
            hypotheses.append(Hypothesis(tuple(graph.words[label] for label in labels), reached and bool(found)))
        yield utterance, tuple(hypotheses)
    del decoder, fst
