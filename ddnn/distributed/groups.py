"""Which workers exchange what: the groups that a worker belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.watchdog import Watchdog


@dataclass(frozen=True)
class Groups:
    """The groups of one worker. A replica is one whole network. It may be shared by several workers: cut into stages of
    consecutive layers, and each layer into columns, of some of its outputs each. Today every worker is a replica by
    itself: `data_parallel`.

    Attributes:
        world: all workers of the job. Its rank 0 logs and writes the run dir. All agree here on what the whole job does:
            the device of each, the precision, how many averagings an epoch has, when to save and to stop. A checkpoint
            has a file for each of these ranks, and they read tables and cache files together.
        replica: the workers that hold one network together. Norms of its parameters are taken over these, and whether they
            are finite.
        column: those of the replica that hold the other columns of this worker's layers.
        stage: those of the replica that hold the same column of the other stages.
        data: the workers that hold the same part of the network, one of each replica, ranked as the replicas are. Each
            trains on a shard of its own, in an order and with noise of its own; models are averaged here, the learning
            rate is scaled by the number of these workers, and figures are summed over their frames.
    """

    world: Communicator
    replica: Communicator
    column: Communicator
    stage: Communicator
    data: Communicator

    @classmethod
    def data_parallel(cls, world: Communicator, hang_timeout: float | None = None) -> Groups:
        """Each worker is a replica by itself, so that all groups within a replica are of one worker, which sends nothing,
        and `data` is the world. With `hang_timeout`, in seconds, a watchdog kills this worker where others would wait
        for it in vain."""
        if hang_timeout is not None and world.world_size > 1:
            world.watchdog = Watchdog(world.rank, world.host, hang_timeout)
        alone = SingleProcess(world.host)
        return cls(world=world, replica=alone, column=alone, stage=alone, data=world)
