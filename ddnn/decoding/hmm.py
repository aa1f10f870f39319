"""HMMs of phones in context, as decoding graphs have them: which transition-ids they consist of, and what those cost.

Follows kaldi `hmm/hmm-utils.cc`: GetHmmAsFsa, and AddTransitionProbs for graphs that are reordered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddnn.kaldi.transition_model import NO_PDF, TransitionModel
from ddnn.kaldi.tree import ContextDependency, read_tree
from ddnn.util.errors import DataError

HINT_SYSTEM = "give --lang, --tree and --model of one system, that of the network's training alignment"

_FEWEST_LEAVE = 1e-10  # probability of leaving a state at least, as in Kaldi


class HmmArc(NamedTuple):
    """A transition of an HMM that is no self-loop, from one HMM state to another; 0 is the first, the last is final."""

    source: int
    destination: int
    transition_id: int  # 0: of a non-emitting state
    cost: float  # of the transition, given that the state is left


@dataclass(frozen=True, eq=False)
class TransitionCosts:
    """Costs (negated logs) by transition-id, from 1; position 0 is unused. A state with the self-loop probability a and a
    forward transition of probability p: `forward` is -transition_scale log(p / (1 - a)) and `leave`
    -self_loop_scale log(1 - a) of the forward transition, `loop` is -self_loop_scale log(a)."""

    forward: list[float]
    leave: list[float]
    loop: list[float]
    loop_id: list[int]  # transition-id of the self-loop of the same state; 0 where it has none


def transition_costs(model: TransitionModel, transition_scale: float, self_loop_scale: float) -> TransitionCosts:
    """The costs of all transition-ids of a model, in single precision as in Kaldi."""
    state, is_loop = model.transition_states()
    loop_of_state = np.zeros(len(model.tuples) + 1, np.int64)
    loop_of_state[state[is_loop]] = np.flatnonzero(is_loop)
    loop_id = loop_of_state[state]
    has_loop = loop_id > 0
    log_loop = np.where(has_loop, model.log_probs[loop_id], np.float32(0))
    leave = np.maximum(1 - np.exp(log_loop), np.float32(_FEWEST_LEAVE))
    log_leave = np.where(has_loop, np.log(leave), np.float32(0))
    return TransitionCosts(
        forward=(-transition_scale * (model.log_probs - log_leave)).tolist(),
        leave=(-self_loop_scale * log_leave).tolist(),
        loop=(-self_loop_scale * log_loop).tolist(),
        loop_id=loop_id.tolist(),
    )


class ContextHmms:
    """The HMM of each window of phones. `tree_path`: for messages."""

    def __init__(
        self, tree: ContextDependency, model: TransitionModel, transition_scale: float, self_loop_scale: float,
        tree_path: Path,
    ) -> None:  # fmt: skip
        self.tree, self.topology, self.tree_path = tree, model.topology, tree_path
        self.costs, self.transition_scale = transition_costs(model, transition_scale, self_loop_scale), transition_scale
        _, first = np.unique(model.transition_states()[0], return_index=True)
        self.first_id = dict(zip(map(tuple, model.tuples.tolist()), first[1:].tolist(), strict=True))

    def arcs(self, window: tuple[int, ...]) -> list[HmmArc]:
        """The transitions of the phone in the middle of a window of N phone-ids, 0 outside the utterance, without
        self-loops. DataError: the tree and the transition model are not of one system."""
        phone, arcs = window[self.tree.central_position], []
        for number, state in enumerate(self.topology.states(phone)):
            pdfs = (self.tree.pdf(window, c) for c in (state.forward_pdf_class, state.self_loop_pdf_class))
            emits = state.forward_pdf_class != NO_PDF
            first = self.first_id.get((phone, number, *pdfs)) if emits else 0
            if first is None:
                message = f"the tree has a pdf for HMM state {number} of phone {phone} in {window} that final.mdl lacks"
                raise DataError(message, location=self.tree_path, hint="give tree and final.mdl of one system")
            for i, (destination, probability) in enumerate(state.transitions, first):
                if destination != number:  # a probability over 1 could make a cycle of negative cost
                    cost = self.costs.forward[i] if emits else -self.transition_scale * math.log(min(probability, 1.0))
                    arcs.append(HmmArc(number, destination, i * emits, cost))
        return arcs


def read_hmms(
    tree_path: Path, transitions: TransitionModel, transition_scale: float, self_loop_scale: float
) -> ContextHmms:
    """The HMMs of a tree and a transition model. DataError: the tree is damaged, or the two are not of one system."""
    tree = read_tree(tree_path)
    if tree.num_pdfs != transitions.num_pdfs:
        message = f"the tree has {tree.num_pdfs} pdfs, final.mdl {transitions.num_pdfs}"
        raise DataError(message, location=tree_path, hint=HINT_SYSTEM)
    return ContextHmms(tree, transitions, transition_scale, self_loop_scale, tree_path)
