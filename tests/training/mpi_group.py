"""Run by mpirun: a training with RBMs whose parameters go by a process group, gloo in place of NCCL; checked in
test_workers.py.

Arguments: the recipe and the run dir.
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

GROUPS: list[ProcessGroupBackend] = []


def gloo(comm: Communicator, backend: str, device: torch.device) -> ProcessGroupBackend:
    GROUPS.append(ProcessGroupBackend(comm, "gloo", device, seconds=60))
    return GROUPS[-1]


if __name__ == "__main__":
    comm = init_communicator()
    transport.choose_transport = lambda *of: "nccl"
    transport.ProcessGroupBackend = gloo  # type: ignore[assignment,misc]
    run_training(load_recipe(Path(sys.argv[1]), ["parallel.pretrain_data=sharded"]), Path(sys.argv[2]), "cpu", comm)
    assert len(GROUPS) == 1 and not dist.is_initialized()
