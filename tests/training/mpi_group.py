"""Run by mpirun: a training whose parameters, and outputs of layers, go by process groups, gloo in place of NCCL; checked in
test_workers.py and test_columns_mpi.py.

Arguments: the recipe, the run dir, and settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ddnn.distributed import transport
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.mpi import init_communicator
from ddnn.distributed.transport import ProcessGroupBackend
from ddnn.recipe.load import load_recipe
from ddnn.training.job import run_training

OPENED: list[int] = []
"""Workers of each default group, and then of each group that is served."""


class Gloo(ProcessGroupBackend):
    def __init__(self, comm: Communicator, backend: str, device: torch.device) -> None:
        OPENED.append(comm.world_size)
        super().__init__(comm, "gloo", device, seconds=60)

    def of(self, comm: Communicator, world: Communicator) -> ProcessGroupBackend:
        OPENED.append(comm.world_size)
        return super().of(comm, world)


if __name__ == "__main__":
    comm = init_communicator()
    transport.choose_transport = lambda *of: "nccl"
    transport.ProcessGroupBackend = Gloo  # type: ignore[misc]
    run_training(load_recipe(Path(sys.argv[1]), sys.argv[3:]), Path(sys.argv[2]), "cpu", comm)
    assert not dist.is_initialized()
    if comm.rank == 0:
        print("opened", OPENED)
