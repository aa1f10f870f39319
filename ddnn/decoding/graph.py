"""Kaldi's decoding graph, `HCLG.fst`: read, checked against its model, and labeled with pdfs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ddnn.kaldi.fst import Fst, read_fst, read_symbols
from ddnn.kaldi.transition_model import TransitionModel, read_transition_model
from ddnn.util.arrays import Int32Array
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited

_HINT = "give the graph and the final.mdl that it was made with (utils/mkgraph.sh)"
_MAX_CHAIN = 10_000
_MAX_RELAXATIONS = 20_000_000
"""Arcs examined for cycles, in addition to fifty times all epsilons: some tenths of a second."""


@dataclass(frozen=True, eq=False)
class DecodingGraph:
    """A decoding graph whose input labels are pdf-id + 1 (0 is epsilon), with its words."""

    fst: Fst
    words: dict[int, str]  # by output label; every label on the graph is there
    transition_ids: Int32Array  # [arcs], 0 where the arc has none
    num_pdfs: int  # columns that a matrix of log-likelihoods must have
    location: Path  # the directory it came from, for messages
    transition_digest: str | None = None  # of the model by which it was read

    def with_penalty(self, penalty: float) -> DecodingGraph:
        """With a word insertion penalty >= 0: a cost of every word, like Kaldi's lattice-add-penalty."""
        if not penalty:
            return self
        arcs = self.fst.arcs.copy()
        arcs["weight"][arcs["olabel"] != 0] += penalty
        return replace(self, fst=replace(self.fst, arcs=arcs))


def read_graph(graph_dir: Path, model: Path) -> DecodingGraph:
    """Reads `HCLG.fst` and `words.txt`, and turns the transition-ids on the graph into pdf-id + 1 through the model.
    DataError: a file is missing or damaged; the model lacks a transition-id of the graph, or `words.txt` a word id."""
    location = graph_dir / "HCLG.fst"
    fst, words = read_fst(location), read_symbols(graph_dir / "words.txt")
    transitions = read_transition_model(model)
    if fst.start < 0 or not np.isfinite(fst.final).any():
        message = f"the graph has {fst.num_states} states and no way to a final one"
        raise DataError(message, location=location, hint=_HINT)
    highest, last = int(fst.arcs["ilabel"].max(initial=0)), transitions.num_transition_ids
    if highest > last:
        message = f"the graph has the transition-id {highest}, but {model.name} has {last}"
        raise DataError(message, location=location, hint=_HINT)
    _check_num_pdfs(graph_dir / "num_pdfs", transitions.num_pdfs, model)
    for label in np.unique(fst.arcs["olabel"]).tolist():
        if label and label not in words:
            message = f"the graph has the word id {label}, which words.txt lacks"
            raise DataError(message, location=graph_dir / "words.txt", hint=_HINT)
    _check_self_loops(fst, transitions, model, location)
    check_epsilon_cycles(fst, location, "make the graph again with utils/mkgraph.sh")
    arcs = fst.arcs.copy()
    arcs["ilabel"] = transitions.transition_to_pdf[arcs["ilabel"]] + 1  # epsilon stays 0: it has the pdf -1
    fst, transition_ids = replace(fst, arcs=arcs), fst.arcs["ilabel"]
    return DecodingGraph(fst, words, transition_ids, transitions.num_pdfs, graph_dir, transitions.digest)


def _check_num_pdfs(path: Path, num_pdfs: int, model: Path) -> None:
    if not path.exists():
        return
    try:
        content = read_bytes_limited(path, 100).strip()
    except OSError as error:
        raise DataError(f"cannot read num_pdfs: {error.strerror}", location=path, hint=_HINT) from error
    if content != str(num_pdfs).encode():
        says = content[:20].decode(errors="replace")
        message = f"num_pdfs says {says}, but {model.name} has {num_pdfs} pdfs"
        raise DataError(message, location=path, hint=_HINT)


def _check_self_loops(fst: Fst, transitions: TransitionModel, model: Path, location: Path) -> None:
    """DataError if the graph was made with another model: in a graph of Kaldi's, a state with a self-loop is entered (or,
    without --reorder, left) by transitions of the same transition-state. Most arcs must say so."""
    of_state, is_loop = transitions.transition_states()
    source, target, ids = fst.sources(), fst.arcs["nextstate"], fst.arcs["ilabel"]
    loops, moving = ((ids > 0) & (source == target)), ((ids > 0) & (source != target))
    if not (loops.any() and moving.any()):
        return
    loop_state = np.zeros(fst.num_states, np.int64)  # the transition-state of each state's self-loop
    loop_state[source[loops]] = (of_state * is_loop)[ids[loops]]
    entered, left = ((loop_state[side] == of_state[ids])[moving].mean() for side in (target, source))
    if max(entered, left) < 0.5:
        message = f"the graph was made with another model than {model}: only {100 * max(entered, left):.0f} % of its "
        message += "transitions lie beside a self-loop of their transition-state"
        raise DataError(message, location=location, hint=_HINT)


def check_epsilon_cycles(fst: Fst, location: Path, hint: str) -> None:
    """DataError for a cycle of input epsilons with a negative cost, which would keep the decoder in a loop for ever."""
    epsilon = fst.arcs["ilabel"] == 0
    weight = fst.arcs["weight"][epsilon].astype(np.float64)
    if not np.any(weight < 0):
        return
    source, target = fst.sources()[epsilon], fst.arcs["nextstate"][epsilon]
    cost = np.zeros(fst.num_states)
    relaxed, max_relaxed = 0, 50 * len(source) + _MAX_RELAXATIONS
    # Bellman-Ford; on real graphs the chains of epsilons are short, and few arcs matter after the first round.
    for _ in range(min(fst.num_states, _MAX_CHAIN) + 1):
        through = cost[source] + weight
        better = through < cost[target]
        if not better.any():
            return
        np.minimum.at(cost, target[better], through[better])
        relaxed += len(source)
        if relaxed > max_relaxed:
            break
    message = "the graph has a cycle of epsilons with a negative cost, or a chain of them too long to tell"
    raise DataError(message, location=location, hint=hint)
