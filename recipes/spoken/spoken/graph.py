"""The decoding graph of the spoken corpus, made by hand: pronunciations as chains of HMM states below a bigram.

Contexts end with the word, so nothing has to be composed. Each pronunciation is one chain that all histories enter by an epsilon arc
with the word and its Witten-Bell cost. The back-off leads into a prefix tree of all pronunciations with the unigram's costs pushed
towards the root. A pause loops at each history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.fst import ARC, Fst
from spoken.tree import EDGE, SILENCE, STATES, Tree

Pronunciation = tuple[int, ...]
_SELF_LOOP_SCALE = 0.1
_PAUSE = 0.2  # probability of a pause after a word
_START, _END = "<s>", "</s>"


def pronunciations_of(tokens: Iterable[tuple[str, Pronunciation]]) -> dict[str, dict[Pronunciation, float]]:
    """The pronunciations of each word with 10 % of its occurrences or more, four at most, and their probabilities."""
    counts: dict[str, Counter[Pronunciation]] = {}
    for word, phones in tokens:
        counts.setdefault(word, Counter())[phones] += 1
    lexicon = {}
    for word, spoken in sorted(counts.items()):
        ranked = sorted(spoken.items(), key=lambda item: (-item[1], item[0]))[:4]
        kept = [(phones, count) for phones, count in ranked if count >= 0.1 * spoken.total()] or ranked[:1]
        lexicon[word] = {phones: count / sum(n for _, n in kept) for phones, count in kept}
    return lexicon


def states_of(phones: Sequence[int], tree: Tree) -> list[int]:
    """The pdfs of a word's HMM states in order."""
    padded = [EDGE, *phones, EDGE]
    return [
        int(tree.table[phone, state, before, after])
        for before, phone, after in zip(padded, phones, padded[2:], strict=False)
        for state in range(STATES)
    ]


class _Builder:
    """States and arcs of a graph under construction."""

    def __init__(self, self_loop: NDArray[np.float64]) -> None:
        self._stay = (-_SELF_LOOP_SCALE * np.log(self_loop)).tolist()
        self._leave = (-_SELF_LOOP_SCALE * np.log(1 - self_loop)).tolist()
        self.sources: list[int] = []
        self.arcs: list[tuple[int, int, float, int]] = []
        self.states = 0

    def state(self) -> int:
        self.states += 1
        return self.states - 1

    def arc(self, source: int, destination: int, cost: float, word: int = 0, label: int = 0) -> None:
        self.sources.append(source)
        self.arcs.append((label, word, cost, destination))

    def hmm(self, source: int, pdf: int, cost: float = 0.0) -> int:
        """A new state for one HMM state of this pdf, entered from `source`; its self-loop is on it, as in Kaldi's reordered
        graphs. Transition-state `pdf` + 1 has transition-ids 2 pdf + 1 (self-loop) and 2 pdf + 2."""
        state = self.state()
        self.arc(source, state, cost + self._leave[pdf], label=2 * pdf + 2)
        self.arc(state, state, self._stay[pdf], label=2 * pdf + 1)
        return state


def make_graph(
    utterances: Iterable[Sequence[str]],
    lexicon: dict[str, dict[Pronunciation, float]],
    tree: Tree,
    self_loop: NDArray[np.float64],
) -> tuple[Fst, list[str]]:
    """HCLG of a Witten-Bell bigram of `utterances`, and its words; word id n is item n - 1. `self_loop`: float64 [pdfs]."""
    words = sorted(lexicon)
    ids = {word: index + 1 for index, word in enumerate(words)}
    bigrams: dict[str, Counter[str]] = {_START: Counter(), **{word: Counter() for word in words}}
    unigrams: Counter[str] = Counter()
    for utterance in utterances:
        for first, second in zip([_START, *utterance], [*utterance, _END], strict=True):
            bigrams[first][second] += 1
            unigrams[second] += 1
    total = unigrams.total()
    builder = _Builder(self_loop)
    start = builder.state()
    histories = {_START: start, **{word: builder.state() for word in words}}
    back_off = builder.state()
    entries = {word: builder.state() for word in words}
    final: dict[int, float] = {}
    silence = tree.table[SILENCE, :, EDGE, EDGE].tolist()

    def chain(source: int, pdfs: Iterable[int]) -> int:
        for pdf in pdfs:
            source = builder.hmm(source, pdf)
        return source

    for word in words:
        for phones, probability in lexicon[word].items():
            pdfs = states_of(phones, tree)
            state = builder.hmm(entries[word], pdfs[0], -log(probability))
            builder.arc(chain(state, pdfs[1:]), histories[word], 0.0)
    for history, followers in bigrams.items():
        state, seen = histories[history], followers.total()
        for word, count in sorted(followers.items()):
            probability = (count + len(followers) * unigrams[word] / total) / (seen + len(followers))
            if word == _END:
                final[state] = -log(probability)
            else:
                builder.arc(state, entries[word], -log(probability), ids[word])
        weight = len(followers) / (seen + len(followers)) if seen else 1.0
        builder.arc(state, back_off, -log(weight))
        if state not in final:
            final[state] = -log(weight * unigrams[_END] / total)
        pause = builder.hmm(state, silence[0], -log(_PAUSE))
        builder.arc(chain(pause, silence[1:]), state, 0.0)
    leaves = [
        (tuple(states_of(phones, tree)), -log(probability * unigrams[word] / total), word)
        for word in words
        for phones, probability in lexicon[word].items()
    ]
    _add_prefix_tree(builder, back_off, sorted(leaves), histories, ids)
    return _as_fst(builder, start, final), words


def _add_prefix_tree(
    builder: _Builder,
    root: int,
    leaves: list[tuple[tuple[int, ...], float, str]],
    histories: dict[str, int],
    ids: dict[str, int],
) -> None:
    """Words by their pdfs, from `root`; `leaves` in ascending order. Each arc has the least cost below it that is not paid yet."""
    pending = [(root, 0, 0.0, leaves)]
    while pending:
        state, depth, paid, below = pending.pop()
        while below and len(below[0][0]) == depth:
            builder.arc(state, histories[below[0][2]], below[0][1] - paid, ids[below[0][2]])
            below = below[1:]
        begin = 0
        while begin < len(below):
            end, pdf = begin, below[begin][0][depth]
            while end < len(below) and below[end][0][depth] == pdf:
                end += 1
            least = min(cost for _, cost, _ in below[begin:end])
            pending.append((builder.hmm(state, pdf, least - paid), depth + 1, least, below[begin:end]))
            begin = end


def _as_fst(builder: _Builder, start: int, final: dict[int, float]) -> Fst:
    sources = np.array(builder.sources)
    order = np.argsort(sources, kind="stable")
    arcs = np.array(builder.arcs, ARC)[order]
    finals = np.full(builder.states, np.inf, np.float32)
    finals[list(final)] = list(final.values())
    return Fst(start, finals, np.searchsorted(sources[order], np.arange(builder.states + 1)), arcs)
