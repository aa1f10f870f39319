"""What the synthetic speakers sound like: a Gaussian mixture per pdf, a shift and a scale per speaker, noise that is
correlated in time; and how long they stay in each HMM state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddnn.kaldi.basic_types import BasicTypeWriter
from ddnn.kaldi.transition_model import write_left_to_right
from ddnn.synth.lexicon import PHONES, SILENCE_PROBABILITY, STATES, WORDS_PER_UTTERANCE, Lexicon
from ddnn.util.files import atomic_write

COMPONENTS = 2
SPEECH_SELF_LOOP, SILENCE_SELF_LOOP = 2 / 3, 0.9
# Distances between means in units of the noise's standard deviation, over all dims: more dims are not easier.
_PHONE, _STATE, _SENONE, _COMPONENT = 2.2, 1.35, 1.1, 1.2
_SPEAKER_SHIFT, _SPEAKER_SCALE = 1.5, 0.05
_NEIGHBOUR = np.float32(0.5)  # weight of the frames beside in the noise


@dataclass(frozen=True, eq=False)
class Acoustics:
    """The true model. Gaussian `COMPONENTS * pdf + c` is component c of a pdf, of weight 1 / COMPONENTS."""

    lexicon: Lexicon
    # float32 [pdfs * COMPONENTS, dim]
    means: npt.NDArray[np.float32]
    stddevs: npt.NDArray[np.float32]
    self_loop: npt.NDArray[np.float64]  # float64 [pdfs], probability of the self-loop

    @property
    def dim(self) -> int:
        return int(self.means.shape[1])


def make_acoustics(rng: np.random.Generator, lexicon: Lexicon, dim: int) -> Acoustics:
    """Draws the means so that pdfs of one phone are near each other, and those of one of its HMM states nearer."""
    phone, state, pdfs = lexicon.pdf_phone, lexicon.pdf_state, len(lexicon.pdf_phone)
    unit = 1 / np.sqrt(dim)
    center = rng.normal(0, _PHONE * unit, (len(PHONES), dim))[phone]
    center += rng.normal(0, _STATE * unit, (len(PHONES) * STATES, dim))[phone * STATES + state]
    center += rng.normal(0, _SENONE * unit, (pdfs, dim))
    apart = rng.normal(0, _COMPONENT * unit, (len(PHONES), COMPONENTS, dim))[phone]
    means = (center[:, None] + apart).reshape(-1, dim).astype(np.float32)
    stddevs = rng.uniform(0.8, 1.25, (len(PHONES) * STATES, dim))[phone * STATES + state]
    self_loop = np.where(phone == 0, SILENCE_SELF_LOOP, SPEECH_SELF_LOOP)
    return Acoustics(lexicon, means, np.repeat(stddevs, COMPONENTS, axis=0).astype(np.float32), self_loop)


Utterance = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Its word indices, transition-ids (int32 [frames]) and features (float32 [frames, dim])."""


def _gather_ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    ends = np.cumsum(lengths)
    ranges: npt.NDArray[np.int64] = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
    return ranges


def draw_batch(
    rng: np.random.Generator, acoustics: Acoustics, count: int, shift: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
) -> Iterator[Utterance]:  # fmt: skip
    """Draws `count` utterances of a speaker with that shift and scale (float32 [dim] each)."""
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
    durations = rng.geometric(1 - acoustics.self_loop[pdfs])
    per_item = np.add.reduceat(durations, np.cumsum(lengths) - lengths)
    starts = np.cumsum(np.bincount(utterance, per_item, count)).astype(np.int64)[:-1]  # of all but the first
    # The component of the mixture is that of a whole HMM state: a neighbour in time has the same accent.
    gaussian = np.repeat(pdfs * COMPONENTS + rng.integers(0, COMPONENTS, len(pdfs)), durations)
    # Transition-ids as Kaldi orders them ("reorder"): the transition out of the state first, then its self-loops.
    transition_ids = np.repeat(2 * pdfs + 1, durations).astype(np.int32)
    transition_ids[np.cumsum(durations) - durations] += 1
    features = sample_features(rng, acoustics, gaussian, shift, scale)
    words_of = np.split(words, np.cumsum(num_words)[:-1])
    return zip(words_of, np.split(transition_ids, starts), np.split(features, starts), strict=True)


def sample_features(
    rng: np.random.Generator, acoustics: Acoustics, gaussian: npt.NDArray[np.int64], shift: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:  # fmt: skip
    features = np.empty((len(gaussian), acoustics.dim), np.float32)
    unit = np.float32(1 / np.sqrt(1 + 2 * _NEIGHBOUR**2))
    step = max(1, (1 << 17) // acoustics.dim)  # a piece that fits the cache
    for first in range(0, len(gaussian), step):
        piece, which = features[first : first + step], gaussian[first : first + step]
        white = rng.standard_normal((len(piece) + 2, acoustics.dim), np.float32)
        np.add(white[:-2], white[2:], out=piece)
        piece *= _NEIGHBOUR
        piece += white[1:-1]
        piece *= unit
        piece *= acoustics.stddevs[which]
        piece += acoustics.means[which]
        piece *= scale
        piece += shift
    return features


def draw_speaker(rng: np.random.Generator, dim: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A speaker's shift and scale, float32 [dim] each."""
    shift = rng.normal(0, _SPEAKER_SHIFT / np.sqrt(dim), dim)
    return shift.astype(np.float32), np.exp(rng.normal(0, _SPEAKER_SCALE, dim)).astype(np.float32)


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
        write_left_to_right(writer, len(PHONES), STATES, triples, acoustics.self_loop)
        writer.token("<DIMENSION>")
        writer.int32(acoustics.dim)
        writer.token("<NUMPDFS>")
        writer.int32(len(pdfs))
        for mean, variance in zip(means, variances, strict=True):
            write_diag_gmm(writer, mean, variance, weights)


def write_diag_gmm(
    writer: BasicTypeWriter,
    means: npt.NDArray[np.float64],
    variances: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
) -> None:
    """Writes the mixture of one pdf: means and variances [Gaussians, dim], weights [Gaussians] that sum to one."""
    # The log likelihood of an all-zero feature vector, per Gaussian.
    constants = np.log(weights) - 0.5 * (np.log(2 * np.pi * variances) + means**2 / variances).sum(axis=1)
    writer.token("<DiagGMM>", "<GCONSTS>")
    writer.float_vector(constants.astype(np.float32))
    writer.token("<WEIGHTS>")
    writer.float_vector(weights.astype(np.float32))
    writer.token("<MEANS_INVVARS>")
    writer.float_matrix((means / variances).astype(np.float32))
    writer.token("<INV_VARS>")
    writer.float_matrix((1 / variances).astype(np.float32))
    writer.token("</DiagGMM>")
