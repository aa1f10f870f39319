"""Word errors: how they are counted, bootstrap intervals of their rate, and whether two systems differ (Bisani and Ney,
ICASSP 2004). Whole speakers are drawn where they are known, since the errors in the utterances of one speaker are not
independent: intervals over utterances are too narrow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from ddnn.kaldi.data_dir import read_text, read_utt2spk
from ddnn.util.errors import DataError, UserError
from ddnn.util.text import plural, printable, render

log = logging.getLogger(__name__)

REPLICATES = 10_000
SEED = 20_150_701
HINT_INSTALL = "pip install 'ddnn[decode]'"
INTERVAL = (0.025, 0.975)
CHUNK = 1 << 20  # speakers drawn at a time: some 30 MB
MIN_SPEAKERS = 5  # of fewer, an interval over speakers says nothing about others

Integers = npt.NDArray[np.int64]
Unit = Literal["speakers", "utterances"]  # what is drawn


@dataclass(frozen=True)
class Estimate:
    """A difference in percentage points, positive where the one that is expected to be better is; its uncertainty."""

    difference: float
    low: float  # ends of the 95 % percentile interval
    high: float
    prob_improvement: float  # share of the replicates in which the difference is above 0

    @property
    def significant(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def import_kaldialign() -> ModuleType:
    try:
        import kaldialign
    except ImportError as error:
        raise UserError("counting word errors needs the package kaldialign", hint=HINT_INSTALL) from error
    return cast(ModuleType, kaldialign)


def edit_counts(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[int, int, int]:
    """Insertions, deletions and substitutions."""
    counts = import_kaldialign().edit_distance(tuple(reference), tuple(hypothesis))
    return int(counts["ins"]), int(counts["del"]), int(counts["sub"])


def read_reference(path: Path) -> dict[str, tuple[str, ...]]:
    """The words of each utterance of a Kaldi `text`, by `read_text`. DataError: as `read_text`, or no utterance has any
    words."""
    reference = {utterance: tuple(words) for utterance, words in read_text(path).items()}
    if not any(reference.values()):
        hint = "give a Kaldi text: utterance and its words, one a line"
        raise DataError("the reference has no words", location=path, hint=hint)
    return reference


def bootstrap_wer(
    worse: Integers, better: Integers, words: Integers, speakers: Integers, replicates: int = REPLICATES
) -> Estimate:
    """Paired bootstrap of WER(worse) - WER(better) in percentage points, over speakers and seeds; the same arguments
    give the same result.

    Each replicate draws as many runs as there are, and as many speakers, both with replacement. A run comes with its
    partner of the same seed, a speaker with all utterances and their errors in all runs. `worse`, `better`: word
    errors, (runs, utterances), in the same order of seeds. `words`: of each utterance's reference, sum above 0.
    `speakers`: number of each utterance's speaker.
    """
    # Whole numbers: a replicate without a difference is 0, not 1e-17.
    rows = np.vstack([worse - better, words])
    block = np.unique(speakers, return_inverse=True)[1]
    sums = np.zeros((len(rows), block.max() + 1), dtype=np.int64)
    np.add.at(sums.T, block, rows.T)
    gain, spoken = sums[:-1], sums[-1]
    runs, blocks = gain.shape
    percent = 100.0 / runs
    run_rng, speaker_rng = np.random.default_rng(SEED + 1), np.random.default_rng(SEED)
    chunk = max(1, CHUNK // blocks)
    differences = []
    for start in range(0, replicates, chunk):
        size = min(chunk, replicates - start)
        resampled_runs = run_rng.integers(0, runs, size=(size, runs))
        resampled = speaker_rng.integers(0, blocks, size=(size, blocks))
        total = spoken[resampled].sum(axis=1)
        gained = np.zeros(size, dtype=np.int64)
        for run in range(runs):
            gained += (resampled_runs == run).sum(axis=1) * gain[run][resampled].sum(axis=1)
        differences.append(percent * gained[total > 0] / total[total > 0])  # a draw without words has no rate
    return estimate_of(percent * float(gain.sum()) / float(words.sum()), np.concatenate(differences))


def estimate_of(difference: float, replicates: npt.NDArray[np.float64]) -> Estimate:
    # A replicate itself, none in between: of 27 replicates one is 3.7 %, and the lowest is the end of the interval.
    low, high = np.quantile(replicates, INTERVAL, method="inverted_cdf")
    return Estimate(difference, float(low), float(high), float((replicates > 0.0).mean()))


def wer_interval(errors: Sequence[int], words: Sequence[int], speakers: Sequence[int]) -> tuple[float, float]:
    """The 95 % interval of one system's word error rate in percent, between percentiles of the bootstrap replicates;
    arguments by utterance: see `bootstrap_wer`."""
    system_errors = np.array([errors])
    estimate = bootstrap_wer(system_errors, np.zeros_like(system_errors), np.array(words), np.array(speakers))
    return estimate.low, estimate.high


def speaker_numbers(utt2spk: Path, utterances: Sequence[str]) -> tuple[int, ...]:
    """Number of each utterance's speaker, in order of their appearance; empty where there is no such file. DataError
    where it is malformed, or lacks an utterance."""
    if not utt2spk.exists():
        return ()
    speakers = read_utt2spk(utt2spk)
    missing = [utterance for utterance in utterances if utterance not in speakers]
    if missing:
        raise DataError(f"utterance {missing[0]} has no speaker", location=utt2spk, hint="add it to utt2spk")
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(speakers[utterance], len(numbers)) for utterance in utterances)


def units_drawn(utt2spk: Path, utterances: Sequence[str]) -> tuple[Sequence[int], Unit]:
    """The number of what is drawn with each utterance: its speaker; the utterance itself where speakers are not known,
    or too few. What is wrong with utt2spk is a warning: the word error rate does not depend on it."""
    speakers: tuple[int, ...] = ()
    try:
        speakers = speaker_numbers(utt2spk, utterances)
    except DataError as error:
        log.warning("%s: %s; the interval is over utterances", utt2spk, error.message)
    enough_speakers = len(set(speakers)) >= MIN_SPEAKERS
    return (speakers, "speakers") if enough_speakers else (range(len(utterances)), "utterances")


@dataclass(frozen=True)
class UtteranceScore:
    """One utterance at one acoustic scale: the words spoken, the words recognized, and the errors by kind."""

    utterance: str
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]
    insertions: int
    deletions: int
    substitutions: int
    reached_final: bool
    starts: tuple[int, ...] = ()  # the frame, from 0, of the label of each recognized word
    frames: int = 0


def align_words(score: UtteranceScore) -> list[tuple[str | None, str | None]]:
    """Pairs of (word spoken, word recognized); None on the left is an insertion, on the right a deletion."""
    words: list[str | None] = [None, *sorted({*score.reference, *score.hypothesis})]
    number = {word: index for index, word in enumerate(words)}  # numbers, so that no word can be taken for the blank
    pairs = import_kaldialign().align([number[w] for w in score.reference], [number[w] for w in score.hypothesis], 0)
    return [(words[left], words[right]) for left, right in pairs]


@dataclass(frozen=True)
class Comparison:
    """Two systems' words on one reference. `estimate`: WER of the first minus that of the second."""

    names: tuple[str, str]
    wers: tuple[float, float]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    estimate: Estimate
    drawn: Unit
    words: int
    utterances: int
    units: int  # that were drawn from

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "significant": self.estimate.significant}

    def as_text(self) -> str:
        return render("compare-wer.txt.j2", c=self, replicates=REPLICATES)


def compare_hypotheses(reference: Path, hypotheses: tuple[Path, Path], utt2spk: Path | None = None) -> Comparison:
    """Whether two systems differ: their words, each a Kaldi text or a folder of `ddnn score --out`, against those of
    `reference`, a Kaldi text of the same utterances. `utt2spk`: where None, the file beside `reference`, if there is one.
    UserError: the package kaldialign is missing. DataError: a file is damaged, or lacks utterances."""
    import_kaldialign()
    spoken = read_reference(reference)
    utterances, errors = list(spoken), []
    for path in hypotheses:
        path = path / "text" if path.is_dir() else path
        recognized = read_text(path)
        if recognized.keys() != spoken.keys():
            missing, extra = sorted(spoken.keys() - recognized.keys()), sorted(recognized.keys() - spoken.keys())
            message = f"{plural(len(missing), 'utterance')} of the reference missing, {len(extra)} not in it"
            message += f", as {printable((missing or extra)[0], '')}"
            hint = f"give the words of exactly the utterances of {reference}"
            raise DataError(message, location=path, hint=hint)
        errors.append([sum(edit_counts(spoken[name], recognized[name])) for name in utterances])
    if utt2spk is not None and not utt2spk.is_file():
        raise DataError("no such file", location=utt2spk, hint="name the utt2spk of the reference")
    numbers, drawn = units_drawn(utt2spk or reference.with_name("utt2spk"), utterances)
    words = [len(spoken[name]) for name in utterances]
    first, second = errors
    return Comparison(
        names=(str(hypotheses[0]), str(hypotheses[1])),
        wers=(100.0 * sum(first) / sum(words), 100.0 * sum(second) / sum(words)),
        intervals=(wer_interval(first, words, numbers), wer_interval(second, words, numbers)),
        estimate=bootstrap_wer(np.array([first]), np.array([second]), np.array(words), np.array(numbers)),
        drawn=drawn,
        words=sum(words),
        utterances=len(words),
        units=len(set(numbers)),
    )
