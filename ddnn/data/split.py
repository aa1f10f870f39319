"""What is held out for cross-validation."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.files import read_regular

DEFAULT_FRACTION = 0.1
MOST_BYTES = 1 << 30
"""Of a list of speakers."""


class Utterances(Protocol):
    """What a split looks at: a `CorpusPlan` has it, and so has a `Corpus`."""

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """Speaker of each utterance; None where they are not known."""

    @property
    def num_frames(self) -> NDArray[np.int64]:
        """(utterances,) frames of each."""


def split_by_speakers_file(corpus: Utterances, path: Path) -> tuple[list[int], list[int]]:
    """Indices of the utterances to train on, and of those of the speakers listed in `path`, one a line.

    Raises:
        DataError: the file cannot be read, names a speaker that the corpus lacks, or leaves one side empty.
    """
    try:
        listed = read_regular(path, MOST_BYTES).decode("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list of cross-validation speakers: {error}", where=path) from error
    known = set(_speakers(corpus))
    unknown = sorted(set(listed) - known)
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(set(listed))} listed speakers are not in the corpus: {', '.join(unknown[:5])}",
            where=path,
            mend=f"list speakers of the training data, such as {', '.join(sorted(known)[:3])}",
        )
    return _split(corpus, set(listed), str(path))


def split_by_fraction(corpus: Utterances, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Holds out whole speakers, drawn with `seed`, until they have `fraction` of the frames or more.

    Raises:
        DataError: one side would be empty, as with a single speaker.
    """
    frames: dict[str, int] = defaultdict(int)
    for speaker, count in zip(_speakers(corpus), corpus.num_frames, strict=True):
        frames[speaker] += int(count)
    wanted = fraction * int(corpus.num_frames.sum())
    held_out: set[str] = set()
    names = sorted(frames)
    for index in np.random.default_rng([seed, 0x5EED]).permutation(len(names)):
        if sum(frames[s] for s in held_out) >= wanted:
            break
        held_out.add(names[index])
    return _split(corpus, held_out, f"data.cv.fraction {fraction:g}")


def _speakers(corpus: Utterances) -> tuple[str, ...]:
    if corpus.speakers is None:
        raise DataError(
            "the training data has no utt2spk; it is needed to hold out speakers for cross-validation",
            mend="write utt2spk, or give data.cv.data and data.cv.alignments",
        )
    return corpus.speakers


def _split(corpus: Utterances, held_out: set[str], rule: str) -> tuple[list[int], list[int]]:
    train = [u for u, speaker in enumerate(_speakers(corpus)) if speaker not in held_out]
    cv = [u for u, speaker in enumerate(_speakers(corpus)) if speaker in held_out]
    if not train or not cv:
        side = "training" if not train else "cross-validation"
        raise DataError(
            f"{len(held_out)} of {len(set(_speakers(corpus)))} speakers held out: no utterance is left for {side}",
            where=rule,
            mend="hold out other speakers, or give data.cv.data and data.cv.alignments",
        )
    return train, cv
