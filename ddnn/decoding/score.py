"""Word error rates without Kaldi: log-likelihoods decoded with Kaldi's own `HCLG.fst`, compared with a reference, and the
files of the result."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy import float32
from numpy.typing import NDArray

from ddnn.decoding.graph import DecodingGraph, read_graph
from ddnn.decoding.options import DecodeOptions, ScaleChoice, read_choice
from ddnn.decoding.search import Hypothesis, decode_utterances
from ddnn.decoding.word_errors import (
    Unit,
    UtteranceScore,
    align_words,
    edit_counts,
    import_kaldialign,
    read_reference,
    units_drawn,
    wer_interval,
)
from ddnn.kaldi.alignments import TRANSITION_DIGEST, check_same_tree
from ddnn.kaldi.archive import MatrixReader, iterate_matrices, read_scp
from ddnn.runs.run_status import FINAL, MODEL_DIGEST, model_digest, read_digest
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_directory, write_text
from ddnn.util.progress import frame_counter
from ddnn.util.text import printable, render

log = logging.getLogger(__name__)

SUSPICIOUS_WER = 90.0
"""In percent: if hardly a word is right, the files probably do not belong together."""
FRAME_SHIFT = 0.01  # seconds, the default of Kaldi's features


@dataclass(frozen=True)
class ScaleScore:
    """All utterances at one acoustic scale and word insertion penalty. The fields are those of score.json, in order."""

    acoustic_scale: float
    word_insertion_penalty: float
    wer: float  # word error rate in percent of the reference words
    interval_over: Unit  # drawn with replacement: whole speakers, where they are known and enough
    insertions: int
    deletions: int
    substitutions: int
    words: int  # in the reference
    sentence_errors: int  # utterances with at least one error
    lm_weight: float  # as Kaldi counts it: the inverse of the acoustic scale
    interval: tuple[float, float]  # of `wer`, in percent: `wer_interval`
    not_final: tuple[str, ...]  # utterances whose best path did not reach a final state; their words so far are counted
    utterances: tuple[UtteranceScore, ...]  # in the order of the log-likelihoods


@dataclass(frozen=True)
class ScoreResult:
    """Word error rates at each scale, in the order asked for, and again with the next penalty; `best` is the index of the
    (first) lowest. `reference`: digest of the reference. `chosen_on`: the scoring that chose the only scale. `out`: the
    folder with the words, whose score.json another scoring can take the best scale from. `model`: digest of the model
    of the log-likelihoods, where known; `run_dir`: the run, if its model has changed since; `inputs`: the paths
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
            for end, extreme, more in ((min(tried), "smallest", "smaller"), (max(tried), "largest", "larger")):
                if len(tried) > 1 and ends == {end} and end:
                    notes.append(f"the best {name} is the {extreme} tried: try {more} ones, too")
        if self.chosen_here:
            advice = "choose it on a development set, by --out DEV, and give --acoustic-scale-from DEV/score.json here"
            if self.out is not None and self.chosen_on is None:
                advice = f"if this is a development set, use it for the test set: --acoustic-scale-from {self.out}/score.json"
            notes.append(f"the scale was chosen on this text, which makes its word error rate optimistic: {advice}")
        return notes


def decode_options(scale_from: Path | None = None, **options: Any) -> DecodeOptions:
    """The `options` that are not None; acoustic scale and penalty of an earlier scoring, if `scale_from` names one.
    UserError: scale or penalty are given, too. DataError: it is no scoring."""
    chosen = {name: value for name, value in options.items() if value is not None}
    if scale_from is not None:
        if chosen.keys() & {"acoustic_scales", "word_insertion_penalties"}:
            hint = "remove --acoustic-scale and --word-insertion-penalty, which it replaces"
            raise UserError("given together with what it replaces", location="--acoustic-scale-from", hint=hint)
        choice = read_choice(scale_from)
        chosen |= {"acoustic_scales": (choice.acoustic_scale,), "chosen_on": choice}
        chosen |= {"word_insertion_penalties": (choice.word_insertion_penalty,)}
    return DecodeOptions(**chosen)


def score(
    loglikes: Path, *, graph_dir: Path, model: Path, text: Path, options: DecodeOptions, out: Path | None = None,
    frame_shift: float = FRAME_SHIFT, jobs: int = 1,
) -> ScoreResult:  # fmt: skip
    """Decodes log-likelihoods (a `.scp`, an archive, or a directory with `loglikes.scp`: frames x pdfs) with Kaldi's
    graph directory and the `final.mdl` that the graph was made with; gives the word error rate at each acoustic scale
    against `text`, the reference of exactly these utterances, with its interval by the speakers of the utt2spk beside it.
    `out`: new directory for the files of `write_hypotheses`; `frame_shift`: seconds a frame; `jobs`: processes that
    decode, with the same result. UserError: the packages of `ddnn[decode]` are missing. DataError: an input is
    missing, damaged, or does not fit the others."""
    if not 0 < frame_shift < 1e3:
        raise UserError(f"{frame_shift:g} found, expected seconds above 0", location="--frame-shift")
    import_kaldialign()
    source, reference = _find_loglikes(loglikes), read_reference(text)
    graph = read_graph(graph_dir, model)
    tree, _ = read_digest(source.parent / TRANSITION_DIGEST)
    check_same_tree(graph.transition_digest, tree, model, f"the network of {source.name}")
    spoken = set().union(*reference.values())
    if spoken.isdisjoint(graph.words.values()):
        message = f"no word of the text is in {graph_dir / 'words.txt'}, not even {min(spoken)}"
        hint = "write the words as words.txt has them; upper and lower case differ"
        raise DataError(message, location=text, hint=hint)
    digest, run_dir = read_digest(source.parent / MODEL_DIGEST)
    stale = run_dir is not None and model_digest(run_dir) not in (digest, None)
    with nullcontext() if out is None else atomic_directory(out) as folder:
        scales = tuple(_score_scales(source, reference, text.with_name("utt2spk"), graph, options, jobs))
        best = min(range(len(scales)), key=lambda index: scales[index].wer)
        if scales[best].wer >= SUSPICIOUS_WER:
            message = "the lowest word error rate is %.1f %%: are log-likelihoods, graph, %s and %s of one system?"
            log.warning(message, scales[best].wer, model, text)
        result = ScoreResult(
            scales,
            best,
            reference=hashlib.sha256(repr(sorted(reference.items())).encode()).hexdigest(),
            chosen_on=options.chosen_on,
            out=out,
            model=digest,
            run_dir=run_dir if stale else None,
            inputs={"loglikes": str(source), "graph": str(graph_dir), "text": str(text)},
        )
        if folder is not None:
            write_hypotheses(result, folder, frame_shift)
    return result


def _find_loglikes(loglikes: Path) -> Path:
    """The scp or archive. DataError: there is none, or it holds posteriors."""
    source = loglikes / "loglikes.scp" if loglikes.is_dir() else loglikes
    if source.name.startswith("posteriors.") or (not source.exists() and (loglikes / "posteriors.scp").exists()):
        message = "posteriors found, a decoder needs log-likelihoods: log-posteriors minus the log-priors of the pdfs"
        raise DataError(message, location=loglikes, hint="write them with ddnn decode-prep, without --as")
    if not source.is_file():
        inside = [file.parent for file in sorted(loglikes.glob("*/loglikes.scp"))]
        hint = (
            f"name the --out of ddnn decode-prep, such as {inside[0]}" if inside else "make them with ddnn decode-prep"
        )
        raise DataError(f"no log-likelihoods at {source.name}", location=source, hint=hint)
    return source


def _read_loglikes(source: Path, reference: set[str]) -> Iterator[tuple[str, NDArray[float32]]]:
    """Every utterance and its matrix; the utterances of an scp are checked before an hour of decoding."""
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


def _score_scales(
    source: Path, reference: dict[str, tuple[str, ...]], utt2spk: Path, graph: DecodingGraph, options: DecodeOptions,
    jobs: int,
) -> Iterator[ScaleScore]:  # fmt: skip
    """Each scale, and again with the next penalty."""
    units: tuple[Sequence[int], Unit] | None = None  # the order of the utterances is that of the log-likelihoods
    penalties, jobs = options.word_insertion_penalties, min(jobs, len(reference))
    with frame_counter("decoding", len(penalties) * len(reference), unit="utterances") as advance:
        for penalty in penalties:
            scores: list[list[UtteranceScore]] = [[] for _ in options.acoustic_scales]
            loglikes, penalized = _read_loglikes(source, set(reference)), graph.with_penalty(penalty)
            for utterance, frames, hypotheses in decode_utterances(loglikes, penalized, options, jobs):
                for column, hypothesis in zip(scores, hypotheses, strict=True):
                    column.append(_score_utterance(utterance, reference[utterance], hypothesis, frames))
                advance(1)
            for scale, column in zip(options.acoustic_scales, scores, strict=True):
                units = units or units_drawn(utt2spk, [score.utterance for score in column])
                yield _sum_up(scale, penalty, tuple(column), *units)


def _score_utterance(name: str, reference: tuple[str, ...], hypothesis: Hypothesis, frames: int) -> UtteranceScore:
    counts = edit_counts(reference, hypothesis.words)
    return UtteranceScore(
        name, reference, hypothesis.words, *counts, hypothesis.reached_final, hypothesis.starts, frames
    )


def _sum_up(
    scale: float, penalty: float, utterances: tuple[UtteranceScore, ...], numbers: Sequence[int], drawn: Unit
) -> ScaleScore:
    counts = [(u.insertions, u.deletions, u.substitutions) for u in utterances]
    words = [len(u.reference) for u in utterances]
    insertions, deletions, substitutions = map(sum, zip(*counts, strict=True))
    return ScaleScore(
        acoustic_scale=scale,
        word_insertion_penalty=penalty,
        wer=100 * (insertions + deletions + substitutions) / sum(words),
        interval_over=drawn,
        insertions=insertions,
        deletions=deletions,
        substitutions=substitutions,
        words=sum(words),
        sentence_errors=sum(u.reference != u.hypothesis for u in utterances),
        lm_weight=1 / scale,
        interval=wer_interval([sum(count) for count in counts], words, numbers),
        not_final=tuple(u.utterance for u in utterances if not u.reached_final),
        utterances=utterances,
    )


def write_hypotheses(result: ScoreResult, folder: Path, frame_shift: float = FRAME_SHIFT) -> None:
    """The words at the best scale: `text` (Kaldi), `hyp.trn` and `ref.trn` (NIST sclite), `hyp.ctm` (utterance, channel,
    start, duration, word; times in seconds); and `score.json`. A word begins at its label on the best path and
    ends where the next one does, like Kaldi's lattice-to-ctm-conf without lattice-align-words: the graph decides
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


def render_text(result: ScoreResult, *, alignments: bool = False) -> str:
    """A line per acoustic scale and penalty, the best marked with `*`; with `alignments`, every utterance of the best."""
    utterances = result.scales[result.best].utterances if alignments else ()
    source = "" if result.chosen_on is None else printable(str(result.chosen_on.source), "")
    pairs = [(u, [(left or "***", right or "***") for left, right in align_words(u)]) for u in utterances]
    return render("score.txt.j2", result=result, source=source, alignments=pairs) + "\n"


def as_json(result: ScoreResult, *, alignments: bool = False) -> dict[str, Any]:
    """The result as plain values for JSON; with `alignments`, every utterance of the best scale with its word pairs."""
    best, source = result.scales[result.best], result.chosen_on
    value: dict[str, Any] = {
        **result.inputs,
        "scales": [{**vars(scale), "utterances": len(scale.utterances)} for scale in result.scales],
        "best": best.acoustic_scale,
        "best_word_insertion_penalty": best.word_insertion_penalty,
        "wer": best.wer,
        "model": result.model,
        "reference": result.reference,
        "chosen_on_this_text": result.chosen_here,
        "chosen_by": None if source is None else str(source.source),
        "notes": result.notes(),
    }
    if alignments:
        value["alignments"] = {u.utterance: [list(pair) for pair in align_words(u)] for u in best.utterances}
    return value
