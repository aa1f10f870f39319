"""Where the time of a worker goes within an epoch, and what it did: the figures of its row in metrics.jsonl."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from ddnn.distributed.communicator import CommStats


class Timer:
    """Seconds of the training thread by what they were spent on: `data`, `compute`, `averaging`.

    On CUDA `compute` includes what the host waits for at the end of an interval, and `data` only what the host itself
    does.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Sets all to zero."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.started = self._marked = time.perf_counter()

    def mark(self, part: str) -> None:
        """The time since the last mark was spent on `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._marked
        self._marked = now


@dataclass
class EpochCounters:
    """What this worker did since the epoch began.

    Attributes:
        stats: the communicator's counters as the epoch began.
        frames, minibatches: trained on.
        averagings, excluded_averagings: how many there were, and how many of these (and of the epoch's last mean)
            without this worker's model, because it was not finite.
        consensus_distances: |theta - mean| / |theta| before each averaging, where known.
        interval_seconds: of the minibatches between two averagings, each time.
    """

    stats: CommStats
    frames: int = 0
    minibatches: int = 0
    averagings: int = 0
    excluded_averagings: int = 0
    consensus_distances: list[float] = field(default_factory=list)
    interval_seconds: list[float] = field(default_factory=list)
