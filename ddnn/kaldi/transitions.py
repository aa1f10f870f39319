"""The transition model with which a Kaldi acoustic model (`final.mdl`) begins, whatever stands behind it.

Follows kaldi `hmm/transition-model.cc`. A transition-state is a (phone, HMM state, forward pdf, self-loop pdf); the
transition-ids number, from 1, the transitions that leave the transition-states, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.kaldi.basic_io import Reader, read_whole
from ddnn.kaldi.basic_write import (
    write_float_matrix,
    write_float_vector,
    write_header,
    write_int32,
    write_int32_block,
    write_line_end,
    write_token,
)
from ddnn.kaldi.topology import NO_PDF, Topology, read_topology, write_topology

KIND = "a Kaldi transition model"
# Arrays of pdfs follow from the greatest pdf-id: no tree has a million leaves.
MAX_PDF = 1_000_000


@dataclass(frozen=True, eq=False)
class TransitionModel:
    """A transition model and its derived tables. T is the number of transition-ids, S of transition-states.

    Args:
        topology: the HMMs of the phones.
        tuples: int32 (S, 4), in ascending order: phone, HMM state, forward pdf, self-loop pdf. Row s is
            transition-state s + 1.
        log_probs: float32 (T + 1,), natural logarithm, indexed by transition-id; [0] is unused.
        transition_to_pdf: int32 (T + 1,), indexed by transition-id; [0] is -1. So are the next three.
        transition_to_phone: int32 (T + 1,).
        transition_to_hmm_state: int32 (T + 1,), state within the phone's HMM.
        transition_is_self_loop: bool (T + 1,); [0] is False.
        transition_is_final: bool (T + 1,), whether it leaves the phone; [0] is False.
    """

    topology: Topology
    tuples: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    transition_to_pdf: NDArray[np.int32]
    transition_to_phone: NDArray[np.int32]
    transition_to_hmm_state: NDArray[np.int32]
    transition_is_self_loop: NDArray[np.bool_]
    transition_is_final: NDArray[np.bool_]

    @property
    def num_pdfs(self) -> int:
        """Greatest pdf-id plus one."""
        return int(self.tuples[:, 2:].max()) + 1

    @property
    def num_phones(self) -> int:
        """Greatest phone-id in use."""
        return int(self.tuples[:, 0].max())

    @property
    def num_transition_ids(self) -> int:
        """T: transition-ids are 1 to T."""
        return len(self.transition_to_pdf) - 1


def read_transition_model(path: str | PathLike[str]) -> TransitionModel:
    """Reads the transition model of `path`, text or binary, with `<Triples>` or `<Tuples>`; the rest is not read.

    Raises:
        DataError: the file cannot be read, is damaged, or is no transition model.
    """
    reader = read_whole(path, KIND)
    reader.expect("<TransitionModel>")
    topology = read_topology(reader)
    width = 4 if reader.expect("<Triples>", "<Tuples>") == "<Tuples>" else 3
    count = reader.int32("the number of transition-states")
    tuples = reader.int32_block(count * width, "transition-states").reshape(-1, width)
    if width == 3:
        tuples = tuples[:, [0, 1, 2, 2]]
    problem = _find_problem(topology, tuples)
    if problem is not None:
        raise reader.error("transition-states that fit the topology", problem)
    reader.expect("</Tuples>" if width == 4 else "</Triples>")
    reader.expect("<LogProbs>")
    log_probs = _read_log_probs(reader, topology, tuples)
    reader.expect("</LogProbs>")
    reader.expect("</TransitionModel>")
    return _derive(topology, tuples, log_probs)


def _read_log_probs(reader: Reader, topology: Topology, tuples: NDArray[np.int32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        log_probs = reader.float_vector("the log probabilities").astype(np.float32)
    # Before any table is made: a few transition-states with many transitions each could claim any number of ids.
    expected = 1 + sum(len(topology.states(phone)[state].transitions) for phone, state in tuples[:, :2].tolist())
    if len(log_probs) != expected:
        raise reader.error(f"{expected} log probabilities (transition-ids and one)", str(len(log_probs)))
    if not (np.isfinite(log_probs) & (log_probs <= 0)).all():
        bad = log_probs[~(np.isfinite(log_probs) & (log_probs <= 0))][0]
        raise reader.error("log probabilities of zero or less", str(bad))
    return log_probs


def build_transition_model(topology: Topology, tuples: Iterable[tuple[int, int, int, int]]) -> TransitionModel:
    """A transition model whose probabilities are the topology's, as Kaldi initialises it.

    Args:
        topology: the HMMs of the phones.
        tuples: (phone, HMM state, forward pdf, self-loop pdf) each, in any order.

    Raises:
        DataError: the tuples do not fit the topology.
    """
    array = np.array(sorted(set(tuples)), np.int32).reshape(-1, 4)
    problem = _find_problem(topology, array)
    if problem is not None:
        raise DataError(f"not {KIND}: {problem}")
    states = [topology.states(phone)[state] for phone, state in array[:, :2].tolist()]
    probabilities = [1.0, *(probability for state in states for _, probability in state.transitions)]
    if max(probabilities) > 1.0:
        raise DataError(f"not {KIND}: a transition probability of {max(probabilities)}, more than 1")
    return _derive(topology, array, np.log(np.array(probabilities, np.float32)))


def _find_problem(topology: Topology, tuples: NDArray[np.int32]) -> str | None:
    """What is wrong with transition-states, in words; None where they are sound."""
    if not len(tuples):
        return "none"
    if tuples[:, 2:].min() < 0 or tuples[:, 2:].max() > MAX_PDF:
        found = f"{tuples[:, 2:].min()} to {tuples[:, 2:].max()}"
        return f"pdf-ids {found} (they must lie in 0 to {MAX_PDF})"
    is_hmm = topology.is_hmm
    for number, (phone, hmm_state, forward, self_loop) in enumerate(tuples.tolist(), start=1):
        if phone not in topology.phone_to_entry:
            return f"phone {phone} in transition-state {number}, which the topology lacks"
        states = topology.states(phone)
        if not 0 <= hmm_state < len(states) or states[hmm_state].forward_pdf_class == NO_PDF:
            return f"HMM state {hmm_state} of phone {phone} in transition-state {number}, which does not emit"
        if is_hmm and forward != self_loop:
            return f"two pdf-ids in transition-state {number}, where the topology has one pdf class a state"
    changed = np.diff(tuples.astype(np.int64), axis=0)
    first = (changed != 0).argmax(axis=1)
    unordered = np.flatnonzero(changed[np.arange(len(changed)), first] <= 0)
    if unordered.size:
        return f"transition-state {unordered[0] + 2}, which does not come after the one before it"
    return None


def _derive(topology: Topology, tuples: NDArray[np.int32], log_probs: NDArray[np.float32]) -> TransitionModel:
    """The tables by transition-id (`TransitionModel::ComputeDerived`), for sound arguments."""
    states = [topology.states(phone) for phone in tuples[:, 0].tolist()]
    numbers = tuples[:, 1].tolist()
    counts = [len(entry[number].transitions) for entry, number in zip(states, numbers, strict=True)]
    by_id = np.concatenate([np.full((1, 4), -1, np.int32), np.repeat(tuples, counts, axis=0)])
    destination = np.full(len(by_id), -1, np.int32)
    last = np.full(len(by_id), -2, np.int32)
    destination[1:] = [d for entry, number in zip(states, numbers, strict=True) for d, _ in entry[number].transitions]
    last[1:] = np.repeat([len(entry) - 1 for entry in states], counts)
    is_self_loop = destination == by_id[:, 1]
    is_self_loop[0] = False
    return TransitionModel(
        topology=topology,
        tuples=tuples,
        log_probs=log_probs,
        transition_to_pdf=np.where(is_self_loop, by_id[:, 3], by_id[:, 2]),
        transition_to_phone=by_id[:, 0].copy(),
        transition_to_hmm_state=by_id[:, 1].copy(),
        transition_is_self_loop=is_self_loop,
        transition_is_final=destination == last,
    )


def write_transition_model(handle: BinaryIO, model: TransitionModel, *, binary: bool = True) -> None:
    """Writes `model` at the beginning of a file, with the header; `write_diag_gmms` may follow."""
    name = b"Triples" if model.topology.is_hmm else b"Tuples"
    tuples = model.tuples[:, :3] if model.topology.is_hmm else model.tuples
    write_header(handle, binary=binary)
    write_token(handle, "<TransitionModel>")
    write_line_end(handle, binary=binary)
    write_topology(handle, model.topology, binary=binary)
    handle.write(b"<%s> " % name)
    write_int32(handle, len(tuples), binary=binary)
    if binary:
        write_int32_block(handle, tuples)
        handle.write(b"</%s> <LogProbs> " % name)
    else:
        rows = (b"".join(b"%d " % value for value in row) + b"\n" for row in tuples.tolist())
        handle.write(b"\n" + b"".join(rows) + b"</%s> \n<LogProbs> \n" % name)
    write_float_vector(handle, model.log_probs, binary=binary)
    for token in ("</LogProbs>", "</TransitionModel>"):
        write_token(handle, token)
        write_line_end(handle, binary=binary)


def write_diag_gmms(
    handle: BinaryIO,
    means: Sequence[NDArray[np.floating]],
    variances: Sequence[NDArray[np.floating]],
    weights: Sequence[NDArray[np.floating]],
) -> None:
    """Writes the Gaussian mixtures of a `final.mdl`, binary, behind the transition model (kaldi `gmm/am-diag-gmm.cc`).

    Args:
        means, variances: per pdf-id (Gaussians, feature dim); variances are positive.
        weights: per pdf-id (Gaussians,); positive, they sum to one.
    """
    write_token(handle, "<DIMENSION>")
    write_int32(handle, means[0].shape[1], binary=True)
    write_token(handle, "<NUMPDFS>")
    write_int32(handle, len(means), binary=True)
    for mean, variance, weight in zip(means, variances, weights, strict=True):
        # The log likelihood of an all-zero feature vector, per Gaussian.
        constants = np.log(weight) - 0.5 * (np.log(2 * np.pi * variance) + mean**2 / variance).sum(axis=1)
        write_token(handle, "<DiagGMM>")
        write_token(handle, "<GCONSTS>")
        write_float_vector(handle, constants.astype(np.float32), binary=True)
        write_token(handle, "<WEIGHTS>")
        write_float_vector(handle, weight.astype(np.float32), binary=True)
        write_token(handle, "<MEANS_INVVARS>")
        write_float_matrix(handle, (mean / variance).astype(np.float32), binary=True)
        write_token(handle, "<INV_VARS>")
        write_float_matrix(handle, (1 / variance).astype(np.float32), binary=True)
        write_token(handle, "</DiagGMM>")
