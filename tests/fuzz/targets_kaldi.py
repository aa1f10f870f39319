"""Kaldi's models and graphs as fuzz targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from corpora import write_graph_dir, write_model
from fuzz import seeds
from fuzz.child import Target
from kaldi_files import fst_bytes

from ddnn.kaldi.fst import read_fst, read_symbols
from ddnn.kaldi.nnet1_file import read_nnet1, write_nnet1
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.kaldi.tree import read_tree

MODEL = (
    b"<TransitionModel> ",
    b"<Topology> ",
    b"<TopologyEntry> ",
    b"<ForPhones> ",
    b"</ForPhones> ",
    b"<State> ",
    b"</State> ",
    b"<PdfClass> ",
    b"<ForwardPdfClass> ",
    b"<SelfLoopPdfClass> ",
    b"<Transition> ",
    b"<Final> ",
    b"</TopologyEntry> ",
    b"</Topology> ",
    b"<Triples> ",
    b"</Triples> ",
    b"<Tuples> ",
    b"<LogProbs> ",
    b"FV ",
    b"</LogProbs> ",
    b"</TransitionModel> ",
    b"\4",
    b"\xff\xff\xff\xff",
    b"\0B",
)


NNET = (
    b"<Nnet> ",
    b"</Nnet> ",
    b"<AffineTransform> ",
    b"<affinetransform> ",
    b"<Sigmoid> ",
    b"<Tanh> ",
    b"<Softmax> ",
    b"<ParametricRelu> ",
    b"<Splice> ",
    b"<AddShift> ",
    b"<Rescale> ",
    b"<Rbm> ",
    b"<LearnRateCoef> ",
    b"<MaxNorm> ",
    b"<BiasLearnRateCoef> ",
    b"<!EndOfComponent> ",
    b"FM ",
    b"FV ",
    b"DM ",
    b"bern ",
    b"gauss ",
    b"\4",
    b"[",
    b"]",
    b"<AlphaLearnRateCoef> ",
    b"<Convolutional> ",
    b"<ConvolutionalComponent> ",
    b"<MaxPoolingComponent> ",
    b"<PatchStep> ",
    b"<PoolSize> ",
    b"<Filters> ",
    b"<Bias> ",
    b"<Copy> ",
    b"<Dropout> ",
    b"<DropoutRetention> ",
    b"<ParallelComponent> ",
    b"<NestedNnetCount> ",
    b"<NestedNnet> ",
    b"</ParallelComponent> ",
    b"\0B",
)


TREE = (
    b"ContextDependency ",
    b"ToLength ",
    b"ToPdf ",
    b"NULL ",
    b"CE ",
    b"TE ",
    b"SE ",
    b"( ",
    b"{ ",
    b"\xfc",
    b"\4",
    b"\0B",
)


FST = (b"vector", b"const", b"standard", b"log", b"\xd6\xfd\xb2\x7e", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff" * 8)


def _transitions(folder: Path) -> None:
    model = read_transition_model(folder / "final.mdl")
    assert model.num_pdfs <= 1_000_001 and model.num_phones >= 1


def _tree(folder: Path) -> None:
    tree = read_tree(folder / "tree")
    for phone in range(4):
        assert (tree.pdf((phone,) * tree.context_width, 0) or 0) < tree.num_pdfs


def _nnet1(folder: Path) -> None:
    write_nnet1(folder / "again", read_nnet1(folder / "final.nnet"))


def _graph(folder: Path) -> None:
    from ddnn.decoding.graph import read_graph

    read_graph(folder, folder / "final.mdl")


def _decode(folder: Path) -> None:
    """The graph, walked by the decoder's C++."""
    from ddnn.decoding.graph import read_graph
    from ddnn.decoding.options import DecodeOptions
    from ddnn.decoding.search import decode_utterances

    scores = [(name, np.log(np.abs(matrix) + 0.1)) for name, matrix in seeds.MATRICES.items()]
    options = DecodeOptions((0.1,), 13.0, 100, 2)
    for _ in decode_utterances(scores, read_graph(folder, folder / "final.mdl"), options):
        pass


def _graph_beside(folder: Path) -> None:
    write_graph_dir(folder)
    write_model(folder / "final.mdl")
    (folder / "num_pdfs").write_text("3\n")


def _bellman_ford(states: int) -> bytes:
    """Epsilons of negative cost in a chain, laid out against the order in which they are looked at."""
    from ddnn.kaldi.fst import ARC, Fst

    arcs = np.array([(0, 0, -1.0, state - 1) for state in range(1, states)], ARC)
    offsets = np.concatenate([[0, 0], np.arange(1, states)])
    return fst_bytes(Fst(0, np.zeros(states, np.float32), offsets, arcs))


def kaldi_targets() -> list[Target]:
    """Transition models, nnet1 networks, graphs."""
    targets = [
        Target(
            "transition model",
            "final.mdl",
            _transitions,
            (*(seeds.transitions(binary=b, chain=c) for b in (True, False) for c in (True, False)), seeds.final_mdl()),
            (b"<TransitionModel> <Topology> " + b"<TopologyEntry> " * 5000, b"<TransitionModel>" + b" " * 60_000),
            tokens=MODEL,
            per_byte=200,
        ),
        Target(
            "decision tree",
            "tree",
            _tree,
            (seeds.tree(binary=True), seeds.tree(binary=False)),
            (
                b"ContextDependency 3 1 ToPdf " + b"TE 0 1 ( " * 6000,
                b"ContextDependency 3 1 ToPdf TE 0 11000 ( " + b"NULL " * 11_000 + b") EndContextDependency ",
                b"ContextDependency 3 1 ToPdf SE 0 [ " + b"1 " * 25_000 + b"] { CE 0 CE 1 } EndContextDependency ",
            ),
            tokens=TREE,
            per_byte=200,
        ),
        Target(
            "nnet1 network",
            "final.nnet",
            _nnet1,
            (
                *(seeds.network(binary=b, kind=k) for b in (True, False) for k in ("sigmoid", "relu", "tanh")),
                *(seeds.dbn(binary=b) for b in (True, False)),
                *(seeds.front(binary=b) for b in (True, False)),
                *(seeds.layers(binary=b) for b in (True, False)),
            ),
            (
                b"<ParallelComponent> 1 1 <NestedNnetCount> 1 <NestedNnet> 1 " * 1000,
                b"<Nnet> <Copy> 30000 1 [ " + b"1 " * 30_000 + b"] </Nnet> ",
                b"<Nnet> <Splice> 1000000 1 [ " + b"1 " * 30_000 + b"] </Nnet> ",
                b"<Nnet> <AddShift> 1 1 [ " + b"1" * 30_000 + b"x ] </Nnet> ",
                b"<Nnet> <AffineTransform> 2 2 [\n" + b"1\n" * 30_000 + b"] [ ] </Nnet>",
            ),
            tokens=NNET,
            per_byte=200,
        ),
        Target(
            "graph",
            "HCLG.fst",
            lambda folder: read_fst(folder / "HCLG.fst"),
            (seeds.graph("const"), seeds.graph("vector")),
            tokens=FST,
        ),
        Target(
            "graph with its model and words",
            "HCLG.fst",
            _graph,
            (seeds.graph("const"), seeds.graph("vector")),
            (_bellman_ford(20_000),),
            beside=_graph_beside,
            tokens=FST,
            inputs=300,
        ),
        Target("graph, num_pdfs", "num_pdfs", _graph, (b"3\n",), (b"3" * 60_000,), beside=_graph_beside, inputs=100),
        Target(
            "symbol table",
            "words.txt",
            lambda folder: read_symbols(folder / "words.txt"),
            (seeds.WORDS,),
            (b"a 99999999999\n", b"a 1\n" * 9000, b"\n" * 30_000, b"a\xc2\xa0b 1\n"),
            per_byte=250,
        ),
    ]
    try:
        import kaldi_decoder
    except ImportError:
        return targets
    assert kaldi_decoder
    decode = Target(
        "graph, decoded",
        "HCLG.fst",
        _decode,
        (seeds.graph("const"), seeds.graph("vector")),
        beside=_graph_beside,
        tokens=FST,
        inputs=100,
    )
    return [*targets, decode]
