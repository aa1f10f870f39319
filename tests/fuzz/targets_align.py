"""What ddnn align reads as fuzz targets, each file damaged beside the others, walked by the decoder's C++."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from corpora import write_model
from fuzz import seeds
from fuzz.child import Target
from fuzz.targets_kaldi import FST, MODEL, TREE
from kaldi_files import fst_bytes, tree_bytes

from ddnn.decoding.align import Aligner, AlignOptions
from ddnn.decoding.hmm import read_hmms
from ddnn.decoding.lang_dir import read_lexicon, read_transcripts
from ddnn.decoding.training_graph import Lexicon, TrainingGraphs
from ddnn.kaldi.fst import ARC, Fst
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.kaldi.tree import ContextDependency, EventMap

LOGLIKES = np.random.default_rng(4).normal(0.0, 3.0, (9, 3)).astype(np.float32)
TEXT = "u1 a b\nu2 c\nu3 zebra a\n"
WORDS = b"<eps> 0\na 1\nb 2\nc 3\n<unk> 4\n"


def _lexicon(kind: str) -> bytes:
    """Words of one or two phones, with silence, phone 3, before or behind them, or without."""
    arcs = [
        (3, 0, 0.7, 1), (0, 0, 0.7, 1),  # state 0
        (1, 1, 0.0, 1), (2, 2, 0.0, 1), (1, 3, 0.1, 2), (2, 4, 0.5, 2), (3, 0, 1.0, 1),  # state 1
        (2, 0, 0.0, 1), (0, 0, 3.0, 1),  # state 2
    ]  # fmt: skip
    final = np.array([np.inf, 0.0, np.inf], np.float32)
    return fst_bytes(Fst(0, final, np.array([0, 2, 7, 9]), np.array(arcs, ARC)), kind)


def _tree(width: int, central: int) -> bytes:
    leaves = EventMap(central, None, (None, 0, 1, 2))
    return tree_bytes(ContextDependency(width, central, (0, 1, 2, leaves), 3), binary=width == 3)


def _beside(folder: Path) -> None:
    write_model(folder / "final.mdl")
    files = {"tree": _tree(3, 1), "L.fst": _lexicon("vector"), "words.txt": WORDS, "oov.int": b"4\n"}
    for name, content in {**files, "text": TEXT.encode()}.items():
        (folder / name).write_bytes(content)


def _align(folder: Path) -> None:
    model, options = read_transition_model(folder / "final.mdl"), AlignOptions()
    transcripts, _ = read_transcripts(folder / "text", folder)
    hmms = read_hmms(folder / "tree", model, options.transition_scale, options.self_loop_scale)
    lexicon = Lexicon(read_lexicon(folder / "L.fst", model))
    aligner = Aligner(TrainingGraphs(lexicon, hmms, model.transition_to_pdf), transcripts, options)
    loglikes = np.zeros((len(LOGLIKES), model.num_pdfs), np.float32)
    loglikes[:, :3] = LOGLIKES[:, : model.num_pdfs]
    for utterance in list(transcripts)[:3]:
        aligned = aligner(utterance, loglikes)
        assert aligned.problem or len(aligned.transition_ids) == len(loglikes)


def align_targets() -> list[Target]:
    """Lexicon, tree, model, words and the word for others; none without the decoder."""
    try:
        import kaldi_decoder
    except ImportError:
        return []
    assert kaldi_decoder

    def target(file: str, *found: bytes, crafted: tuple[bytes, ...] = (), tokens: tuple[bytes, ...] = ()) -> Target:
        return Target(
            f"aligned, {file}", file, _align, found, crafted, _beside, tokens=tokens, per_byte=400, inputs=150
        )

    far = np.array([(1, 1, 1e38, 0), (1, 2, -1e38, 0), (2, 3, 0.0, 0)], ARC)
    huge = Fst(0, np.zeros(1, np.float32), np.array([0, 3]), far)
    return [
        target("L.fst", _lexicon("const"), _lexicon("vector"), crafted=(fst_bytes(huge),), tokens=FST),
        target(
            "tree", _tree(1, 0), _tree(3, 1), _tree(2, 1), crafted=(_tree(7, 0), _tree(7, 6), _tree(31, 0)), tokens=TREE
        ),
        target("final.mdl", seeds.final_mdl(), tokens=MODEL),
        target("words.txt", WORDS, crafted=(b"a 2147483647\nb 0\nc 1\n", b"a 1\nb 1\nc 1\n")),
        target("oov.int", b"4\n", crafted=(b"9" * 99, b"0", b"\xb2", b" 4 ")),
    ]
