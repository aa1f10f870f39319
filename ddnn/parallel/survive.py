"""What the workers that are left do when another has died: MPI's ULFM (Bland et al., IJHPCA 2013)."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

from ddnn.parallel.connect import bare
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.launch import fault_tolerant
from ddnn.parallel.lost import WorkerLost, all_agree

__all__ = ["WorkerLost", "fault_tolerant", "finish", "survivors"]

SETTLE = 0.2
"""Seconds between the news of a death and `Shrink`: what kills one worker often kills another at once, and Open MPI 5.0
crashes where it hears of a death in the midst of it, for some milliseconds (in ompi_comm_activate)."""


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
    if exchange.communicator is None:
        return exchange, exchange.gather(said), []
    with exchange.guard.busy() if exchange.guard else nullcontext():
        now = exchange
        while True:
            left = _without_the_dead(now)
            try:
                # As every call, agreed upon: all have heard all, or none goes on.
                told = left.gather([exchange.rank, said])
                break
            except WorkerLost:
                now = left
    old_ranks = [rank for rank, _ in told]
    left.become([exchange.members[rank] for rank in old_ranks])
    left.wire, left.guard, left.traffic = exchange.wire, exchange.guard, exchange.traffic
    left.before = exchange
    return left, [what for _, what in told], sorted(set(range(exchange.size)) - set(old_ranks))


def _without_the_dead(exchange: Exchange) -> Exchange:
    """A bare exchange of those that are left. Frees the old communicator."""
    communicator = exchange.communicator
    if not exchange.lost:
        communicator.Revoke()
        all_agree(communicator, False)  # what those wait for that have met no error yet
    time.sleep(SETTLE)
    smaller = communicator.Shrink()
    communicator.Free()
    left = bare(smaller)
    # Before anyone may revoke the new communicator all have to be out of Shrink, in which Open MPI 5 crashes over it.
    if not all_agree(smaller, True):
        left.lost = True
        return _without_the_dead(left) if left.communicator is not None else left
    return left


def finish(exchange: Exchange) -> None:
    """Collective, the last thing that workers do together. Raises WorkerLost on all of those that are left, or on none.

    Without it a worker might end while another, that has met a death in their last exchange, waits for it for ever.
    In a job that is not fault tolerant it is a barrier.
    """
    if not exchange.outlives:
        exchange.barrier()
        return
    with exchange.guard.busy() if exchange.guard else nullcontext():
        exchange.agree()
