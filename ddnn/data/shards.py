"""Which worker takes which utterances."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def shards(num_frames: NDArray[np.int64], utterances: Sequence[int], workers: int) -> list[list[int]]:
    """Shares the utterances out, one shard for each worker, balanced by frames: the longest utterance to the worker
    with the fewest frames, and so on (the code of arXiv 1507.01239). Ties go to the lowest rank.

    Two shards differ by no more frames than the longest utterance has. With fewer utterances than workers some shards
    are empty. O(u log u) for u utterances.

    Args:
        num_frames: (all utterances,) int64, such as `CorpusPlan.num_frames`.
        utterances: indices into it, each once.

    Returns:
        For each rank its utterances, ascending.
    """
    chosen = np.asarray(utterances, dtype=np.int64)
    longest_first = chosen[np.lexsort((chosen, -num_frames[chosen]))]
    lightest = [(0, rank) for rank in range(workers)]  # a heap of frames and rank
    shares: list[list[int]] = [[] for _ in range(workers)]
    for u, length in zip(longest_first.tolist(), num_frames[longest_first].tolist(), strict=True):
        frames, rank = lightest[0]
        shares[rank].append(u)
        heapq.heapreplace(lightest, (frames + length, rank))
    return [sorted(share) for share in shares]


def positions(shard: Sequence[int], utterances: Iterable[int]) -> list[int]:
    """Where those of `utterances` that are in the shard lie in it, ascending: their indices in the worker's corpus."""
    wanted = set(utterances)
    return [position for position, u in enumerate(shard) if u in wanted]
