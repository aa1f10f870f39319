"""Word error rates without Kaldi: log-likelihoods decoded with Kaldi's own `HCLG.fst` (the best path by token passing,
after kaldi `decoder/faster-decoder.cc`), and scored. The packages of the extra `[decode]` are imported only when
needed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ddnn.decoding.word_errors import (
    HINT_INSTALL,
    Unit,
    UtteranceScore,
    align_words,
    import_kaldialign,
    read_reference,
    units_drawn,
    wer_interval,
)
from ddnn.kaldi.alignments import TRANSITION_DIGEST, check_same_tree
from ddnn.kaldi.archive import MatrixReader, iterate_matrices, read_scp
from ddnn.kaldi.fst import Fst, read_fst, read_symbols, write_fst
from ddnn.kaldi.transition_model import TransitionModel, read_transition_model
from ddnn.runs.run_status import FINAL, MODEL_DIGEST, model_digest
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_directory, read_bytes_limited, write_text
from ddnn.util.pool import worker_pool
from ddnn.util.progress import frame_counter
from ddnn.util.text import printable

log = logging.getLogger(__name__)

SUSPICIOUS_WER = 90.0
"""In percent: a decoding in which hardly a word is right has taken files that do not belong together."""
FRAME_SHIFT = 0.01  # seconds, as Kaldi's features have it where nothing else was asked for
_MAX_CHOICE_BYTES = 64 << 20
_MAX_DIGEST_BYTES = 8192
_MAX_CHAIN = 10_000
_MAX_RELAXATIONS = 20_000_000
"""Arcs that are examined for cycles, beside fifty times all epsilons: some tenths of a second."""


@dataclass(frozen=True)
class ScaleChoice:
    """The best acoustic scale and word insertion penalty of an earlier scoring. `reference`: digest of its text."""

    source: Path
    acoustic_scale: float
    word_insertion_penalty: float
    reference: str


@dataclass(frozen=True)
class DecodeOptions:
    """Options of the search; UserError for those that the decoder cannot work with."""

    acoustic_scales: tuple[float, ...] = (0.05, 0.07, 0.1, 0.143)  # of log-likelihoods, one decoding each
    beam: float = 13.0  # cost above the best token at which a token is dropped
    max_active: int = 7000  # tokens retained per frame, at most
    min_active: int = 200  # tokens retained per frame even where the beam would drop them
    word_insertion_penalties: tuple[float, ...] = (0.0,)  # cost of each word; all of them at each scale
    chosen_on: ScaleChoice | None = None  # what the only scale and penalty come from

    def __post_init__(self) -> None:
        scales = self.acoustic_scales
        if not scales or not all(0 < scale < 1e6 for scale in scales) or len(set(scales)) != len(scales):
            message = f"acoustic scales {', '.join(map(str, scales))}: expected different numbers above 0"
            raise UserError(message, hint="for example 0.05,0.07,0.1,0.143")
        penalties = self.word_insertion_penalties
        if not penalties or not all(0 <= p < 1e6 for p in penalties) or len(set(penalties)) != len(penalties):
            message = f"word insertion penalties {', '.join(map(str, penalties))}: expected different numbers from 0 on"
            raise UserError(message, hint="for example 0,0.5,1")
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

    def with_penalty(self, penalty: float) -> DecodingGraph:
        """With a word insertion penalty >= 0: a cost of every word, as of Kaldi's lattice-add-penalty."""
        arcs = self.fst.arcs.copy() if penalty else self.fst.arcs
        if penalty:
            arcs["weight"][arcs["olabel"] != 0] += penalty
        return replace(self, fst=Fst(self.fst.start, self.fst.final, self.fst.offsets, arcs))


@dataclass(frozen=True)
class Hypothesis:
    """The words of the best path at one acoustic scale, none where no path survived; whether it ends in a final state,
    as it must in a complete utterance; and the frame from 0 at which the label of each word lies on the path."""

    words: tuple[str, ...]
    reached_final: bool
    starts: tuple[int, ...] = ()


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
            says = found[:20].decode(errors="replace")
            message = f"num_pdfs says {says}, but {model.name} has {transitions.num_pdfs} pdfs"
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


def _digest_in(file: Path) -> tuple[str | None, Path | None]:
    """A digest that decode-prep has left beside log-likelihoods, and the path behind it; None where there is none."""
    try:
        digest, _, path = os.fsdecode(read_bytes_limited(file, _MAX_DIGEST_BYTES)).rstrip("\n").partition(" ")
    except OSError:
        return None, None
    return digest or None, (file.parent / path).resolve() if path else None


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
    if np.all(matrix >= 0) and np.allclose(matrix.sum(axis=1), 1, atol=1e-2):
        message = f"utterance {utterance}: posteriors found (each frame sums to 1), expected log-likelihoods"
        raise DataError(message, location=graph.location, hint=hint)
    return matrix


class _Decoder:
    """Decodes at each acoustic scale with the FST in a file, whose output labels are `words`. UserError: the packages are
    missing."""

    def __init__(self, fst: Path, words: dict[int, str], options: DecodeOptions) -> None:
        try:
            import kaldi_decoder
            import kaldifst
        except ImportError as error:
            message = f"decoding needs packages that are not installed ({error.name})"
            raise UserError(message, hint=HINT_INSTALL) from error
        self.kaldi, self.words, self.scales = kaldi_decoder, words, options.acoustic_scales
        limits = {"beam": options.beam, "max_active": options.max_active, "min_active": options.min_active}
        self.config = kaldi_decoder.FasterDecoderOptions(**limits)
        self.fst = kaldifst.StdFst.read(str(fst))

    def __call__(self, loglikes: npt.NDArray[np.float32]) -> tuple[Hypothesis, ...]:
        """One hypothesis per scale. `loglikes`: as of `_check_loglikes`."""
        return tuple(self._decode(np.ascontiguousarray(loglikes * np.float32(scale))) for scale in self.scales)

    def _decode(self, scaled: npt.NDArray[np.float32]) -> Hypothesis:
        # A decoder's hash table remembers the size of utterances before, which changes the order of tokens: a new one
        # makes the result that of this utterance alone. It does not keep the FST alive, nor the decodable its matrix.
        decoder, decodable = self.kaldi.FasterDecoder(self.fst, self.config), self.kaldi.DecodableCtc(scaled)
        decoder.decode(decodable)
        reached = bool(decoder.reached_final())
        found, path = decoder.get_best_path()
        labels = _output_labels(path.start, path.to_str()) if found else []
        words, starts = tuple(self.words[label] for label, _ in labels), tuple(start for _, start in labels)
        return Hypothesis(words, reached and bool(found), starts)


def decode_utterances(
    loglikes: Iterable[tuple[str, npt.NDArray[np.float32]]], graph: DecodingGraph, options: DecodeOptions, jobs: int = 1
) -> Iterator[tuple[str, int, tuple[Hypothesis, ...]]]:
    """Decodes each utterance at each acoustic scale (frames x pdfs, not yet scaled), in `jobs` processes with the same
    result; yields in order the utterance, its number of frames and one hypothesis per scale. UserError: the packages
    are missing. DataError: a matrix that is empty, has another number of pdfs than the graph, or holds NaN or Inf."""
    checked = ((name, _check_loglikes(name, matrix, graph)) for name, matrix in loglikes)
    with tempfile.TemporaryDirectory(prefix="ddnn-graph-") as folder:
        arguments = Path(folder) / "pdfs.fst", graph.words, options
        write_fst(arguments[0], graph.fst)
        if jobs == 1:
            decoder = _Decoder(*arguments)
            yield from ((name, len(matrix), decoder(matrix)) for name, matrix in checked)
            return
        with worker_pool(jobs, "a process of --jobs", "--jobs 1") as pool:
            pool.initialize(_start_decoding, *arguments)
            yield from pool.run((_decode, *utterance) for utterance in checked)


_decoder: list[_Decoder] = []  # of a process of --jobs


def _start_decoding(fst: Path, words: dict[int, str], options: DecodeOptions) -> None:
    _decoder[:] = [_Decoder(fst, words, options)]


def _decode(utterance: str, loglikes: npt.NDArray[np.float32]) -> tuple[str, int, tuple[Hypothesis, ...]]:
    return utterance, len(loglikes), _decoder[0](loglikes)


def _output_labels(state: int, arcs: str) -> list[tuple[int, int]]:
    """The output labels of a linear lattice, printed as OpenFst prints it, each with the number of frames before it."""
    lines = (line.split()[:4] for line in arcs.splitlines())
    following = {int(line[0]): (int(line[1]), int(line[2]), int(line[3])) for line in lines if len(line) == 4}
    labels, frame = [], 0
    while state in following:
        state, consumed, label = following.pop(state)
        if label:
            labels.append((label, frame))
        frame += consumed != 0
    return labels


@dataclass(frozen=True)
class ScaleScore:
    """All utterances at one acoustic scale and word insertion penalty."""

    acoustic_scale: float
    word_insertion_penalty: float
    wer: float  # word error rate in percent of the reference words
    interval: tuple[float, float]  # of `wer`, in percent: `wer_interval`
    interval_over: Unit  # drawn with replacement: whole speakers, where they are known and enough
    insertions: int
    deletions: int
    substitutions: int
    words: int  # in the reference
    sentence_errors: int  # utterances with at least one error
    not_final: tuple[str, ...]  # utterances whose best path did not reach a final state; their words so far are counted
    utterances: tuple[UtteranceScore, ...]  # in the order of the log-likelihoods


@dataclass(frozen=True)
class ScoreResult:
    """Word error rates at each scale, in the order asked for, and again with the next penalty; `best` is the index of the
    (first) lowest. `reference`: digest of the reference. `chosen_on`: the scoring that chose the only scale. `out`: the
    folder with the words, whose score.json another scoring can take the best scale from. `model`: digest of the model
    that the log-likelihoods are of, where known; `run_dir`: the run whose model is another one by now; `inputs`: the paths
    of log-likelihoods, graph and text."""

    scales: tuple[ScaleScore, ...]
    best: int
    reference: str = ""
    chosen_on: ScaleChoice | None = None
    out: Path | None = None
    model: str | None = None
    run_dir: Path | None = None
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def chosen_here(self) -> bool:
        """Whether scale or penalty were chosen by the errors of this same text."""
        return len(self.scales) > 1 or (self.chosen_on is not None and self.chosen_on.reference == self.reference)

    def notes(self) -> list[str]:
        """What the reader of the best word error rate should know."""
        notes, best = [], self.scales[self.best]
        if self.run_dir is not None:
            message = f"the log-likelihoods are of another model than {self.run_dir / FINAL} is now (was it trained "
            notes.append(f"{message}longer?): write them again with ddnn decode-prep")
        lowest = [s for s in self.scales if s.wer == best.wer]
        for name in ("acoustic scale", "word insertion penalty"):
            tried, ends = ({getattr(s, name.replace(" ", "_")) for s in group} for group in (self.scales, lowest))
            for end, word in ((min(tried), "smallest"), (max(tried), "largest")):
                if len(tried) > 1 and ends == {end} and end:
                    more = "smaller" if word == "smallest" else "larger"
                    notes.append(f"the best {name} is the {word} tried: try {more} ones, too")
        if self.chosen_here:
            advice = "choose it on a development set, by --out DEV, and give --acoustic-scale-from DEV/score.json here"
            if self.out is not None and self.chosen_on is None:
                advice = f"if this is a development set, use it for the test set: --acoustic-scale-from {self.out}/score.json"
            notes.append(f"the scale was chosen on this text, which makes its word error rate optimistic: {advice}")
        return notes


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


def _find_loglikes(loglikes: Path) -> Path:
    """The scp or archive. DataError: there is none, or it holds posteriors."""
    source = loglikes / "loglikes.scp" if loglikes.is_dir() else loglikes
    if source.name.startswith("posteriors.") or (not source.exists() and (loglikes / "posteriors.scp").exists()):
        message = "posteriors found, a decoder needs log-likelihoods: log-posteriors minus the log-priors of the pdfs"
        raise DataError(message, location=loglikes, hint="write them with ddnn decode-prep, without --as")
    if not source.is_file():
        message = f"no log-likelihoods at {source.name}"
        inside = [file.parent for file in sorted(loglikes.glob("*/loglikes.scp"))]
        hint = (
            f"name the --out of ddnn decode-prep, such as {inside[0]}" if inside else "make them with ddnn decode-prep"
        )
        raise DataError(message, location=source, hint=hint)
    return source


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


def _sum_up(
    scale: float, penalty: float, utterances: tuple[UtteranceScore, ...], units: tuple[Sequence[int], Unit]
) -> ScaleScore:
    counts = [(u.insertions, u.deletions, u.substitutions) for u in utterances]
    numbers, drawn = units
    words = [len(u.reference) for u in utterances]
    insertions, deletions, substitutions = map(sum, zip(*counts, strict=True))
    return ScaleScore(
        acoustic_scale=scale,
        word_insertion_penalty=penalty,
        wer=100 * (insertions + deletions + substitutions) / sum(words),
        interval=wer_interval([sum(count) for count in counts], words, numbers),
        interval_over=drawn,
        insertions=insertions,
        deletions=deletions,
        substitutions=substitutions,
        words=sum(words),
        sentence_errors=sum(u.reference != u.hypothesis for u in utterances),
        not_final=tuple(u.utterance for u in utterances if not u.reached_final),
        utterances=utterances,
    )


def score(
    loglikes: Path, *, graph_dir: Path, model: Path, text: Path, options: DecodeOptions, out: Path | None = None,
    frame_shift: float = FRAME_SHIFT, jobs: int = 1,
) -> ScoreResult:  # fmt: skip
    """Decodes log-likelihoods (a `.scp`, an archive, or a directory with `loglikes.scp`: frames x pdfs) with Kaldi's
    graph directory and the `final.mdl` that the graph was made with; gives the word error rate at each acoustic scale
    against `text`, the reference of exactly these utterances, with its interval by the speakers of the utt2spk beside it.
    `out`: new directory for what `write_hypotheses` writes; `frame_shift`: seconds a frame; `jobs`: processes that
    decode, with the same result. UserError: the packages of `ddnn[decode]` are missing. DataError: an input is
    missing, damaged, or does not fit the others."""
    if not 0 < frame_shift < 1e3:
        raise UserError(f"{frame_shift:g} found, expected seconds above 0", location="--frame-shift")
    ka = import_kaldialign()
    source = _find_loglikes(loglikes)
    reference = read_reference(text)
    digest = hashlib.sha256(repr(sorted(reference.items())).encode()).hexdigest()
    graph = read_graph(graph_dir, model)
    check_same_tree(
        graph.transition_digest,
        _digest_in(source.parent / TRANSITION_DIGEST)[0],
        model,
        f"the network of {source.name}",
    )
    spoken = set().union(*reference.values())
    if spoken.isdisjoint(graph.words.values()):
        message = f"no word of the text is in {graph_dir / 'words.txt'}, not even {min(spoken)}"
        hint = "write the words as words.txt has them; upper and lower case differ"
        raise DataError(message, location=text, hint=hint)
    of_model, run_dir = _digest_in(source.parent / MODEL_DIGEST)
    stale = run_dir is not None and model_digest(run_dir) not in (of_model, None)
    inputs = {"loglikes": str(source), "graph": str(graph_dir), "text": str(text)}
    with nullcontext() if out is None else atomic_directory(out) as folder:
        results = tuple(_score_all(ka, source, reference, text.with_name("utt2spk"), graph, options, jobs))
        best = min(range(len(results)), key=lambda index: results[index].wer)
        if results[best].wer >= SUSPICIOUS_WER:
            message = "the lowest word error rate is %.1f %%: are log-likelihoods, graph, %s and %s of one system?"
            log.warning(message, results[best].wer, model, text)
        result = ScoreResult(
            results, best, digest, options.chosen_on, out, of_model, run_dir if stale else None, inputs
        )
        if folder is not None:
            write_hypotheses(result, folder, frame_shift)
    return result


def _score_all(
    ka: ModuleType, source: Path, reference: dict[str, tuple[str, ...]], utt2spk: Path, graph: DecodingGraph,
    options: DecodeOptions, jobs: int,
) -> Iterator[ScaleScore]:  # fmt: skip
    """Each scale, and again with the next penalty."""
    units: tuple[Sequence[int], Unit] | None = None  # the order of the utterances is that of the log-likelihoods
    penalties, jobs = options.word_insertion_penalties, min(jobs, len(reference))
    with frame_counter("decoding", len(penalties) * len(reference), unit="utterances") as advance:
        for penalty in penalties:
            scores: list[list[UtteranceScore]] = [[] for _ in options.acoustic_scales]
            loglikes, penalized = _loglikes(source, set(reference)), graph.with_penalty(penalty)
            for utterance, frames, hypotheses in decode_utterances(loglikes, penalized, options, jobs):
                words = reference[utterance]
                for column, found in zip(scores, hypotheses, strict=True):
                    counts = ka.edit_distance(words, found.words)
                    kinds = (int(counts["ins"]), int(counts["del"]), int(counts["sub"]))
                    final, starts = found.reached_final, found.starts
                    column.append(UtteranceScore(utterance, words, found.words, *kinds, final, starts, frames))
                advance(1)
            for scale, column in zip(options.acoustic_scales, scores, strict=True):
                units = units or units_drawn(utt2spk, [score.utterance for score in column])
                yield _sum_up(scale, penalty, tuple(column), units)


def write_hypotheses(result: ScoreResult, folder: Path, frame_shift: float = FRAME_SHIFT) -> None:
    """The words at the best scale: `text` (Kaldi), `hyp.trn` and `ref.trn` (NIST sclite), `hyp.ctm` (utterance, channel,
    start, duration, word; times in seconds); and `score.json`. A word begins where its label lies on the best path and
    ends where the next one does, as of Kaldi's lattice-to-ctm-conf without lattice-align-words: the graph decides
    where it is, often at the beginning of the word, and pauses belong to the word before."""
    lines: dict[str, list[str]] = {"text": [], "hyp.trn": [], "ref.trn": [], "hyp.ctm": []}
    for u in result.scales[result.best].utterances:
        lines["text"].append(" ".join((u.utterance, *u.hypothesis)))
        lines["hyp.trn"].append(" ".join((*u.hypothesis, f"({u.utterance})")))
        lines["ref.trn"].append(" ".join((*u.reference, f"({u.utterance})")))
        for word, start, end in zip(u.hypothesis, u.starts, (*u.starts[1:], u.frames), strict=True):
            times = f"{start * frame_shift:.3f} {(end - start) * frame_shift:.3f}"
            lines["hyp.ctm"].append(f"{u.utterance} 1 {times} {word}")
    for name, content in lines.items():
        write_text(folder / name, "".join(f"{line}\n" for line in content))
    write_text(folder / "score.json", json.dumps(as_json(result), indent=2, ensure_ascii=False) + "\n")


def read_choice(path: Path) -> ScaleChoice:
    """The best scale and penalty from what `ddnn score --json` prints, or `--out` has left. DataError: it is not that."""
    path = path / "score.json" if path.is_dir() else path
    hint = "give the score.json of `ddnn score DEV ... --out DIR`"
    try:
        found = json.loads(read_bytes_limited(path, _MAX_CHOICE_BYTES))
        scale, penalty, reference = (found[name] for name in ("best", "best_word_insertion_penalty", "reference"))
        if not (isinstance(scale, float) and isinstance(penalty, float) and isinstance(reference, str)):
            raise TypeError
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path, hint=hint) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError("expected the JSON of a scoring", location=path, hint=hint) from error
    return ScaleChoice(path, scale, penalty, reference)


def decode_options(scale_from: Path | None = None, **options: Any) -> DecodeOptions:
    """Those of `options` that are not None; acoustic scale and penalty of an earlier scoring, where `scale_from` names
    it. UserError: these are given, too. DataError: it is no scoring."""
    given = {name: value for name, value in options.items() if value is not None}
    if scale_from is not None:
        if given.keys() & {"acoustic_scales", "word_insertion_penalties"}:
            hint = "remove --acoustic-scale and --word-insertion-penalty, which it replaces"
            raise UserError("given together with what it replaces", location="--acoustic-scale-from", hint=hint)
        choice = read_choice(scale_from)
        given |= {"acoustic_scales": (choice.acoustic_scale,), "chosen_on": choice}
        given |= {"word_insertion_penalties": (choice.word_insertion_penalty,)}
    return DecodeOptions(**given)


def render_text(result: ScoreResult, *, alignments: bool = False) -> str:
    """A line per acoustic scale and penalty, the best marked with `*`; with `alignments`, every utterance of the best.
    LM weights as Kaldi counts them, the inverse of the scale."""
    lines = []
    penalties = any(s.word_insertion_penalty for s in result.scales)

    def at(s: ScaleScore, width: int = 0) -> str:
        text = f"acoustic scale {s.acoustic_scale:<{width}g}  LM weight {1 / s.acoustic_scale:<{width}.4g}"
        return text + f"  word insertion penalty {s.word_insertion_penalty:<{width}g}" * penalties

    for index, s in enumerate(result.scales):
        mark = " *" if index == result.best else ""
        counts = f"{s.insertions} ins, {s.deletions} del, {s.substitutions} sub / {s.words}"
        failed = f", {len(s.not_final)} utterances did not reach the end of the graph" if s.not_final else ""
        interval = f"95 % percentile interval {s.interval[0]:.2f} .. {s.interval[1]:.2f} by {s.interval_over}"
        lines.append(f"{at(s, 6)} WER {s.wer:6.2f} %  ({counts}; {interval}{failed}){mark}")
    best = result.scales[result.best]
    errors = f"{best.sentence_errors} of {len(best.utterances)} utterances have errors"
    source = "" if result.chosen_on is None else f", chosen by {printable(str(result.chosen_on.source), '')}"
    lines.append(f"best: WER {best.wer:.2f} % at {at(best).replace('  ', ', ')}{source}; {errors}")
    lines += [f"note: {note}" for note in result.notes()]
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
        more = {"lm_weight": 1 / s.acoustic_scale, "interval": s.interval, "not_final": s.not_final}
        scales.append({**plain, **more, "utterances": len(s.utterances)})
    best, source = result.scales[result.best], result.chosen_on
    value: dict[str, Any] = {
        **result.inputs, "scales": scales, "best": best.acoustic_scale, "best_word_insertion_penalty": best.word_insertion_penalty,
        "wer": best.wer, "model": result.model, "reference": result.reference, "chosen_on_this_text": result.chosen_here,
        "chosen_by": None if source is None else str(source.source), "notes": result.notes(),
    }  # fmt: skip
    if alignments:
        value["alignments"] = {u.utterance: [list(pair) for pair in align_words(u)] for u in best.utterances}
    return value
