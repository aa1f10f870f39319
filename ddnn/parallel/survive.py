"""What the workers that are left do when another has died: MPI's ULFM (Bland et al., IJHPCA 2013)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddnn.parallel.exchange import Exchange, over
from ddnn.parallel.launch import fault_tolerant
from ddnn.parallel.lost import WorkerLost, deaths_noticed

__all__ = ["WorkerLost", "fault_tolerant", "finish", "survivors"]


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
    communicator = exchange.communicator
    if communicator is None:
        return exchange, exchange.gather(said), []
    with exchange.guard.busy() if exchange.guard else nullcontext():
        if not exchange.lost:
            communicator.Revoke()
            _all_agree(communicator, False)  # where a worker that has finished its work may stand
        done = False
        while not done:
            smaller = communicator.Shrink()
            communicator.Free()
            communicator = smaller
            try:
                left, told = _meet(communicator, [exchange.rank, said])
            except WorkerLost:
                communicator.Revoke()  # the others may wait for the dead one, or for this one
                done = _all_agree(communicator, False)
            else:
                done = _all_agree(communicator, True)
    old_ranks = [rank for rank, _ in told]
    if exchange.members:
        left.members = [exchange.members[rank] for rank in old_ranks]
    left.wire, left.guard, left.traffic = exchange.wire, exchange.guard, exchange.traffic
    left.before = exchange
    lost = sorted(set(range(exchange.size)) - set(old_ranks))
    return left, [what for _, what in told], lost


def finish(exchange: Exchange) -> None:
    """Collective, the last thing that workers do together. Raises WorkerLost on all of those that are left, or on none.

    Without it a worker might end while another, that has met a death in their last exchange, waits for it for ever.
    In a job that is not fault tolerant it is a barrier.
    """
    if exchange.communicator is None or not fault_tolerant():
        exchange.barrier()
        return
    with exchange.guard.busy() if exchange.guard else nullcontext():
        if not _all_agree(exchange.communicator, True):
            exchange.lost = True
            raise WorkerLost("a worker has died before all had finished")


def _meet(communicator: Any, said: Any) -> tuple[Exchange, list[Any]]:
    """The exchange over a communicator, and what everyone says."""
    with deaths_noticed():
        left = over(communicator)
        return left, left.gather(said)


def _all_agree(communicator: Any, well: bool) -> bool:
    """Whether all say that all is well and none has died: the same answer on all that are left, over a revoked
    communicator too."""
    try:
        with deaths_noticed():
            return bool(communicator.Agree(int(well)))
    except WorkerLost:
        return False
