"""The decoding graph of the synthetic language: a loop over its words (a unigram), silence between them optional."""

from __future__ import annotations

import numpy as np

from ddnn.kaldi.fst import ARC, Fst
from ddnn.synth.acoustics import SILENCE_PROBABILITY, WORDS_PER_UTTERANCE, Acoustics
from ddnn.synth.lexicon import Lexicon

SELF_LOOP_SCALE = 0.1
"""As utils/mkgraph.sh has it: the costs of self-loops, and of leaving them, count a tenth."""


def make_graph(lexicon: Lexicon, acoustics: Acoustics) -> Fst:
    """HCLG with transition-ids on its arcs and word ids at the beginning of each word.

    State 0 is the start and comes before the optional silence; state 1 comes after it, leads into the words, and is
    final. Then one state per HMM state of each word. Self-loops stand on the state that a transition enters, as Kaldi's
    reordered graphs have it.
    """
    pdfs, count = lexicon.pdfs, len(lexicon.words)
    starts, ends = lexicon.offsets[:-1], lexicon.offsets[1:]
    state = np.arange(len(pdfs)) + 2
    mean_words = sum(WORDS_PER_UTTERANCE) / 2
    leave = -SELF_LOOP_SCALE * np.log(1 - acoustics.self_loop)[pdfs]
    forward = np.zeros(len(pdfs), ARC)
    forward["ilabel"], forward["weight"], forward["nextstate"] = 2 * pdfs + 2, leave, state
    source = state - 1
    source[starts[:-1]], source[starts[-1]] = 1, 0
    forward["olabel"][starts[:-1]] = np.arange(count) + 1
    language = -np.log(lexicon.probabilities * mean_words / (mean_words + 1))
    forward["weight"][starts] += np.concatenate([language, [-np.log(SILENCE_PROBABILITY)]]).astype(np.float32)
    loops = np.zeros(len(pdfs), ARC)
    loops["ilabel"], loops["nextstate"] = 2 * pdfs + 1, state
    loops["weight"] = -SELF_LOOP_SCALE * np.log(acoustics.self_loop)[pdfs]
    back = np.zeros(
        count + 2, ARC
    )  # without input: from the end of each word to 0, from silence to 1, and past the silence
    back["nextstate"][-2:] = 1
    back["weight"][-1] = -np.log(1 - SILENCE_PROBABILITY)
    sources = np.concatenate([source, state, state[ends - 1], [0]])
    order = np.argsort(sources, kind="stable")
    arcs = np.concatenate([forward, loops, back])[order]
    offsets = np.searchsorted(sources[order], np.arange(len(pdfs) + 3)).astype(np.int64)
    final = np.full(len(pdfs) + 2, np.inf, np.float32)
    final[1] = np.log(mean_words + 1)
    return Fst(0, final, offsets, arcs)
