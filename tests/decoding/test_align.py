"""Forced alignment: against an exact search over all state sequences, against Kaldi's, and what users get wrong."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_data_dir, write_model
from jobs import assert_refused
from kaldi_files import tree_bytes
from phone_systems import fst_of, make_model, make_tree

from ddnn.decoding.hmm import ContextHmms, transition_costs
from ddnn.decoding.prepare import import_nnet1
from ddnn.kaldi.alignments import job_files, read_alignments, write_pdf_counts
from ddnn.kaldi.archive import iterate_int_vectors
from ddnn.kaldi.fst import ARC, Fst, write_fst
from ddnn.kaldi.nnet1 import Activation, AffineTransform
from ddnn.kaldi.nnet1_file import write_nnet1
from ddnn.kaldi.transition_model import TransitionModel
from ddnn.kaldi.tree import ContextDependency, EventMap
from ddnn.runs.run_status import MODEL_DIGEST, model_digest, read_digest
from ddnn.util.errors import UserError

pytest.importorskip("kaldi_decoder")

from ddnn.decoding.align import Aligner, AlignOptions, align
from ddnn.decoding.training_graph import Lexicon, TrainingGraphs

pytestmark = pytest.mark.usefixtures("forked_children")

RunCli = Callable[..., Any]
WORDS = {1: [((2, 3), 0.1), ((2,), 0.9)], 2: [((3,), 0.0)], 3: [((4, 2), 0.3), ((4, 5), 0.2)]}
"""Of each word the pronunciations and their costs."""
END_COST = 0.1  # where a silence may follow, but does not
SILENCE_COSTS = (0.4, 1.1)  # of no silence, and of phone 1, before the first and behind every word


def lexicon_fst() -> Fst:
    """As utils/make_lexicon_fst.pl: from state 0 to the loop, state 1, or to state 2, before the silence."""
    ways = list(zip((1, 2), SILENCE_COSTS, strict=True))
    arcs = [*((0, 0, 0, cost, to) for to, cost in ways), (2, 1, 0, 0.0, 1)]
    new = 3
    for word, pronunciations in WORDS.items():
        for phones, cost in pronunciations:
            state = 1
            for i, phone in enumerate(phones):
                label, extra = (word, cost) if i == 0 else (0, 0.0)
                if i == len(phones) - 1:
                    arcs += [(state, phone, label, extra + more, to) for to, more in ways]
                else:
                    arcs.append((state, phone, label, extra, new))
                    state, new = new, new + 1
    return fst_of(arcs, {1: 0.0, 2: END_COST})


def pronunciations(words: Sequence[int]) -> Iterator[tuple[list[int], float]]:
    """All phone strings of a transcript, and their costs."""
    silences = [((), SILENCE_COSTS[0]), ((1,), SILENCE_COSTS[1])]
    choices = [silences, *(choice for word in words for choice in (WORDS[word], silences))]
    choices[-1] = [*choices[-1], ((), SILENCE_COSTS[1] + END_COST)]
    for parts in product(*choices):
        yield [phone for phones, _ in parts for phone in phones], sum(cost for _, cost in parts)


def exact_alignment(
    words: Sequence[int], loglikes: np.ndarray, tree: ContextDependency, model: TransitionModel, options: AlignOptions
) -> tuple[float, list[int]]:
    """The best path by trying, from each state at each frame, every number of frames in it and every way to leave it.
    The frames of a state have its forward transition-id first, then self-loops."""
    state_of, is_loop = model.transition_states()
    tuples = [tuple(row) for row in model.tuples.tolist()]

    def best(phones: list[int]) -> tuple[float, list[int]]:
        left = tree.central_position
        padded = [0] * left + phones + [0] * (tree.context_width - 1 - left)

        @cache
        def rest(i: int, h: int, t: int) -> tuple[float, tuple[int, ...]]:
            if i == len(phones):
                return (0.0, ()) if t == len(loglikes) else (math.inf, ())
            states = model.topology.states(phones[i])
            if h == len(states) - 1:
                return rest(i + 1, 0, t)
            classes = states[h].forward_pdf_class, states[h].self_loop_pdf_class
            found: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
            if classes[0] < 0:
                for to, p in states[h].transitions:
                    cost, ids = rest(i, to, t)
                    found.append((cost - options.transition_scale * math.log(p), ids))
                return min(found)
            f, g = (tree.pdf(padded[i : i + tree.context_width], c) for c in classes)
            first = int(np.flatnonzero(state_of == tuples.index((phones[i], h, f, g)) + 1)[0])
            loop = next((first + k for k, (to, _) in enumerate(states[h].transitions) if to == h), 0)
            log_loop = float(model.log_probs[loop]) if loop else -math.inf
            log_leave = math.log(1 - math.exp(log_loop))
            for k, (to, _) in enumerate(states[h].transitions):
                if to == h:
                    continue
                forward = options.self_loop_scale * log_leave
                forward += options.transition_scale * (float(model.log_probs[first + k]) - log_leave)
                for frames in range(1, len(loglikes) - t + 1 if loop else 2):
                    if t + frames > len(loglikes):
                        break
                    acoustic = loglikes[t, f] + loglikes[t + 1 : t + frames, g].sum()
                    loops = options.self_loop_scale * log_loop * (frames - 1) if frames > 1 else 0.0
                    cost, ids = rest(i, to, t + frames)
                    cost -= forward + loops + options.acoustic_scale * acoustic
                    found.append((cost, (first + k, *(loop,) * (frames - 1), *ids)))
            return min(found)

        cost, ids = rest(0, 0, 0)
        return cost, list(ids)

    assert not is_loop[0]
    return min((best(phones)[0] + cost, best(phones)[1]) for phones, cost in pronunciations(words))


@pytest.mark.parametrize(("width", "central"), [(1, 0), (2, 0), (2, 1), (3, 1), (3, 0), (4, 1), (4, 3)])
def test_the_best_of_all_state_sequences(width: int, central: int, tmp_path: Path) -> None:
    tree = make_tree(width, central)
    model = make_model(tree)
    options = AlignOptions(1000.0, 0.0, acoustic_scale=0.3, transition_scale=0.7, self_loop_scale=0.4)
    hmms = ContextHmms(tree, model, options.transition_scale, options.self_loop_scale, tmp_path)
    graphs = TrainingGraphs(Lexicon(lexicon_fst()), hmms, model.transition_to_pdf)
    rng = np.random.default_rng(width * 10 + central)
    transcripts = {"none": [], "one": [1], "two": [3, 1], "three": [2, 3, 2], "same": [1, 1]}
    aligner, used = Aligner(graphs, transcripts, options), set()
    for utterance, words in transcripts.items():
        for frames in (6, 11):
            loglikes = (rng.normal(size=(frames, tree.num_pdfs)) * 4).astype(np.float32)
            cost, expected = exact_alignment(words, loglikes.astype(np.float64), tree, model, options)
            aligned = aligner(utterance, loglikes)
            assert cost < math.inf and aligned.transition_ids is not None
            assert aligned.transition_ids.tolist() == expected, (utterance, frames)
            assert aligned.transition_ids.dtype == np.int32 and not aligned.retried and not aligned.problem
            used |= {tuple(model.tuples[model.transition_states()[0][i] - 1, :2].tolist()) for i in expected}
    assert len(used) >= 6


def test_costs_of_transitions() -> None:
    model = make_model(make_tree(1, 0))
    costs = transition_costs(model, 0.5, 0.1)
    silence = [1, 2, 3]  # of the state 0 of phone 1: its self-loop, and two forward transitions
    assert [costs.loop_id[i] for i in silence] == [1, 1, 1]
    np.testing.assert_allclose([costs.loop[i] for i in silence], -0.1 * np.log(0.3), rtol=1e-6)
    np.testing.assert_allclose([costs.leave[i] for i in silence], -0.1 * np.log(0.7), rtol=1e-6)
    np.testing.assert_allclose(
        [costs.forward[i] for i in silence[1:]], -0.5 * np.log([0.3 / 0.7, 0.4 / 0.7]), rtol=1e-6
    )
    alone = int(np.flatnonzero(model.tuples[:, 0] == 4)[0]) + 1
    [forward] = np.flatnonzero(model.transition_states()[0] == alone)
    assert (costs.loop_id[forward], costs.leave[forward], costs.forward[forward]) == (0, 0.0, 0.0)


def test_a_state_that_is_never_left(tmp_path: Path) -> None:
    """As in Kaldi its cost is that of a probability of 1e-10."""
    model = make_model(make_tree(1, 0))
    model.log_probs[1] = 0.0
    np.testing.assert_allclose(transition_costs(model, 1.0, 1.0).leave[1], -math.log(1e-10), rtol=1e-6)


def test_what_cannot_be_aligned(tmp_path: Path) -> None:
    tree = make_tree(3, 1)
    model = make_model(tree)
    hmms = ContextHmms(tree, model, 1.0, 0.1, tmp_path)
    graphs = TrainingGraphs(Lexicon(lexicon_fst()), hmms, model.transition_to_pdf)
    transcripts = {"short": [1, 2, 1], "unknown": [1, 9], "word-of-another-state": [0]}
    aligner = Aligner(graphs, transcripts, AlignOptions())
    loglikes = np.zeros((3, tree.num_pdfs), np.float32)
    assert "no transcript" in aligner("missing", loglikes).problem
    assert "fewer frames" in aligner("short", loglikes).problem
    for utterance in ("unknown", "word-of-another-state"):
        assert "no way through L.fst" in aligner(utterance, loglikes).problem


# A system whose phones 1, 2, 3 have one state and pdf each, and whose words a, b, c are one of them.
@pytest.fixture
def system(tmp_path: Path) -> Path:
    """`run`, `data`, `lang`, `final.mdl`, `tree`."""
    weight = np.eye(3, 4, dtype=np.float32) * 20
    write_nnet1(tmp_path / "x.nnet", (AffineTransform(weight, np.zeros(3, np.float32)), Activation("softmax", 3)))
    write_pdf_counts(tmp_path / "counts", np.array([30.5, 20.5, 10.5]))
    import_nnet1(tmp_path / "x.nnet", None, tmp_path / "run", tmp_path / "counts")
    write_model(tmp_path / "final.mdl")
    nodes = (0, 1, 2, EventMap(0, None, (None, 0, 1, 2)))
    (tmp_path / "tree").write_bytes(tree_bytes(ContextDependency(1, 0, nodes, 3), binary=True))
    (tmp_path / "lang").mkdir()
    arcs = [(0, 1, 1, 0.0, 0), (0, 2, 2, 0.0, 0), (0, 3, 3, 0.0, 0)]
    write_fst(tmp_path / "lang/L.fst", fst_of(arcs, {0: 0.0}))
    (tmp_path / "lang/words.txt").write_text("<eps> 0\na 1\nb 2\nc 3\n<unk> 4\n")
    (tmp_path / "lang/oov.int").write_text("3\n")
    labels = {"u1": [0, 0, 1, 2], "u2": [2, 2, 2], "u3": [1, 0, 0, 0, 1], "u4": [0, 1], "u5": [2]}
    write_data_dir(tmp_path / "data", {name: np.eye(4, dtype=np.float32)[ids] for name, ids in labels.items()})
    (tmp_path / "data/text").write_text("u1 a b c\nu2 c\nu3 b a b\nu4 a b\nu5 c\n")
    return tmp_path


def arguments(system: Path, **other: Any) -> list[Any]:
    values = {"data": "data", "lang": "lang", "model": "final.mdl", "tree": "tree", "out": "ali"}
    options = {name: system / value for name, value in values.items()} | {"device": "cpu"} | other
    return ["align", system / "run", *(part for name, value in options.items() for part in (f"--{name}", value))]


def ids_of(path: Path) -> dict[str, np.ndarray]:
    return {name: ids for file in job_files(path, "ali.{}.gz") for name, ids in iterate_int_vectors(file)}


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_alignment_dir(system: Path, run_cli: RunCli, jobs: int) -> None:
    result = run_cli(*arguments(system, jobs=jobs), "--json")
    assert result.exit_code == 0, result.stderr
    out = system / "ali"
    names = [f"ali.{job + 1}.gz" for job in range(jobs)]
    assert sorted(path.name for path in out.iterdir()) == [*names, "final.mdl", "model.sha256", "num_jobs", "tree"]
    assert (out / "num_jobs").read_text() == f"{jobs}\n"
    assert read_digest(out / MODEL_DIGEST) == (model_digest(system / "run"), system / "run")
    for name in ("final.mdl", "tree"):
        assert (out / name).read_bytes() == (system / name).read_bytes()
    pdfs = {name: ids.tolist() for name, ids in read_alignments(out).pdfs.items()}
    assert pdfs == {"u1": [0, 0, 1, 2], "u2": [2, 2, 2], "u3": [1, 0, 0, 0, 1], "u4": [0, 1], "u5": [2]}
    # Of pdf p the self-loop is 2p + 1 and the forward transition 2p + 2, which comes first.
    assert ids_of(out)["u1"].tolist() == [2, 1, 4, 6]
    assert json.loads(result.stdout) == {
        "out": str(out), "utterances": 5, "aligned": 5, "frames": 15, "retried": [], "failed": {}, "oov": {},
    }  # fmt: skip


def test_processes_give_the_same_alignment(system: Path, run_cli: RunCli) -> None:
    alone, three = (system / name for name in ("alone", "three"))
    for out, jobs in ((alone, 1), (three, 3)):
        assert run_cli(*arguments(system, out=out, jobs=jobs)).exit_code == 0
    expected, found = ids_of(alone), ids_of(three)
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_utterances_that_fail_are_named_and_omitted(
    system: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture
) -> None:
    (system / "data/text").write_text("u1 a b c\nu2 a b c a\nu3 b a b\nu4 zebra zoo\nu6 a\n")
    result = run_cli(*arguments(system), "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    short = "no final state reached (a wrong transcript, or fewer frames than HMM states)"
    assert summary["failed"] == {short: ["u2"], "no transcript in text": ["u5"]}
    assert (summary["utterances"], summary["aligned"], summary["frames"]) == (5, 3, 11)
    assert summary["oov"] == {"zebra": 1, "zoo": 1}
    assert "1 utterance: no transcript in text: u5" in caplog.messages
    assert ids_of(system / "ali").keys() == {"u1", "u3", "u4"}
    assert read_alignments(system / "ali").pdfs["u4"].tolist() == [2, 2]  # oov.int is the word c
    shutil.rmtree(system / "ali")
    text = run_cli(*arguments(system)).stdout
    assert "3 of 5 utterances aligned, 11 frames; 2 words outside words.txt" in text


def test_priors_are_subtracted(system: Path, run_cli: RunCli) -> None:
    """Of two words that the frames fit alike, the one whose pdf is rarer gets more of them."""
    write_data_dir(system / "data", {"u4": np.zeros((4, 4), np.float32)})
    for counts, expected in (([100.5, 1.5, 1.5], [0, 1, 1, 1]), ([1.5, 100.5, 1.5], [0, 0, 0, 1])):
        write_pdf_counts(system / "run/ali_train_pdf.counts", np.array(counts))
        out = system / str(counts[0])
        assert run_cli(*arguments(system, out=out)).exit_code == 0
        assert read_alignments(out).pdfs["u4"].tolist() == expected


def test_nothing_is_left_of_an_alignment_without_result(system: Path, run_cli: RunCli) -> None:
    (system / "data/text").write_text("u9 a\n")
    result = run_cli(*arguments(system))
    assert_refused(result, str(system / "data"), "none of 5 utterances could be aligned", "no transcript in text")
    assert not (system / "ali").exists() and not list(system.glob(".*"))


def test_another_alignment_is_not_overwritten(system: Path, run_cli: RunCli) -> None:
    (system / "ali").mkdir()
    (system / "ali/ali.1.gz").write_bytes(b"mine")
    assert_refused(run_cli(*arguments(system)), str(system / "ali"), "exists already", "name another")
    assert (system / "ali/ali.1.gz").read_bytes() == b"mine"


def _other_model(system: Path) -> None:
    write_model(system / "final.mdl", range(2))


def _other_tree(system: Path) -> None:
    (system / "tree").write_bytes(
        tree_bytes(ContextDependency(1, 0, (0, 1, EventMap(0, None, (None, 0, 1))), 2), binary=False)
    )


def _tree_in_another_order(system: Path) -> None:
    nodes = (0, 1, 2, EventMap(0, None, (None, 1, 0, 2)))
    (system / "tree").write_bytes(tree_bytes(ContextDependency(1, 0, nodes, 3), binary=False))


def _other_phones(system: Path) -> None:
    write_fst(system / "lang/L.fst", fst_of([(0, 1, 1, 0.0, 0), (0, 7, 2, 0.0, 0)], {0: 0.0}))


def _endless_lexicon(system: Path) -> None:
    write_fst(system / "lang/L.fst", fst_of([(0, 1, 1, 0.0, 1), (1, 0, 0, -1.0, 0), (0, 0, 0, 0.5, 1)], {0: 0.0}))


def _empty_lexicon(system: Path) -> None:
    empty = Fst(-1, np.zeros(0, np.float32), np.zeros(1, np.int64), np.zeros(0, ARC))
    write_fst(system / "lang/L.fst", empty)


def _unknown_word(system: Path) -> None:
    (system / "data/text").write_text("u1 a zebra\n")
    (system / "lang/oov.int").unlink()


def _damaged_oov(system: Path) -> None:
    (system / "data/text").write_text("u1 a zebra\n")
    (system / "lang/oov.int").write_text("<unk>\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: (s / "tree").unlink(), ("tree", "cannot read a Kaldi tree", "beside final.mdl")),
        (lambda s: (s / "final.mdl").unlink(), ("final.mdl", "cannot read a Kaldi transition model")),
        (_other_model, ("final.mdl", "final.mdl has 2 pdfs, the network 3", "of one system")),
        (_other_tree, ("tree", "the tree has 2 pdfs, final.mdl 3", "of one system")),
        (_tree_in_another_order, ("tree", "HMM state 0 of phone", "that final.mdl lacks", "of one system")),
        (_other_phones, ("lang/L.fst", "L.fst has the phone-id 7, for which final.mdl has no HMM", "not L_disambig.fst")),
        (_endless_lexicon, ("lang/L.fst", "a cycle of epsilons with a negative cost", "prepare_lang.sh")),
        (_empty_lexicon, ("lang/L.fst", "L.fst has no states", "prepare_lang.sh")),
        (lambda s: (s / "lang/L.fst").unlink(), ("lang/L.fst", "cannot read the FST L.fst")),
        (lambda s: (s / "lang/words.txt").unlink(), ("lang/words.txt", "the symbol table does not exist")),
        (lambda s: (s / "data/text").unlink(), ("data/text", "the transcripts does not exist")),
        (_unknown_word, ("lang/oov.int", "words.txt lacks 'zebra'", "prepare_lang.sh")),
        (_damaged_oov, ("lang/oov.int", "expected the word-id for words outside words.txt")),
        (lambda s: (s / "run/ali_train_pdf.counts").unlink(), ("run", "there is no ali_train_pdf.counts")),
    ],
)  # fmt: skip
def test_what_users_get_wrong(
    system: Path, run_cli: RunCli, damage: Callable[[Path], None], said: tuple[str, ...]
) -> None:
    damage(system)
    assert_refused(run_cli(*arguments(system)), str(system / said[0]), *said[1:])
    assert not (system / "ali").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam": 0}, "--beam"), ({"beam": "nan"}, "--beam"), ({"retry_beam": 5}, "not wider than the beam 10"),
        ({"acoustic_scale": 0}, "--acoustic-scale"), ({"self_loop_scale": -1}, "--self-loop-scale"),
    ],
)  # fmt: skip
def test_options_that_contradict(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        AlignOptions(**{name: float(value) for name, value in options.items()})
    assert AlignOptions(retry_beam=0.0).beam == 10.0


def test_without_the_decoder(system: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaldi_decoder", None)
    result = run_cli(*arguments(system))
    assert result.exit_code == 2 and not (system / "ali").exists()
    assert "packages that are not installed (kaldi_decoder)" in result.stderr and "ddnn[decode]" in result.stderr


def lang_dir(shared: Path, path: Path) -> Path:
    path.mkdir()
    for file in (
        shared / "golden/smbr/lang/L.fst",
        shared / "golden/smbr/lang/oov.int",
        shared / "an4/graph/words.txt",
    ):
        shutil.copyfile(file, path / file.name)
    return path


def kaldi_network(shared: Path, network: Path, out: Path) -> Path:
    kaldi = shared / "an4/kaldi_nnet1"
    import_nnet1(network, kaldi / "feature_transform.nnet", out, kaldi / "ali_train_pdf.counts")
    return out


def data_dir(feats: Path, text: Path, path: Path, every: int = 1) -> Path:
    """Every so-many-th utterance."""
    path.mkdir()
    lines = (line.split(None, 1) for line in feats.read_text().splitlines()[::every])
    (path / "feats.scp").write_text("".join(f"{name} {feats.parent / place}\n" for name, place in lines))
    shutil.copyfile(text, path / "text")
    return path


def assert_as_kaldi(out: Path, expected: Path) -> int:
    """How many utterances are aligned; each as Kaldi's, to the transition-id."""
    kaldi, found = dict(iterate_int_vectors(expected)), ids_of(out)
    assert found.keys() <= kaldi.keys()
    assert [name for name, ids in found.items() if not np.array_equal(ids, kaldi[name])] == []
    return len(found)


def test_an4_is_aligned_as_by_kaldi(shared: Path, tmp_path: Path) -> None:
    """158 of the 948 utterances."""
    an4, golden = shared / "an4", shared / "golden/smbr"
    run = kaldi_network(shared, an4 / "kaldi_nnet1/rbm_ce.nnet", tmp_path / "run")
    data = data_dir(an4 / "train/feats.scp", an4 / "train/text", tmp_path / "data", every=6)
    paths = (lang_dir(shared, tmp_path / "lang"), an4 / "ali/final.mdl", an4 / "ali/tree", tmp_path / "ali")
    result = align(run, data, *paths, AlignOptions(), "cpu")
    assert (result.aligned, result.retried, result.failed, result.oov) == (158, (), {}, {})
    assert assert_as_kaldi(tmp_path / "ali", golden / "an4_ali.1.gz") == 158


@pytest.mark.parametrize(
    ("text", "expected", "retried"),
    [
        ("text", "aligned.1.gz", set()),
        ("wrong_text", "wrong_aligned.1.gz", {"mblw-an2-mblw-b", "fash-an254-fash-b", "fash-cen2-fash-b"}),
    ],
)
def test_right_and_wrong_transcripts_as_by_kaldi(
    shared: Path, tmp_path: Path, text: str, expected: str, retried: set[str]
) -> None:
    small, ali = shared / "golden/smbr/small", shared / "an4/ali"
    run = kaldi_network(shared, small / "init.nnet", tmp_path / "run")
    data = data_dir(small / "train.scp", small / text, tmp_path / "data")
    paths = (lang_dir(shared, tmp_path / "lang"), ali / "final.mdl", ali / "tree", tmp_path / "ali")
    result = align(run, data, *paths, AlignOptions(), "cpu")
    assert (set(result.retried), result.failed) == (retried, {})
    assert assert_as_kaldi(tmp_path / "ali", small / expected) == 12
