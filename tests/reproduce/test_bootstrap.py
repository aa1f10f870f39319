"""The bootstraps against naive twins in float64, and against kaldialign's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.decoding import word_errors
from ddnn.decoding.word_errors import SEED, bootstrap_wer
from ddnn.reproduce.comparison import bootstrap_seeds

COUNTS = st.integers(0, 12)


def naive_wer(
    worse: np.ndarray, better: np.ndarray, words: np.ndarray, speakers: np.ndarray, replicates: int
) -> tuple[float, np.ndarray]:
    """Replicate by replicate, utterance by utterance, the rates of both sides each by itself."""
    run_rng, speaker_rng = np.random.default_rng(SEED + 1), np.random.default_rng(SEED)
    names = sorted(set(speakers.tolist()))

    def rate(errors: np.ndarray, utterances: list[int]) -> float:
        chosen = errors[:, utterances]
        return 100.0 * chosen.sum(dtype=np.float64) / (len(errors) * words[utterances].sum(dtype=np.float64))

    every = list(range(len(words)))
    differences = []
    for _ in range(replicates):
        runs = run_rng.integers(0, len(worse), size=len(worse))
        drawn = speaker_rng.integers(0, len(names), size=len(names))
        utterances = [u for number in drawn for u in every if speakers[u] == names[number]]
        if words[utterances].sum() > 0:
            differences.append(rate(worse[runs], utterances) - rate(better[runs], utterances))
    return rate(worse, every) - rate(better, every), np.array(differences)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_words_as_their_twin(runs: int, utterances: int, data: st.DataObject) -> None:
    def some(rows: int) -> np.ndarray:
        row = st.lists(COUNTS, min_size=utterances, max_size=utterances)
        return np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)), dtype=np.int64)

    worse, better, words, speakers = some(runs), some(runs), some(1)[0], some(1)[0]
    words[0] += 1
    found = bootstrap_wer(worse, better, words, speakers, replicates=50)
    difference, replicates = naive_wer(worse, better, words, speakers, 50)
    assert found.difference == pytest.approx(difference, abs=1e-9)
    ordered = np.sort(replicates)
    assert found.low == pytest.approx(ordered[int(np.ceil(0.025 * len(replicates))) - 1], abs=1e-9)
    assert found.high == pytest.approx(ordered[int(np.ceil(0.975 * len(replicates))) - 1], abs=1e-9)
    assert (replicates > 1e-9).mean() == pytest.approx(found.prob_improvement)


def test_utterances_of_one_speaker_are_not_independent() -> None:
    """Of eight speakers with 50 utterances each, five gain an error an utterance and three lose one: by utterance that
    would be significant, but other speakers might as well give the opposite."""
    speakers = np.repeat(np.arange(8), 50)
    better = np.full((1, 400), 2)
    worse = better + np.where(speakers < 5, 1, -1)
    words = np.full(400, 10)
    by_utterance = bootstrap_wer(worse, better, words, np.arange(400))
    by_speaker = bootstrap_wer(worse, better, words, speakers)
    assert by_utterance.significant and not by_speaker.significant
    assert by_speaker.difference == by_utterance.difference == 2.5
    assert by_speaker.high - by_speaker.low > 5.0 * (by_utterance.high - by_utterance.low)


def test_as_kaldialign_where_each_utterance_has_a_speaker_of_its_own() -> None:
    """Kaldi's compute-wer-bootci draws utterances: the same interval of one system, the same chance of improvement."""
    kaldialign = pytest.importorskip("kaldialign")
    rng = np.random.default_rng(4)
    references = [[f"w{w}" for w in rng.integers(0, 50, size=rng.integers(1, 15))] for _ in range(80)]

    def recognize(error_rate: float) -> tuple[list[list[str]], np.ndarray]:
        hypotheses = [[w if rng.random() > error_rate else "x" for w in reference] for reference in references]
        wrong = [sum(h == "x" for h in hypothesis) for hypothesis in hypotheses]
        return hypotheses, np.array([wrong])

    (first, first_errors), (second, second_errors) = recognize(0.2), recognize(0.17)
    words = np.array([len(reference) for reference in references])
    theirs = kaldialign.bootstrap_wer_ci(references, first, second)
    alone = bootstrap_wer(first_errors, np.zeros_like(first_errors), words, np.arange(80))
    assert alone.low == pytest.approx(100 * theirs["system1"]["ci95min"], abs=0.4)
    assert alone.high == pytest.approx(100 * theirs["system1"]["ci95max"], abs=0.4)
    both = bootstrap_wer(first_errors, second_errors, words, np.arange(80))
    assert both.prob_improvement == pytest.approx(theirs["p_s2_improv_over_s1"], abs=0.02)


def test_systems_without_a_difference() -> None:
    errors, words = np.array([[1, 0, 2, 1] * 10]), np.full(40, 5)
    found = bootstrap_wer(errors, errors, words, np.arange(40), replicates=200)
    assert (found.low, found.difference, found.high, found.prob_improvement) == (0.0, 0.0, 0.0, 0.0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    worse, better = generator.integers(0, 5, (3, 40)), generator.integers(0, 4, (3, 40))
    words, speakers = generator.integers(1, 9, 40), np.arange(40) // 2
    whole = bootstrap_wer(worse, better, words, speakers, replicates=500)
    monkeypatch.setattr(word_errors, "CHUNK", 100)
    assert bootstrap_wer(worse, better, words, speakers, replicates=500) == whole


def test_words_without_a_difference_are_not_significant() -> None:
    errors, words, speakers = np.array([[1, 0, 2], [0, 1, 1], [2, 1, 0]]), np.array([3, 3, 3]), np.arange(3)
    found = bootstrap_wer(errors, errors[::-1], words, speakers)
    assert found.low <= found.difference <= found.high
    equal = bootstrap_wer(errors, errors, words, speakers)
    assert (equal.difference, equal.low, equal.high, equal.prob_improvement) == (0.0, 0.0, 0.0, 0.0)
    assert not equal.significant


def test_known_power() -> None:
    """One error less in each of 100 utterances of ten words: ten points in every replicate."""
    words = np.full(100, 10)
    found = bootstrap_wer(np.full((1, 100), 2), np.full((1, 100), 1), words, np.arange(100))
    assert (found.difference, found.low, found.high, found.prob_improvement) == (10.0, 10.0, 10.0, 1.0)
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
