"""Which workers exchange what: the groups that a worker belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.watchdog import Watchdog


@dataclass(frozen=True)
class Groups:
    """The groups of one worker. A replica is one whole network. Several workers may share it, split into stages of
    consecutive layers, and each layer into columns that hold some of its outputs. The ranks of a replica follow each
    other, those of a stage's columns too.

    Attributes:
        world: all workers of the job. Its rank 0 logs and writes the run dir. Here all agree on what the job does: the
            device of each, the precision, how many averagings an epoch has, when to save and to stop. They read tables
            and cache files together.
        replica: the workers that hold one network together. Whether its parameters are finite, and how far they are from the
            mean, is found over these.
        column: the workers among which this worker's layers are split by columns.
        stage: the workers, one of each stage, among which the network is split by layers; all with the same column.
        data: the workers that hold the same part of the network, one of each replica, ranked as the replicas are. Each
            trains on a shard of its own, in an order and with noise of its own; models are averaged here, the learning
            rate is scaled by the number of these workers, and figures are summed over their frames. A checkpoint has a
            file for each of these ranks.
    """

    world: Communicator
    replica: Communicator
    column: Communicator
    stage: Communicator
    data: Communicator

    @classmethod
    def data_parallel(cls, world: Communicator) -> Groups:
        """Each worker is a replica by itself, so that all groups within a replica are of one worker, which sends nothing,
        and `data` is the world."""
        alone = SingleProcess(world.host)
        return cls(world=world, replica=alone, column=alone, stage=alone, data=world)

    @classmethod
    def split(cls, world: Communicator, columns: int, stages: int = 1) -> Groups:
        """Replicas of `columns` x `stages` workers, which divides the number of workers: the rank of a worker is
        (replica x stages + stage) x columns + column. Collective."""
        if columns == stages == 1:
            return cls.data_parallel(world)
        rank, alone = world.rank, SingleProcess(world.host)
        replica, part = divmod(rank, columns * stages)
        of_replica = world.split(replica, part)
        column = of_replica if stages == 1 else alone if columns == 1 else world.split(rank // columns, rank)
        stage = alone if stages == 1 else world.split(replica * columns + rank % columns, rank)
        return cls(world, of_replica, column, stage, data=world.split(part, replica))


def watch(world: Communicator, hang_timeout: float) -> None:
    """From now on a watchdog kills this worker if it hangs for `hang_timeout` seconds while others wait for it, also in
    groups that are split from `world`."""
    if world.world_size > 1:
        world.watchdog = Watchdog(world.rank, world.host, hang_timeout)
