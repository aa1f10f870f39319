"""What is spoken, and what it sounds like. An invented language: words spelled by their phones, senones in context, and
a decoding graph of a loop of words. The speakers: a Gaussian mixture per pdf, a shift and a scale per speaker, noise
that is correlated in time; and how long they stay in each HMM state. As filter banks, the means are log-mel spectra with
formants, which a speaker's vocal tract moves along frequency, and the noise of neighboring bands is correlated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddnn.kaldi.basic_types import BasicTypeWriter
from ddnn.kaldi.fst import ARC, Fst
from ddnn.kaldi.transition_model import write_left_to_right
from ddnn.util.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_write

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
    probabilities: Float64Array  # float64 [words], unigram, near Zipf's law
    pdfs: Int32Array  # int32, the pdf-ids of the words' HMM states one after the other; silence comes last
    # int64 [words + 2]: word w owns `pdfs[offsets[w]:offsets[w + 1]]`, silence the last stretch
    offsets: Int64Array
    pdf_phone: Int32Array  # int32 [pdfs], index into `PHONES` of each pdf
    pdf_state: Int32Array  # int32 [pdfs], HMM state of each pdf

    @property
    def self_loop(self) -> Float64Array:
        """float64 [pdfs], probability of the self-loop."""
        return np.where(self.pdf_phone == 0, SILENCE_SELF_LOOP, SPEECH_SELF_LOOP)


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


def _apportion(total: int, limits: Int64Array) -> Int64Array:
    """`total` into parts of 1 to `limits`, in proportion to `limits - 1`; the largest remainders are rounded up."""
    exact = (limits - 1) * ((total - len(limits)) / max(1, int((limits - 1).sum())))
    parts = np.minimum(np.floor(exact).astype(np.int64), limits - 1)
    order = np.argsort(parts - exact, kind="stable")
    parts[order[parts[order] < (limits - 1)[order]][: total - len(limits) - int(parts.sum())]] += 1
    return np.asarray(parts + 1)


def make_lexicon(rng: np.random.Generator, num_pdfs: int) -> Lexicon:
    """Invents the words, and ties the contexts of each (phone, HMM state) to `num_pdfs` pdfs in all, each in some word.

    A context is the phone before and the phone after within the word. The contexts of a first state are ordered by the
    phone before, those of a last state by the phone after; neighbors in that order share a pdf, as in a decision tree.
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


def make_graph(lexicon: Lexicon) -> Fst:
    """HCLG with transition-ids on its arcs and word ids at the beginning of each word. State 0 is the start and comes
    before the optional silence; state 1 comes after it, leads into the words, and is final. Then one state per HMM
    state of each word. Self-loops are on the state that a transition enters, as in Kaldi's reordered graphs."""
    pdfs, num_words = lexicon.pdfs, len(lexicon.words)
    starts, ends = lexicon.offsets[:-1], lexicon.offsets[1:]
    state, self_loop = np.arange(len(pdfs)) + 2, lexicon.self_loop[pdfs]
    mean_words = sum(WORDS_PER_UTTERANCE) / 2
    language = -np.log(lexicon.probabilities * mean_words / (mean_words + 1))
    # Into each state, its self-loop; then without input: from the end of each word to 0, from silence to 1, and past it.
    source = np.concatenate([state - 1, state, state[ends - 1], [0]])
    source[starts] = [1] * num_words + [0]
    arcs = np.zeros(len(source), ARC)
    arcs["nextstate"] = np.concatenate([state, state, [0] * num_words, [1, 1]])
    arcs["ilabel"][: 2 * len(pdfs)] = np.concatenate([2 * pdfs + 2, 2 * pdfs + 1])
    arcs["olabel"][starts[:-1]] = np.arange(num_words) + 1
    arcs["weight"][: 2 * len(pdfs)] = -SELF_LOOP_SCALE * np.log(np.concatenate([1 - self_loop, self_loop]))
    arcs["weight"][starts] += np.concatenate([language, [-np.log(SILENCE_PROBABILITY)]]).astype(np.float32)
    arcs["weight"][-1] = -np.log(1 - SILENCE_PROBABILITY)
    order = np.argsort(source, kind="stable")
    offsets = np.searchsorted(source[order], np.arange(len(pdfs) + 3)).astype(np.int64)
    final = np.full(len(pdfs) + 2, np.inf, np.float32)
    final[1] = np.log(mean_words + 1)
    return Fst(0, final, offsets, arcs[order])


COMPONENTS = 2
SPEECH_SELF_LOOP, SILENCE_SELF_LOOP = 2 / 3, 0.9
# Distances between means in units of the noise's standard deviation, over all dims: more dims are not easier.
_PHONE, _STATE, _SENONE, _COMPONENT = 2.2, 1.35, 1.1, 1.2
_SPEAKER_SHIFT, _SPEAKER_SCALE = 1.5, 0.05
_STDDEVS = (0.8, 1.25)
_NEIGHBOR = np.float32(0.5)  # weight of the frames beside in the noise


@dataclass(frozen=True, eq=False)
class Voice:
    """How a speaker sounds: the means of the Gaussians, float32 [pdfs * COMPONENTS, dim], and a shift and a scale of all
    features, float32 [dim] each."""

    means: Float32Array
    shift: Float32Array
    scale: Float32Array


@dataclass(frozen=True, eq=False)
class Acoustics:
    """The true model. Gaussian `COMPONENTS * pdf + c` is component c of a pdf, of weight 1 / COMPONENTS."""

    lexicon: Lexicon
    # float32 [pdfs * COMPONENTS, dim]
    means: Float32Array
    stddevs: Float32Array

    @property
    def dim(self) -> int:
        return int(self.means.shape[1])

    def draw_speaker(self, rng: np.random.Generator) -> Voice:
        shift = rng.normal(0, _SPEAKER_SHIFT / np.sqrt(self.dim), self.dim)
        scale = np.exp(rng.normal(0, _SPEAKER_SCALE, self.dim))
        return Voice(self.means, shift.astype(np.float32), scale.astype(np.float32))

    def draw_noise(self, rng: np.random.Generator, out: Float32Array) -> None:
        """Fills `out` [frames, dims] with noise of variance 1 that is correlated in time."""
        white = rng.standard_normal((len(out) + 2, out.shape[1]), np.float32)
        np.add(white[:-2], white[2:], out=out)
        out *= _NEIGHBOR
        out += white[1:-1]
        out *= np.float32(1 / np.sqrt(1 + 2 * _NEIGHBOR**2))


def _draw_by_state(rng: np.random.Generator, lexicon: Lexicon, low: float, high: float, dims: int) -> Float64Array:
    """float64 [Gaussians, dims], uniform, the same for all Gaussians of an HMM state."""
    values = rng.uniform(low, high, (len(PHONES) * STATES, dims))
    return np.repeat(values[lexicon.pdf_phone * STATES + lexicon.pdf_state], COMPONENTS, axis=0)


def _draw_around(
    rng: np.random.Generator, lexicon: Lexicon, centers: Float64Array, deviations: tuple[float, float, float]
) -> Float64Array:
    """float64 [Gaussians, dims] near the centers [phones, dims]: pdfs of one phone are near each other, those of one of its
    HMM states nearer. `deviations`: standard deviations between HMM states, senones and components."""
    phone, dims = lexicon.pdf_phone, centers.shape[1]
    by_state, by_senone, by_component = deviations
    values = centers[phone]
    values += rng.normal(0, by_state, (len(PHONES) * STATES, dims))[phone * STATES + lexicon.pdf_state]
    values += rng.normal(0, by_senone, (len(phone), dims))
    apart = rng.normal(0, by_component, (len(PHONES), COMPONENTS, dims))[phone]
    return (values[:, None] + apart).reshape(-1, dims)


def make_acoustics(rng: np.random.Generator, lexicon: Lexicon, dim: int) -> Acoustics:
    unit = 1 / np.sqrt(dim)
    centers = rng.normal(0, _PHONE * unit, (len(PHONES), dim))
    means = _draw_around(rng, lexicon, centers, (_STATE * unit, _SENONE * unit, _COMPONENT * unit))
    stddevs = _draw_by_state(rng, lexicon, *_STDDEVS, dim)
    return Acoustics(lexicon, means.astype(np.float32), stddevs.astype(np.float32))


_HIGHEST = 4000.0  # Hz: that of 8 kHz audio
_FORMANTS = ((250.0, 850.0), (850.0, 2400.0), (2200.0, 3300.0), (1500.0, 3800.0))  # Hz; the last is of friction
_WIDTHS = (90.0, 90.0, 100.0, 220.0)  # mel, standard deviations of the peaks
_VOWEL, _CONSONANT = (4.0, 3.5, 2.5, 0.0), (1.5, 1.5, 1.2, 3.0)  # heights of the peaks, in units of the noise
_FLOOR = 6.0  # logarithm of the energy between the peaks
# Standard deviations of the logarithms of the formants' frequencies between HMM states, senones and components.
_MOVES = (0.06, 0.05, 0.03)
_TRACT = 0.22  # logarithm of the factor that the shortest vocal tract moves the formants up by, the longest down
_SMOOTHING = (1.0, 2.0, 3.0, 2.0, 1.0)  # over the bands of the noise: correlation 16/19 of neighbors


def _mel(hertz: Float64Array) -> Float64Array:
    return np.asarray(1127.0 * np.log1p(hertz / 700.0))  # kaldi feat/mel-computations.h


@dataclass(frozen=True, eq=False)
class FilterBanks(Acoustics):
    """Log-mel spectra: peaks over a floor. A speaker moves all peaks by one factor, as the length of the vocal tract does,
    so that a phone is the same pattern elsewhere along frequency."""

    formants: Float64Array  # float64 [pdfs * COMPONENTS, peaks], Hz, of a vocal tract of average length
    heights: Float64Array  # float64 [pdfs * COMPONENTS, peaks]

    def draw_speaker(self, rng: np.random.Generator) -> Voice:
        """A vocal tract, and a recording's level and slope over the bands, which CMVN takes away."""
        factor, (level, slope) = np.exp(rng.uniform(-_TRACT, _TRACT)), rng.normal(0, 1, 2)
        shift = level + slope * np.linspace(-1, 1, self.dim)
        means = spectra(self.formants * factor, self.heights, self.dim)
        return Voice(means, shift.astype(np.float32), np.ones(self.dim, np.float32))

    def draw_noise(self, rng: np.random.Generator, out: Float32Array) -> None:
        frames, dim = out.shape
        wide = np.empty((frames, dim + len(_SMOOTHING) - 1), np.float32)
        super().draw_noise(rng, wide)
        weights = np.array(_SMOOTHING, np.float32) / np.float32(np.linalg.norm(_SMOOTHING))
        np.sum([weight * wide[:, k : k + dim] for k, weight in enumerate(weights)], axis=0, out=out)


def spectra(formants: Float64Array, heights: Float64Array, bands: int) -> Float32Array:
    """float32 [Gaussians, bands]: peaks at the frequencies `formants` (Hz) of these heights, both [Gaussians, peaks]."""
    centers = np.linspace(_mel(np.array(20.0)), _mel(np.array(_HIGHEST)), bands + 2)[1:-1]
    result = np.full((len(formants), bands), _FLOOR)
    for peak, width in enumerate(_WIDTHS):
        distance = (centers - _mel(formants[:, peak, None])) / width
        result += heights[:, peak, None] * np.exp(-0.5 * distance * distance)
    return result.astype(np.float32)


def make_filter_banks(rng: np.random.Generator, lexicon: Lexicon, bands: int) -> FilterBanks:
    """Draws the formants of each phone; those of its HMM states, senones and components are near them."""
    low, high = np.log(_FORMANTS).T
    centers = rng.uniform(low, high, (len(PHONES), len(_FORMANTS)))
    formants = np.exp(_draw_around(rng, lexicon, centers, _MOVES))
    peaks = [(0.0,) * len(_FORMANTS) if p == PHONES[0] else _VOWEL if p in VOWELS else _CONSONANT for p in PHONES]
    heights = np.repeat(np.array(peaks)[lexicon.pdf_phone], COMPONENTS, axis=0)
    heights *= _draw_by_state(rng, lexicon, 0.7, 1.3, len(_FORMANTS))
    stddevs = _draw_by_state(rng, lexicon, *_STDDEVS, bands).astype(np.float32)
    return FilterBanks(lexicon, spectra(formants, heights, bands), stddevs, formants, heights)


ACOUSTICS = {"gaussian": make_acoustics, "fbank": make_filter_banks}
"""The kinds of features: a random generator, a lexicon and the number of dims make one."""


Utterance = tuple[Int64Array, Int32Array, Float32Array]
"""Its word indices, transition-ids (int32 [frames]) and features (float32 [frames, dim])."""


def _gather_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    ends = np.cumsum(lengths)
    ranges: Int64Array = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
    return ranges


def draw_batch(rng: np.random.Generator, acoustics: Acoustics, count: int, voice: Voice) -> Iterator[Utterance]:
    """Draws `count` utterances of a speaker."""
    lexicon, (low, high) = acoustics.lexicon, WORDS_PER_UTTERANCE
    num_words = rng.integers(low, high + 1, count)
    cumulative = np.cumsum(lexicon.probabilities)
    words = np.minimum(np.searchsorted(cumulative, rng.random(int(num_words.sum())), "right"), len(cumulative) - 1)
    # In each utterance: silence, word, silence, word, ..., silence; then most silences are removed.
    slots = 2 * num_words + 1
    position = _gather_ranges(np.zeros(count, np.int64), slots)
    items = np.full(len(position), len(cumulative), np.int64)
    items[position % 2 == 1] = words
    keep = (position % 2 == 1) | (rng.random(len(position)) < SILENCE_PROBABILITY)
    utterance = np.repeat(np.arange(count), slots)[keep]
    items = items[keep]
    lengths = np.diff(lexicon.offsets)[items]
    pdfs = lexicon.pdfs[_gather_ranges(lexicon.offsets[items], lengths)]
    durations = rng.geometric(1 - lexicon.self_loop[pdfs])
    per_item = np.add.reduceat(durations, np.cumsum(lengths) - lengths)
    starts = np.cumsum(np.bincount(utterance, per_item, count)).astype(np.int64)[:-1]  # of all but the first
    # The component of the mixture is that of a whole HMM state: a neighbor in time has the same accent.
    gaussian = np.repeat(pdfs * COMPONENTS + rng.integers(0, COMPONENTS, len(pdfs)), durations)
    # Transition-ids as Kaldi orders them ("reorder"): the transition out of the state first, then its self-loops.
    transition_ids = np.repeat(2 * pdfs + 1, durations).astype(np.int32)
    transition_ids[np.cumsum(durations) - durations] += 1
    features = sample_features(rng, acoustics, gaussian, voice)
    words_of = np.split(words, np.cumsum(num_words)[:-1])
    return zip(words_of, np.split(transition_ids, starts), np.split(features, starts), strict=True)


def sample_features(rng: np.random.Generator, acoustics: Acoustics, gaussian: Int64Array, voice: Voice) -> Float32Array:
    features = np.empty((len(gaussian), acoustics.dim), np.float32)
    step = max(1, (1 << 17) // acoustics.dim)  # a piece that fits the cache
    for first in range(0, len(gaussian), step):
        piece, which = features[first : first + step], gaussian[first : first + step]
        acoustics.draw_noise(rng, piece)
        piece *= acoustics.stddevs[which]
        piece += voice.means[which]
        piece *= voice.scale
        piece += voice.shift
    return features


def write_model(path: Path, acoustics: Acoustics) -> None:
    """Writes the true model as a `final.mdl`: the transition model, then the mixtures (kaldi `gmm/am-diag-gmm.cc`)."""
    lexicon = acoustics.lexicon
    pdfs = np.arange(len(lexicon.pdf_phone), dtype=np.int32)  # in the order of phones and HMM states
    triples = np.stack([lexicon.pdf_phone + 1, lexicon.pdf_state, pdfs], axis=1)
    means = acoustics.means.astype(np.float64).reshape(len(pdfs), COMPONENTS, -1)
    variances = acoustics.stddevs.astype(np.float64).reshape(means.shape) ** 2
    weights = np.full(COMPONENTS, 1 / COMPONENTS)
    with atomic_write(path) as handle:
        writer = BasicTypeWriter(handle)
        write_left_to_right(writer, len(PHONES), STATES, triples, lexicon.self_loop)
        writer.token("<DIMENSION>")
        writer.int32(acoustics.dim)
        writer.token("<NUMPDFS>")
        writer.int32(len(pdfs))
        for mean, variance in zip(means, variances, strict=True):
            write_diag_gmm(writer, mean, variance, weights)


def write_diag_gmm(
    writer: BasicTypeWriter,
    means: Float64Array,
    variances: Float64Array,
    weights: Float64Array,
) -> None:
    """Writes the mixture of one pdf: means and variances [Gaussians, dim], weights [Gaussians] that sum to one."""
    # The log likelihood of an all-zero feature vector, per Gaussian.
    constants = np.log(weights) - 0.5 * (np.log(2 * np.pi * variances) + means**2 / variances).sum(axis=1)
    writer.token("<DiagGMM>")
    for token, vector in (("<GCONSTS>", constants), ("<WEIGHTS>", weights)):
        writer.token(token)
        writer.float_vector(vector.astype(np.float32))
    for token, matrix in (("<MEANS_INVVARS>", means / variances), ("<INV_VARS>", 1 / variances)):
        writer.token(token)
        writer.float_matrix(matrix.astype(np.float32))
    writer.token("</DiagGMM>")
