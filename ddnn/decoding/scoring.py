"""Word error rates without Kaldi: decode at several acoustic scales, align with the reference, count (kaldialign)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ddnn.decoding.decoder import DecodeOptions, Hypothesis, decode_utterances, read_graph
from ddnn.kaldi.archive import MatrixReader, iterate_matrices
from ddnn.kaldi.data_dir import read_text
from ddnn.kaldi.scp import read_scp
from ddnn.util.errors import DataError, UserError

_HINT_INSTALL = "pip install 'ddnn[decode]'"


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


def _errors(ka: ModuleType, utterance: str, reference: tuple[str, ...], hypothesis: Hypothesis) -> UtteranceScore:
    counts = ka.edit_distance(reference, hypothesis.words)
    kinds = (int(counts["ins"]), int(counts["del"]), int(counts["sub"]))
    return UtteranceScore(utterance, reference, hypothesis.words, *kinds, hypothesis.reached_final)


def _sum_up(ka: ModuleType, scale: float, utterances: tuple[UtteranceScore, ...]) -> ScaleScore:
    references, hypotheses = [list(u.reference) for u in utterances], [list(u.hypothesis) for u in utterances]
    bootstrap = ka.bootstrap_wer_ci(references, hypotheses)
    low, high = 100 * float(bootstrap["ci95min"]), 100 * float(bootstrap["ci95max"])
    insertions, deletions, substitutions = (
        sum(counts) for counts in zip(*((u.insertions, u.deletions, u.substitutions) for u in utterances), strict=True)
    )
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
    """Decodes log-likelihoods and gives the word error rate at each acoustic scale. UserError: the packages of
    `ddnn[decode]` are missing. DataError: an input is missing, damaged, or does not fit the others; log-likelihoods and
    reference differ in their utterances.

    Args:
        loglikes: a `.scp`, an archive, or a directory with `loglikes.scp`: float matrices, frames x pdfs.
        graph_dir: Kaldi's graph directory: `HCLG.fst` and `words.txt`.
        model: the `final.mdl` that the graph was made with.
        text: the reference, a Kaldi `text` of exactly the utterances in `loglikes`.
    """
    ka = _import_kaldialign()
    source = loglikes / "loglikes.scp" if loglikes.is_dir() else loglikes
    if not source.is_file():
        hint = "make them with ddnn decode-prep"
        raise DataError(f"no log-likelihoods at {source.name}", location=source, hint=hint)
    reference = read_reference(text)
    graph = read_graph(graph_dir, model)
    scores: list[list[UtteranceScore]] = [[] for _ in options.acoustic_scales]
    for utterance, hypotheses in decode_utterances(_loglikes(source, set(reference)), graph, options):
        for column, hypothesis in zip(scores, hypotheses, strict=True):
            column.append(_errors(ka, utterance, reference[utterance], hypothesis))
    results = tuple(
        _sum_up(ka, scale, tuple(column)) for scale, column in zip(options.acoustic_scales, scores, strict=True)
    )
    return ScoreResult(results, min(range(len(results)), key=lambda index: results[index].wer))


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
