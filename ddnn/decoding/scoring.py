"""Word error rates without Kaldi: log-likelihoods decoded with Kaldi's own `HCLG.fst` (the best path by token passing,
after kaldi `decoder/faster-decoder.cc`), and scored. The packages of the extra `[decode]` are imported only when
needed."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ddnn.kaldi.alignments import TRANSITION_DIGEST, check_same_tree
from ddnn.kaldi.archive import MatrixReader, iterate_matrices, read_scp
from ddnn.kaldi.data_dir import read_text
from ddnn.kaldi.fst import Fst, read_fst, read_symbols, write_fst
from ddnn.kaldi.transition_model import TransitionModel, read_transition_model
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited

log = logging.getLogger(__name__)

SUSPICIOUS_WER = 90.0
"""In percent: a decoding in which hardly a word is right has taken files that do not belong together."""
_HINT_INSTALL = "pip install 'ddnn[decode]'"
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
    transition_digest: str | None = None  # of the model by which it was read


@dataclass(frozen=True)
class Hypothesis:
    """The words of the best path at one acoustic scale, none where no path survived; and whether it ends in a final
    state, as it must in a complete utterance."""

    words: tuple[str, ...]
    reached_final: bool


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
    _check_self_loops(fst, transitions, model, location)
    _check_epsilon_cycles(fst, location)
    arcs = fst.arcs.copy()
    arcs["ilabel"] = transitions.transition_to_pdf[arcs["ilabel"]] + 1  # epsilon stays 0: it has the pdf -1
    pdf_graph = Fst(fst.start, fst.final, fst.offsets, arcs)
    return DecodingGraph(pdf_graph, words, transitions.num_pdfs, graph_dir, transitions.digest)


def _check_self_loops(fst: Fst, transitions: TransitionModel, model: Path, location: Path) -> None:
    """DataError where the graph was made with another model: in a graph of Kaldi's, a state that is held by a self-loop
    is entered (or, without --reorder, left) by transitions of the same transition-state. Most arcs must say so."""
    of_state, is_loop = transitions.transition_states()
    source, target, ids = fst.sources(), fst.arcs["nextstate"], fst.arcs["ilabel"]
    held = np.zeros(fst.num_states, np.int64)  # by which transition-state
    loops, moving = ((ids > 0) & (source == target)), ((ids > 0) & (source != target))
    if not (loops.any() and moving.any()):
        return
    held[source[loops]] = (of_state * is_loop)[ids[loops]]
    entered, left = ((held[side] == of_state[ids])[moving].mean() for side in (target, source))
    if max(entered, left) < 0.5:
        message = f"the graph was made with another model than {model}: only {100 * max(entered, left):.0f} % of its "
        message += "transitions lie beside a self-loop of their transition-state"
        hint = "give the graph and the final.mdl that it was made with (utils/mkgraph.sh)"
        raise DataError(message, location=location, hint=hint)


def _network_digest(folder: Path) -> str | None:
    """The transition model's digest that decode-prep has left beside log-likelihoods; None where it is not known."""
    try:
        text = read_bytes_limited(folder / TRANSITION_DIGEST, 100).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text or None


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
    try:
        import kaldi_decoder
        import kaldifst
    except ImportError as error:
        message = f"decoding needs packages that are not installed ({error.name})"
        raise UserError(message, hint=_HINT_INSTALL) from error
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


@dataclass(frozen=True)
class UtteranceScore:
    """One utterance at one acoustic scale: the words said, the words recognized, and the errors by kind."""

    utterance: str
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]
    insertions: int
    deletions: int
    substitutions: int
    reached_final: bool


@dataclass(frozen=True)
class ScaleScore:
    """All utterances at one acoustic scale."""

    acoustic_scale: float
    wer: float  # word error rate in percent of the reference words
    # 95 % bootstrap interval of `wer` in percent (Bisani and Ney 2004), utterances drawn with replacement; None where a
    # draw has no words, as a few utterances without words make it.
    interval: tuple[float, float] | None
    insertions: int
    deletions: int
    substitutions: int
    words: int  # in the reference
    sentence_errors: int  # utterances with at least one error
    not_final: tuple[str, ...]  # utterances whose best path did not reach a final state; their words so far are counted
    utterances: tuple[UtteranceScore, ...]  # in the order of the log-likelihoods


@dataclass(frozen=True)
class ScoreResult:
    """Word error rates at each scale, in the order asked for; `best` is the index of the (first) lowest."""

    scales: tuple[ScaleScore, ...]
    best: int


def _import_kaldialign() -> ModuleType:
    try:
        import kaldialign
    except ImportError as error:
        raise UserError("counting word errors needs the package kaldialign", hint=_HINT_INSTALL) from error
    if not hasattr(kaldialign, "bootstrap_wer_ci"):
        raise UserError("this kaldialign is too old: it has no bootstrap_wer_ci", hint=_HINT_INSTALL)
    return cast(ModuleType, kaldialign)


def read_reference(path: Path) -> dict[str, tuple[str, ...]]:
    """The words of each utterance of a Kaldi `text`, by `read_text`. DataError: as `read_text`, or no utterance has any
    words."""
    reference = {utterance: tuple(words) for utterance, words in read_text(path).items()}
    if not any(reference.values()):
        hint = "give a Kaldi text: utterance and its words, one a line"
        raise DataError("the reference has no words", location=path, hint=hint)
    return reference


def _check_same_utterances(decoded: set[str], reference: set[str], loglikes: Path) -> None:
    errors = []
    for missing, description in (
        (decoded - reference, "utterances have no reference"),
        (reference - decoded, "utterances of the reference have no log-likelihoods"),
    ):
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            errors.append(f"{len(missing)} {description} ({', '.join(sorted(missing)[:5])}{more})")
    if errors:
        hint = "score with the text of exactly these utterances: a part would give another word error rate"
        raise DataError("; ".join(errors), location=loglikes, hint=hint)


def _loglikes(source: Path, reference: set[str]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every utterance and its matrix; those of an scp are known, and checked, before an hour of decoding."""
    if source.suffix == ".scp":
        entries = read_scp(source)
        _check_same_utterances({entry.key for entry in entries}, reference, source)
        with MatrixReader() as reader:
            for entry in entries:
                yield entry.key, reader.read(entry)
        return
    seen: set[str] = set()
    for utterance, matrix in iterate_matrices(source):
        if utterance in seen:
            raise DataError(f"utterance {utterance} occurs twice", location=source, hint="write the archive again")
        if utterance not in reference:
            _check_same_utterances({utterance}, set(), source)
        seen.add(utterance)
        yield utterance, matrix
    _check_same_utterances(seen, reference, source)


def _sum_up(ka: ModuleType, scale: float, utterances: tuple[UtteranceScore, ...]) -> ScaleScore:
    references, hypotheses = [list(u.reference) for u in utterances], [list(u.hypothesis) for u in utterances]
    bootstrap = ka.bootstrap_wer_ci(references, hypotheses)
    low, high = 100 * float(bootstrap["ci95min"]), 100 * float(bootstrap["ci95max"])
    counts = [(u.insertions, u.deletions, u.substitutions) for u in utterances]
    insertions, deletions, substitutions = map(sum, zip(*counts, strict=True))
    words = sum(len(reference) for reference in references)
    return ScaleScore(
        acoustic_scale=scale,
        wer=100 * (insertions + deletions + substitutions) / words,
        interval=(max(0.0, low), high) if math.isfinite(low + high) else None,
        insertions=insertions,
        deletions=deletions,
        substitutions=substitutions,
        words=words,
        sentence_errors=sum(u.reference != u.hypothesis for u in utterances),
        not_final=tuple(u.utterance for u in utterances if not u.reached_final),
        utterances=utterances,
    )


def score(loglikes: Path, *, graph_dir: Path, model: Path, text: Path, options: DecodeOptions) -> ScoreResult:
    """Decodes log-likelihoods (a `.scp`, an archive, or a directory with `loglikes.scp`: frames x pdfs) with Kaldi's
    graph directory and the `final.mdl` that the graph was made with; gives the word error rate at each acoustic scale
    against `text`, the reference of exactly these utterances. UserError: the packages of `ddnn[decode]` are missing.
    DataError: an input is missing, damaged, or does not fit the others."""
    ka = _import_kaldialign()
    source = loglikes / "loglikes.scp" if loglikes.is_dir() else loglikes
    if not source.is_file():
        hint = "make them with ddnn decode-prep"
        raise DataError(f"no log-likelihoods at {source.name}", location=source, hint=hint)
    reference = read_reference(text)
    graph = read_graph(graph_dir, model)
    check_same_tree(graph.transition_digest, _network_digest(source.parent), model, f"the network of {source.name}")
    scores: list[list[UtteranceScore]] = [[] for _ in options.acoustic_scales]
    for utterance, hypotheses in decode_utterances(_loglikes(source, set(reference)), graph, options):
        words = reference[utterance]
        for column, found in zip(scores, hypotheses, strict=True):
            counts = ka.edit_distance(words, found.words)
            kinds = (int(counts["ins"]), int(counts["del"]), int(counts["sub"]))
            column.append(UtteranceScore(utterance, words, found.words, *kinds, found.reached_final))
    results = tuple(
        _sum_up(ka, scale, tuple(column)) for scale, column in zip(options.acoustic_scales, scores, strict=True)
    )
    best = min(range(len(results)), key=lambda index: results[index].wer)
    if results[best].wer >= SUSPICIOUS_WER:
        message = "the lowest word error rate is %.1f %%: are log-likelihoods, graph, %s and %s of one system?"
        log.warning(message, results[best].wer, model, text)
    return ScoreResult(results, best)


def align_words(score: UtteranceScore) -> list[tuple[str | None, str | None]]:
    """Pairs of (word said, word recognized); None on the left is an insertion, on the right a deletion."""
    words: list[str | None] = [None, *sorted({*score.reference, *score.hypothesis})]
    number = {word: index for index, word in enumerate(words)}  # numbers, so that no word can be taken for the blank
    pairs = _import_kaldialign().align([number[w] for w in score.reference], [number[w] for w in score.hypothesis], 0)
    return [(words[left], words[right]) for left, right in pairs]


def render_text(result: ScoreResult, *, alignments: bool = False) -> str:
    """A line per acoustic scale, the best marked with `*`; with `alignments`, every utterance at the best scale."""
    lines = []
    for index, s in enumerate(result.scales):
        mark = " *" if index == result.best else ""
        counts = f"{s.insertions} ins, {s.deletions} del, {s.substitutions} sub / {s.words}"
        failed = f", {len(s.not_final)} utterances did not reach the end of the graph" if s.not_final else ""
        interval = "no interval" if s.interval is None else f"95 % interval {s.interval[0]:.2f} .. {s.interval[1]:.2f}"
        lines.append(f"acoustic scale {s.acoustic_scale:<6g} WER {s.wer:6.2f} %  ({counts}; {interval}{failed}){mark}")
    best = result.scales[result.best]
    errors = f"{best.sentence_errors} of {len(best.utterances)} utterances have errors"
    lines.append(f"best: WER {best.wer:.2f} % at {best.acoustic_scale:g}; {errors}")
    for u in best.utterances if alignments else ():
        pairs = [(left or "***", right or "***") for left, right in align_words(u)]
        lines += ["", f"{u.utterance}: {u.insertions} ins, {u.deletions} del, {u.substitutions} sub"]
        for name, side in (("ref", 0), ("hyp", 1)):
            lines.append(f"  {name}: " + " ".join(pair[side].ljust(max(map(len, pair))) for pair in pairs).rstrip())
    return "\n".join(lines) + "\n"


def as_json(result: ScoreResult, *, alignments: bool = False) -> dict[str, Any]:
    """The result as plain values for JSON; with `alignments`, every utterance of the best scale with its word pairs."""
    scales = []
    for s in result.scales:
        plain = {name: value for name, value in vars(s).items() if name not in ("interval", "not_final", "utterances")}
        scales.append({**plain, "interval": s.interval, "not_final": s.not_final, "utterances": len(s.utterances)})
    best = result.scales[result.best]
    value: dict[str, Any] = {"scales": scales, "best": best.acoustic_scale, "wer": best.wer}
    if alignments:
        value["alignments"] = {u.utterance: [list(pair) for pair in align_words(u)] for u in best.utterances}
    return value
