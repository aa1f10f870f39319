"""Denominator lattices without Kaldi: every path of small ones, interruptions, and Kaldi's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_data_dir, write_graph_dir, write_model
from jobs import RunCli, assert_refused
from lattice_paths import all_paths, posteriors

from ddnn.decoding import lattices
from ddnn.decoding.graph import DecodingGraph, read_graph
from ddnn.decoding.lattices import WEAK, LatticeOptions, LatticesResult, make_lattices, order_cost
from ddnn.decoding.prepare import import_nnet1
from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.kaldi.archive import RecordReader, read_scp
from ddnn.kaldi.data_dir import read_text
from ddnn.kaldi.fst import ARC, Fst, write_fst
from ddnn.kaldi.lattice import Lattice, iterate_lattices, read_lattice
from ddnn.kaldi.nnet1 import Activation, AffineTransform
from ddnn.kaldi.nnet1_file import write_nnet1
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.runs.run_status import MODEL_DIGEST, model_digest
from ddnn.util.errors import DataError, UserError

pytestmark = pytest.mark.usefixtures("forked_children")
pytest.importorskip("kaldi_decoder")

WORDS = {"u1": (0, 1, 0), "u2": (0, 2), "u3": (2,), "u4": (1, 0, 2), "u5": (2, 0)}


def spoken(*pdfs: int) -> np.ndarray:
    """Features of three frames of each pdf, of which noise makes no path a tie."""
    rows = np.eye(3, 4, dtype=np.float32)[np.repeat(pdfs, 3)]
    return 20 * rows + np.random.default_rng(len(pdfs)).normal(0, 1, rows.shape).astype(np.float32)


def write_run(path: Path, pdfs: int = 3) -> Path:
    """A run dir whose log-likelihoods are the first features, plus a constant."""
    weight = np.eye(pdfs, 4, dtype=np.float32)
    write_nnet1(path / "x.nnet", (AffineTransform(weight, np.zeros(pdfs, np.float32)), Activation("softmax", pdfs)))
    write_pdf_counts(path / "counts", np.full(pdfs, 10.5))
    import_nnet1(path / "x.nnet", None, path / "run", path / "counts")
    return path / "run"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A directory with run/, data/, graph/ and final.mdl."""
    write_graph_dir(tmp_path / "graph")
    write_model(tmp_path / "final.mdl")
    write_run(tmp_path)
    write_data_dir(tmp_path / "data", {name: spoken(*pdfs) for name, pdfs in WORDS.items()})
    text = {name: " ".join("abc"[pdf] for pdf in pdfs) for name, pdfs in WORDS.items()}
    (tmp_path / "data/text").write_text("".join(f"{name} {words}\n" for name, words in text.items()))
    return tmp_path


def make(folder: Path, out: str = "out", jobs: int = 1, **options: Any) -> LatticesResult:
    paths = folder / "run", folder / "data", folder / "graph", folder / "final.mdl", folder / out
    return make_lattices(*paths, LatticeOptions(**options), "cpu", jobs)


def read(scp: Path) -> dict[str, Lattice]:
    with RecordReader() as reader:
        return {entry.key: read_lattice(reader, entry) for entry in read_scp(scp)}


@pytest.mark.parametrize("raw", [False, True])
def test_every_path_has_its_costs_words_and_transition_ids(toy: Path, raw: bool) -> None:
    """Acoustic costs not scaled, whatever scale the search had; a transition into each word, then self-loops."""
    result = make(toy, raw=raw, acoustic_scale=0.25)
    made = read(toy / ("out/raw_lat.scp" if raw else "out/lat.scp"))
    assert list(made) == list(WORDS) and result.frames == 3 * sum(map(len, WORDS.values()))
    for name, pdfs in WORDS.items():
        paths = all_paths(made[name])
        best = min(paths, key=lambda path: path[1][0] + 0.25 * path[1][1])
        assert best[0] == tuple(pdf + 1 for pdf in pdfs)
        loglikes = spoken(*pdfs)[:, :3] - np.log(1 / 3)
        for words, (graph, acoustic, tids) in paths:
            of_frames = (np.array(tids) - 1) // 2
            assert acoustic == pytest.approx(-loglikes[np.arange(len(loglikes)), of_frames].sum(), abs=2e-3)
            entered = [tid for tid in tids if tid % 2 == 0]
            assert words == tuple(tid // 2 for tid in entered)
            assert graph == pytest.approx(0.5 * len(entered) + 0.1 * (len(tids) - len(entered)), abs=1e-4)
        sequences = [words for words, _ in paths]
        assert raw or len(set(sequences)) == len(sequences)
    assert not raw or any(len(all_paths(x)) > len({words for words, _ in all_paths(x)}) for x in made.values())


def test_raw_lattices_have_their_own_name_and_a_warning(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(toy, raw=True)
    assert "another criterion" in caplog.text and not (toy / "out/lat.scp").exists()


def test_a_lattice_ends_in_a_final_state(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The graph is `a b`: one frame is too short for it, and with a narrow beam `a` alone does not reach its end."""
    arcs = [(2, 1, 0.5, 1), (1, 0, 0.1, 1), (4, 2, 0.5, 2), (3, 0, 0.1, 2)]
    final = np.array([np.inf, np.inf, 0.0], np.float32)
    write_fst(toy / "graph/HCLG.fst", Fst(0, final, np.array([0, 1, 3, 4]), np.array(arcs, ARC)))
    write_data_dir(toy / "data", {"long": spoken(0, 1), "other": spoken(0, 0), "short": spoken(0)[:1]})
    (toy / "data/text").write_text("long a b\nother a\nshort a\n")
    result = make(toy, beam=1.5, lattice_beam=1.0)
    assert result.without_lattice == ("other", "short") and result.frames == 6
    assert list(read(toy / "out/lat.scp")) == ["long"]
    assert "2 utterances without a lattice, whose search did not end in a final state: other, short" in caplog.text
    write_data_dir(toy / "data", {"short": spoken(0)[:1]})
    with pytest.raises(DataError, match="none of 1 utterance has a lattice"):
        make(toy, "out2")


class _StoppedError(Exception):
    """Ends a run in the middle."""


def archives(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("lat.*.ark"))}


def test_an_interrupted_run_continues(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lattices, "PART", 2)
    whole = make(toy, "whole")
    assert list(archives(toy / "whole")) == ["lat.1.ark", "lat.2.ark", "lat.3.ark"]
    assert (toy / "whole/num_jobs").read_text() == "3\n"
    called: list[str] = []
    original = lattices.LatticeMaker.__call__

    def interrupted(self: lattices.LatticeMaker, utterance: str, loglikes: np.ndarray) -> Lattice | None:
        called.append(utterance)
        if called == ["u1", "u2", "u3", "u4"]:
            raise _StoppedError
        return original(self, utterance, loglikes)

    monkeypatch.setattr(lattices.LatticeMaker, "__call__", interrupted)
    with pytest.raises(_StoppedError):
        make(toy)
    assert list(archives(toy / "out")) == ["lat.1.ark"] and not (toy / "out/lat.scp").exists()
    called.clear()
    result = make(toy)
    assert called == ["u3", "u4", "u5"] and archives(toy / "out") == archives(toy / "whole")
    assert (result.frames, result.utterances) == (whole.frames, whole.utterances)
    assert list(read(toy / "out/lat.scp")) == list(WORDS)
    called.clear()
    assert make(toy) == result and called == []


def test_processes_make_the_same_bytes(toy: Path) -> None:
    make(toy)
    make(toy, "two", jobs=2)
    assert archives(toy / "out") == archives(toy / "two")


def test_what_belongs_to_the_lattices_lies_beside_them(toy: Path) -> None:
    make(toy)
    assert (toy / "out/final.mdl").read_bytes() == (toy / "final.mdl").read_bytes()
    digest, path = (toy / "out" / MODEL_DIGEST).read_text().split()
    assert digest == model_digest(toy / "run") and (toy / "out" / path).resolve() == toy / "run"


@pytest.mark.parametrize("other", [{"beam": 12.0}, {"lattice_beam": 6.0}, {"acoustic_scale": 0.2}, {"raw": True}])
def test_lattices_of_other_options_are_not_mixed(toy: Path, other: dict[str, Any]) -> None:
    make(toy)
    with pytest.raises(UserError, match="something else than lattices of this model"):
        make(toy, **other)


def test_lattices_of_other_data_or_a_folder_in_use_are_refused(toy: Path) -> None:
    make(toy)
    write_data_dir(toy / "data", {"u1": spoken(0), "u2": spoken(1)})
    for out in ("out", "data"):
        with pytest.raises(UserError, match="something else than lattices of this model"):
            make(toy, out)


def test_words_that_the_graph_lacks_are_named(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`d` is in words.txt, but on no arc."""
    (toy / "graph/words.txt").write_text("<eps> 0\na 1\nb 2\nc 3\nd 4\n")
    (toy / "data/text").write_text("u1 a d\nu2 d e\nu3 a\nu4 d d\nu5\n")
    assert make(toy).missing_words == {"d": 3, "e": 1}
    assert "lacks 2 words of the transcripts (d, e), those of 3 utterances" in caplog.text
    (toy / "data/text").unlink()
    make(toy)
    assert "text does not exist" in caplog.text


def test_a_graph_whose_words_depend_on_their_order_is_warned_of(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`a` behind `b` costs 3.5 in place of 0.5; then there is no way from `b` to `a`."""
    make(toy)
    assert "weak language model" not in caplog.text

    def write_bigram(costs: np.ndarray) -> DecodingGraph:
        """`costs`: of a, b, c at the beginning and behind each of them."""
        arcs, offsets = list[tuple[int, int, float, int]](), [0]
        for state, row in enumerate(costs.tolist()):
            arcs += [(2 * pdf + 2, pdf + 1, cost, pdf + 1) for pdf, cost in enumerate(row) if np.isfinite(cost)]
            arcs += [(2 * state - 1, 0, 0.1, state)] * (state > 0)
            offsets.append(len(arcs))
        fst = Fst(0, np.zeros(4, np.float32), np.array(offsets), np.array(arcs, ARC))
        write_fst(toy / "graph/HCLG.fst", fst)
        return read_graph(toy / "graph", toy / "final.mdl")

    costs = np.full((4, 3), 0.5)
    assert order_cost(write_bigram(costs), ["abc"]) == 0.0
    costs[2, 0] = 3.5
    graph = write_bigram(costs)
    assert order_cost(graph, ["ab", "abc", "aa", "aba", "b", ""]) == pytest.approx((3 / 2 + 3 / 3) / 2)
    assert order_cost(graph, ["a", "bb"]) == 0.0
    make(toy, "strong")
    assert "weak language model" in caplog.text and "make the graph with ddnn graph" in caplog.text
    costs[2, 0] = np.inf
    graph = write_bigram(costs)
    assert order_cost(graph, ["ab"]) == order_cost(graph, ["ba"]) == np.inf


def test_a_loop_of_negative_cost_ends(toy: Path) -> None:
    """A self-loop without a word, as a damaged graph may have it: each round of it would be cheaper than the last."""
    graph = read_graph(toy / "graph", toy / "final.mdl")
    arcs = graph.fst.arcs.copy()
    arcs["weight"][arcs["olabel"] == 0] = -1.0
    assert order_cost(replace(graph, fst=replace(graph.fst, arcs=arcs)), ["ab", "bc"]) < WEAK


def test_unigrams_and_trigrams_of_an4_are_told_apart(an4: Path) -> None:
    transcripts = read_text(an4 / "test/text").values()
    for name, weak in (("graph_ug", True), ("graph", False)):
        graph = read_graph(an4 / name, an4 / "ali/final.mdl")
        words = {graph.words[label] for label in graph.fst.arcs["olabel"].tolist() if label}
        cost = order_cost(graph, [transcript for transcript in transcripts if set(transcript) <= words])
        assert cost < WEAK / 5 if weak else cost > 3 * WEAK


def test_files_of_other_systems_are_refused(toy: Path) -> None:
    (toy / "four").mkdir()
    write_run(toy / "four", pdfs=4)
    paths = toy / "data", toy / "graph", toy / "final.mdl", toy / "out"
    with pytest.raises(DataError, match="has 3 pdfs, the network 4"):
        make_lattices(toy / "four/run", *paths, LatticeOptions())


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("graph/HCLG.fst", "cannot read the FST"),
        ("graph/words.txt", "the symbol table does not exist"),
        ("final.mdl", "cannot read a Kaldi transition model"),
        ("run/ali_train_pdf.counts", "there is no ali_train_pdf.counts"),
    ],
)
def test_what_is_not_there_is_named(toy: Path, run_cli: RunCli, missing: str, message: str) -> None:
    (toy / missing).unlink()
    paths = ["--graph", toy / "graph", "--model", toy / "final.mdl", "--data", toy / "data", "--out", toy / "out"]
    where = toy / ("run" if missing.startswith("run") else missing)
    assert_refused(run_cli("denlats", toy / "run", *paths, "--device", "cpu"), str(where), message)
    assert not (toy / "out").exists()


@pytest.mark.parametrize(
    "options", [{"beam": 0.0}, {"lattice_beam": -1.0}, {"acoustic_scale": float("nan")}, {"beam": 5.0}], ids=str
)
def test_options_that_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        LatticeOptions(**options)


def test_the_command_prints_what_was_made(toy: Path, run_cli: RunCli) -> None:
    paths = ["--graph", toy / "graph", "--model", toy / "final.mdl", "--data", toy / "data", "--out", toy / "out"]
    arguments = ["denlats", toy / "run", *paths, "--device", "cpu"]
    assert run_cli(*arguments).stdout.endswith("lat.scp: lattices of 5 of 5 utterances, 33 frames\n")
    done = json.loads(run_cli(*arguments, "--json").stdout)
    assert done == {
        "lattices": str(toy / "out/lat.scp"),
        "utterances": 5,
        "without_lattice": [],
        "frames": 33,
        "missing_words": {},
    }
    refused = run_cli(*arguments, "--lattice-beam", "20")
    assert refused.exit_code == 2 and "--lattice-beam" in refused.stderr


def test_lattices_are_those_of_kaldi(shared: Path, tmp_path: Path) -> None:
    """Before and after determinization, of the small network: section 13 of the specification."""
    small, an4 = shared / "golden/smbr/small", shared / "an4"
    nnet1 = an4 / "kaldi_nnet1"
    import_nnet1(
        small / "init.nnet", nnet1 / "feature_transform.nnet", tmp_path / "run", nnet1 / "ali_train_pdf.counts"
    )
    (tmp_path / "data").mkdir()
    entries = read_scp(small / "train.scp")
    (tmp_path / "data/feats.scp").write_text("".join(f"{e.key} {e.location}\n" for e in entries))
    model = read_transition_model(an4 / "ali/final.mdl")
    for raw, name in ((True, "raw_lat"), (False, "lat")):
        out, kaldi = tmp_path / name, dict(iterate_lattices(small / f"{name}.1.gz"))
        paths = tmp_path / "data", shared / "golden/smbr/dengraph", an4 / "ali/final.mdl", out
        make_lattices(tmp_path / "run", *paths, LatticeOptions(raw=raw), "cpu")
        same_size, compared = 0, 0
        for utterance, lattice in read(out / f"{name}.scp").items():
            if utterance not in kaldi or kaldi[utterance].num_frames != lattice.num_frames:
                continue  # missing, or exchanged, on purpose
            expected, compared = kaldi[utterance], compared + 1
            same_size += lattice.times.shape == expected.times.shape and lattice.source.shape == expected.source.shape
            total, of_pdfs = posteriors(lattice, 0.1, model.transition_to_pdf, model.num_pdfs)
            kaldi_total, kaldi_of_pdfs = posteriors(expected, 0.1, model.transition_to_pdf, model.num_pdfs)
            assert total == pytest.approx(kaldi_total, abs=0.01 if raw else 0.02)
            np.testing.assert_allclose(of_pdfs, kaldi_of_pdfs, atol=5e-3)
        assert compared == 10 and same_size >= (7 if raw else 5)  # else an arc or some at the edge of the beam
