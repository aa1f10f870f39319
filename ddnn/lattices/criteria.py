"""MMI, MPFE and sMBR of an utterance: their values on a lattice and their derivatives.

Follows kaldi `nnetbin/nnet-train-mmi-sequential.cc`, `nnet-train-mpe-sequential.cc` and Veselý, Ghoshal, Burget and Povey 2013,
"Sequence-discriminative training of deep neural networks". As there, derivatives lack the factor `acoustic_scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ddnn.kaldi.lattice import Lattice
from ddnn.kaldi.transition_model import TransitionModel
from ddnn.lattices.forward_backward import ForwardBackward
from ddnn.util.arrays import Float32Array, Float64Array, Int32Array, Int64Array

DROPPED = 1e-20  # a reference of a smaller posterior is not in the lattice


@dataclass(frozen=True, eq=False)
class Value:
    """What a criterion says of an utterance.

    Attributes:
        derivative: float32 (frames, pdfs), of what is minimized, by the log-likelihoods, without the factor `acoustic_scale`.
        objective: of sMBR and MPFE the expected number of right frames; of MMI the logarithm of the reference's posterior,
            but for a constant.
        reference: of MMI the posterior of the reference's pdf, summed over frames; else `objective`.
        dropped: frames of MMI on which the reference is not in the lattice.
    """

    derivative: Float32Array
    objective: float
    reference: float
    dropped: int = 0


@dataclass(frozen=True, eq=False)
class SequenceCriterion:
    """One of the criteria, with the options of a recipe. `silence`: ids of the silence phones."""

    name: Literal["smbr", "mpfe", "mmi"]
    transition_model: TransitionModel
    silence: Sequence[int]
    acoustic_scale: float = 0.1
    lm_scale: float = 1.0
    old_acoustic_scale: float = 0.0
    one_silence_class: bool = True
    drop_frames: bool = True
    boost: float = 0.0

    def __call__(self, lattice: Lattice, loglikes: Float32Array, reference: Int32Array) -> Value:
        """Of an utterance of T frames. `loglikes`: (T, pdfs), of the network, minus log-priors. `reference`: (T,)
        transition-ids. `lattice.num_frames` is T, its transition-ids are of the model."""
        frames, arcs = _frames_of(lattice)
        pdfs, right_pdfs = self.transition_model.transition_to_pdf[lattice.tids], self._pdfs(reference)
        phones, right_phones = self._phones[lattice.tids], self._phones[reference][frames]
        scores, count = loglikes[frames, pdfs].astype(np.float64), len(lattice.source)
        costs = self.lm_scale * lattice.graph_cost.astype(np.float64)
        acoustic = self.old_acoustic_scale * lattice.acoustic_cost - np.bincount(arcs, scores, count)
        silent, right_silent = np.isin(phones, self.silence), np.isin(right_phones, self.silence)
        if self.name == "mmi":
            if self.boost:
                wrong = (phones != right_phones) & ~silent
                costs -= self.lm_scale * self.boost * np.bincount(arcs, wrong, count)
            paths = ForwardBackward(lattice, costs + self.acoustic_scale * acoustic)
            posterior = _spread(paths.posteriors[arcs], frames, pdfs, loglikes.shape)
            return self._mmi(posterior, paths.log_likelihood, loglikes, right_pdfs)
        right = pdfs == right_pdfs[frames] if self.name == "smbr" else phones == right_phones
        right = right | (silent & right_silent) if self.one_silence_class else right & ~silent
        values: Float64Array = np.bincount(arcs, right, count).astype(np.float64)
        paths = ForwardBackward(lattice, costs + self.acoustic_scale * acoustic)
        expected, objective = paths.expected(values)
        derivative = _spread((paths.posteriors * (objective - expected))[arcs], frames, pdfs, loglikes.shape)
        return Value(derivative.astype(np.float32), objective, objective)

    def _mmi(self, posterior: Float64Array, likelihood: float, loglikes: Float32Array, right: Int32Array) -> Value:
        frames = np.arange(len(right))
        of_reference = posterior[frames, right]
        score = self.acoustic_scale * float(loglikes[frames, right].sum(dtype=np.float64))
        dropped = of_reference < DROPPED if self.drop_frames else np.zeros(len(right), bool)
        posterior[frames, right] -= 1.0
        posterior[dropped] = 0.0
        derivative = posterior.astype(np.float32)
        return Value(derivative, score - likelihood, float(of_reference.sum()), int(dropped.sum()))

    @cached_property
    def _phones(self) -> Int32Array:
        """By transition-id, from 0."""
        states, _ = self.transition_model.transition_states()
        phones: Int32Array = np.concatenate([[0], self.transition_model.tuples[:, 0]])[states]
        return phones

    def _pdfs(self, tids: Int32Array) -> Int32Array:
        pdfs: Int32Array = self.transition_model.transition_to_pdf[tids]
        return pdfs


def _frames_of(lattice: Lattice) -> tuple[Int64Array, Int64Array]:
    """Of each transition-id of all strings its frame and its arc."""
    lengths = np.diff(lattice.offsets)
    arcs = np.repeat(np.arange(len(lengths)), lengths)
    frames: Int64Array = (lattice.times[lattice.source] - lattice.offsets[:-1])[arcs] + np.arange(len(arcs))
    return frames, arcs


def _spread(values: Float64Array, frames: Int64Array, pdfs: Int32Array, shape: tuple[int, ...]) -> Float64Array:
    """(frames, pdfs): values added up where they belong."""
    total = np.bincount(frames * shape[1] + pdfs, values, shape[0] * shape[1])
    return total.reshape(shape).astype(np.float64)
