"""Confidence intervals of differences between two conditions, by the bootstrap.

Word error rates: paired, over speakers and seeds (Bisani and Ney, ICASSP 2004). Whole speakers are drawn, since the
errors in the utterances of one speaker are not independent: intervals over utterances are too narrow. Frame accuracies:
over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

REPLICATES = 10_000
SEED = 20_150_701
MAX_ENUMERATED = 5
"""Seeds of which all n**n resamples are enumerated (3,125); of more, `REPLICATES` are drawn."""
INTERVAL = (0.025, 0.975)
CHUNK = 1 << 20
"""Speakers drawn at a time: some 30 MB."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A difference and its uncertainty; positive where the one that is expected to be better is.

    Attributes:
        difference: in percentage points.
        low, high: ends of its 95 % percentile interval.
        prob_improvement: share of the replicates in which the difference is above 0.
    """

    difference: float
    low: float
    high: float
    prob_improvement: float

    @property
    def significant(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0.0 or self.high < 0.0


def bootstrap_wer(
    worse: Integers, better: Integers, words: Integers, speakers: Integers, replicates: int = REPLICATES
) -> Estimate:
    """Paired bootstrap of a difference of word error rates, over speakers and seeds.

    Each replicate draws as many runs as there are, and as many speakers, both with replacement. A run comes with its
    partner of the same seed, a speaker with all utterances and their errors in all runs. The interval is about other
    speakers and other seeds.

    Args:
        worse, better: word errors, (runs, utterances), in the same order of seeds.
        words: of each utterance's reference; the sum is above 0.
        speakers: number of each utterance's speaker.

    Returns:
        WER(worse) - WER(better) in percentage points; the same arguments give the same result.
    """
    if worse.shape != better.shape:
        raise ValueError(f"{len(worse)} and {len(better)} runs, expected a partner for each")
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
        differences.append(percent * gained[total > 0] / total[total > 0])
    return _estimate(percent * float(gain.sum()) / float(words.sum()), np.concatenate(differences))


def bootstrap_seeds(differences: Sequence[float]) -> Estimate:
    """Bootstrap of the mean of differences that are paired by seed.

    Up to five seeds all resamples are enumerated. With two or three the interval reaches from the lowest to the highest
    difference: it does not contain 0 exactly where all differences have the same sign, which three that mean nothing
    have one time in four.

    Args:
        differences: of each seed, in percentage points; two or more.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise ValueError(f"{n} differences have no interval, expected two or more")
    if n <= MAX_ENUMERATED:
        resampled: npt.NDArray[Any] = np.indices((n,) * n).reshape(n, -1).T
    else:
        resampled = np.random.default_rng(SEED).integers(0, n, size=(REPLICATES, n))
    return _estimate(float(values.mean()), values[resampled].mean(axis=1))


def _estimate(difference: float, replicates: Floats) -> Estimate:
    # A replicate itself, none in between: of 27 replicates one is 3.7 %, and the lowest is the end of the interval.
    low, high = np.quantile(replicates, INTERVAL, method="inverted_cdf")
    return Estimate(difference, float(low), float(high), float((replicates > 0.0).mean()))
