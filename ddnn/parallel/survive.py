"""What the workers that are left do when another has died: MPI's ULFM (Bland et al., IJHPCA 2013)."""

from __future__ import annotations

from typing import Any

from ddnn.parallel.exchange import Exchange, over
from ddnn.parallel.launch import fault_tolerant
from ddnn.parallel.lost import WorkerLost, deaths_noticed

__all__ = ["WorkerLost", "fault_tolerant", "survivors"]


def survivors(exchange: Exchange, said: Any) -> tuple[Exchange, list[Any], list[int]]:
    """Collective over the workers that are left, each of which comes here after `WorkerLost`; ends the old exchange.

    The others are called: whatever they do over the old exchange raises WorkerLost. So a worker may come here before
    it has met one itself. Where a thread beside the main one exchanges, its call has to be waited for before; it ends
    at the latest when another worker comes here. A worker that dies meanwhile counts as lost.

    Args:
        exchange: that of before, which is not to be used any more. Its buffers must not be used either.
        said: what this worker has to tell the others, as JSON: see `Exchange.gather`.

    Returns:
        exchange: over those that are left, in the order of before. Its `members` know them by their first numbers; it
            keeps the wire, the guard and the traffic. Of its carriers only the CPU's is there: transports of GPUs have
            to be chosen again.
        said: what each of them said, by their new ranks.
        lost: ranks in the old exchange of those that have died.
    """
    communicator, ok = exchange.communicator, False
    if communicator is None:
        return exchange, exchange.gather(said), []
    while not ok:
        communicator.Revoke()
        smaller = communicator.Shrink()
        try:
            with deaths_noticed():
                left = over(smaller)
                told = left.gather([exchange.rank, said])
            ok = True
        except WorkerLost:
            smaller.Revoke()
        try:
            with deaths_noticed():
                ok = bool(smaller.Agree(int(ok)))
        except WorkerLost:
            ok = False
        communicator.Free()
        communicator = smaller
    old_ranks = [rank for rank, _ in told]
    if exchange.members:
        left.members = [exchange.members[rank] for rank in old_ranks]
    left.wire, left.guard, left.traffic = exchange.wire, exchange.guard, exchange.traffic
    lost = sorted(set(range(exchange.size)) - set(old_ranks))
    return left, [what for _, what in told], lost
