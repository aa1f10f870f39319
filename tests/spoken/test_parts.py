"""The parts of recipes/spoken that need no synthesizer, each against a plain reference."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoken.channel import BANDS, SHIFT, WINDOW, Channel, Settings, filter_banks, num_frames, play_tape
from spoken.corpus import _frames, _label
from spoken.graph import make_graph, pronunciations_of, states_of
from spoken.phones import PHONES, phone_of
from spoken.text import choose_clauses, clauses_of
from spoken.tree import EDGE, SILENCE, STATES, Statistics, accumulate, grow, merge
from spoken.voices import Speech

from ddnn.kaldi.fst import Fst, check_fst


def test_clauses_end_at_punctuation() -> None:
    verse = "And God said, Let there be light: and there was light. So it was"
    assert [" ".join(clause) for clause in clauses_of(verse)] == [
        "and god said let there be light",
        "and there was light",
        "so it was",
    ]
    verses = [verse, verse, "And the light was good, and the spirit of God moved upon it."]
    chosen = choose_clauses(verses, 12, np.random.default_rng(1))
    assert sorted(" ".join(clause) for clause in chosen) == ["and god said let there be light", "and there was light"]


def test_filter_banks_follow_kaldi() -> None:
    samples = np.random.default_rng(1).normal(0, 0.1, 1000)
    assert len(filter_banks(samples)) == num_frames(1000) == 1 + (1000 - WINDOW) // SHIFT == 11
    frame = samples[3 * SHIFT : 3 * SHIFT + WINDOW] * 32768
    frame = frame - frame.mean()
    frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
    frame *= (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / (WINDOW - 1))) ** 0.85
    power = np.abs(np.fft.fft(frame, 256)[:129]) ** 2

    def mel(frequency: float) -> float:
        return 1127 * log(1 + frequency / 700)

    width = (mel(3800) - mel(100)) / (BANDS + 1)
    for band in (0, 7, BANDS - 1):
        energy = 0.0
        for index in range(129):
            distance = abs(mel(index * 8000 / 256) - (mel(100) + (band + 1) * width))
            energy += max(0.0, 1 - distance / width) * power[index]
        assert filter_banks(samples)[3, band] == pytest.approx(log(energy), abs=1e-4)


def test_tape_keeps_positions() -> None:
    rng = np.random.default_rng(2)
    click = np.zeros(22050)
    click[11000:11040] = 1
    tape, positions = play_tape(click, 22050, 0.2, rng)
    assert (np.diff(positions) > 0).all() and len(tape) == len(positions)
    assert abs(positions[int(np.argmax(tape))] - 11020) < 40
    unchanged, positions = play_tape(click, 22050, 0.0, rng)
    assert abs(len(unchanged) - 8000) < 2


@pytest.mark.parametrize("seed", range(6))  # all three noises
def test_noise_is_as_loud_as_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = [rng.normal(0, 0.1, 4000) for _ in range(6)]
    speech = np.sin(np.arange(16000) / 3)
    loud, quiet = (
        Channel(Settings(snr=snr, reverb=0, tilt=0), pool, np.random.default_rng(seed)).transmit(
            speech, np.random.default_rng(seed)
        )
        for snr in (60.0, 0.0)
    )
    correlation = float(np.corrcoef(loud, quiet)[0, 1])
    assert len(loud) == len(quiet) == 16000 and np.abs(loud).max() <= 1
    assert correlation < 0.98
    assert len(np.unique(loud)) <= 255  # 8-bit mu-law


def test_phones_are_known() -> None:
    assert (
        PHONES[phone_of("IR") - 1] == "3:" and PHONES[phone_of("") - 1] == "SIL" and PHONES[phone_of("tX") - 1] == "t"
    )
    assert PHONES[phone_of("%") - 1] == "@"


def _statistics(rng: np.random.Generator) -> Statistics:
    """Phones 1 (silence), 2 and 3; the first state of phone 2 has another mean after phone 3."""
    statistics: Statistics = {}
    rows = []
    for phone in (1, 2, 3):
        for state in range(STATES):
            for before in (EDGE, 2, 3):
                rows += [(phone, state, before, after) for after in (EDGE, 2, 3) for _ in range(60)]
    contexts = np.array(rows)
    features = rng.normal(0, 1, (len(rows), 2))
    features[:, 0] += 5 * contexts[:, 0]
    features[(contexts[:, 0] == 2) & (contexts[:, 1] == 0) & (contexts[:, 2] == 3), 1] += 4
    accumulate(statistics, contexts[:1000], features[:1000])
    accumulate(statistics, contexts[1000:], features[1000:])
    assert sum(value[0] for value in statistics.values()) == len(rows)
    return statistics


def test_merged_statistics_keep_no_part_in_memory() -> None:
    """Rows of a part are views of one array: a speaker with one new context must not keep all of it."""
    parts = [_statistics(np.random.default_rng(seed)) for seed in (1, 2)]
    merged = merge(iter(parts))
    assert all(np.allclose(merged[key], parts[0][key] + parts[1][key]) for key in merged)
    alone = merge(iter(parts[:1]))
    assert all(value.base is None and not np.shares_memory(value, parts[0][key]) for key, value in alone.items())


def test_tree_splits_where_the_likelihood_gains_most() -> None:
    statistics = _statistics(np.random.default_rng(3))
    roots = grow(statistics, 3, 9)
    assert roots.num_pdfs == 9 and roots.pdf_phone.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    tree = grow(statistics, 3, 10)
    assert tree.num_pdfs == 10
    after_3 = tree.table[2, 0, 3, :]
    assert len(np.unique(after_3)) == 1 and not np.isin(tree.table[2, 0, [EDGE, 1, 2], :], after_3).any()
    for pdf in range(10):
        where = np.argwhere(tree.table == pdf)
        assert {tuple(row[:2]) for row in where} == {(tree.pdf_phone[pdf], tree.pdf_state[pdf])}
    assert (tree.table[0] == -1).all() and (tree.table[1:] >= 0).all()


def test_leaves_have_enough_frames() -> None:
    statistics = _statistics(np.random.default_rng(4))
    tree = grow(statistics, 3, 1000, least=150)
    counts = np.zeros(tree.num_pdfs)
    for (phone, state, before, after), value in statistics.items():
        counts[tree.table[phone, state, before, after]] += value[0]
    assert counts.min() >= 150 and len(counts) > 12
    assert (np.bincount(tree.pdf_phone)[1] == STATES) and counts.sum() == sum(v[0] for v in statistics.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "t", "_:", "s"]), st.integers(0, 3000)), min_size=1, max_size=12),
    st.integers(0, 800),
)
def test_every_phone_has_its_three_states(symbols: list[tuple[str, int]], pad: int) -> None:
    begins = np.cumsum([duration for _, duration in symbols])
    speech = Speech(np.zeros(int(begins[-1]) + 3000), [(int(b), s) for b, (s, _) in zip(begins, symbols, strict=True)])
    positions = np.arange(0, len(speech.samples), 22050 / 8000)
    length = len(positions) + 2 * pad
    utterance = _label("u", speech, [("word", 0, len(symbols))], positions, pad, length)
    if utterance is None:
        assert {symbol for symbol, _ in symbols} == {"_:"} or num_frames(length) < STATES * (len(symbols) + 1)
        return
    frames = _frames(utterance)
    assert len(frames) == utterance.frames == num_frames(length)
    changes = np.flatnonzero(np.any(frames[1:, :2] != frames[:-1, :2], axis=1)) + 1
    states = frames[np.concatenate([[0], changes]), 1]
    assert states.tolist() == list(range(STATES)) * (len(states) // STATES)
    spoken = [phone for phone, *_ in utterance.phones if phone != SILENCE]
    assert utterance.pronunciations == [spoken] and len(spoken) == sum(symbol != "_:" for symbol, _ in symbols)


def _costs(graph: Fst, labels: list[int]) -> dict[int, float]:
    """Words of no path but the cheapest: its cost by final state, a plain search over a sequence of input labels."""
    best = {graph.start: 0.0}

    def close(costs: dict[int, float]) -> dict[int, float]:
        pending = list(costs)
        while pending:
            state = pending.pop()
            for arc in graph.arcs[graph.offsets[state] : graph.offsets[state + 1]]:
                cost = costs[state] + float(arc["weight"])
                if not arc["ilabel"] and cost < costs.get(int(arc["nextstate"]), inf) - 1e-9:
                    costs[int(arc["nextstate"])] = cost
                    pending.append(int(arc["nextstate"]))
        return costs

    for label in labels:
        following: dict[int, float] = {}
        for state, cost in close(best).items():
            for arc in graph.arcs[graph.offsets[state] : graph.offsets[state + 1]]:
                if arc["ilabel"] == label:
                    target = int(arc["nextstate"])
                    following[target] = min(following.get(target, inf), cost + float(arc["weight"]))
        best = following
    return {state: cost + float(graph.final[state]) for state, cost in close(best).items() if graph.final[state] < inf}


def test_graph_has_the_costs_of_the_bigram() -> None:
    tree = grow(_statistics(np.random.default_rng(5)), 3, 14)
    tokens = [("ab", (2, 3))] * 8 + [("ab", (2, 2))] * 2 + [("ab", (3, 3))] + [("a", (2,))] * 3
    lexicon = pronunciations_of(tokens)
    assert lexicon == {"a": {(2,): 1.0}, "ab": {(2, 3): 0.8, (2, 2): 0.2}}
    utterances = [["a", "ab"], ["a", "a"], ["ab"]]
    half = np.full(tree.num_pdfs, 0.5)
    graph, words = make_graph(utterances, lexicon, tree, half)
    check_fst(graph)
    assert words == ["a", "ab"]

    def path(*spoken: tuple[int, ...]) -> list[int]:
        return [2 * pdf + 2 for phones in spoken for pdf in states_of(phones, tree)]

    def seen(count: int, kinds: int, total: int, unigram: float) -> float:
        return (count + kinds * unigram) / (total + kinds)

    of = {"a": 3 / 8, "ab": 2 / 8, "</s>": 3 / 8}
    probability = seen(2, 2, 3, of["a"]) * seen(1, 3, 3, of["ab"]) * seen(2, 1, 2, of["</s>"]) * 0.8
    states = 9
    assert min(_costs(graph, path((2,), (2, 3))).values()) == pytest.approx(
        -log(probability) - 0.1 * states * log(0.5), abs=1e-4
    )
    # "ab ab" was never seen: by the back-off and its prefix tree
    probability = seen(1, 2, 3, of["ab"]) * (1 / (2 + 1)) * of["ab"] * seen(2, 1, 2, of["</s>"]) * 0.8 * 0.2
    cost = min(_costs(graph, path((2, 3), (2, 2))).values())
    assert cost == pytest.approx(-log(probability) - 0.1 * 12 * log(0.5), abs=1e-4)
    assert exp(-cost) < 1
