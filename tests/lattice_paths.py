"""What is in small lattices, computed plainly."""

from __future__ import annotations

import numpy as np

from ddnn.kaldi.lattice import Lattice

Weight = tuple[float, float, tuple[int, ...]]  # graph cost, acoustic cost, transition-ids


def all_paths(lattice: Lattice) -> list[tuple[tuple[int, ...], Weight]]:
    """Words, costs and transition-ids of each path."""
    found = []
    leaving: dict[int, list[int]] = {}
    for arc, source in enumerate(lattice.source.tolist()):
        leaving.setdefault(source, []).append(arc)

    def walk(state: int, words: tuple[int, ...], graph: float, acoustic: float, tids: tuple[int, ...]) -> None:
        if state == len(lattice.times) - 1:
            found.append((words, (graph, acoustic, tids)))
        for arc in leaving.get(state, ()):
            word = int(lattice.word[arc])
            string = tuple(lattice.tids[lattice.offsets[arc] : lattice.offsets[arc + 1]].tolist())
            costs = graph + float(lattice.graph_cost[arc]), acoustic + float(lattice.acoustic_cost[arc])
            walk(int(lattice.destination[arc]), words + ((word,) if word else ()), *costs, tids + string)

    walk(0, (), 0.0, 0.0, ())
    return found


def posteriors(lattice: Lattice, scale: float, transition_to_pdf: np.ndarray, pdfs: int) -> tuple[float, np.ndarray]:
    """Log-likelihood of a lattice, and the posterior of each pdf in each frame, plainly."""
    costs = lattice.graph_cost.astype(np.float64) + scale * lattice.acoustic_cost
    alpha, beta = np.full(len(lattice.times), -np.inf), np.full(len(lattice.times), -np.inf)
    alpha[0] = beta[-1] = 0.0
    arcs = list(zip(lattice.source.tolist(), lattice.destination.tolist(), costs.tolist(), strict=True))
    for source, destination, cost in arcs:
        alpha[destination] = np.logaddexp(alpha[destination], alpha[source] - cost)
    for source, destination, cost in reversed(arcs):
        beta[source] = np.logaddexp(beta[source], beta[destination] - cost)
    result = np.zeros((lattice.num_frames, pdfs))
    for arc, (source, destination, cost) in enumerate(arcs):
        tids = lattice.tids[lattice.offsets[arc] : lattice.offsets[arc + 1]]
        gamma = np.exp(alpha[source] - cost + beta[destination] - alpha[-1])
        np.add.at(result, (lattice.times[source] + np.arange(len(tids)), transition_to_pdf[tids]), gamma)
    return float(alpha[-1]), result
