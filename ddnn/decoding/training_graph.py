"""Graphs of transcripts for forced alignment: all state sequences that the words of an utterance may have.

Follows kaldi `decoder/training-graph-compiler.cc`. The graph is neither determinized nor minimized: its best path is the
same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddnn.decoding.hmm import ContextHmms
from ddnn.decoding.search import import_kaldi
from ddnn.kaldi.fst import Fst
from ddnn.util.arrays import Int32Array

Phones = tuple[int, ...]
Place = tuple[int, int]  # a state of L.fst, and how many words were taken
Ways = tuple[list[tuple[int, Place, float]], float]
Part = tuple[int, list[tuple[int, int, int, int, float, bool]]]

_MAX_HMMS = 20_000
"""HMMs that are kept: 2 KB each."""


class Lexicon:
    """The arcs of L.fst, by state and word."""

    def __init__(self, fst: Fst) -> None:
        self.start, self.final = fst.start, fst.final.tolist()
        self._words = int(fst.arcs["olabel"].max(initial=0)) + 1
        keys = fst.sources() * self._words + fst.arcs["olabel"]
        order = np.argsort(keys, kind="stable")
        self._keys, self._arcs = keys[order], fst.arcs[order]

    def arcs(self, state: int, word: int) -> list[tuple[int, int, float, int]]:
        """(phone, word, cost, next state) of the arcs that leave a state with this word; 0: no word, or no phone."""
        key = state * self._words + word
        first, last = np.searchsorted(self._keys, (key, key + 1)) if word < self._words else (0, 0)
        arcs: list[tuple[int, int, float, int]] = self._arcs[first:last].tolist()
        return arcs


class _Transcript:
    """The product of L.fst and the words of an utterance; its states are pairs of a state of L and the words taken."""

    def __init__(self, lexicon: Lexicon, words: list[int]) -> None:
        self.lexicon, self.words = lexicon, words
        self._ways: dict[Place, Ways] = {}
        self._behind: dict[tuple[Place, int], set[Phones]] = {}

    def ways(self, place: Place) -> Ways:
        """(phone, next state, cost) of the arcs that leave a state, and the cost of ending there, also behind arcs without
        a phone, which are taken at the least cost."""
        if (known := self._ways.get(place)) is not None:
            return known
        costs, todo, final = {place: 0.0}, [place], math.inf
        arcs: dict[Place, list[tuple[int, Place, float]]] = {}
        while todo:
            state, used = at = todo.pop()
            arcs[at] = []
            if used == len(self.words):
                final = min(final, costs[at] + self.lexicon.final[state])
            for word in (0, *self.words[used : used + 1]):
                for phone, _, cost, next_state in self.lexicon.arcs(state, word):
                    following, total = (next_state, used + (word > 0)), costs[at] + cost
                    if phone:
                        arcs[at].append((phone, following, total))
                    elif total < costs.get(following, math.inf):
                        costs[following] = total
                        todo.append(following)
        self._ways[place] = known = ([arc for some in arcs.values() for arc in some], final)
        return known

    def phones_behind(self, place: Place, count: int) -> set[Phones]:
        """All strings of `count` phones that may follow a state, 0 behind the end."""
        if (known := self._behind.get((place, count))) is None:
            arcs, final = self.ways(place)
            known = set[Phones]([(0,) * count] if math.isfinite(final) or not count else [])
            if count:
                known |= {(p, *then) for p, following, _ in arcs for then in self.phones_behind(following, count - 1)}
            self._behind[place, count] = known
        return known


class TrainingGraphs:
    """Graphs of transcripts: input labels are pdf-id + 1 and output labels transition-ids."""

    def __init__(self, lexicon: Lexicon, hmms: ContextHmms, pdf_of: Int32Array) -> None:
        self.lexicon, self.hmms, self.label = lexicon, hmms, (pdf_of + 1).tolist()
        self._parts: dict[tuple[int, ...], Part] = {}

    def __call__(self, words: list[int]) -> Any:
        """The graph of a transcript, a kaldifst.StdVectorFst, without states where the lexicon has no way through it."""
        kaldifst = import_kaldi()[1]
        make_arc, fst, transcript = kaldifst.StdArc, kaldifst.StdVectorFst(), _Transcript(self.lexicon, words)
        left = self.hmms.tree.central_position
        right = self.hmms.tree.context_width - 1 - left
        fst.start = fst.add_state()
        nodes: dict[tuple[Place, Phones, Phones], int] = {}
        todo = []

        def node(place: Place, before: Phones, behind: Phones) -> int:
            """Between two phones, before which and behind which the windows have these."""
            key = place, before, behind
            if key not in nodes:
                nodes[key] = fst.add_state()
                todo.append(key)
            return nodes[key]

        first = (self.lexicon.start, 0)
        for behind in transcript.phones_behind(first, right):
            fst.add_arc(0, make_arc(0, 0, 0.0, node(first, (0,) * left, behind)))
        while todo:
            place, before, behind = key = todo.pop()
            source, (arcs, final) = nodes[key], transcript.ways(place)
            if not any(behind) and math.isfinite(final):
                fst.set_final(source, final)
            for phone, following, cost in arcs:
                if behind[:1] not in ((), (phone,)):
                    continue
                for then in transcript.phones_behind(following, right):
                    if then[: right - 1] != behind[1:]:
                        continue
                    # The cost of L's arc is on the last transition: with 10 as the beam as many utterances need the
                    # wider one as with Kaldi's graphs.
                    window = (*before, phone, *then)
                    target = node(following, window[1 : left + 1], then)
                    inner, part = self._part(window)
                    states = [source, *(fst.add_state() for _ in range(inner)), target]
                    for begin, end, label, transition_id, weight, is_last in part:
                        weight += cost if is_last else 0.0
                        fst.add_arc(states[begin], make_arc(label, transition_id, weight, states[end]))
        kaldifst.connect(fst)
        return fst

    def _part(self, window: tuple[int, ...]) -> Part:
        """The HMM of a window, reordered: how many states it has inside, and (from, to, input label, output label, cost,
        whether it is a last transition) of its arcs; 0 is where it begins, the highest number where it ends. A state
        inside belongs to a forward transition: that transition enters it, then come the self-loops of the HMM state
        which the transition left. Self-loops are the last arcs of a state, as in Kaldi: where two paths cost the same,
        the order of arcs decides."""
        if (part := self._parts.get(window)) is not None:
            return part
        forward, costs, arcs, loops = self.hmms.arcs(window), self.hmms.costs, [], []
        final = max(arc.destination for arc in forward)
        for i, (hmm_state, destination, transition_id, cost) in enumerate(forward, 1):
            before = [0] if hmm_state == 0 else []
            before += [j for j, other in enumerate(forward, 1) if other.destination == hmm_state]
            label, loop_id = (self.label[transition_id], costs.loop_id[transition_id])
            for j in before:
                arcs.append((j, i, label, transition_id, cost + costs.leave[transition_id], destination == final))
            if destination == final:
                arcs.append((i, len(forward) + 1, 0, 0, 0.0, False))
            if loop_id:
                loops.append((i, i, self.label[loop_id], loop_id, costs.loop[loop_id], False))
        if len(self._parts) >= _MAX_HMMS:
            self._parts.clear()
        self._parts[window] = part = (len(forward), arcs + loops)
        return part
