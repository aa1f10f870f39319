"""HMM topologies: which states a phone has and which transitions leave them.

Follows kaldi `hmm/hmm-topology.cc`; its `Check` is applied to every topology read or made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ddnn.errors import DataError
from ddnn.kaldi.basic_io import Reader
from ddnn.kaldi.basic_write import write_float32, write_int32, write_int32_vector, write_line_end, write_token

NO_PDF = -1
# A table indexed by phone is part of the format: a phone-id alone must not claim gigabytes.
MAX_PHONE = 1_000_000


@dataclass(frozen=True)
class State:
    """One HMM state.

    Args:
        forward_pdf_class, self_loop_pdf_class: pdf classes, NO_PDF for a non-emitting state.
        transitions: (destination state, probability) each.
    """

    forward_pdf_class: int
    self_loop_pdf_class: int
    transitions: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Topology:
    """The HMMs of all phones.

    Args:
        entries: the different HMMs; each a tuple of states, the last one final, without transitions.
        phone_to_entry: phone-id (1 or more) to the index of its HMM in `entries`, phones in ascending order.
    """

    entries: tuple[tuple[State, ...], ...]
    phone_to_entry: dict[int, int]

    def states(self, phone: int) -> tuple[State, ...]:
        """The states of `phone`; KeyError where the topology lacks it."""
        return self.entries[self.phone_to_entry[phone]]

    @property
    def is_hmm(self) -> bool:
        """Whether every state has one pdf class for both forward transitions and self-loop (no chain topology)."""
        return all(state.forward_pdf_class == state.self_loop_pdf_class for entry in self.entries for state in entry)


def left_to_right(phones: Iterable[int], num_states: int = 3, self_loop: float = 0.75) -> Topology:
    """One HMM for all `phones`: `num_states` emitting states in a row, with self-loops of probability `self_loop`.

    Raises:
        DataError: an argument is out of range.
    """
    states = [State(s, s, ((s, self_loop), (s + 1, 1.0 - self_loop))) for s in range(num_states)]
    topology = Topology(((*states, State(NO_PDF, NO_PDF, ())),), dict.fromkeys(sorted(phones), 0))
    problem = find_problem(topology)
    if problem is not None:
        raise DataError(f"not an HMM topology: {problem}")
    return topology


def read_topology(reader: Reader) -> Topology:
    """`<Topology>` to `</Topology>`.

    Raises:
        DataError: the bytes are no topology, or one that Kaldi would refuse.
    """
    reader.expect("<Topology>")
    topology = _read_binary(reader) if reader.binary else _read_text(reader)
    problem = find_problem(topology)
    if problem is not None:
        raise reader.error("an HMM topology", problem)
    return topology


def _read_binary(reader: Reader) -> Topology:
    phones = reader.int32_vector("the list of phones").tolist()
    indices = reader.int32_vector("the table of phones").tolist()
    if phones != [phone for phone, index in enumerate(indices) if index != -1]:
        raise reader.error("a list of phones that agrees with the table of phones", "two that differ")
    count = reader.int32("the number of HMMs")
    extended = count == -1
    if extended:
        count = reader.int32("the number of HMMs")
    entries = []
    for _ in range(_count(reader, count)):
        states = []
        for _ in range(_count(reader, reader.int32("the number of states"))):
            forward = reader.int32("a pdf class")
            self_loop = reader.int32("a pdf class") if extended else forward
            number = _count(reader, reader.int32("the number of transitions"))
            transitions = [(reader.int32("a state"), reader.float32("a probability")) for _ in range(number)]
            states.append(State(forward, self_loop, tuple(transitions)))
        entries.append(tuple(states))
    reader.expect("</Topology>")
    return Topology(tuple(entries), {phone: indices[phone] for phone in phones})


def _count(reader: Reader, count: int) -> int:
    if not 0 <= count * 5 <= reader.remaining:
        raise reader.error("a number of items that the file can hold", str(count))
    return count


def _read_text(reader: Reader) -> Topology:
    entries: list[tuple[State, ...]] = []
    phone_to_entry: dict[int, int] = {}
    while reader.expect("<TopologyEntry>", "</Topology>") == "<TopologyEntry>":
        reader.expect("<ForPhones>")
        while reader.peek_token() != "</ForPhones>":
            phone = reader.int32("a phone or </ForPhones>")
            if phone in phone_to_entry:
                raise reader.error("phones that each occur once", f"phone {phone} twice")
            phone_to_entry[phone] = len(entries)
        reader.expect("</ForPhones>")
        states: list[State] = []
        while reader.expect("<State>", "</TopologyEntry>") == "<State>":
            states.append(_read_text_state(reader, len(states)))
        entries.append(tuple(states))
    return Topology(tuple(entries), dict(sorted(phone_to_entry.items())))


def _read_text_state(reader: Reader, number: int) -> State:
    found = reader.int32("the state's number")
    if found != number:
        raise reader.error(f"state {number}", f"state {found}")
    forward = self_loop = NO_PDF
    token = reader.peek_token()
    if token == "<PdfClass>":
        reader.expect(token)
        forward = self_loop = reader.int32("a pdf class")
    elif token == "<ForwardPdfClass>":
        reader.expect(token)
        forward = reader.int32("a pdf class")
        reader.expect("<SelfLoopPdfClass>")
        self_loop = reader.int32("a pdf class")
    transitions = []
    while reader.expect("<Transition>", "</State>") == "<Transition>":
        transitions.append((reader.int32("a state"), reader.float32("a probability")))
    return State(forward, self_loop, tuple(transitions))


def find_problem(topology: Topology) -> str | None:
    """What Kaldi would refuse in `topology`, in words; None where it is sound."""
    phones = topology.phone_to_entry
    if not topology.entries or not phones:
        return "an empty one"
    if min(phones) < 1 or max(phones) > MAX_PHONE:
        return f"phones {min(phones)} to {max(phones)} (they must lie in 1 to {MAX_PHONE})"
    if set(phones.values()) != set(range(len(topology.entries))):
        return "an HMM without phones, or a phone without an HMM"
    for index, entry in enumerate(topology.entries):
        problem = _find_problem_of_entry(entry)
        if problem is not None:
            return f"{problem} (HMM {index} of {len(topology.entries)}, counted from 0)"
    return None


def _find_problem_of_entry(entry: Sequence[State]) -> str | None:
    last = len(entry) - 1
    if last < 1:
        return "an HMM without an emitting state"
    if entry[last].transitions or entry[last].forward_pdf_class != NO_PDF:
        return "a last state that is emitting or has transitions"
    classes: set[int] = set()
    reached = {0}
    for number, state in enumerate(entry):
        destinations = [destination for destination, _ in state.transitions]
        emitting = state.forward_pdf_class != NO_PDF
        if emitting != (state.self_loop_pdf_class != NO_PDF):
            return f"state {number} with only one of its two pdf classes"
        if emitting:
            classes |= {state.forward_pdf_class, state.self_loop_pdf_class}
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
        reached.update(destinations)
    if len(reached) != len(entry):
        return "a state that no transition reaches"
    if classes != set(range(len(classes))):
        return f"pdf classes {sorted(classes)[:8]} (they must be 0, 1, 2, ...)"
    return None


def write_topology(handle: BinaryIO, topology: Topology, *, binary: bool) -> None:
    """`<Topology>` to `</Topology>`, as Kaldi writes it."""
    write_token(handle, "<Topology>")
    if binary:
        _write_binary(handle, topology)
    else:
        handle.write(b"\n")
        for index in range(len(topology.entries)):
            _write_text_entry(handle, topology, index)
    write_token(handle, "</Topology>")
    write_line_end(handle, binary=binary)


def _write_binary(handle: BinaryIO, topology: Topology) -> None:
    phones = np.array(list(topology.phone_to_entry), np.int32)
    indices = np.full(int(phones.max()) + 1, -1, np.int32)
    indices[phones] = list(topology.phone_to_entry.values())
    write_int32_vector(handle, phones, binary=True)
    write_int32_vector(handle, indices, binary=True)
    extended = not topology.is_hmm
    if extended:
        write_int32(handle, -1, binary=True)
    write_int32(handle, len(topology.entries), binary=True)
    for entry in topology.entries:
        write_int32(handle, len(entry), binary=True)
        for state in entry:
            write_int32(handle, state.forward_pdf_class, binary=True)
            if extended:
                write_int32(handle, state.self_loop_pdf_class, binary=True)
            write_int32(handle, len(state.transitions), binary=True)
            for destination, probability in state.transitions:
                write_int32(handle, destination, binary=True)
                write_float32(handle, probability, binary=True)


def _write_text_entry(handle: BinaryIO, topology: Topology, index: int) -> None:
    phones = [phone for phone, entry in topology.phone_to_entry.items() if entry == index]
    is_hmm = topology.is_hmm
    handle.write(b"<TopologyEntry> \n<ForPhones> \n")
    handle.write(b"".join(b"%d " % phone for phone in phones) + b"\n</ForPhones> \n")
    for number, state in enumerate(topology.entries[index]):
        handle.write(b"<State> %d " % number)
        if state.forward_pdf_class != NO_PDF:
            if is_hmm:
                handle.write(b"<PdfClass> %d " % state.forward_pdf_class)
            else:
                classes = (state.forward_pdf_class, state.self_loop_pdf_class)
                handle.write(b"<ForwardPdfClass> %d <SelfLoopPdfClass> %d " % classes)
        for destination, probability in state.transitions:
            handle.write(b"<Transition> %d " % destination)
            write_float32(handle, probability, binary=False)
        handle.write(b"</State> \n")
    handle.write(b"</TopologyEntry> \n")
