"""Forward-backward over the arcs of a lattice, compact or not: likelihoods, posteriors and expected values of paths.

Follows kaldi `lat/lattice-functions.cc` (`LatticeForwardBackward`, `LatticeForwardBackwardMpeVariants`), in float64. All
arcs between two levels of states (`Lattice.levels`) are done at once.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ddnn.kaldi.lattice import Lattice
from ddnn.util.arrays import AnyArray, Float64Array, Int64Array

TOLERANCE = 1e-4  # how far posteriors may be from adding up to the number of frames, relative to it


def _log_sums(terms: Float64Array, starts: Int64Array) -> Float64Array:
    """Logarithms of the sums of exp(terms) from each of `starts` to the next; -inf where all of them are."""
    most = np.maximum.reduceat(terms, starts)
    most[most == -np.inf] = 0.0
    with np.errstate(divide="ignore"):
        sums: Float64Array = (
            np.log(np.add.reduceat(np.exp(terms - np.repeat(most, _lengths(starts, terms))), starts)) + most
        )
    return sums


def _lengths(starts: Int64Array, terms: AnyArray) -> Int64Array:
    return np.diff(starts, append=len(terms))


class Sweep:
    """The arcs of a lattice in the order of the states that they lead to, or, `backward`, that they come from, level by level.

    Attributes:
        levels: for each level the arcs, int64, those of one state together; where those of each state begin among them; and
            the states.
    """

    def __init__(self, lattice: Lattice, *, backward: bool = False) -> None:
        ends, others = (lattice.source, lattice.destination) if backward else (lattice.destination, lattice.source)
        order = np.argsort(ends, kind="stable")
        sorted_ends, self.others = ends[order], others
        starts = np.flatnonzero(np.diff(sorted_ends, prepend=-1))
        states = sorted_ends[starts]
        bounds = np.searchsorted(states, lattice.levels)
        self.levels = []
        for first, last in pairwise(bounds.tolist()):
            if first == last:
                continue
            begin, end = starts[first], starts[last] if last < len(starts) else len(order)
            self.levels.append((order[begin:end], starts[first:last] - begin, states[first:last]))
        if backward:
            self.levels.reverse()

    def log_likelihoods(self, costs: Float64Array, initial: int, num_states: int) -> Float64Array:
        """(states,): of each state the logarithm of the summed likelihood of all paths from `initial`."""
        totals = np.full(num_states, -np.inf)
        totals[initial] = 0.0
        for arcs, starts, states in self.levels:
            totals[states] = _log_sums(totals[self.others[arcs]] - costs[arcs], starts)
        return totals

    def expected(self, costs: Float64Array, values: Float64Array, totals: Float64Array) -> Float64Array:
        """(states,): the expected sum of `values` of arcs on the paths from the initial state, of `log_likelihoods` `totals`."""
        sums = np.zeros(len(totals))
        for arcs, starts, states in self.levels:
            others = self.others[arcs]
            with np.errstate(invalid="ignore"):
                shares = np.exp(totals[others] - costs[arcs] - np.repeat(totals[states], _lengths(starts, arcs)))
            sums[states] = np.add.reduceat(np.nan_to_num(shares) * (sums[others] + values[arcs]), starts)
        return sums


class ForwardBackward:
    """Of a lattice with `costs`, float64 (arcs,), scaled.

    Attributes:
        log_likelihood: of the lattice, all paths together.
        posteriors: float64 (arcs,); NaN where they do not add up to 1 in each frame, since costs are too large for float64.
    """

    def __init__(self, lattice: Lattice, costs: Float64Array) -> None:
        self._lattice, self._costs, states = lattice, costs, len(lattice.times)
        self._forward, self._backward = Sweep(lattice), Sweep(lattice, backward=True)
        self._alpha = self._forward.log_likelihoods(costs, 0, states)
        self._beta = self._backward.log_likelihoods(costs, states - 1, states)
        self.log_likelihood = float(self._alpha[-1])
        paths = self._alpha[lattice.source] - costs + self._beta[lattice.destination]
        self.posteriors: Float64Array = np.exp(paths - self.log_likelihood)
        frames = float(self.posteriors @ np.diff(lattice.offsets))
        if not abs(frames - lattice.num_frames) <= TOLERANCE * lattice.num_frames:
            self.posteriors.fill(np.nan)

    def expected(self, values: Float64Array) -> tuple[Float64Array, float]:
        """The expected sum of `values` (arcs,) on the paths through each arc, (arcs,), and that on all paths."""
        before = self._forward.expected(self._costs, values, self._alpha)
        behind = self._backward.expected(self._costs, values, self._beta)
        return before[self._lattice.source] + values + behind[self._lattice.destination], float(before[-1])
