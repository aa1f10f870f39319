"""Where the time of a worker goes, and how its model moves beside the others': a row of metrics.jsonl per epoch."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from ddnn.parallel.exchange import Exchange
from ddnn.parallel.traffic import Traffic


class Clock:
    """Seconds of the training thread by what they went into: `data`, `compute`, `averaging`.

    On CUDA `compute` holds what the host waits for at the end of a block, and `data` only what the host itself does.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins anew."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.started = self._mark = time.perf_counter()

    def lap(self, what: str) -> None:
        """The time since the last lap went into `what`."""
        now = time.perf_counter()
        self.seconds[what] += now - self._mark
        self._mark = now


@dataclass
class Counts:
    """What happened since the epoch began, on this worker.

    Attributes:
        frames, minibatches: trained on.
        averagings: how many were made.
        left_out: how many of them, and of the epoch's last mean, were made without this worker's model.
        divergences: |theta - mean| / |theta| before each averaging, where known.
        blocks: seconds of each block of minibatches between two averagings, without these.
        traffic: the exchange's counters as the epoch began.
    """

    traffic: Traffic
    frames: int = 0
    minibatches: int = 0
    averagings: int = 0
    left_out: int = 0
    divergences: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)


def counts_from_now(exchange: Exchange) -> Counts:
    """Counts of nothing yet."""
    return Counts(traffic=exchange.traffic.copy())


def worker_row(
    epoch: int,
    exchange: Exchange,
    device: torch.device,
    clock: Clock,
    counts: Counts,
    *,
    parameters: int,
    overlap: bool = False,
) -> dict[str, Any]:
    """The row of this worker: shares are of its training thread's `seconds`, from the epoch's start to its mean model.

    `waiting_share` is the wait for the slowest before an averaging, `communication_share` all else that averaging takes
    from the training thread. With overlap both happen in the background: what the training thread still waits for
    counts as communication, and `exchange_seconds` is the background's time.
    """
    seconds = max(time.perf_counter() - clock.started, 1e-9)
    traffic = exchange.traffic - counts.traffic
    averaging = clock.seconds["averaging"]
    waiting = 0.0 if overlap else min(traffic.waiting_seconds, averaging)
    return {
        "epoch": epoch,
        "split": "worker",
        "rank": exchange.number,
        "host": exchange.host,
        "device": str(device),
        "frames": counts.frames,
        "minibatches": counts.minibatches,
        "seconds": round(seconds, 4),
        "frames_per_second": round(counts.frames / seconds, 1),
        "compute_share": round(clock.seconds["compute"] / seconds, 5),
        "data_share": round(clock.seconds["data"] / seconds, 5),
        "communication_share": round((averaging - waiting) / seconds, 5),
        "waiting_share": round(waiting / seconds, 5),
        "averagings": counts.averagings,
        "left_out": counts.left_out,
        "divergence": round(statistics.fmean(counts.divergences), 8) if counts.divergences else None,
        "bytes_sent": traffic.bytes_sent,
        "exchange_seconds": round(traffic.transfer_seconds, 5),
        "parameters": parameters,
        "block_seconds": round(statistics.fmean(counts.blocks), 6) if counts.blocks else None,
        "block_seconds_std": round(statistics.pstdev(counts.blocks), 6) if counts.blocks else None,
    }
