"""Senones: a decision tree that ties the states of phones by their neighbors within the word (Young, Odell and Woodland 1994).

One root for each phone and HMM state. Questions are the sets of phones that an average-linkage clustering of the phones' means
joins, and the edge of the word. Splits are greedy by the likelihood of one diagonal Gaussian a leaf."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage

from ddnn.util.arrays import Int32Array

EDGE = 0  # of the word, as the neighbor of a phone
SILENCE = 1
STATES = 3
Context = tuple[int, int, int, int]  # phone, HMM state, phone before, phone after
Statistics = dict[Context, NDArray[np.float64]]  # [1 + 2 dims]: count, sums, sums of squares


def accumulate(statistics: Statistics, contexts: NDArray[np.int64], features: NDArray[np.float64]) -> None:
    """Adds frames: `contexts` int64 [frames, 4], `features` float64 [frames, dims]."""
    keys, inverse = np.unique(contexts, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    values = np.concatenate([np.ones((len(features), 1)), features, features**2], axis=1)[order]
    sums = np.add.reduceat(values, np.searchsorted(inverse[order], np.arange(len(keys))), axis=0)
    _add(statistics, zip(map(tuple, keys.tolist()), sums, strict=True))


def merge(parts: Iterator[Statistics]) -> Statistics:
    """The sum of parts, in their order."""
    total: Statistics = {}
    for part in parts:
        _add(total, part.items())
    return total


def _add(total: Statistics, items: Iterable[tuple[Context, NDArray[np.float64]]]) -> None:
    for key, value in items:
        total[key] = total[key] + value if key in total else value.copy()  # a view would keep its whole array


@dataclass(frozen=True)
class Tree:
    """Which pdf a state of a phone has in a context: pdfs are numbered by phone, then HMM state, so their transition-states
    have the same numbers."""

    num_phones: int
    table: Int32Array  # [phones + 1, STATES, phones + 1, phones + 1]: phone, state, before, after; -1 where no phone is
    pdf_phone: Int32Array
    pdf_state: Int32Array

    @property
    def num_pdfs(self) -> int:
        return len(self.pdf_phone)


def _cost(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """-2 log likelihood, but for a constant, of a Gaussian's frames: float64 [n, 1 + 2 dims] to [n]."""
    dims = (values.shape[-1] - 1) // 2
    count = np.maximum(values[..., :1], 1e-9)
    mean = values[..., 1 : dims + 1] / count
    variance = np.maximum(values[..., dims + 1 :] / count - mean**2, 0.01)
    return np.asarray(values[..., 0] * np.log(variance).sum(axis=-1))


def _questions(statistics: Statistics, num_phones: int) -> NDArray[np.bool_]:
    """Sets of phones, bool [questions, phones + 1]; column `EDGE` is the edge of the word."""
    dims = (len(next(iter(statistics.values()))) - 1) // 2
    sums = np.zeros((num_phones + 1, 1 + 2 * dims))
    for (phone, *_), value in statistics.items():
        sums[phone] += value
    present = np.flatnonzero(sums[:, 0] > 0)
    means = sums[present, 1 : dims + 1] / sums[present, :1]
    sets = [np.isin(np.arange(num_phones + 1), [phone]) for phone in (EDGE, *present)]
    joined = [sets[1 + index] for index in range(len(present))]
    for first, second, *_ in linkage(means, "average")[:-1]:
        joined.append(joined[int(first)] | joined[int(second)])
    return np.unique(np.array([sets[0], *joined]), axis=0)


def grow(statistics: Statistics, num_phones: int, pdfs: int, least: float = 100) -> Tree:
    """Splits the best leaf until there are `pdfs`, or none can be split into leaves of `least` frames each. Silence has one
    pdf a state."""
    questions = _questions(statistics, num_phones)
    leaves: dict[int, tuple[int, int, Int32Array]] = {}  # phone, state, contexts of the tables below
    keys: dict[tuple[int, int], list[Context]] = {}
    for key in sorted(statistics):
        keys.setdefault(key[:2], []).append(key)
    queue: list[tuple[float, int]] = []
    splits: dict[int, tuple[int, NDArray[np.bool_]]] = {}
    stacks = {root: np.array([statistics[key] for key in members]) for root, members in keys.items()}
    neighbors = {root: np.array([key[2:] for key in members]) for root, members in keys.items()}
    rules: dict[int, list[tuple[int, NDArray[np.bool_], bool]]] = {}

    def add(
        number: int, root: tuple[int, int], members: NDArray[np.int64], path: list[tuple[int, NDArray[np.bool_], bool]]
    ) -> None:
        leaves[number], rules[number] = (*root, members.astype(np.int32)), path
        if root[0] == SILENCE:
            return
        values, own = stacks[root][members], neighbors[root][members]
        best = (0.0, 0, questions[0])
        total = values.sum(axis=0)
        for side in (0, 1):
            inside = questions[:, own[:, side]] @ values
            outside = total - inside
            gains = _cost(total[None])[0] - _cost(inside) - _cost(outside)
            gains[(inside[:, 0] < least) | (outside[:, 0] < least)] = 0
            index = int(np.argmax(gains))
            if gains[index] > best[0]:
                best = (float(gains[index]), side, questions[index])
        if best[0] > 0:
            splits[number] = best[1:]
            heapq.heappush(queue, (-best[0], number))

    for phone in range(1, num_phones + 1):
        for state in range(STATES):
            root = (phone, state)
            if root not in keys:  # no frame of it: one pdf all the same
                stacks[root] = np.zeros((0, len(next(iter(statistics.values())))))
                neighbors[root] = np.zeros((0, 2), np.int64)
                leaves[len(leaves)], rules[len(rules)] = (phone, state, np.zeros(0, np.int32)), []
            else:
                add(len(leaves), root, np.arange(len(keys[root])), [])
    while queue and len(leaves) < pdfs:
        number = heapq.heappop(queue)[1]
        phone, state, members = leaves[number]
        side, question = splits[number]
        answers = question[neighbors[phone, state][members][:, side]]
        path = rules[number]
        add(number, (phone, state), members[answers].astype(np.int64), [*path, (side, question, True)])
        add(len(leaves), (phone, state), members[~answers].astype(np.int64), [*path, (side, question, False)])
    return _tabulate(leaves, rules, num_phones)


def _tabulate(
    leaves: dict[int, tuple[int, int, Int32Array]],
    rules: dict[int, list[tuple[int, NDArray[np.bool_], bool]]],
    num_phones: int,
) -> Tree:
    order = sorted(leaves, key=lambda number: (*leaves[number][:2], number))
    table = np.full((num_phones + 1, STATES, num_phones + 1, num_phones + 1), -1, np.int32)
    for pdf, number in enumerate(order):
        phone, state, _ = leaves[number]
        mask = np.ones((num_phones + 1, num_phones + 1), bool)
        for side, question, answer in rules[number]:
            accepted = question == answer
            mask &= accepted[:, None] if side == 0 else accepted[None, :]
        table[phone, state][mask] = pdf
    phones, states = np.array([leaves[number][:2] for number in order], np.int32).T
    return Tree(num_phones, table, phones, states)
