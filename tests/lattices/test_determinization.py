"""Determinization against all paths of small lattices, and against Kaldi's own lattices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lattice_paths import Weight, all_paths, posteriors

from ddnn.kaldi.lattice import Arcs, Lattice, iterate_lattices, sort_arcs
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.lattices.determinization import determinize

RawArc = tuple[
    int, int, int, int, float, float
]  # source, destination (-1: the end), tid, word, graph and acoustic cost


def lattice_of(arcs: list[RawArc]) -> Lattice:
    source, destination, tid, word, *costs = map(np.array, zip(*arcs, strict=True))
    states = 1 + int(max(source.max(), destination.max()))
    has_tid = (tid > 0).astype(np.int64)
    final = destination < 0
    return sort_arcs(Arcs(0, states, source, destination, final, word, np.stack(costs, 1), tid[tid > 0], has_tid))


def best_paths(lattice: Lattice) -> dict[tuple[int, ...], Weight]:
    """The best path of each word sequence, in Kaldi's order of weights."""
    best: dict[tuple[int, ...], Weight] = {}

    def rank(weight: Weight) -> tuple[float, float, tuple[int, ...]]:
        return weight[0] + weight[1], weight[0], tuple(-tid for tid in weight[2])

    for words, weight in all_paths(lattice):
        if words not in best or rank(weight) < rank(best[words]):
            best[words] = weight
    return best


COSTS = st.integers(0, 24).map(lambda eighths: eighths / 8)  # sums are exact, and ties frequent


@st.composite
def raw_lattices(draw: st.DrawFn) -> Lattice:
    """A few states in each frame, arcs with a tid to the next frame and without one within a frame."""
    frames, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    arcs: list[RawArc] = []
    words = st.sampled_from([0, 0, 1, 2])
    for t in range(frames):
        here, there = ([0] if t == 0 else range(t * width, (t + 1) * width)), range((t + 1) * width, (t + 2) * width)
        for _ in range(draw(st.integers(1, 6))):
            source, destination = draw(st.sampled_from(here)), draw(st.sampled_from(there))
            arcs.append((source, destination, draw(st.integers(1, 3)), draw(words), draw(COSTS), draw(COSTS)))
        for _ in range(draw(st.integers(0, 2)) if width > 1 else 0):
            first, second = sorted(draw(st.lists(st.sampled_from(there), min_size=2, max_size=2, unique=True)))
            arcs.append((first, second, 0, draw(words), draw(COSTS), draw(COSTS)))
    last = [state for state in range(frames * width, (frames + 1) * width) if any(arc[1] == state for arc in arcs)]
    reached = {0}
    for source, destination, *_ in sorted(arcs):
        if source in reached:
            reached.add(destination)
    assume(any(state in reached for state in last))
    arcs += [(state, -1, 0, 0, draw(COSTS), 0.0) for state in last]
    arcs = [arc for arc in arcs if arc[0] in reached]
    return _connected(arcs)


def _connected(arcs: list[RawArc]) -> Lattice:
    """Without states from which no final state can be reached, as decoders write lattices."""
    useful = {-1}
    for source, destination, *_ in sorted(arcs, reverse=True):
        if destination in useful:
            useful.add(source)
    return lattice_of([arc for arc in arcs if arc[0] in useful and arc[1] in useful])


@settings(max_examples=300, deadline=None)
@given(raw_lattices(), st.sampled_from([0.5, 2.0, 100.0]))
def test_the_best_path_of_each_word_sequence_remains(raw: Lattice, beam: float) -> None:
    expected, result = best_paths(raw), determinize(raw, beam)
    paths = all_paths(result)
    assert max(Counter(words for words, _ in paths).values()) == 1
    actual = dict(paths)
    lowest = min(graph + acoustic for graph, acoustic, _ in expected.values())
    for words, weight in expected.items():
        if sum(weight[:2]) <= lowest + beam:
            assert actual[words] == weight
    for words, weight in actual.items():  # what else was kept shares its arcs with paths within the beam
        assert expected[words] == weight
    if beam == 100.0:
        assert actual.keys() == expected.keys()


@settings(max_examples=100, deadline=None)
@given(raw_lattices(), st.sampled_from([0.5, 2.0]))
def test_every_arc_lies_on_a_path_within_the_beam(raw: Lattice, beam: float) -> None:
    result = determinize(raw, beam)
    totals = {words: weight[0] + weight[1] for words, weight in all_paths(result)}
    lowest = min(totals.values())
    costs = (result.graph_cost + result.acoustic_cost).astype(np.float64)
    forward, backward = np.full(len(result.times), np.inf), np.full(len(result.times), np.inf)
    forward[0] = backward[-1] = 0.0
    for arc, (source, destination) in enumerate(zip(result.source, result.destination, strict=True)):
        forward[destination] = min(forward[destination], forward[source] + costs[arc])
    for arc in range(len(result.source) - 1, -1, -1):
        source, destination = result.source[arc], result.destination[arc]
        backward[source] = min(backward[source], costs[arc] + backward[destination])
    through = forward[result.source] + costs + backward[result.destination]
    assert (through <= lowest + beam + 1e-9).all()


def test_a_tie_is_decided_by_graph_cost_then_by_the_greater_string() -> None:
    by_graph = lattice_of([(0, 1, 1, 7, 2.0, 1.0), (0, 1, 2, 7, 1.0, 2.0), (1, -1, 0, 0, 0.0, 0.0)])
    assert all_paths(determinize(by_graph, 5.0)) == [((7,), (1.0, 2.0, (2,)))]
    by_string = lattice_of([(0, 1, 3, 7, 1.0, 1.0), (0, 1, 2, 7, 1.0, 1.0), (1, -1, 0, 0, 0.0, 0.0)])
    assert all_paths(determinize(by_string, 5.0)) == [((7,), (1.0, 1.0, (3,)))]


def test_sets_are_the_same_where_they_are_after_the_arcs_without_words() -> None:
    """After word 1 and after word 2 come different states, from which the same ones with words are reached."""
    arcs: list[RawArc] = [
        *((0, 1, 1, 1, 0.0, 0.0), (0, 2, 1, 2, 0.0, 0.0)),
        *((1, 3, 5, 0, 0.0, 1.0), (2, 3, 5, 0, 0.0, 1.0), (3, 4, 6, 3, 0.0, 0.0), (4, -1, 0, 0, 0.0, 0.0)),
    ]  # fmt: skip
    result = determinize(lattice_of(arcs), 10.0)
    assert (len(result.times), len(result.source)) == (4, 4)


def test_members_of_a_set_are_never_pruned_singly() -> None:
    """State 2 is 8 above state 1 after word 1, but it is in the set of both, which word 3 continues within the beam."""
    arcs: list[RawArc] = [
        *((0, 1, 1, 1, 0.0, 0.0), (0, 2, 2, 1, 8.0, 0.0)),
        *((1, 3, 3, 3, 0.0, 0.0), (2, 3, 3, 3, 0.0, 0.0), (3, -1, 0, 0, 0.0, 0.0)),
        *((1, 4, 4, 4, 4.0, 0.0), (2, 4, 4, 4, -4.0, 0.0), (4, -1, 0, 0, 0.0, 0.0)),
    ]  # fmt: skip
    assert dict(all_paths(determinize(lattice_of(arcs), 5.0))) == {
        (1, 3): (0.0, 0.0, (1, 3)),
        (1, 4): (4.0, 0.0, (2, 4)),  # a tie, which the greater string decides
    }


def test_as_kaldi_determinizes(shared: Path) -> None:
    small, model = shared / "golden/smbr/small", read_transition_model(shared / "an4/ali/final.mdl")
    kaldi, same_size, compared = dict(iterate_lattices(small / "lat.1.gz")), 0, 0
    for utterance, raw in iterate_lattices(small / "raw_lat.1.gz"):
        if utterance not in kaldi:
            continue
        expected = kaldi[utterance]
        result = determinize(replace(raw, acoustic_cost=np.float32(0.1) * raw.acoustic_cost), 7.0)
        result = replace(result, acoustic_cost=result.acoustic_cost / np.float32(0.1))
        total, of_pdfs = posteriors(result, 0.1, model.transition_to_pdf, model.num_pdfs)
        kaldi_total, kaldi_of_pdfs = posteriors(expected, 0.1, model.transition_to_pdf, model.num_pdfs)
        assert total == pytest.approx(kaldi_total, abs=0.02)
        np.testing.assert_allclose(of_pdfs, kaldi_of_pdfs, atol=5e-3)
        compared += 1
        same_size += (len(result.times), len(result.source)) == (len(expected.times), len(expected.source))
    assert compared >= 10 and same_size >= 6
