"""Which utterances are held out for cross-validation, and which worker gets which."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.data.index import UtteranceIndex
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited

DEFAULT_FRACTION = 0.1
MAX_LIST_BYTES = 1 << 30
"""Of a list of speakers."""


def hold_out_speakers(index: UtteranceIndex, path: Path) -> tuple[list[int], list[int]]:
    """Indices of the utterances to train on, and of those of the speakers listed in `path`, one per line.

    Raises:
        DataError: the file cannot be read, names a speaker that the data does not have, or leaves one side empty.
    """
    try:
        listed = set(read_bytes_limited(path, MAX_LIST_BYTES).decode("utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list of cross-validation speakers: {error}", location=path) from error
    known = set(_speakers(index))
    unknown = sorted(listed - known)
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(listed)} listed speakers are not in the data: {', '.join(unknown[:5])}",
            location=path,
            hint=f"list speakers of the training data, such as {', '.join(sorted(known)[:3])}",
        )
    return _split(index, listed, str(path))


def hold_out_fraction(index: UtteranceIndex, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Holds out whole speakers, drawn with `seed`, until they have `fraction` of the frames or more.

    Raises:
        DataError: one side would be empty, as with a single speaker.
    """
    frames: dict[str, int] = defaultdict(int)
    for speaker, count in zip(_speakers(index), index.num_frames, strict=True):
        frames[speaker] += int(count)
    wanted = fraction * int(index.num_frames.sum())
    held_out: set[str] = set()
    names = sorted(frames)
    for n in np.random.default_rng([seed, 0x5EED]).permutation(len(names)):
        if sum(frames[s] for s in held_out) >= wanted:
            break
        held_out.add(names[n])
    return _split(index, held_out, f"data.cv.fraction {fraction:g}")


def _speakers(index: UtteranceIndex) -> tuple[str, ...]:
    if index.speakers is None:
        raise DataError(
            "the training data has no utt2spk; it is needed to hold out speakers for cross-validation",
            hint="write utt2spk, or give data.cv.data and data.cv.alignments",
        )
    return index.speakers


def _split(index: UtteranceIndex, held_out: set[str], rule: str) -> tuple[list[int], list[int]]:
    speakers = _speakers(index)
    train = [u for u, speaker in enumerate(speakers) if speaker not in held_out]
    cv = [u for u, speaker in enumerate(speakers) if speaker in held_out]
    if not train or not cv:
        side = "training" if not train else "cross-validation"
        raise DataError(
            f"{len(held_out)} of {len(set(speakers))} speakers held out: no utterance remains for {side}",
            location=rule,
            hint="hold out other speakers, or give data.cv.data and data.cv.alignments",
        )
    return train, cv


def assign_shards(num_frames: NDArray[np.int64], utterances: Sequence[int], workers: int) -> list[list[int]]:
    """Distributes the utterances, one shard per worker, balanced by frames: the longest utterance to the worker with
    the fewest frames, and so on (the code of arXiv 1507.01239). Ties go to the lowest rank.

    Two shards differ by no more frames than the longest utterance has. With fewer utterances than workers some shards
    are empty. O(u log u) for u utterances.

    Args:
        num_frames: (all utterances,) int64, such as `UtteranceIndex.num_frames`.
        utterances: indices into it, each once.

    Returns:
        For each rank its utterances, ascending.
    """
    chosen = np.asarray(utterances, dtype=np.int64)
    longest_first = chosen[np.lexsort((chosen, -num_frames[chosen]))]
    lightest = [(0, rank) for rank in range(workers)]  # a heap of frames and rank
    shards: list[list[int]] = [[] for _ in range(workers)]
    for u, length in zip(longest_first.tolist(), num_frames[longest_first].tolist(), strict=True):
        frames, rank = lightest[0]
        shards[rank].append(u)
        heapq.heapreplace(lightest, (frames + length, rank))
    return [sorted(shard) for shard in shards]


def local_positions(shard: Sequence[int], utterances: Iterable[int]) -> list[int]:
    """Positions in the shard of those of `utterances` that it has, ascending: their indices in the worker's dataset."""
    wanted = set(utterances)
    return [position for position, u in enumerate(shard) if u in wanted]
