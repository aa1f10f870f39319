"""What a worker sent, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What this worker sent so far and how long it took; only ever grows.

    Attributes:
        bytes_sent: what this worker handed to the network. A sum or an all-gather counts its own buffer once, whatever
            the MPI makes of it (a ring all-reduce moves 2 (n - 1) / n times as much), an all-to-all the chunks for
            others, a broadcast the root's buffer.
        transfer_seconds: in messages that move data.
        waiting_seconds: in small messages that cannot end before the slowest worker is there: `Exchange.waiting`.
    """

    bytes_sent: int = 0
    transfer_seconds: float = 0.0
    waiting_seconds: float = 0.0

    def copy(self) -> Traffic:
        """As it is now."""
        return Traffic(self.bytes_sent, self.transfer_seconds, self.waiting_seconds)

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What came since `earlier`."""
        return Traffic(
            self.bytes_sent - earlier.bytes_sent,
            self.transfer_seconds - earlier.transfer_seconds,
            self.waiting_seconds - earlier.waiting_seconds,
        )
