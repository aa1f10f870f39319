"""An invented language: words spelled by their phones, and context-dependent senones for its phones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddnn.errors import UserError

VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = (
    *("B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N"),
    *("NG", "P", "R", "S", "SH", "T", "TH", "V", "W", "Y", "Z", "ZH"),
)
PHONES = ("SIL", *sorted((*CONSONANTS, *VOWELS)))
"""Phone-id i + 1 stands at index i."""
STATES = 3
"""Emitting HMM states of every phone, silence too."""
SMALLEST_PDFS = STATES * len(PHONES)
_MOST_WORDS = 20_000


@dataclass(frozen=True, eq=False)
class Lexicon:
    """Words, and the pdfs that they pass through.

    Attributes:
        words: names; word w has word id w + 1.
        probabilities: float64 [words], unigram, near Zipf's law.
        pdfs: int32, the pdf-ids of the words' HMM states one after the other; silence comes last.
        offsets: int64 [words + 2]: word w owns `pdfs[offsets[w]:offsets[w + 1]]`, silence the last stretch.
        pdf_phone: int32 [pdfs], index into `PHONES` of each pdf.
        pdf_state: int32 [pdfs], HMM state of each pdf.
    """

    words: tuple[str, ...]
    probabilities: npt.NDArray[np.float64]
    pdfs: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    pdf_phone: npt.NDArray[np.int32]
    pdf_state: npt.NDArray[np.int32]


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


def _share_out(total: int, most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`total` into parts of 1 to `most`, in proportion to `most - 1`; the largest remainders are rounded up."""
    exact = (most - 1) * ((total - len(most)) / max(1, int((most - 1).sum())))
    parts = np.minimum(np.floor(exact).astype(np.int64), most - 1)
    order = np.argsort(parts - exact, kind="stable")
    for part in order[parts[order] < (most - 1)[order]][: total - len(most) - int(parts.sum())]:
        parts[part] += 1
    shares: npt.NDArray[np.int64] = parts + 1
    return shares


def make_lexicon(rng: np.random.Generator, num_pdfs: int) -> Lexicon:
    """Invents the words, and ties the contexts of each (phone, HMM state) to `num_pdfs` pdfs in all, each in some word.

    A context is the phone before and the phone after within the word. The contexts of a first state are ordered by the
    phone before, those of a last state by the phone after; neighbours in that order share a pdf, as in a decision tree.

    Raises:
        UserError: fewer pdfs than HMM states, or more than the words have contexts.
    """
    if num_pdfs < SMALLEST_PDFS:
        raise UserError(
            f"{num_pdfs} pdfs for {SMALLEST_PDFS} HMM states", mend=f"--pdfs {SMALLEST_PDFS} is the smallest possible"
        )
    names, pronunciations = _invent_words(rng, min(_MOST_WORDS, max(100, num_pdfs // 4)))
    lengths = np.array([len(p) for p in pronunciations])
    ends = np.cumsum(lengths)
    phone = np.concatenate(pronunciations).astype(np.int64)
    before, after = np.roll(phone, 1), np.roll(phone, -1)
    before[ends - lengths] = after[ends - 1] = 0  # silence's index stands for the word's edge
    size = len(PHONES)
    # One context per row of `contexts`; `which` says which one each phone of the lexicon has.
    contexts, which = np.unique((phone * size + before) * size + after, return_inverse=True)
    counts = np.bincount(contexts // size**2, minlength=size)[1:]
    most = STATES + STATES * int(counts.sum())
    if num_pdfs > most:
        raise UserError(f"{num_pdfs} pdfs, but the words have contexts for {most} only", mend=f"--pdfs {most} or fewer")
    parts = _share_out(num_pdfs - STATES, np.repeat(counts, STATES)).reshape(-1, STATES)
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
