"""The transition model with which a Kaldi acoustic model (`final.mdl`) begins, whatever follows it.

Follows kaldi `hmm/hmm-topology.cc`, whose `Check` is applied to every topology, and `hmm/transition-model.cc`. A
transition-state is a (phone, HMM state, forward pdf, self-loop pdf); the transition-ids number, from 1, the transitions
that leave the transition-states, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, open_kaldi_file
from ddnn.util.arrays import Float32Array, Float64Array, Int32Array, Int64Array

NO_PDF = -1
# A table indexed by phone is part of the format: a phone-id alone must not claim gigabytes.
MAX_PHONE = 1_000_000
# Arrays of pdfs follow from the greatest pdf-id: no tree has a million leaves.
MAX_PDF = 1_000_000


@dataclass(frozen=True)
class HmmState:
    """One HMM state."""

    forward_pdf_class: int  # NO_PDF for a non-emitting state
    self_loop_pdf_class: int
    transitions: tuple[tuple[int, float], ...]  # (destination state, probability) each


@dataclass(frozen=True)
class Topology:
    """The HMMs of all phones: which states a phone has and which transitions leave them."""

    entries: tuple[tuple[HmmState, ...], ...]  # the different HMMs; their last states are final, without transitions
    phone_to_entry: dict[int, int]  # phone-id (1 or more) to the index of its HMM, phones in ascending order

    def states(self, phone: int) -> tuple[HmmState, ...]:
        return self.entries[self.phone_to_entry[phone]]

    @property
    def is_hmm(self) -> bool:
        """Whether every state has one pdf class for both forward transitions and self-loop (no chain topology)."""
        return all(state.forward_pdf_class == state.self_loop_pdf_class for entry in self.entries for state in entry)


@dataclass(frozen=True, eq=False)
class TransitionModel:
    """A transition model of T transition-ids and S transition-states; row s of `tuples` is transition-state s + 1."""

    topology: Topology
    tuples: Int32Array  # (S, 4), in ascending order: phone, HMM state, forward pdf, self-loop pdf
    log_probs: Float32Array  # (T + 1,), natural logarithm, indexed by transition-id; [0] is unused
    transition_to_pdf: Int32Array  # (T + 1,), indexed by transition-id; [0] is -1
    gmm_dim: int | None = None  # of the features of the GMMs that follow; None where none follow

    @property
    def num_pdfs(self) -> int:
        """Greatest pdf-id plus one."""
        return int(self.tuples[:, 2:].max()) + 1

    @property
    def num_phones(self) -> int:
        return int(self.tuples[:, 0].max())

    @property
    def num_transition_ids(self) -> int:
        """T: transition-ids are 1 to T."""
        return len(self.transition_to_pdf) - 1

    @property
    def digest(self) -> str:
        """SHA-256 of the transition-states, as lines of numbers as Kaldi writes them between `<Triples>` and
        `</Triples>` (`<Tuples>` of a chain model). Models of one tree have the same, whatever else was trained."""
        columns = 3 if self.topology.is_hmm else 4
        lines = (" ".join(map(str, row)) + "\n" for row in self.tuples[:, :columns].tolist())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def transition_states(self) -> tuple[Int64Array, NDArray[np.bool_]]:
        """Of each transition-id, (T + 1,): its transition-state, counted from 1, and whether it is a self-loop; 0 and
        False for the unused id 0."""
        transitions = _transitions(self.topology, self.tuples)
        return transitions[:, 0], transitions[:, 1].astype(bool)


def _transitions(topology: Topology, tuples: Int32Array) -> Int64Array:
    """By transition-id, (T + 1, 3): its transition-state, whether it is a self-loop, and its pdf. As
    `TransitionModel::ComputeDerived`."""
    rows = [(0, False, NO_PDF)]
    for number, (phone, hmm_state, forward, self_loop) in enumerate(tuples.tolist(), 1):
        for destination, _ in topology.states(phone)[hmm_state].transitions:
            is_self_loop = destination == hmm_state
            rows.append((number, is_self_loop, self_loop if is_self_loop else forward))
    return np.array(rows, np.int64)


def _validate_topology(topology: Topology) -> str | None:
    """What Kaldi would refuse in `topology`, in words; None where it is valid."""
    phones = topology.phone_to_entry
    if not topology.entries or not phones:
        return "an empty one"
    if min(phones) < 1 or max(phones) > MAX_PHONE:
        return f"phones {min(phones)} to {max(phones)} (expected 1 to {MAX_PHONE})"
    if set(phones.values()) != set(range(len(topology.entries))):
        return "an HMM without phones, or a phone without an HMM"
    for index, entry in enumerate(topology.entries):
        if problem := _validate_entry(entry):
            return f"{problem} (HMM {index} of {len(topology.entries)}, counted from 0)"
    return None


def _validate_entry(entry: Sequence[HmmState]) -> str | None:
    last = len(entry) - 1
    if last < 1:
        return "an HMM without an emitting state"
    if entry[last].transitions or entry[last].forward_pdf_class != NO_PDF:
        return "a last state that is emitting or has transitions"
    for number, state in enumerate(entry):
        destinations = [destination for destination, _ in state.transitions]
        emitting = state.forward_pdf_class != NO_PDF
        if emitting != (state.self_loop_pdf_class != NO_PDF):
            return f"state {number} with only one of its two pdf classes"
        if number < last and not destinations:
            return f"state {number} without transitions"
        if any(not 0 <= destination <= last for destination in destinations):
            return f"state {number} with a transition to a state that is not there"
        if len(set(destinations)) != len(destinations):
            return f"state {number} with two transitions to one state"
        if any(not 0.0 < probability < np.inf for _, probability in state.transitions):
            return f"state {number} with a transition probability that is not positive"
        if not emitting and (number in destinations or last in destinations):
            return f"non-emitting state {number} with a self-loop or a transition to the last state"
    if len({0}.union(*(dict(state.transitions) for state in entry))) != len(entry):
        return "a state that no transition reaches"
    classes = {pdf for state in entry for pdf in (state.forward_pdf_class, state.self_loop_pdf_class)} - {NO_PDF}
    if classes != set(range(len(classes))):
        return f"pdf classes {sorted(classes)[:8]} (they must be 0, 1, 2, ...)"
    return None


def _read_binary_topology(reader: BasicTypeReader) -> Topology:
    phones = reader.int32_vector("the list of phones").tolist()
    indices = reader.int32_vector("the table of phones").tolist()
    if phones != [phone for phone, index in enumerate(indices) if index != -1]:
        raise reader.error("a list of phones that agrees with the table of phones", "two that differ")
    count = reader.int32("the number of HMMs")
    extended = count == -1
    if extended:
        count = reader.int32("the number of HMMs")
    entries = []
    for _ in range(count):
        states = []
        for _ in range(reader.int32("the number of states")):
            forward = reader.int32("a pdf class")
            self_loop = reader.int32("a pdf class") if extended else forward
            number = reader.int32("the number of transitions")
            transitions = tuple((reader.int32("a state"), reader.float32("a probability")) for _ in range(number))
            states.append(HmmState(forward, self_loop, transitions))
        entries.append(tuple(states))
    reader.expect("</Topology>")
    return Topology(tuple(entries), {phone: indices[phone] for phone in phones})


def _read_text_topology(reader: BasicTypeReader) -> Topology:
    entries, phone_to_entry = list[tuple[HmmState, ...]](), dict[int, int]()
    while reader.expect("<TopologyEntry>", "</Topology>") == "<TopologyEntry>":
        reader.expect("<ForPhones>")
        while reader.peek_token() != "</ForPhones>":
            phone = reader.int32("a phone or </ForPhones>")
            if phone in phone_to_entry:
                raise reader.error("phones that each occur once", f"phone {phone} twice")
            phone_to_entry[phone] = len(entries)
        reader.expect("</ForPhones>")
        states: list[HmmState] = []
        while reader.expect("<State>", "</TopologyEntry>") == "<State>":
            states.append(_read_text_state(reader, len(states)))
        entries.append(tuple(states))
    return Topology(tuple(entries), dict(sorted(phone_to_entry.items())))


def _read_text_state(reader: BasicTypeReader, expected: int) -> HmmState:
    number = reader.int32("the state's number")
    if number != expected:
        raise reader.error(f"state {expected}", f"state {number}")
    forward = self_loop = NO_PDF
    token = reader.peek_token()
    if token in ("<PdfClass>", "<ForwardPdfClass>"):
        reader.expect(token)
        forward = self_loop = reader.int32("a pdf class")
    if token == "<ForwardPdfClass>":
        reader.expect("<SelfLoopPdfClass>")
        self_loop = reader.int32("a pdf class")
    transitions = []
    while reader.expect("<Transition>", "</State>") == "<Transition>":
        transitions.append((reader.int32("a state"), reader.float32("a probability")))
    return HmmState(forward, self_loop, tuple(transitions))


def read_transition_model(path: Path) -> TransitionModel:
    """Reads the transition model of `path`, text or binary, with `<Triples>` or `<Tuples>`; of the rest only `gmm_dim`.
    DataError: the file cannot be read, is damaged, or is no transition model, or one that Kaldi would refuse."""
    hint = "steps/align_*.sh leaves final.mdl in the alignment dir; copy it from the directory of the system that made "
    with open_kaldi_file(path, "a Kaldi transition model", hint_missing=hint + "the alignment") as reader:
        reader.expect("<TransitionModel>")
        reader.expect("<Topology>")
        topology = _read_binary_topology(reader) if reader.binary else _read_text_topology(reader)
        if problem := _validate_topology(topology):
            raise reader.error("an HMM topology", problem)
        width = 4 if reader.expect("<Triples>", "<Tuples>") == "<Tuples>" else 3
        count = reader.int32("the number of transition-states")
        tuples = reader.int32_block(count * width, "transition-states").reshape(-1, width)
        if width == 3:
            tuples = tuples[:, [0, 1, 2, 2]]
        if problem := _validate_tuples(topology, tuples):
            raise reader.error("transition-states that fit the topology", problem)
        reader.expect("</Tuples>" if width == 4 else "</Triples>")
        reader.expect("<LogProbs>")
        log_probs = _read_log_probs(reader, topology, tuples)
        reader.expect("</LogProbs>")
        reader.expect("</TransitionModel>")
        gmm_dim = None
        if reader.peek_token() == "<DIMENSION>":
            reader.expect("<DIMENSION>")
            gmm_dim = reader.int32("the dimension of the GMMs")
    pdfs = _transitions(topology, tuples)[:, 2].astype(np.int32)
    return TransitionModel(topology, tuples, log_probs, pdfs, gmm_dim)


def _read_log_probs(reader: BasicTypeReader, topology: Topology, tuples: Int32Array) -> Float32Array:
    with np.errstate(over="ignore", invalid="ignore"):
        log_probs = reader.float_vector("the log probabilities").astype(np.float32)
    # Before any table is made: a few transition-states with many transitions each could claim any number of ids.
    rows = tuples[:, :2].tolist()
    expected = 1 + sum(len(topology.states(phone)[state].transitions) for phone, state in rows)
    if len(log_probs) != expected:
        raise reader.error(f"{expected} log probabilities (transition-ids and one)", str(len(log_probs)))
    valid = np.isfinite(log_probs) & (log_probs <= 0)
    if not valid.all():
        raise reader.error("log probabilities of zero or less", str(log_probs[~valid][0]))
    return log_probs


def _validate_tuples(topology: Topology, tuples: Int32Array) -> str | None:
    """What is wrong with transition-states, in words; None where they are valid."""
    if not len(tuples):
        return "none"
    if tuples[:, 2:].min() < 0 or tuples[:, 2:].max() > MAX_PDF:
        return f"pdf-ids {tuples[:, 2:].min()} to {tuples[:, 2:].max()} (expected 0 to {MAX_PDF})"
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


def write_left_to_right(
    writer: BasicTypeWriter, phones: int, states: int, triples: Int32Array, self_loop: Float64Array
) -> None:
    """Writes a transition model at the beginning of a binary file; the acoustic model may follow. Phones 1, 2, ... have
    one HMM: so many emitting states in a row, each with a self-loop. `triples`: int32 (S, 3), in ascending order:
    phone, HMM state, pdf. `self_loop`: (S,), trained probability of the self-loop of each transition-state."""
    writer.marker()
    writer.token("<TransitionModel>", "<Topology>")
    writer.int32_vector(np.arange(1, phones + 1, dtype=np.int32))
    writer.int32_vector(np.array([-1, *[0] * phones], np.int32))
    writer.int32_block(np.array([1, states + 1]))  # HMMs, and states of it
    for state in range(states):
        writer.int32_block(np.array([state, 2]))
        for destination, probability in ((state, 0.75), (state + 1, 0.25)):
            writer.int32(destination)
            writer.float32(probability)
    writer.int32_block(np.array([NO_PDF, 0]))
    writer.token("</Topology>", "<Triples>")
    writer.int32(len(triples))
    writer.int32_block(triples)
    writer.token("</Triples>", "<LogProbs>")
    log_probs = np.stack([np.log(self_loop), np.log(1 - self_loop)], axis=1)
    writer.float_vector(np.concatenate([[0.0], log_probs.reshape(-1)]).astype(np.float32))
    writer.token("</LogProbs>", "</TransitionModel>")
