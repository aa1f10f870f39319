"""Word error rates without Kaldi: Kaldi's own log-likelihoods, a graph made by hand, and input that cannot be."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import loop_of_words, write_graph_dir, write_model
from kaldi_files import read_matrix

from ddnn.decoding.graph import DecodingGraph, read_graph
from ddnn.decoding.options import DecodeOptions, read_choice
from ddnn.decoding.score import as_json, render_text, score
from ddnn.decoding.search import _output_labels, decode_utterances
from ddnn.decoding.word_errors import (
    UtteranceScore,
    align_words,
    compare_hypotheses,
    read_reference,
    speaker_numbers,
    wer_interval,
)
from ddnn.kaldi.alignments import TRANSITION_DIGEST
from ddnn.kaldi.archive import read_scp, write_matrices
from ddnn.kaldi.fst import ARC, Fst, write_fst
from ddnn.kaldi.nnet1 import Activation, AddShift, AffineTransform, Rescale, Splice
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.runs.run_status import FINAL, MODEL_DIGEST, model_digest
from ddnn.util import pool
from ddnn.util.errors import DataError, UserError

pytestmark = pytest.mark.usefixtures("forked_children")

pytest.importorskip("kaldi_decoder")
pytest.importorskip("kaldialign")

ONE = DecodeOptions((1.0,))
NOTE = (
    "the scale was chosen on this text, which makes its word error rate optimistic: choose it on a development set, by "
    "--out DEV, and give --acoustic-scale-from DEV/score.json here"
)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A directory with graph/, final.mdl, text and loglikes.scp; the second utterance has `c` for `b`."""
    write_graph_dir(tmp_path / "graph")
    write_model(tmp_path / "final.mdl")
    (tmp_path / "text").write_text("u1 a b a\nu2 a b\nu3\n")
    write_loglikes(tmp_path, {"u1": spoken(0, 1, 0), "u2": spoken(0, 2), "u3": spoken(2)})
    return tmp_path


def spoken(*pdfs: int) -> np.ndarray:
    """Three frames of each pdf, clearly."""
    return np.where(np.repeat(pdfs, 3)[:, None] == np.arange(3), 0.0, -20.0).astype(np.float32)


def write_loglikes(folder: Path, matrices: Mapping[str, np.ndarray]) -> None:
    write_matrices(folder / "loglikes.ark", folder / "loglikes.scp", matrices.items())


def run(folder: Path, options: DecodeOptions = ONE, loglikes: str = "loglikes.scp", **changed: Any) -> Any:
    paths = {"graph_dir": folder / "graph", "model": folder / "final.mdl", "text": folder / "text", **changed}
    return score(folder / loglikes, options=options, **paths)


@pytest.mark.parametrize("loglikes", ["loglikes.scp", "loglikes.ark", "."])
def test_counts_of_every_kind(toy: Path, loglikes: str) -> None:
    (only,) = run(toy, loglikes=loglikes).scales
    assert [u.hypothesis for u in only.utterances] == [("a", "b", "a"), ("a", "c"), ("c",)]
    assert (only.insertions, only.deletions, only.substitutions, only.words) == (1, 0, 1, 5)
    assert only.wer == pytest.approx(40.0) and only.sentence_errors == 2 and only.not_final == ()


def test_score_and_compare_wer_give_the_same_interval(toy: Path) -> None:
    """Percentiles over utterances where speakers are not known, also where a draw of u3 alone has no words."""
    (only,) = run(toy, out=toy / "out").scales
    assert only.interval_over == "utterances" and only.interval[0] < only.wer < only.interval[1]
    assert compare_hypotheses(toy / "text", (toy / "out", toy / "out")).intervals == (only.interval, only.interval)
    low, high = only.interval
    assert f"95 % percentile interval {low:.2f} .. {high:.2f} by utterances" in render_text(run(toy))


def test_scales_in_order_and_the_best_marked(toy: Path) -> None:
    # A word costs 0.5: at a very small scale no second word pays.
    (toy / "text").write_text("u1 a b a\nu2 a b\nu3 b\n")
    result = run(toy, DecodeOptions((0.001, 1.0, 0.9)))
    assert [s.acoustic_scale for s in result.scales] == [0.001, 1.0, 0.9] and result.best == 1
    assert result.scales[0].deletions >= 2
    low, high = result.scales[1].interval
    assert 0 <= low < 100 / 3 < high
    text = render_text(result, alignments=True)
    assert [line.endswith("*") for line in text.splitlines()[:3]] == [False, True, False]
    assert "ref: a b\n  hyp: a c" in text and "ref: b\n  hyp: c" in text
    plain = json.loads(json.dumps(as_json(result, alignments=True), allow_nan=False))
    assert plain["best"] == 1.0 and plain["wer"] == pytest.approx(100 / 3) and plain["scales"][1]["substitutions"] == 2
    assert plain["alignments"]["u3"] == [["b", "c"]] and "alignments" not in as_json(result)


def test_kaldis_loglikelihoods_decode_to_the_reference(an4: Path, kaldi_nnet1: Path, tmp_path: Path) -> None:
    reference = (an4 / "test" / "text").read_text().splitlines()[:3]
    (tmp_path / "text").write_text("\n".join(reference) + "\n")
    for graph in ("graph", "graph_ug"):
        result = score(
            kaldi_nnet1 / "loglikes_first3.ark", graph_dir=an4 / graph, model=an4 / "ali" / "final.mdl",
            text=tmp_path / "text", options=DecodeOptions((0.1,)),
        )  # fmt: skip
        # The network takes the B of the third utterance for a P, in Kaldi too: its 4.14 % come out below.
        right = [line.split()[1:] for line in reference]
        right[2][0] = "P"
        assert [list(u.hypothesis) for u in result.scales[0].utterances] == right


def kaldis_loglikes(an4: Path, kaldi_nnet1: Path) -> Iterator[tuple[str, np.ndarray]]:
    """What Kaldi's nnet-forward gives for the test set: pre-softmax activations minus log priors."""
    counts = np.array((kaldi_nnet1 / "ali_train_pdf.counts").read_text().strip().strip("[]").split(), float)
    network = (*read_nnet1(kaldi_nnet1 / "feature_transform.nnet"), *read_nnet1(kaldi_nnet1 / "rbm_ce.nnet"))
    for entry in read_scp(an4 / "test" / "feats.scp"):
        x = read_matrix(entry)
        for component in network:
            if isinstance(component, Splice):
                rows = np.arange(len(x))[:, None] + component.offsets
                x = x[rows.clip(0, len(x) - 1)].reshape(len(x), -1)
            elif isinstance(component, AddShift):
                x = x + component.shift
            elif isinstance(component, Rescale):
                x = x * component.scale
            elif isinstance(component, AffineTransform):
                x = x @ component.weight.T + component.bias
            elif isinstance(component, Activation) and component.kind == "sigmoid":
                x = 1 / (1 + np.exp(-x))
        yield entry.key, (x - np.log(counts / counts.sum())).astype(np.float32)


def test_kaldis_word_error_rate(an4: Path, kaldi_nnet1: Path, tmp_path: Path) -> None:
    write_matrices(tmp_path / "loglikes.ark", tmp_path / "loglikes.scp", kaldis_loglikes(an4, kaldi_nnet1))
    result = score(
        tmp_path, graph_dir=an4 / "graph", model=an4 / "ali" / "final.mdl", text=an4 / "test" / "text",
        options=DecodeOptions((0.1,)),
    )  # fmt: skip
    (only,) = result.scales
    assert (only.insertions, only.deletions, only.substitutions, only.words) == (5, 2, 25, 773)
    assert round(only.wer, 2) == 4.14 and only.not_final == ()
    assert (an4 / "test" / "utt2spk").exists() and only.interval_over == "speakers"
    numbers = speaker_numbers(an4 / "test" / "utt2spk", [u.utterance for u in only.utterances])
    errors = [u.insertions + u.deletions + u.substitutions for u in only.utterances]
    assert only.interval == wer_interval(errors, [len(u.reference) for u in only.utterances], numbers)
    assert only.interval[0] < 4.14 < only.interval[1]


def test_several_processes_give_the_result_of_one(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them than utterances; errors are those of the first utterance that has one. Progress counts all."""
    started, advanced = [], [0, 0]
    start = pool.WorkerPool.start
    monkeypatch.setattr(pool.WorkerPool, "start", lambda *args: (started.append(1), start(*args))[1])

    @contextmanager
    def counter(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        def advance(number: int) -> None:
            advanced[0] += number

        advanced[:] = [0, total]
        yield advance

    monkeypatch.setattr("ddnn.decoding.score.frame_counter", counter)
    options = DecodeOptions((0.001, 1.0), word_insertion_penalties=(0.0, 0.5))
    expected = run(toy, options)
    for jobs, processes in ((2, 2), (9, 3)):
        started.clear()
        assert run(toy, options, jobs=jobs) == expected
        assert len(started) == 2 * processes, "for each penalty"
        assert advanced == [6, 6]
    empty = np.zeros((0, 3), np.float32)
    write_loglikes(toy, {"u1": spoken(0), "u2": empty, "u3": empty})
    with pytest.raises(DataError, match="u2"):
        run(toy, options, jobs=2)


def test_an_utterance_that_ends_within_a_word_is_counted(toy: Path) -> None:
    # No self-loops: an utterance of one frame ends too early, one of three too late.
    arcs, final = np.array([(2, 1, 0, 1), (4, 0, 0, 2)], ARC), np.array([np.inf, np.inf, 0], np.float32)
    write_fst(toy / "graph" / "HCLG.fst", Fst(0, final, np.array([0, 1, 2, 2]), arcs))
    write_loglikes(toy, {"u1": spoken(0)[:1], "u2": spoken(0, 1)[2:4], "u3": spoken(0)})
    (only,) = run(toy).scales
    assert only.not_final == ("u1", "u3") and [u.hypothesis for u in only.utterances] == [("a",), ("a",), ()]
    assert "2 utterances did not reach the end of the graph" in render_text(run(toy))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((4, 2), np.float32), r"u2.*4x2.*3 pdfs"),
        (np.zeros((4, 4), np.float32), r"u2.*4x4"),
        (np.zeros((0, 3), np.float32), r"u2.*frame"),
        (np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), r"u2.*pdf 1 in frame 1 is nan"),
        (np.array([[0, -np.inf, 0]], np.float32), r"u2.*-inf"),
        (np.array([[0, 1e300, 0]]), r"u2.*inf"),
    ],
)
def test_matrices_that_cannot_be_decoded(toy: Path, matrix: np.ndarray, message: str) -> None:
    graph = read_graph(toy / "graph", toy / "final.mdl")
    with pytest.raises(DataError, match=message):
        list(decode_utterances([("u1", spoken(0)), ("u2", matrix)], graph, ONE))


def test_pdfs_that_were_never_seen_do_not_disturb(toy: Path) -> None:
    graph = read_graph(toy / "graph", toy / "final.mdl")
    matrix = spoken(0, 1)
    matrix[:, 2] = -1.8e19
    ((_, _, (hypothesis,)),) = decode_utterances([("u", matrix)], graph, ONE)
    assert hypothesis.words == ("a", "b") and hypothesis.reached_final


def test_other_utterances_than_the_reference(toy: Path) -> None:
    for loglikes in ("loglikes.scp", "loglikes.ark"):
        (toy / "text").write_text("u1 a b a\nu2 a b\n")
        with pytest.raises(DataError, match=r"1 utterances have no reference \(u3\)"):
            run(toy, loglikes=loglikes)
        (toy / "text").write_text("".join(f"u{n} a\n" for n in range(1, 12)))
        with pytest.raises(DataError, match=r"8 utterances of the reference.*and 3 more"):
            run(toy, loglikes=loglikes)


def test_references_that_cannot_be(toy: Path) -> None:
    for wrong, message in (
        (b"u1\nu2\n", "no words"),
        (b"u1 a\nu1 b\n", "utterance u1 occurs twice, in lines 1 and 2"),
        (b"u1 \xff\n", "UTF-8"),
    ):
        (toy / "text").write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            read_reference(toy / "text")
    with pytest.raises(DataError, match="no log-likelihoods") as caught:
        run(toy, loglikes="none.scp")
    assert caught.value.hint == "make them with ddnn decode-prep"


def test_a_reference_of_other_words_than_the_graphs(toy: Path) -> None:
    """Not a word error rate of 100 % after an hour."""
    (toy / "text").write_text("u1 A B A\nu2 A B\nu3\n")
    with pytest.raises(DataError, match=r"no word of the text is in .*words\.txt, not even A") as caught:
        run(toy)
    assert "upper and lower case" in str(caught.value.hint)


def test_a_run_dir_in_place_of_its_log_likelihoods(toy: Path) -> None:
    (toy / "run").mkdir()
    for name in ("b", "a"):
        (toy / "run" / name).mkdir()
        write_loglikes(toy / "run" / name, {"u1": spoken(0)})
    with pytest.raises(DataError, match=r"no log-likelihoods at loglikes\.scp") as caught:
        run(toy, loglikes="run")
    assert caught.value.hint == f"name the --out of ddnn decode-prep, such as {toy}/run/a"


def change(toy: Path, **fields: float) -> None:
    fst = loop_of_words()
    for name, value in fields.items():
        fst.arcs[name][0] = value
    write_fst(toy / "graph" / "HCLG.fst", fst)


def test_graphs_that_do_not_fit(toy: Path) -> None:
    change(toy, ilabel=7)
    with pytest.raises(DataError, match=r"transition-id 7, but final\.mdl has 6"):
        run(toy)
    change(toy, olabel=9)
    with pytest.raises(DataError, match="word id 9"):
        run(toy)
    empty = np.zeros(0, ARC)
    write_fst(toy / "graph" / "HCLG.fst", Fst(-1, np.zeros(0, np.float32), np.zeros(1, np.int64), empty))
    with pytest.raises(DataError, match="no way to a final"):
        run(toy)
    change(toy)
    for content, said in (
        (b"616\n", r"num_pdfs says 616, but final\.mdl has 3 pdfs"),
        (b"\xff", "num_pdfs says \ufffd, but"),
    ):
        (toy / "graph" / "num_pdfs").write_bytes(content)
        with pytest.raises(DataError, match=said):
            run(toy)


def test_a_graph_in_which_a_decoder_would_never_end(toy: Path) -> None:
    change(toy, ilabel=0, weight=-0.5)
    with pytest.raises(DataError, match="negative cost"):
        run(toy)
    change(toy, ilabel=0, weight=0.0)
    assert isinstance(read_graph(toy / "graph", toy / "final.mdl"), DecodingGraph)


def test_every_option_reaches_the_decoder(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaldi_decoder = pytest.importorskip("kaldi_decoder")
    given: list[Any] = []
    real = kaldi_decoder.FasterDecoder

    def decoder(fst: Any, config: Any) -> Any:
        given.append((config.beam, config.max_active, config.min_active))
        return real(fst, config)

    monkeypatch.setattr(kaldi_decoder, "FasterDecoder", decoder)
    run(toy, DecodeOptions((1.0,), beam=9.5, max_active=77, min_active=5))
    assert set(given) == {(9.5, 77, 5)}


def test_options_that_cannot_be() -> None:
    scales: tuple[tuple[float, ...], ...] = ((), (0.0,), (float("nan"),), (0.1, 0.1))
    for options in (
        *({"acoustic_scales": values} for values in scales),
        {"word_insertion_penalties": ()}, {"word_insertion_penalties": (-0.5,)}, {"word_insertion_penalties": (1.0, 1.0)},
        {"beam": 0.0}, {"beam": float("nan")}, {"min_active": 9, "max_active": 9},
    ):  # fmt: skip
        with pytest.raises(UserError, match="expected"):
            DecodeOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["kaldi_decoder", "kaldifst", "kaldialign"])
def test_the_extra_is_named_where_it_is_missing(toy: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == missing:
            raise ImportError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'ddnn\[decode\]'"):
        run(toy)


def test_words_that_look_like_blanks() -> None:
    utterance = UtteranceScore("u", ("<eps>", "***", "b"), ("***", "c"), 0, 1, 1, True)
    assert align_words(utterance) == [("<eps>", None), ("***", "***"), ("b", "c")]


def test_the_graph_of_another_model_is_refused(toy: Path) -> None:
    """With as many pdfs and transition-ids, which only no longer belong together."""
    graph = loop_of_words()
    arcs = graph.arcs.copy()
    entering = arcs["ilabel"] % 2 == 0
    arcs["ilabel"][entering & (arcs["ilabel"] > 0)] = [4, 6, 2]
    write_fst(toy / "graph" / "HCLG.fst", Fst(graph.start, graph.final, graph.offsets, arcs))
    with pytest.raises(DataError, match=r"the graph was made with another model than .*final.mdl: only 0 %"):
        run(toy)


def test_log_likelihoods_of_another_tree_are_refused(toy: Path) -> None:
    tree = read_transition_model(toy / "final.mdl").digest
    for digest, refused in (("", False), (tree, False), ("0" * 64, True)):
        (toy / TRANSITION_DIGEST).write_text(f"{digest}\n")
        if refused:
            with pytest.raises(DataError, match=r"another tree than that of the network of loglikes.scp"):
                run(toy)
        else:
            run(toy)


@pytest.mark.parametrize("decoded", ["run/decode", "elsewhere/of/run"])
def test_log_likelihoods_of_the_model_of_before_are_named(
    toy: Path, monkeypatch: pytest.MonkeyPatch, decoded: str
) -> None:
    """Wherever they lie: the run dir is named beside them. What is not known is taken as it is."""
    monkeypatch.chdir(toy)
    folder = Path(decoded)
    for other in (Path("run"), folder, folder.parent.parent):  # that of another run above the log-likelihoods
        other.mkdir(parents=True, exist_ok=True)
        (other / FINAL).write_bytes(b"another network")
    Path("run", FINAL).write_bytes(b"four epochs")
    digest = model_digest(Path("run"))
    write_loglikes(folder, {"u1": spoken(0, 1, 0), "u2": spoken(0, 2), "u3": spoken(2)})

    def notes() -> list[str]:
        result = run(Path(), loglikes=decoded, graph_dir=toy / "graph", model=toy / "final.mdl", text=toy / "text")
        assert as_json(result)["notes"] == result.notes() and as_json(result)["model"] == recorded
        return list(result.notes())

    recorded = None
    assert notes() == []
    recorded = digest
    (folder / MODEL_DIGEST).write_text(f"{digest}\n")
    assert notes() == [], "an older version left no path"
    (folder / MODEL_DIGEST).write_text(f"{digest} {os.path.relpath('run', decoded)}\n")
    assert notes() == []
    Path("run", FINAL).write_bytes(b"six epochs")
    (note,) = notes()
    assert f"of another model than {toy / 'run' / FINAL} is now" in note and "ddnn decode-prep" in note
    Path("run", FINAL).unlink()
    assert notes() == []


def test_hypotheses_are_written(toy: Path) -> None:
    """For Kaldi, for sclite, and with times: each label of the toy graph is on the first of the three frames of its word."""
    (toy / "text").write_text("u1 a b a\nu2 a b\nu3 é\n", encoding="utf-8")
    write_loglikes(toy, {"u1": spoken(0, 1, 0), "u2": spoken(0, 2), "u3": spoken(2)})
    result = run(toy, DecodeOptions((0.001, 1.0)), out=toy / "out")
    written = {path.name: path.read_text("utf-8") for path in (toy / "out").iterdir()}
    scored = json.loads(written.pop("score.json"))
    assert scored == json.loads(json.dumps(as_json(result))) and scored["chosen_on_this_text"]
    inputs = {"loglikes": "loglikes.scp", "graph": "graph", "text": "text"}
    assert all(scored[name] == str(toy / path) for name, path in inputs.items())
    assert [(s["acoustic_scale"], s["lm_weight"], s["word_insertion_penalty"]) for s in scored["scales"]] == [
        (0.001, 1000.0, 0.0),
        (1.0, 1.0, 0.0),
    ]
    assert written == {
        "text": "u1 a b a\nu2 a c\nu3 c\n",
        "hyp.trn": "a b a (u1)\na c (u2)\nc (u3)\n",
        "ref.trn": "a b a (u1)\na b (u2)\né (u3)\n",
        "hyp.ctm": "u1 1 0.000 0.030 a\nu1 1 0.030 0.030 b\nu1 1 0.060 0.030 a\n"
        "u2 1 0.000 0.030 a\nu2 1 0.030 0.030 c\nu3 1 0.000 0.030 c\n",
    }
    with pytest.raises(UserError, match="out exists already and is not empty"):
        run(toy, out=toy / "out")
    run(toy, out=toy / "slow", frame_shift=0.1)
    assert (toy / "slow" / "hyp.ctm").read_text().startswith("u1 1 0.000 0.300 a\nu1 1 0.300 0.300 b\n")
    with pytest.raises(UserError, match="expected seconds above 0"):
        run(toy, frame_shift=0.0)


def test_a_scoring_that_fails_writes_nothing(toy: Path) -> None:
    matrices = {"u1": spoken(0), "u2": spoken(0), "u3": np.full((3, 3), np.nan, np.float32)}
    write_loglikes(toy, matrices)
    with pytest.raises(DataError, match="u3"):
        run(toy, out=toy / "out")
    assert not list(toy.glob("*out*"))


def test_epsilons_and_words_without_frames_have_times() -> None:
    """A lattice as OpenFst prints it: not in the order of its path, with epsilons and weights."""
    lattice = "2 0 7 0 0.5,0\n1 2 0 5 0,1\n0 4 0 9\n3 1 6 8 0.5,0\n4\n"
    assert _output_labels(3, lattice) == [(8, 0), (5, 1), (9, 2)]
    assert _output_labels(-1, "") == [] == _output_labels(4, "4 1.5,0\n")
    assert _output_labels(0, "0 1 1 1\n1 0 1 2\n") == [(1, 0), (2, 1)], "a cycle, which no best path has, ends"


def test_word_insertion_penalty_is_a_cost_of_each_word(toy: Path) -> None:
    """As of a graph whose words cost so much more; combined with each scale, the best marked."""
    matrix = spoken(0, 1, 0, 2) * np.float32(0.05)  # 1 a frame: at a penalty of 3 a word no longer pays
    write_loglikes(toy, {"u1": matrix, "u2": matrix, "u3": matrix})
    (toy / "text").write_text("u1 a b a c\nu2 a b\nu3 a\n")
    penalties = (0.0, 0.5, 2.6, 4.0)
    result = run(toy, DecodeOptions((1.0, 0.5), word_insertion_penalties=penalties))
    points = [(s.acoustic_scale, s.word_insertion_penalty) for s in result.scales]
    assert points == [(scale, penalty) for penalty in penalties for scale in (1.0, 0.5)]
    plain = []
    for penalty in penalties:
        fst = loop_of_words()
        fst.arcs["weight"][:3] += penalty
        write_fst(toy / "graph" / "HCLG.fst", fst)
        plain += run(toy, DecodeOptions((1.0, 0.5))).scales
    assert [s.utterances for s in result.scales] == [s.utterances for s in plain]
    numbers = [len(s.utterances[0].hypothesis) for s in result.scales[::2]]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 1
    text = render_text(result)
    assert "acoustic scale 0.5     LM weight 2       word insertion penalty 2.6    WER" in text
    assert "word insertion penalty" not in render_text(run(toy))


def test_the_scale_is_chosen_on_a_development_set(toy: Path) -> None:
    (toy / "text").write_text("u1 a b a\nu2 a b\nu3 b\n")
    options = DecodeOptions((0.001, 0.9, 1.0), word_insertion_penalties=(0.0, 0.1))
    dev = run(toy, options, out=toy / "dev")
    assert dev.notes() == json.loads((toy / "dev" / "score.json").read_text())["notes"], "0.9 is as good as 1"
    first, advice = NOTE.split(": ")[0], "if this is a development set, use it for the test set: --acoustic-scale-from "
    assert dev.notes() == [f"{first}: {advice}{toy}/dev/score.json"]
    assert run(toy, options).notes() == [NOTE], "nothing was written that another scoring could take"
    choice = read_choice(toy / "dev")
    assert (choice.acoustic_scale, choice.word_insertion_penalty) == (0.9, 0.0)
    chosen = DecodeOptions((0.9,), chosen_on=choice)
    assert run(toy, chosen, out=toy / "again").notes() == [NOTE], "it is the text on which the scale was chosen"
    (toy / "text").write_text("u1 a b a\nu2 a c\nu3 b\n")
    result = run(toy, chosen)
    assert result.notes() == [] and not as_json(result)["chosen_on_this_text"]
    assert f", chosen by {toy / 'dev' / 'score.json'}; " in render_text(result)
    assert as_json(result)["chosen_by"] == str(toy / "dev" / "score.json")
    assert run(toy).notes() == []


def test_a_best_scale_at_the_end_of_those_tried(toy: Path) -> None:
    assert (
        run(toy, DecodeOptions((0.001, 0.01, 1.0))).notes()[0]
        == "the best acoustic scale is the largest tried: try larger ones, too"
    )
    (toy / "text").write_text("u1 a\nu2 a\nu3 c\n")
    options = DecodeOptions((0.01, 1.0), word_insertion_penalties=(0.0, 2.0))
    smallest = "the best acoustic scale is the smallest tried: try smaller ones, too"
    assert smallest in run(toy, options).notes()
    write_loglikes(toy, {"u1": spoken(0), "u2": spoken(0), "u3": spoken(2)})
    assert run(toy, options).notes() == [NOTE], "all are equally good"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"best": "0.1", "best_word_insertion_penalty": 0.0, "reference": ""}', "[" * 99_999, "\xff"],
)
def test_no_scoring_to_choose_from(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_choice(tmp_path / "none.json")
    (tmp_path / "score.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="expected the JSON of a scoring"):
        read_choice(tmp_path)


def test_posteriors_are_no_log_likelihoods(toy: Path) -> None:
    posteriors = np.full((3, 3), 1 / 3, np.float32)
    write_loglikes(toy, {"u1": spoken(0), "u2": spoken(0), "u3": posteriors})
    with pytest.raises(DataError, match="utterance u3: posteriors found"):
        run(toy)
    for name in ("loglikes", "posteriors"):
        (toy / "decode").mkdir(exist_ok=True)
        (toy / "decode" / f"{name}.scp").touch()
    with pytest.raises(DataError, match="the scp is empty"):
        run(toy, loglikes="decode")
    (toy / "decode" / "loglikes.scp").unlink()
    for loglikes in ("decode", "decode/posteriors.scp", "decode/posteriors.ark"):
        with pytest.raises(DataError, match="posteriors found, a decoder needs log-likelihoods"):
            run(toy, loglikes=loglikes)


def test_kaldis_graphs_belong_to_their_model(an4: Path) -> None:
    for name in ("graph", "graph_ug"):
        read_graph(an4 / name, an4 / "ali/final.mdl")


def test_a_decoding_in_which_no_word_is_right_is_suspicious(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(toy)
    assert not caplog.records
    (toy / "text").write_text("u1 c c c\nu2 b b\nu3 a\n")
    run(toy)
    assert "the lowest word error rate is" in caplog.text and "of one system?" in caplog.text
