"""An invented language: words spelled by their phones, senones in context, and a decoding graph of a loop of words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddnn.kaldi.fst import ARC, Fst
from ddnn.util.errors import UserError

VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (
    *("B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N"),
    *("NG", "P", "R", "S", "SH", "T", "TH", "V", "W", "Y", "Z", "ZH"),
)
PHONES = ("SIL", *sorted((*CONSONANTS, *VOWELS)))  # the phone at index i has the phone-id i + 1
STATES = 3  # emitting HMM states of every phone, silence too
MIN_PDFS = STATES * len(PHONES)
_MAX_WORDS = 20_000
SILENCE_PROBABILITY = 0.3  # of the optional silence before, between and after the words
WORDS_PER_UTTERANCE = (2, 8)
SELF_LOOP_SCALE = 0.1  # as utils/mkgraph.sh has it: the costs of self-loops, and of leaving them, count a tenth


@dataclass(frozen=True, eq=False)
class Lexicon:
    """Words, and the pdfs that they pass through."""

    words: tuple[str, ...]  # names; word w has word id w + 1
    probabilities: npt.NDArray[np.float64]  # float64 [words], unigram, near Zipf's law
    pdfs: npt.NDArray[np.int32]  # int32, the pdf-ids of the words' HMM states one after the other; silence comes last
    # int64 [words + 2]: word w owns `pdfs[offsets[w]:offsets[w + 1]]`, silence the last stretch
    offsets: npt.NDArray[np.int64]
    pdf_phone: npt.NDArray[np.int32]  # int32 [pdfs], index into `PHONES` of each pdf
    pdf_state: npt.NDArray[np.int32]  # int32 [pdfs], HMM state of each pdf


def _invent_words(rng: np.random.Generator, count: int) -> tuple[tuple[str, ...], list[list[int]]]:
    """Names and pronunciations of 2 to 8 phones, mostly consonant and vowel in turn; all different."""
    kinds = [[PHONES.index(phone) for phone in kind] for kind in (CONSONANTS, VOWELS)]
    names: dict[str, list[int]] = {}
    while len(names) < count:
        length, kind = int(rng.integers(2, 9)), int(rng.integers(2))
        phones = []
        for _ in range(length):
            phones.append(kinds[kind][rng.integers(len(kinds[kind]))])
            kind = 1 - kind if rng.random() < 0.85 else kind
        names.setdefault("".join(PHONES[phone] for phone in phones), phones)
    return tuple(names), list(names.values())


def _apportion(total: int, limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`total` into parts of 1 to `limits`, in proportion to `limits - 1`; the largest remainders are rounded up."""
    exact = (limits - 1) * ((total - len(limits)) / max(1, int((limits - 1).sum())))
    parts = np.minimum(np.floor(exact).astype(np.int64), limits - 1)
    order = np.argsort(parts - exact, kind="stable")
    for part in order[parts[order] < (limits - 1)[order]][: total - len(limits) - int(parts.sum())]:
        parts[part] += 1
    shares: npt.NDArray[np.int64] = parts + 1
    return shares


def make_lexicon(rng: np.random.Generator, num_pdfs: int) -> Lexicon:
    """Invents the words, and ties the contexts of each (phone, HMM state) to `num_pdfs` pdfs in all, each in some word.

    A context is the phone before and the phone after within the word. The contexts of a first state are ordered by the
    phone before, those of a last state by the phone after; neighbours in that order share a pdf, as in a decision tree.
    UserError: fewer pdfs than HMM states, or more than the words have contexts.
    """
    if num_pdfs < MIN_PDFS:
        message = f"{num_pdfs} pdfs for {MIN_PDFS} HMM states"
        raise UserError(message, hint=f"--pdfs {MIN_PDFS} is the smallest possible")
    names, pronunciations = _invent_words(rng, min(_MAX_WORDS, max(100, num_pdfs // 4)))
    lengths = np.array([len(p) for p in pronunciations])
    ends = np.cumsum(lengths)
    phone = np.concatenate(pronunciations).astype(np.int64)
    before, after = np.roll(phone, 1), np.roll(phone, -1)
    before[ends - lengths] = after[ends - 1] = 0  # silence's index marks the word's edge
    size = len(PHONES)
    # One context per row of `contexts`; `which` says which one each phone of the lexicon has.
    contexts, which = np.unique((phone * size + before) * size + after, return_inverse=True)
    counts = np.bincount(contexts // size**2, minlength=size)[1:]
    max_pdfs = STATES + STATES * int(counts.sum())
    if num_pdfs > max_pdfs:
        message = f"{num_pdfs} pdfs, but the words have contexts for {max_pdfs} only"
        raise UserError(message, hint=f"--pdfs {max_pdfs} or fewer")
    parts = _apportion(num_pdfs - STATES, np.repeat(counts, STATES)).reshape(-1, STATES)
    pdf_of = np.empty((len(contexts), STATES), np.int32)
    pdf_phone, pdf_state = [0] * STATES, list(range(STATES))
    for index in range(1, size):
        mine = np.flatnonzero(contexts // size**2 == index)
        by_after = np.argsort(contexts[mine] % size, kind="stable")
        for state in range(STATES):
            classes = int(parts[index - 1, state])
            ordered = mine[by_after] if state == STATES - 1 else mine
            pdf_of[ordered, state] = len(pdf_phone) + np.arange(len(mine)) * classes // len(mine)
            pdf_phone += [index] * classes
            pdf_state += [state] * classes
    pdfs = np.concatenate([pdf_of[which].reshape(-1), np.arange(STATES, dtype=np.int32)])
    offsets = np.concatenate([[0], ends, [ends[-1] + 1]]) * STATES
    weights = 1.0 / (np.arange(len(names)) + 10.0)
    return Lexicon(
        names, weights / weights.sum(), pdfs, offsets, np.array(pdf_phone, np.int32), np.array(pdf_state, np.int32)
    )


def make_graph(lexicon: Lexicon, self_loop: npt.NDArray[np.float64]) -> Fst:
    """HCLG with transition-ids on its arcs and word ids at the beginning of each word. State 0 is the start and comes
    before the optional silence; state 1 comes after it, leads into the words, and is final. Then one state per HMM
    state of each word. Self-loops (`self_loop`: float64 [pdfs], their probability) are on the state that a transition
    enters, as in Kaldi's reordered graphs."""
    pdfs, count = lexicon.pdfs, len(lexicon.words)
    starts, ends = lexicon.offsets[:-1], lexicon.offsets[1:]
    state = np.arange(len(pdfs)) + 2
    mean_words = sum(WORDS_PER_UTTERANCE) / 2
    leave = -SELF_LOOP_SCALE * np.log(1 - self_loop)[pdfs]
    forward = np.zeros(len(pdfs), ARC)
    forward["ilabel"], forward["weight"], forward["nextstate"] = 2 * pdfs + 2, leave, state
    source = state - 1
    source[starts[:-1]], source[starts[-1]] = 1, 0
    forward["olabel"][starts[:-1]] = np.arange(count) + 1
    language = -np.log(lexicon.probabilities * mean_words / (mean_words + 1))
    forward["weight"][starts] += np.concatenate([language, [-np.log(SILENCE_PROBABILITY)]]).astype(np.float32)
    loops = np.zeros(len(pdfs), ARC)
    loops["ilabel"], loops["nextstate"] = 2 * pdfs + 1, state
    loops["weight"] = -SELF_LOOP_SCALE * np.log(self_loop)[pdfs]
    # Without input: from the end of each word to 0, from silence to 1, and past the silence.
    back = np.zeros(count + 2, ARC)
    back["nextstate"][-2:] = 1
    back["weight"][-1] = -np.log(1 - SILENCE_PROBABILITY)
    sources = np.concatenate([source, state, state[ends - 1], [0]])
    order = np.argsort(sources, kind="stable")
    arcs = np.concatenate([forward, loops, back])[order]
    offsets = np.searchsorted(sources[order], np.arange(len(pdfs) + 3)).astype(np.int64)
    final = np.full(len(pdfs) + 2, np.inf, np.float32)
    final[1] = np.log(mean_words + 1)
    return Fst(0, final, offsets, arcs)
