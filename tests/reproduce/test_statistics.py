"""The bootstraps against naive twins in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.reproduce import statistics
from ddnn.reproduce.statistics import SEED, bootstrap_seeds, bootstrap_words

COUNTS = st.integers(0, 12)


def naive_words(worse: np.ndarray, better: np.ndarray, words: np.ndarray, draws: int) -> tuple[float, np.ndarray]:
    """Draw by draw, the rates of both sides each by itself."""
    of_runs, generator = np.random.default_rng(SEED + 1), np.random.default_rng(SEED)

    def rate(errors: np.ndarray, picked: np.ndarray) -> float:
        return 100.0 * errors[:, picked].sum(dtype=np.float64) / (len(errors) * words[picked].sum(dtype=np.float64))

    every = np.arange(len(words))
    drawn = []
    for _ in range(draws):
        runs = of_runs.integers(0, len(worse), size=len(worse))
        picked = generator.integers(0, len(words), size=len(words))
        if words[picked].sum() > 0:
            drawn.append(rate(worse[runs], picked) - rate(better[runs], picked))
    return rate(worse, every) - rate(better, every), np.array(drawn)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_words_as_their_twin(runs: int, utterances: int, data: st.DataObject) -> None:
    def some(rows: int) -> np.ndarray:
        row = st.lists(COUNTS, min_size=utterances, max_size=utterances)
        return np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)), dtype=np.int64)

    worse, better, words = some(runs), some(runs), some(1)[0]
    words[0] += 1
    found = bootstrap_words(worse, better, words, draws=50)
    difference, drawn = naive_words(worse, better, words, 50)
    assert found.difference == pytest.approx(difference, abs=1e-9)
    ordered = np.sort(drawn)
    assert found.low == pytest.approx(ordered[int(np.ceil(0.025 * len(drawn))) - 1], abs=1e-9)
    assert found.high == pytest.approx(ordered[int(np.ceil(0.975 * len(drawn))) - 1], abs=1e-9)
    assert (drawn > 1e-9).mean() == pytest.approx(found.probability)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    worse, better = generator.integers(0, 5, (3, 40)), generator.integers(0, 4, (3, 40))
    words = generator.integers(1, 9, 40)
    whole = bootstrap_words(worse, better, words, draws=500)
    monkeypatch.setattr(statistics, "BLOCK", 100)
    assert bootstrap_words(worse, better, words, draws=500) == whole == bootstrap_words(worse, better, words, draws=500)


def test_words_without_a_difference_are_not_significant() -> None:
    errors = np.array([[1, 0, 2], [0, 1, 1], [2, 1, 0]])
    found = bootstrap_words(errors, errors[::-1], np.array([3, 3, 3]))
    assert found.low <= found.difference <= found.high
    equal = bootstrap_words(errors, errors, np.array([3, 3, 3]))
    assert (equal.difference, equal.low, equal.high, equal.probability) == (0.0, 0.0, 0.0, 0.0)
    assert not equal.significant


def test_known_power() -> None:
    """One error less in each of 100 utterances of ten words: ten points in every draw."""
    words = np.full(100, 10)
    found = bootstrap_words(np.full((1, 100), 2), np.full((1, 100), 1), words)
    assert (found.difference, found.low, found.high, found.probability) == (10.0, 10.0, 10.0, 1.0)
    assert found.significant


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=5))
def test_seeds_as_their_twin(differences: list[float]) -> None:
    drawn = sorted(sum(draw) / len(draw) for draw in itertools.product(differences, repeat=len(differences)))
    found = bootstrap_seeds(differences)
    assert found.difference == pytest.approx(sum(differences) / len(differences), abs=1e-12)
    assert found.low == pytest.approx(drawn[int(np.ceil(0.025 * len(drawn))) - 1], abs=1e-12)
    assert found.high == pytest.approx(drawn[int(np.ceil(0.975 * len(drawn))) - 1], abs=1e-12)


@given(st.lists(st.floats(-5.0, 5.0).filter(lambda value: abs(value) > 1e-6), min_size=3, max_size=3))
def test_three_seeds_are_significant_where_their_signs_agree(differences: list[float]) -> None:
    found = bootstrap_seeds(differences)
    assert found.significant == (len({value > 0 for value in differences}) == 1)
    assert (found.low, found.high) == pytest.approx((min(differences), max(differences)))


def test_many_seeds_are_drawn() -> None:
    differences = np.random.default_rng(3).normal(0.5, 1.0, 40).tolist()
    found = bootstrap_seeds(differences)
    assert found == bootstrap_seeds(differences)
    error = np.std(differences) / np.sqrt(40)
    assert found.low == pytest.approx(np.mean(differences) - 1.96 * error, abs=0.05)
    assert found.high == pytest.approx(np.mean(differences) + 1.96 * error, abs=0.05)


def test_one_seed_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two or more"):
        bootstrap_seeds([0.3])
