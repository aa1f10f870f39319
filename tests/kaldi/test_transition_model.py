"""The transition model: Kaldi's own mapping of AN4's alignments, round trips, and files that are none."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kaldi_files import build_transition_model, model_bytes, transitions_of, write_diag_gmms

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter
from ddnn.kaldi.transition_model import (
    NO_PDF,
    HmmState,
    Topology,
    TransitionModel,
    read_transition_model,
    write_left_to_right,
)
from ddnn.util.errors import DataError

FINAL = HmmState(NO_PDF, NO_PDF, ())
# A chain model's topology: forward and self-loop have pdfs of their own.
CHAIN = Topology(((HmmState(0, 1, ((0, 0.5), (1, 0.5))), FINAL),), {1: 0, 3: 0})


def small_model(num_phones: int = 2) -> TransitionModel:
    states = [HmmState(s, s, ((s, 0.75), (s + 1, 0.25))) for s in range(3)]
    topology = Topology(((*states, FINAL),), dict.fromkeys(range(1, num_phones + 1), 0))
    tuples = [(p, s, (p - 1) * 3 + s, (p - 1) * 3 + s) for p in range(1, num_phones + 1) for s in range(3)]
    return build_transition_model(topology, tuples)


def read_bytes(data: bytes, path: Path) -> TransitionModel:
    path.write_bytes(data)
    return read_transition_model(path)


def rows(path: Path) -> dict[str, np.ndarray]:
    lines = path.read_text().splitlines()
    return {line.split()[0]: np.array(line.split()[1:], np.int32) for line in lines}


@pytest.mark.parametrize(
    ("model", "ids", "expected", "table"),
    [
        ("recipes/an4/corpus/ali/final.mdl", "tids.txt", "pdfs.expected.txt", "transition_to_pdf"),
        ("recipes/an4/corpus/ali/final.mdl", "tids.txt", "phones.expected.txt", "phone"),
        ("golden/tables/mono.mdl", "mono_tids.txt", "mono_pdfs.expected.txt", "transition_to_pdf"),
        ("golden/tables/mono_transitions.txt", "mono_tids.txt", "mono_pdfs.expected.txt", "transition_to_pdf"),
    ],
)
def test_alignments_as_kaldi_maps_them(
    from_kaldi: Callable[[str], Path], golden: Path, model: str, ids: str, expected: str, table: str
) -> None:
    found = read_transition_model(from_kaldi(model))
    mapping = found.transition_to_pdf if table == "transition_to_pdf" else transitions_of(found)["phone"]
    alignments, goal = rows(golden / "tables" / ids), rows(golden / "tables" / expected)
    assert alignments.keys() == goal.keys() != set()
    for utterance, alignment in alignments.items():
        np.testing.assert_array_equal(mapping[alignment], goal[utterance], err_msg=utterance)


def test_figures_of_an4(an4: Path) -> None:
    model = read_transition_model(an4 / "ali" / "final.mdl")
    assert (model.num_pdfs, model.num_phones, model.num_transition_ids, len(model.tuples)) == (616, 142, 4860, 2390)
    assert model.transition_to_pdf.dtype == np.int32 and model.transition_to_pdf[0] == -1
    assert len(model.log_probs) == len(model.transition_to_pdf) == len(transitions_of(model)) == 4861
    # Probabilities of one transition-state sum to one.
    state = np.cumsum(np.r_[0, [len(model.topology.states(p)[s].transitions) for p, s in model.tuples[:, :2]]])
    sums = np.add.reduceat(np.exp(model.log_probs[1:].astype(np.float64)), state[:-1])
    np.testing.assert_allclose(sums, 1, atol=1e-5)


@pytest.mark.parametrize("name", ["recipes/an4/corpus/ali/final.mdl", "golden/tables/mono.mdl"])
def test_written_as_kaldi_wrote_it(from_kaldi: Callable[[str], Path], name: str) -> None:
    written = model_bytes(read_transition_model(from_kaldi(name)), binary=True)
    assert len(written) > 10_000
    assert from_kaldi(name).read_bytes().startswith(written)


def test_text_as_kaldi_wrote_it(golden: Path) -> None:
    model = read_transition_model(golden / "tables" / "mono.mdl")
    assert model_bytes(model, binary=False) == (golden / "tables" / "mono_transitions.txt").read_bytes()


@pytest.mark.parametrize("binary", [True, False])
def test_both_layouts_round_trip(tmp_path: Path, binary: bool) -> None:
    chain = build_transition_model(CHAIN, [(3, 0, 4, 1), (1, 0, 0, 2), (1, 0, 0, 1)])
    for model, token in ((small_model(), b"<Triples>"), (chain, b"<Tuples>")):
        data = model_bytes(model, binary=binary)
        assert token in data
        again = read_bytes(data, tmp_path / "final.mdl")
        assert again.topology == model.topology
        for field in ("tuples", "transition_to_pdf"):
            np.testing.assert_array_equal(getattr(again, field), getattr(model, field))
        np.testing.assert_allclose(again.log_probs, model.log_probs, rtol=1e-6)
        assert model_bytes(again, binary=binary) == data


def test_transition_ids_of_a_chain_model() -> None:
    model = build_transition_model(CHAIN, [(3, 0, 4, 1), (1, 0, 0, 2), (1, 0, 0, 1)])
    np.testing.assert_array_equal(model.tuples, [(1, 0, 0, 1), (1, 0, 0, 2), (3, 0, 4, 1)])
    np.testing.assert_array_equal(model.transition_to_pdf, [-1, 1, 0, 2, 0, 1, 4])
    np.testing.assert_array_equal(transitions_of(model)["phone"], [-1, 1, 1, 1, 1, 3, 3])
    np.testing.assert_array_equal(transitions_of(model)["is_self_loop"], [0, 1, 0, 1, 0, 1, 0])
    np.testing.assert_allclose(model.log_probs, np.log([1, *[0.5] * 6]), rtol=1e-6)
    assert (model.num_pdfs, model.num_phones, model.num_transition_ids) == (5, 3, 6)


def test_a_left_to_right_model() -> None:
    model = small_model()
    np.testing.assert_array_equal(model.transition_to_pdf, [-1, *np.repeat(range(6), 2)])
    np.testing.assert_array_equal(transitions_of(model)["is_self_loop"][1:], [1, 0] * 6)
    np.testing.assert_allclose(np.exp(model.log_probs[1:]), [0.75, 0.25] * 6, rtol=1e-6)


def test_a_gmm_behind_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    means, variances = rng.normal(size=(6, 2, 4)), rng.uniform(0.5, 2, (6, 2, 4))
    weights = np.full((6, 2), 0.5)
    with (tmp_path / "final.mdl").open("wb") as handle:
        triples = np.array([(p, s, (p - 1) * 3 + s) for p in (1, 2) for s in range(3)], np.int32)
        write_left_to_right(BasicTypeWriter(handle), 2, 3, triples, np.full(6, 0.75))
        write_diag_gmms(handle, list(means), list(variances), list(weights))
    data = (tmp_path / "final.mdl").read_bytes()
    assert read_transition_model(tmp_path / "final.mdl").num_pdfs == 6
    assert data.startswith(model_bytes(small_model(), binary=True))
    source = BasicTypeReader.from_bytes(data[data.index(b"<DIMENSION>") :], binary=True)
    source.expect("<DIMENSION>")
    assert source.int32() == 4
    source.expect("<NUMPDFS>")
    assert source.int32() == 6
    for pdf in range(6):
        source.expect("<DiagGMM>")
        source.expect("<GCONSTS>")
        # The constant is the log likelihood of the zero vector, written out.
        normal = np.exp(-0.5 * means[pdf] ** 2 / variances[pdf]) / np.sqrt(2 * np.pi * variances[pdf])
        np.testing.assert_allclose(source.float_vector(), np.log(0.5 * normal.prod(axis=1)), rtol=1e-5)
        source.expect("<WEIGHTS>")
        np.testing.assert_array_equal(source.float_vector(), [0.5, 0.5])
        source.expect("<MEANS_INVVARS>")
        np.testing.assert_allclose(source.float_matrix(), means[pdf] / variances[pdf], rtol=1e-6)
        source.expect("<INV_VARS>")
        np.testing.assert_allclose(source.float_matrix(), 1 / variances[pdf], rtol=1e-6)
        source.expect("</DiagGMM>")
    assert source.remaining == 0


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology((), {}), "empty"),
        (Topology(((HmmState(0, 0, ((1, 1.0),)), FINAL),), {0: 0}), "phones 0 to 0"),
        (Topology(((HmmState(0, 0, ((1, 1.0),)), FINAL),), {2**31 - 1: 0}), "phones 2147483647"),
        (Topology(((HmmState(0, 0, ((1, 1.0),)), FINAL),) * 2, {1: 0}), "an HMM without phones"),
        (Topology(((FINAL,),), {1: 0}), "without an emitting state"),
        (Topology(((HmmState(0, 0, ((2, 1.0),)), FINAL),), {1: 0}), "a state that is not there"),
        (Topology(((HmmState(0, 0, ((-1, 1.0),)), FINAL),), {1: 0}), "a state that is not there"),
        (Topology(((HmmState(0, 0, ((1, 0.5), (1, 0.5))), FINAL),), {1: 0}), "two transitions to one state"),
        (Topology(((HmmState(0, 0, ((1, 0.0),)), FINAL),), {1: 0}), "not positive"),
        (Topology(((HmmState(0, 0, ((1, float("nan")),)), FINAL),), {1: 0}), "not positive"),
        (Topology(((HmmState(0, 0, ()), FINAL),), {1: 0}), "state 0 without transitions"),
        (Topology(((HmmState(0, 0, ((0, 1.0),)), FINAL),), {1: 0}), "no transition reaches"),
        (Topology(((HmmState(1, 1, ((1, 1.0),)), FINAL),), {1: 0}), "pdf classes"),
        (Topology(((HmmState(-1, -1, ((1, 1.0),)), FINAL),), {1: 0}), "non-emitting state 0"),
        (Topology(((HmmState(0, -1, ((1, 1.0),)), FINAL),), {1: 0}), "only one of its two pdf classes"),
        (Topology(((HmmState(0, 0, ((1, 1.0),)), HmmState(0, 0, ())),), {1: 0}), "last state"),
    ],
)
def test_topologies_that_kaldi_refuses(tmp_path: Path, topology: Topology, message: str) -> None:
    text = ["<TransitionModel> <Topology>"]
    for index, entry in enumerate(topology.entries):
        phones = " ".join(str(phone) for phone, one in topology.phone_to_entry.items() if one == index)
        text.append(f"<TopologyEntry> <ForPhones> {phones} </ForPhones>")
        for number, state in enumerate(entry):
            arcs = " ".join(f"<Transition> {to} {probability}" for to, probability in state.transitions)
            classes = f"<ForwardPdfClass> {state.forward_pdf_class} <SelfLoopPdfClass> {state.self_loop_pdf_class}"
            text.append(f"<State> {number} {classes} {arcs} </State>")
        text.append("</TopologyEntry>")
    text.append("</Topology> <Triples> 1\n1 0 0\n</Triples>\n")
    with pytest.raises(DataError, match=f"not a Kaldi transition model: expected an HMM topology .*{message}"):
        read_bytes("\n".join(text).encode(), tmp_path / "final.mdl")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"<Triples> 6", b"<Triples> 2147483647", "transition-states"),
        (b"<Triples> 6", b"<Triples> -1", "transition-states"),
        (b"<Triples> 6", b"<Triples> 5", "expected </Triples>"),
        (b"<Triples> 6", b"<Pairs> 6", "expected <Triples> or <Tuples>"),
        (b"\n2 0 3 \n", b"\n3 0 3 \n", "phone 3 in transition-state 4, which the topology lacks"),
        (b"\n2 0 3 \n", b"\n2 3 3 \n", "HMM state 3 of phone 2 in transition-state 4"),
        (b"\n2 0 3 \n", b"\n2 -1 3 \n", "HMM state -1 of phone 2"),
        (b"\n2 0 3 \n", b"\n2 0 -3 \n", "pdf-ids -3 to 5"),
        (b"\n2 0 3 \n", b"\n2 0 2147483647 \n", "pdf-ids 0 to 2147483647"),
        (b"\n2 0 3 \n", b"\n1 2 2 \n", "transition-state 4, which does not come after"),
        (b"-1.386294 ]", b"]", "expected 13 log probabilities.* found 12"),
        (b"-1.386294 ]", b"0.5 ]", "log probabilities of zero or less.* found 0.5"),
        (b"-1.386294 ]", b"nan ]", "log probabilities of zero or less.* found nan"),
        (b"-1.386294 ]", b"-1e39 ]", "log probabilities of zero or less.* found -inf"),
        (b"<State> 1", b"<State> 2", "expected state 1 .* found state 2"),
        (b"</ForPhones>", b"1 </ForPhones>", "phone 1 twice"),
        (b"<State> 3 </State>", b"<State> 3 <Final> </State>", "found '<Final>'"),
        (b"<TransitionModel>", b"<Nnet3>", "expected <TransitionModel> at byte 0, found '<Nnet3>'"),
    ],
)
def test_models_that_do_not_fit(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    text = model_bytes(small_model(), binary=False)
    assert text.count(old) == 1
    with pytest.raises(DataError, match=f"not a Kaldi transition model: .*{message}") as caught:
        read_bytes(text.replace(old, new), tmp_path / "a model.mdl")
    assert caught.value.location == str(tmp_path / "a model.mdl")


@pytest.mark.parametrize("binary", [True, False])
def test_cut_at_every_byte(tmp_path: Path, binary: bool) -> None:
    data = model_bytes(small_model(), binary=binary)
    whole = read_bytes(data, tmp_path / "final.mdl")
    for length in range(len(data)):
        try:
            model = read_bytes(data[:length], tmp_path / "final.mdl")
        except DataError:
            continue
        # Only the white space behind the last token may be missing.
        assert data[length:].strip() == b""
        np.testing.assert_array_equal(model.log_probs, whole.log_probs)


@pytest.mark.parametrize("binary", [True, False])
def test_each_byte_changed(tmp_path: Path, binary: bool) -> None:
    data = model_bytes(build_transition_model(CHAIN, [(1, 0, 0, 1), (3, 0, 2, 1)]), binary=binary)
    refused = 0
    tracemalloc.start()
    try:
        for position in range(len(data)):
            for change in (0x01, 0x80, 0xFF):
                damaged = data[:position] + bytes([data[position] ^ change]) + data[position + 1 :]
                try:
                    model = read_bytes(damaged, tmp_path / "final.mdl")
                except DataError:
                    refused += 1
                else:
                    assert model.num_transition_ids == 4
                    assert (model.log_probs <= 0).all()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert refused > 1.5 * len(data)


@given(st.binary(max_size=60), st.sampled_from([b"", b"\0B", b"\0B<TransitionModel> <Topology> \x04"]))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes) -> None:
    with pytest.raises(DataError, match="not a Kaldi transition model"):
        read_bytes(head + data, tmp_path_factory.getbasetemp() / "any.mdl")


def test_few_states_cannot_claim_many_transition_ids(tmp_path: Path) -> None:
    # 3,000 transition-states of 3,000 transitions each: 9 million ids in 150 kB.
    arcs = tuple((state, 1 / 3000) for state in range(1, 3001))
    entry = (HmmState(0, 0, arcs), *(HmmState(0, 0, ((3000, 1.0),)) for _ in range(2999)), FINAL)
    model = small_model()
    object.__setattr__(model, "topology", Topology((entry,), {1: 0}))
    object.__setattr__(model, "tuples", np.array([(1, 0, pdf, pdf) for pdf in range(3000)], np.int32))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="expected 9000001 log probabilities"):
            read_bytes(model_bytes(model, binary=True), tmp_path / "final.mdl")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
