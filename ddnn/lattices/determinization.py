"""Determinization of lattices: of each word sequence the best alignment alone remains.

Follows Povey et al. 2012, "Generating exact lattices in the WFST framework", and kaldi `lat/determinize-lattice-pruned.cc`
without its first pass over phones, which changes only what is pruned at the edge of the beam."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

import numpy as np

from ddnn.kaldi.lattice import Arcs, Lattice, sort_arcs

_GRID = 1024
"""Costs within sets of states are compared as multiples of 1 / _GRID."""

_Step = tuple[float, float, int | tuple[int, ...], int]
"""The best path to a state: cost, graph cost, the state before it (or the string that the path begins with), and the
transition-id of its last arc (0: none). The cost is that of graph and acoustics together."""
_Weight = tuple[float, float, tuple[int, ...]]
"""Cost of graph and acoustics together, graph cost, string."""
_Arcs = list[tuple[int, float, float, int]]
"""Destination, cost, graph cost, transition-id."""


class _Paths(dict[int, _Step]):
    """The best path to each of several states of the raw lattice."""

    def string(self, state: int) -> tuple[int, ...]:
        """The transition-ids of the path to a state."""
        before: int | tuple[int, ...] = state
        backward = []
        while isinstance(before, int):
            _, _, before, tid = self[before]
            if tid:
                backward.append(tid)
        return before + tuple(reversed(backward))

    def offer(self, state: int, step: _Step) -> None:
        """Takes another path to a state if it is better: of smaller cost, else of smaller graph cost, else with the string
        that is greater at the first difference. Strings are equally long: all paths to a state have its time."""
        old = self.get(state)
        if old is None or step[:2] < old[:2]:
            self[state] = step
        elif step[:2] == old[:2]:
            string = self.string(state)
            self[state] = step
            if self.string(state) <= string:
                self[state] = old


class _Raw:
    """The arcs of a state-level lattice by the state that they leave."""

    def __init__(self, raw: Lattice) -> None:
        states = len(raw.times)
        self.end = states - 1
        self.wordless: list[_Arcs] = [[] for _ in range(states)]
        self.by_word: list[dict[int, _Arcs]] = [{} for _ in range(states)]  # 0: to the end
        self.remaining: list[dict[int, float]] = [
            {} for _ in range(states)
        ]  # cost of the best path to the end, by word
        tids, graph = np.zeros(len(raw.source), np.int32), raw.graph_cost.astype(np.float64)
        tids[np.diff(raw.offsets) == 1] = raw.tids
        columns = raw.source, raw.destination, raw.word, graph + raw.acoustic_cost, graph, tids
        to_end = [inf] * self.end + [0.0]
        for source, destination, word, *arc in zip(*(column[::-1].tolist() for column in columns), strict=True):
            remaining = arc[0] + to_end[destination]
            to_end[source] = min(to_end[source], remaining)
            if word or destination == self.end:
                self.by_word[source].setdefault(word, []).append((destination, *arc))
                self.remaining[source][word] = min(self.remaining[source].get(word, inf), remaining)
            else:
                self.wordless[source].append((destination, *arc))

    def close(self, paths: _Paths) -> list[int]:
        """Follows the arcs without word; returns the states on which more than those depends."""
        waiting, kept = sorted(paths), []  # states are in topological order
        while waiting:
            state = heappop(waiting)
            if self.remaining[state] or state == self.end:
                kept.append(state)
            cost, graph_cost = paths[state][:2]
            for destination, more, more_graph, tid in self.wordless[state]:
                if destination not in paths:
                    heappush(waiting, destination)
                paths.offer(destination, (cost + more, graph_cost + more_graph, state, tid))
        return kept


def determinize(raw: Lattice, beam: float) -> Lattice:
    """A compact lattice in which each word sequence of `raw` has one path, with the weight and string of its best one, without
    paths whose cost is more than `beam` above that of the best. `raw`: a state-level lattice with scaled costs; so are
    those of the result."""
    lattice, arcs = _Raw(raw), list[tuple[int, int, int, _Weight]]()
    sets = list[dict[int, _Weight]]()  # residual weights of states of the raw lattice
    numbers: dict[tuple[tuple[int, _Weight], ...], int] = {}
    tasks: list[tuple[float, int, int]] = []  # a heap: cost above the best of what a set and a word lead to

    def reach(paths: _Paths, excess: float) -> tuple[int, _Weight]:
        """The set that paths lead to, and what they have in common. The most promising tasks come first, so that `excess`
        is the least with which a set is reached."""
        kept = lattice.close(paths)
        cost, graph_cost = min(paths[state][:2] for state in kept)
        strings = [paths.string(state) for state in kept]
        low, high = min(strings), max(strings)
        shared = next((i for i, tids in enumerate(zip(low, high, strict=False)) if tids[0] != tids[1]), len(low))
        members = {
            state: (paths[state][0] - cost, paths[state][1] - graph_cost, string[shared:])
            for state, string in zip(kept, strings, strict=True)
        }
        # Sets are compared as they are here: before the closure more of them would differ, and lattices be larger.
        rounded = tuple((state, (round(c * _GRID), round(g * _GRID), s)) for state, (c, g, s) in members.items())
        number = numbers.setdefault(rounded, len(sets))
        if number == len(sets):
            sets.append(members)
            through = dict[int, float]()
            for state, (residual, _, _) in members.items():
                for word, remaining in lattice.remaining[state].items():
                    through[word] = min(through.get(word, inf), residual + remaining)
            best = min(through.values(), default=0.0)
            for word, total in through.items():
                if excess + (total - best) <= beam:
                    heappush(tasks, (excess + (total - best), number, word))
        return number, (cost, graph_cost, low[:shared])

    _, common = reach(_Paths({0: (0.0, 0.0, (), 0)}), 0.0)
    while tasks:
        excess, number, word = heappop(tasks)
        paths = _Paths()
        # What all paths begin with is on the first arcs: none leads back to set 0.
        cost, graph_cost, prefix = (0.0, 0.0, ()) if number else common
        for state, (residual, residual_graph, string) in sets[number].items():
            for destination, more, more_graph, tid in lattice.by_word[state].get(word, ()):
                step = cost + residual + more, graph_cost + residual_graph + more_graph, prefix + string, tid
                paths.offer(destination, step)
        arcs.append((number, word, *reach(paths, excess)))
    sources, words, destinations, weights = zip(*arcs, strict=True)
    costs = np.array([(graph_cost, cost - graph_cost) for cost, graph_cost, _ in weights])
    tids = np.array([tid for *_, string in weights for tid in string], np.int32)
    to, end = np.array(destinations), numbers[((lattice.end, (0, 0, ())),)]
    lengths = np.array([len(string) for *_, string in weights])
    return sort_arcs(Arcs(0, len(sets), np.array(sources), to, to == end, np.array(words), costs, tids, lengths))
