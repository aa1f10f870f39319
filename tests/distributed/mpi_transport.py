"""Run by mpirun on 2 processes: what transports can be had, and on GPUs (argv[2] cuda) what they do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from mpi_checks import every_averaging, strategy
from torch import Tensor

from ddnn.distributed.communicator import CPU, Communicator, StagingBuffer
from ddnn.distributed.groups import Groups
from ddnn.distributed.mpi import init_communicator
from ddnn.distributed.transport import choose_transport, cuda_aware, open_transport
from ddnn.util.errors import UserError
from ddnn.util.system import choose_device


def refusal(name: str, device: torch.device, comm: Communicator) -> str:
    try:
        return choose_transport(name, device, comm)
    except UserError as error:
        return error.message


def averagings(comm: Communicator, device: torch.device) -> dict[str, Any]:
    return every_averaging(comm, device)


def by_host(comm: Communicator, theta: Tensor) -> list[float]:
    """One averaging of GPU parameters through pinned host memory."""
    staging = StagingBuffer(theta, "host")
    strategy(comm, "all-reduce").average(staging.copy_in(theta), 0, 1.0)
    staging.copy_out(theta)
    values: list[float] = theta.cpu().tolist()
    return values


def main(out: Path, name: str) -> None:
    comm = init_communicator()
    device = choose_device(name, comm.local_rank)
    aware = cuda_aware(comm.mpi_comm)
    found: dict[str, Any] = {"aware": comm.all_gather_object(aware)}
    if device.type == "cpu":
        found["chosen"] = comm.all_gather_object(choose_transport("auto", device, comm))
        found |= {way: comm.all_gather_object(refusal(way, device, comm)) for way in ("device", "nccl")}
    else:
        mine = torch.full((5,), float(comm.rank), device=device)
        found["cpu"] = {**averagings(comm, CPU), "pinned": [(comm.world_size - 1) / 2] * 5}
        found["averaged"] = {"host": {"pinned": by_host(comm, mine)}}
        for way in ("device", "nccl"):
            if refusal(way, device, comm) == way:
                with open_transport(way, device, Groups.data_parallel(comm)):
                    found["averaged"][way] = averagings(comm, device)
    if comm.rank == 0:
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
