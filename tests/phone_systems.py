"""Small systems of five phones: a topology with self-loops, states without them and non-emitting states, trees of any context,
transition models; and FSTs from lists of arcs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from kaldi_files import build_transition_model

from ddnn.kaldi.fst import ARC, Fst
from ddnn.kaldi.transition_model import HmmState, Topology, TransitionModel
from ddnn.kaldi.tree import ContextDependency, EventMap

FINAL = HmmState(-1, -1, ())
SILENCE = (
    HmmState(0, 0, ((0, 0.3), (1, 0.3), (2, 0.4))),
    HmmState(1, 1, ((1, 0.2), (2, 0.5), (3, 0.3))),
    HmmState(2, 2, ((1, 0.3), (2, 0.4), (3, 0.3))),
    FINAL,
)
TWO = (HmmState(0, 0, ((0, 0.6), (1, 0.4))), HmmState(1, 2, ((1, 0.75), (2, 0.25))), FINAL)
ONE = (HmmState(0, 0, ((1, 1.0),)), FINAL)  # without a self-loop
ENTERED = (
    HmmState(-1, -1, ((1, 0.8), (2, 0.2))),
    *(HmmState(c, c, ((s, 0.5), (3, 0.5))) for s, c in ((1, 0), (2, 1))),
    FINAL,
)
TOPOLOGY = Topology((SILENCE, TWO, ONE, ENTERED), {1: 0, 2: 1, 3: 1, 4: 2, 5: 3})
PHONES = range(1, 6)


def fst_of(arcs: Sequence[tuple[int, int, int, float, int]], final: dict[int, float]) -> Fst:
    """From arcs (state, ilabel, olabel, cost, next state)."""
    states = 1 + max(max(arc[0], arc[4]) for arc in arcs)
    ordered = sorted(arcs, key=lambda arc: arc[0])
    offsets = np.searchsorted([arc[0] for arc in ordered], np.arange(states + 1))
    costs = np.array([final.get(state, np.inf) for state in range(states)], np.float32)
    return Fst(0, costs, offsets.astype(np.int64), np.array([arc[1:] for arc in ordered], ARC))


def make_tree(width: int, central: int) -> ContextDependency:
    """Silence has a pdf for each pdf class; those of other phones depend on every phone of the window."""
    nodes: list[EventMap | int] = []

    def add(node: EventMap | int) -> int:
        nodes.append(node)
        return len(nodes) - 1

    pdfs = iter(range(10_000))

    def split(positions: Sequence[int]) -> int:
        if not positions:
            return add(next(pdfs))
        yes_set = frozenset((0, 1 + positions[0], 4))
        return add(EventMap(positions[0], yes_set, (split(positions[1:]), split(positions[1:]))))

    def classes(phone: int) -> int:
        return 1 + max(max(state.forward_pdf_class, state.self_loop_pdf_class) for state in TOPOLOGY.states(phone))

    others = [i for i in range(width) if i != central]
    phones = [
        None,
        *(add(EventMap(-1, None, tuple(split([] if p == 1 else others) for _ in range(classes(p))))) for p in PHONES),
    ]
    add(EventMap(central, None, tuple(phones)))
    return ContextDependency(width, central, tuple(nodes), next(pdfs))


def make_model(tree: ContextDependency) -> TransitionModel:
    tuples = []
    for window in product((0, *PHONES), repeat=tree.context_width):
        phone = window[tree.central_position]
        for number, state in enumerate(TOPOLOGY.states(phone) if phone else ()):
            if state.forward_pdf_class >= 0:
                classes = state.forward_pdf_class, state.self_loop_pdf_class
                tuples.append((phone, number, *(tree.pdf(window, c) for c in classes)))
    return build_transition_model(TOPOLOGY, tuples)
