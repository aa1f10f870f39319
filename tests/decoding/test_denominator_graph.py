"""Graphs of a unigram: against the best of all transcripts, against Kaldi's graph, and what users get wrong."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_model
from jobs import RunCli, assert_refused
from kaldi_files import model_bytes, tree_bytes
from lattice_paths import posteriors
from phone_systems import fst_of, make_model, make_tree

from ddnn.decoding.graph import read_graph
from ddnn.decoding.hmm import ContextHmms
from ddnn.decoding.prepare import import_nnet1, prepare_decoding
from ddnn.kaldi.archive import MatrixReader, RecordReader, read_scp
from ddnn.kaldi.data_dir import read_text
from ddnn.kaldi.fst import Fst, read_fst, write_fst
from ddnn.kaldi.lattice import Lattice, read_lattice
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.kaldi.tree import ContextDependency, EventMap

pytest.importorskip("kaldi_decoder")

import kaldi_decoder
import kaldifst

from ddnn.decoding.denominator_graph import make_graph
from ddnn.decoding.lattices import WEAK, LatticeOptions, make_lattices, order_cost
from ddnn.decoding.training_graph import Lexicon, TrainingGraphs

pytestmark = pytest.mark.usefixtures("forked_children")

WORDS = {1: [((2, 3), 0.1, 0), ((2,), 0.9, 1)], 2: [((3,), 0.2, 1)], 3: [((4, 2), 0.3, 0), ((4, 5), 0.4, 0)],
         4: [((3,), 0.0, 2)]}  # fmt: skip
"""Of each word the pronunciations, their costs, and the numbers of their disambiguation symbols: 2 and 4 sound alike."""
SILENCE_COSTS = (0.4, 1.1)  # of no silence, and of phone 1, before the first and behind every word
SYMBOLS = range(6, 10)  # ids of #0 to #3; #3 is behind the silence
TEXT = "a 1 2\nb 3\nc\nd 1 4 4\ne 3 1 1\n"


def lexicon_fst(disambiguated: bool) -> Fst:
    """As utils/make_lexicon_fst.pl: from state 0 to the loop, state 1, or to state 2, before the silence."""
    ways = list(zip((1, 2), SILENCE_COSTS, strict=True))
    arcs = [*((0, 0, 0, cost, to) for to, cost in ways), (2, 1, 0, 0.0, 3), (3, SYMBOLS[3] * disambiguated, 0, 0.0, 1)]
    new = 4
    for word, pronunciations in reversed(WORDS.items()):  # the order of a lexicon's words does not matter
        for phones, cost, number in pronunciations:
            state, labels = 1, [*phones, *[SYMBOLS[number]] * (disambiguated and number > 0)]
            for i, phone in enumerate(labels):
                label, extra = (0, 0.0) if i else (word, cost)
                arcs.append((state, phone, label, extra, new))
                state, new = new, new + 1
            arcs += [(state, 0, 0, more, to) for to, more in ways]
    return fst_of(arcs, {1: 0.0})


def best_path(graph: Any, scores: np.ndarray, beam: float = 1000.0) -> tuple[float, list[int]] | None:
    """The cost of the best path and its output labels; None where none ends in a final state."""
    decoder = kaldi_decoder.FasterDecoder(graph, kaldi_decoder.FasterDecoderOptions(beam=beam))
    decodable = kaldi_decoder.DecodableCtc(np.ascontiguousarray(scores, np.float32))
    decoder.decode(decodable)
    if not decoder.reached_final():
        return None
    _, _, labels, weight = kaldifst.get_linear_symbol_sequence(decoder.get_best_path()[1])
    return weight.value1 + weight.value2, labels


def opened(graph: Path, model: Path, temporary: Path) -> Any:
    """The graph of a dir, with pdf-id + 1 as input labels."""
    write_fst(temporary, read_graph(graph, model).fst)
    return kaldifst.StdFst.read(str(temporary))


@pytest.mark.parametrize(("width", "central"), [(1, 0), (2, 0), (2, 1), (3, 1), (3, 0), (4, 1)])
def test_the_best_of_all_transcripts(width: int, central: int, tmp_path: Path) -> None:
    """Its cost is that of the graph for forced alignment plus that of its words."""
    tree = make_tree(width, central)
    model = make_model(tree)
    (tmp_path / "tree").write_bytes(tree_bytes(tree, binary=True))
    (tmp_path / "final.mdl").write_bytes(model_bytes(model, binary=True))
    (tmp_path / "phones").mkdir()
    (tmp_path / "phones/disambig.int").write_text("".join(f"{number}\n" for number in SYMBOLS))
    (tmp_path / "words.txt").write_text("<eps> 0\n" + "".join(f"{word} {word}\n" for word in range(1, 7)))
    (tmp_path / "text").write_text(TEXT)
    write_fst(tmp_path / "L_disambig.fst", lexicon_fst(True))
    paths = tmp_path, *(tmp_path / name for name in ("tree", "final.mdl", "text", "graph"))
    result = make_graph(*paths, transition_scale=0.7, self_loop_scale=0.4)
    assert (result.words, result.utterances, result.oov) == (4, 5, {})
    graph = opened(tmp_path / "graph", tmp_path / "final.mdl", tmp_path / "x.fst")

    counts, ends = Counter(word for line in TEXT.splitlines() for word in map(int, line.split()[1:])), 5
    total = counts.total() + ends
    of_words = {word: -math.log(count / total) for word, count in counts.items()}
    hmms = ContextHmms(tree, model, 0.7, 0.4, tmp_path)
    graphs = TrainingGraphs(Lexicon(lexicon_fst(False)), hmms, model.transition_to_pdf)
    rng, seen = np.random.default_rng(width * 10 + central), set[int]()
    transcripts = [words for length in range(4) for words in product(WORDS, repeat=length)]
    training = {words: graphs(list(words)) for words in transcripts}
    for frames in (2, 4, 5, 6, 6, 7):
        scores = rng.normal(0, 1.5, (frames, tree.num_pdfs)).astype(np.float32)
        aligned = {words: best_path(training[words], scores) for words in transcripts}
        costs = {
            words: best[0] + sum(of_words[word] for word in words) - math.log(ends / total)
            for words, best in aligned.items()
            if best is not None
        }
        best = best_path(graph, scores)
        expected = min(costs, key=costs.__getitem__)
        assert best is not None and best[0] == pytest.approx(costs[expected], abs=0.02)
        assert costs[tuple(best[1])] == pytest.approx(costs[expected], abs=0.02)
        seen |= set(expected)
    assert len(seen) >= 2


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """`lang`, `final.mdl`, `tree`, `text`: phones 1, 2, 3 of one state and pdf each; words a, b, c are one of them, and d
    sounds as c."""
    write_model(tmp_path / "final.mdl")
    nodes = (0, 1, 2, EventMap(0, None, (None, 0, 1, 2)))
    (tmp_path / "tree").write_bytes(tree_bytes(ContextDependency(1, 0, nodes, 3), binary=True))
    (tmp_path / "lang/phones").mkdir(parents=True)
    write_lexicon(tmp_path, 5, 6)
    (tmp_path / "lang/words.txt").write_text("<eps> 0\na 1\nb 2\nc 3\nd 4\n<unk> 5\n")
    (tmp_path / "lang/phones.txt").write_text("<eps> 0\nx 1\ny 2\nz 3\n#0 4\n#1 5\n#2 6\n")
    (tmp_path / "lang/phones/disambig.int").write_text("4\n5\n6\n")
    (tmp_path / "lang/phones/silence.csl").write_text("1\n")
    (tmp_path / "lang/oov.int").write_text("3\n")
    (tmp_path / "text").write_text("u1 a b\nu2 d\nu3 a zoo c\nu4\n")
    return tmp_path


def write_lexicon(system: Path, *symbols: int) -> None:
    """`symbols`: of the words c and d."""
    arcs = [(0, 1, 1, 0.0, 0), (0, 2, 2, 0.0, 0), (0, 3, 3, 0.0, 1), (0, 3, 4, 0.0, 2)]
    arcs += [(state, symbol, 0, 0.0, 0) for state, symbol in enumerate(symbols or (0, 0), 1)]
    write_fst(system / "lang/L_disambig.fst", fst_of(arcs, {0: 0.0}))


def arguments(system: Path, **other: Any) -> list[Any]:
    values = {"lang": "lang", "tree": "tree", "model": "final.mdl", "text": "text", "out": "graph"}
    options = {name: system / value for name, value in values.items()} | other
    return ["graph", *(part for name, value in options.items() for part in (f"--{name}", value))]


def test_a_graph_dir(system: Path, run_cli: RunCli) -> None:
    result = run_cli(*arguments(system), "--json")
    assert result.exit_code == 0, result.stderr
    out = system / "graph"
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert found == ["HCLG.fst", "num_pdfs", "phones.txt", "phones/disambig.int", "phones/silence.csl", "words.txt"]
    assert (out / "num_pdfs").read_text() == "3\n"
    for name in found[2:]:
        assert (out / name).read_bytes() == (system / "lang" / name).read_bytes()
    fst = read_fst(out / "HCLG.fst")
    summary = json.loads(result.stdout)
    assert summary == {
        "out": str(out), "states": fst.num_states, "arcs": fst.num_arcs, "words": 4, "utterances": 4, "oov": {"zoo": 1},
    }  # fmt: skip
    shutil.rmtree(out)
    text = run_cli(*arguments(system)).stdout
    assert text.startswith(f"{out}: {fst.num_states} states, {fst.num_arcs} arcs, 4 words of 4 utterances; 1 word")


def test_words_and_ends_cost_what_the_transcripts_say(system: Path) -> None:
    """10 words and ends: a 2, b 1, c 2 (one of them unknown), d 1, ends 4. Frames are of a, a, c: of the words c and d, which
    sound alike, c is the more frequent. A first frame costs 0.1 log(1 / 0.25), another one 0.1 log(1 / 0.75)."""
    make_graph(*(system / name for name in ("lang", "tree", "final.mdl", "text", "graph")))
    graph = opened(system / "graph", system / "final.mdl", system / "x.fst")
    scores = 20 * np.eye(3, dtype=np.float32)[[0, 0, 2]]
    best = best_path(graph, scores)
    assert best is not None and best[1] == [1, 3]
    loops = -0.1 * (2 * math.log(0.25) + math.log(0.75))
    assert best[0] + 60 == pytest.approx(loops - math.log(0.2 * 0.2 * 0.4), abs=5e-3)


def _other_tree(system: Path) -> None:
    nodes = (0, 1, EventMap(0, None, (None, 0, 1)))
    (system / "tree").write_bytes(tree_bytes(ContextDependency(1, 0, nodes, 2), binary=False))


def _tree_in_another_order(system: Path) -> None:
    nodes = (0, 1, 2, EventMap(0, None, (None, 1, 0, 2)))
    (system / "tree").write_bytes(tree_bytes(ContextDependency(1, 0, nodes, 3), binary=False))


def _text(words: str) -> Callable[[Path], None]:
    return lambda system: (system / "text").write_text(words) and None


def _disambiguation(content: str) -> Callable[[Path], None]:
    return lambda system: (system / "lang/phones/disambig.int").write_text(content) and None


def _without(name: str) -> Callable[[Path], None]:
    return lambda system: (system / name).unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without("tree"), ("tree", "cannot read a Kaldi tree", "beside final.mdl")),
        (_without("final.mdl"), ("final.mdl", "cannot read a Kaldi transition model")),
        (_other_tree, ("tree", "the tree has 2 pdfs, final.mdl 3", "of one system")),
        (_tree_in_another_order, ("tree", "HMM state 0 of phone", "that final.mdl lacks", "of one system")),
        (lambda s: write_lexicon(s, 5, 7), ("lang/L_disambig.fst", "phone-id 7", "disambig.int lacks it")),
        (lambda s: write_lexicon(s), ("lang/L_disambig.fst", "cannot be determinized", "disambiguation symbols")),
        (_without("lang/L_disambig.fst"), ("lang/L_disambig.fst", "cannot read the FST L_disambig.fst")),
        (_without("lang/words.txt"), ("lang/words.txt", "the symbol table does not exist")),
        (_without("lang/oov.int"), ("lang/oov.int", "words.txt lacks 'zoo'", "prepare_lang.sh")),
        (_without("lang/phones/disambig.int"), ("lang/phones/disambig.int", "cannot read the ids of", "prepare_lang.sh")),
        (_disambiguation("4\n-5\n6\n"), ("lang/phones/disambig.int", "expected phone-ids, found '-5'")),
        (_disambiguation("#0 9999999999\n"), ("lang/phones/disambig.int", "expected phone-ids, found '#0'")),
        (_without("text"), ("text", "the transcripts does not exist")),
        (_text("u1\nu2\n"), ("text", "the transcripts have no words", "training data")),
        (_text("u1 a <unk> <eps>\n"), ("lang/L_disambig.fst", "2 words of", "without a pronunciation: <eps>, <unk>", "add them")),
        (lambda s: (s / "graph").mkdir() or _text("mine")(s / "graph"), ("graph", "exists already", "name another")),
    ],
)  # fmt: skip
def test_what_users_get_wrong(
    system: Path, run_cli: RunCli, damage: Callable[[Path], None], said: tuple[str, ...]
) -> None:
    damage(system)
    assert_refused(run_cli(*arguments(system)), str(system / said[0]), *said[1:])
    assert not (system / "graph/HCLG.fst").exists() and not list(system.glob(".*"))


@pytest.mark.parametrize("option", ["transition-scale", "self-loop-scale"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_scales_that_cannot_be(system: Path, run_cli: RunCli, option: str, value: str) -> None:
    assert_refused(run_cli(*arguments(system, **{option: value})), f"--{option}", "expected a number of at least 0")


def test_without_the_package(system: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaldifst", None)
    result = run_cli(*arguments(system))
    assert result.exit_code == 2 and "ddnn[decode]" in result.stderr


def of_an4(an4: Path, out: Path) -> Path:
    """Makes the graph of AN4's training transcripts."""
    result = make_graph(an4 / "lang", an4 / "ali/tree", an4 / "ali/final.mdl", an4 / "train/text", out)
    assert (result.words, result.utterances, result.oov) == (99, 948, {})
    assert abs(result.states - 1511) <= 5 and abs(result.arcs - 5521) <= 20
    return out


def test_the_graph_of_an4_is_of_a_weak_language_model(an4: Path, tmp_path: Path) -> None:
    """It has all words of the transcripts, and their order hardly matters."""
    graph = read_graph(of_an4(an4, tmp_path / "graph"), an4 / "ali/final.mdl")
    transcripts = read_text(an4 / "train/text").values()
    spoken = {graph.words[label] for label in graph.fst.arcs["olabel"].tolist() if label}
    assert spoken == set().union(*transcripts) and order_cost(graph, transcripts) < WEAK / 5


def test_the_graph_of_an4_is_that_of_kaldi(an4: Path, shared: Path, tmp_path: Path) -> None:
    """Best paths, and lattices made with it, of 8 utterances."""
    nnet1, train, model = shared / "an4/kaldi_nnet1", an4 / "train", an4 / "ali/final.mdl"
    paths = {"ours": of_an4(an4, tmp_path / "graph"), "kaldi": shared / "golden/smbr/dengraph"}
    import_nnet1(
        nnet1 / "rbm_ce.nnet", nnet1 / "feature_transform.nnet", tmp_path / "run", nnet1 / "ali_train_pdf.counts"
    )
    (tmp_path / "data").mkdir()
    entries = read_scp(train / "feats.scp")[::119]
    (tmp_path / "data/feats.scp").write_text("".join(f"{e.key} {e.location}\n" for e in entries))
    shutil.copyfile(train / "text", tmp_path / "data/text")
    prepare_decoding(tmp_path / "run", tmp_path / "data", tmp_path / "scores")
    graphs = {name: opened(path, model, tmp_path / f"{name}.fst") for name, path in paths.items()}
    with MatrixReader() as reader:
        for entry in read_scp(tmp_path / "scores/loglikes.scp"):
            scores = reader.read(entry, np.float32) * np.float32(0.1)
            ours, kaldi = (best_path(graph, scores, 13.0) for graph in graphs.values())
            assert ours is not None and kaldi is not None
            assert ours[1] == kaldi[1] and ours[0] == pytest.approx(kaldi[0], abs=0.01)
    transitions, made = read_transition_model(model), list[dict[str, Lattice]]()
    for name, path in paths.items():
        out = tmp_path / f"{name}_lats"
        make_lattices(tmp_path / "run", tmp_path / "data", path, model, out, LatticeOptions(), "cpu")
        with RecordReader() as reader:
            made.append({entry.key: read_lattice(reader, entry) for entry in read_scp(out / "lat.scp")})
    assert list(made[0]) == list(made[1]) == [entry.key for entry in entries]
    for lattice, expected in zip(*(lattices.values() for lattices in made), strict=True):
        sizes = transitions.transition_to_pdf, transitions.num_pdfs
        (total, of_pdfs), (kaldi_total, kaldi_of_pdfs) = (posteriors(x, 0.1, *sizes) for x in (lattice, expected))
        assert total == pytest.approx(kaldi_total, abs=0.02)
        np.testing.assert_allclose(of_pdfs, kaldi_of_pdfs, atol=5e-3)
