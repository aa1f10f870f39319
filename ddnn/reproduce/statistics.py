"""Bootstrap: over utterances and seeds for word error rates, over seeds for frame accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

DRAWS = 10_000
SEED = 20_150_701
MOST_ENUMERATED = 5
"""Seeds of which all n**n draws are looked at (3,125); of more, `DRAWS` are drawn."""
INTERVAL = (0.025, 0.975)
BLOCK = 1 << 20
"""Utterances drawn at a time: some 30 MB."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A difference and how sure it is; positive where the one that should be better is.

    Attributes:
        difference: in percent points.
        low, high: ends of its 95 % percentile interval.
        probability: of improvement: share of the draws in which the difference is above 0.
    """

    difference: float
    low: float
    high: float
    probability: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0.0 or self.high < 0.0


def bootstrap_words(worse: Integers, better: Integers, words: Integers, draws: int = DRAWS) -> Estimate:
    """Paired bootstrap of a difference of word error rates (Bisani and Ney, ICASSP 2004), over utterances and seeds.

    Each draw takes as many runs as there are, and as many utterances, both with replacement; a run brings its partner
    of the same seed, an utterance its errors of all runs. The interval is about other utterances and other seeds.

    Args:
        worse, better: word errors, runs x utterances, in the same order of seeds.
        words: of each utterance's reference; the sum is above 0.

    Returns:
        WER(worse) - WER(better) in percent points; the same arguments give the same figures.
    """
    if worse.shape != better.shape:
        raise ValueError(f"{len(worse)} and {len(better)} runs, expected a partner for each")
    # Whole numbers: a draw without a difference is 0, not 1e-17.
    gain = worse - better
    runs, utterances = gain.shape
    percent = 100.0 / runs
    of_runs, of_utterances = np.random.default_rng(SEED + 1), np.random.default_rng(SEED)
    rows = max(1, BLOCK // utterances)
    found = []
    for start in range(0, draws, rows):
        now = min(rows, draws - start)
        drawn = of_runs.integers(0, runs, size=(now, runs))
        picked = of_utterances.integers(0, utterances, size=(now, utterances))
        spoken = words[picked].sum(axis=1)
        gained = np.zeros(now, dtype=np.int64)
        for run in range(runs):
            gained += (drawn == run).sum(axis=1) * gain[run][picked].sum(axis=1)
        found.append(percent * gained[spoken > 0] / spoken[spoken > 0])
    return _estimate(percent * float(gain.sum()) / float(words.sum()), np.concatenate(found))


def bootstrap_seeds(differences: Sequence[float]) -> Estimate:
    """Bootstrap of the mean of differences that are paired by seed.

    Up to five seeds all draws are enumerated. With two or three the interval reaches from the lowest to the highest
    difference: it leaves 0 out just where all differences agree in sign, which three that mean nothing do one time in
    four.

    Args:
        differences: of each seed, in percent points; two or more.

    Returns:
        The mean with its interval; the same arguments give the same figures.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise ValueError(f"{n} differences have no interval, expected two or more")
    if n <= MOST_ENUMERATED:
        picked: npt.NDArray[Any] = np.indices((n,) * n).reshape(n, -1).T
    else:
        picked = np.random.default_rng(SEED).integers(0, n, size=(DRAWS, n))
    return _estimate(float(values.mean()), values[picked].mean(axis=1))


def _estimate(difference: float, drawn: Floats) -> Estimate:
    # A draw itself, none in between: of 27 draws one is 3.7 %, and the lowest is the end of the interval.
    low, high = np.quantile(drawn, INTERVAL, method="inverted_cdf")
    return Estimate(difference, float(low), float(high), float((drawn > 0.0).mean()))
