"""What every communicator must do, whatever carries its messages: compared in test_communicator.py.

Run by mpirun on 4 processes, which are groups of 4, of 1 and 3, and of 2 and 2: one JSON file for each size.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ddnn.distributed.communicator import CPU, CommStats, Communicator
from ddnn.distributed.mpi import MpiCommunicator, init_communicator
from ddnn.distributed.transport import ProcessGroupBackend
from ddnn.distributed.watchdog import NoWatchdog


def variant(comm: Communicator, **attributes: Any) -> Communicator:
    """The same connection with other attributes, its own workspaces and counters."""
    other = copy.copy(comm)
    vars(other).update(stats=CommStats(), _workspaces={}, **attributes)
    return other


def conformance(comm: Communicator) -> dict[str, Any]:
    """Every method once; the answers of all workers."""
    n, rank = comm.world_size, comm.rank
    sums = {}
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensor = torch.tensor([rank, 1], dtype=dtype)
        comm.all_reduce(tensor)
        sums[str(dtype)] = tensor.tolist()
    received = comm.sendrecv(torch.tensor([10 * rank]), (rank + 1) % n, (rank - 1) % n)
    value, where = int(received), received.data_ptr()
    again = comm.sendrecv(torch.tensor([7]), (rank + 1) % n, (rank - 1) % n)
    shorts = torch.tensor([rank, 7], dtype=torch.int16)
    comm.broadcast(shorts, src=n - 1)
    floats = torch.tensor([float(rank)])
    comm.broadcast(floats, src=n - 1)
    refused = []
    for bad in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, 4)[:, 0], torch.ones(4, dtype=torch.float16)):
        try:
            comm.all_reduce(bad)
        except TypeError as error:
            refused.append(str(error))
    try:
        comm.all_to_all(torch.ones(n + 1, 2))
    except ValueError as error:
        refused.append(str(error))
    for block, gathered in ((torch.empty(1), torch.empty(2 * n)), (torch.empty(2), torch.empty(n))):
        try:
            comm.all_gather_into(block, gathered, [2] * n)
        except ValueError as error:
            refused.append(str(error))
    comm.barrier()
    parts = split_in_two(comm)
    moved = {name: uneven(comm, dtype) for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16))}
    before = comm.stats.copy()
    comm.all_reduce(torch.ones(10))
    sent = comm.stats - before
    comm.all_reduce_min(0)
    waited = comm.stats - before - sent
    return {
        "sums": sums,
        "received": comm.all_gather_object(value),
        "workspace kept": all(comm.all_gather_object(again.data_ptr() == where and int(again) == 7)),
        "all_to_all": comm.all_gather_object(comm.all_to_all(torch.arange(n) + 100 * rank).tolist()),
        "all_gather": comm.all_gather_object(comm.all_gather(torch.full((2, 1), float(rank))).flatten().tolist()),
        "broadcast": comm.all_gather_object([shorts.tolist(), floats.tolist()]),
        "min": comm.all_reduce_min(1000 - rank),
        "objects": comm.all_gather_object({"rank": rank, "text": "ü" * rank, "none": None}),
        "local": comm.all_gather_object([comm.local_rank, comm.local_size]),
        "sent": comm.all_gather_object([sent.bytes_sent, sent.comm_seconds > 0, sent.wait_seconds]),
        "waited": comm.all_gather_object([waited.bytes_sent, waited.comm_seconds, waited.wait_seconds > 0]),
        "together": comm.all_gather_object(comm.try_barrier(60.0)),
        "refused": refused,
        "parts": comm.all_gather_object(parts),
        "moved": comm.all_gather_object(moved),
    }


def uneven(comm: Communicator, dtype: torch.dtype) -> dict[str, Any]:
    """Blocks and chunks of different sizes: of worker r, r + 1 elements, and to worker s, 2 r + s elements."""
    n, rank, before = comm.world_size, comm.rank, comm.stats.copy()
    sizes = [other + 1 for other in range(n)]
    gathered = torch.zeros(sum(sizes), dtype=dtype)
    comm.all_gather_into(torch.full((rank + 1,), 0.5 + rank).to(dtype), gathered, sizes)
    sent, received_sizes = [2 * rank + other for other in range(n)], [2 * other + rank for other in range(n)]
    chunks = torch.cat([torch.full((size,), 10.0 * rank + other) for other, size in enumerate(sent)]).to(dtype)
    received = torch.zeros(sum(received_sizes), dtype=dtype)
    comm.all_to_all_into(chunks, received, sent, received_sizes)
    posted = list[list[float]]()
    if n > 1:
        following, previous = (rank + 1) % n, (rank - 1) % n
        tensors = [torch.full((1, size), float(rank)).to(dtype) for size in (1, 2)]
        buffers = [torch.zeros(1, size, dtype=dtype) for size in (1, 2)]
        handles = [comm.irecv(buffer, previous) for buffer in buffers]
        handles += [comm.isend(tensor, following) for tensor in tensors]
        for handle in handles:
            handle.wait()
        posted = [buffer.tolist() for buffer in buffers]
    spent = comm.stats - before
    counted = [spent.bytes_gathered, spent.bytes_exchanged, spent.bytes_posted, spent.bytes_sent]
    return {
        "gathered": gathered.tolist(),
        "received": received.tolist(),
        "posted": posted,
        "elements": [count / dtype.itemsize for count in counted],
    }


def split_in_two(comm: Communicator) -> dict[str, Any]:
    """What the group of the workers of even or of odd rank does, those of higher rank first; and what of it the whole
    group notices."""
    comm.watchdog = NoWatchdog()
    part = comm.split(comm.rank % 2, -comm.rank)
    before = comm.stats.copy()
    total = torch.tensor([comm.rank])
    part.all_reduce(total)
    part.barrier()
    own_stats = comm.stats == before
    pair = part.split(0, 0)  # of all in it, in their order
    return {
        "ranks": part.all_gather_object(comm.rank),
        "place": [part.rank, part.world_size, part.local_rank, part.local_size, part.host == comm.host],
        "sum": int(total),
        "own stats": own_stats,
        "own bytes": part.stats.bytes_sent > 0,
        "watchdog": part.watchdog is comm.watchdog,
        "split again": pair.all_gather_object([comm.rank, pair.rank == part.rank]),
    }


def main(out: Path) -> None:
    world = init_communicator()
    assert isinstance(world, MpiCommunicator)
    for first in (4, 1, 2):
        comm = MpiCommunicator(world.mpi_comm.Split(int(world.rank >= first), world.rank))
        answers = {"mpi": conformance(comm)}
        if comm.world_size > 1:
            backend = ProcessGroupBackend(comm, "gloo", CPU, seconds=60)
            answers["process group"] = conformance(variant(comm, backends={"cpu": backend}))
            if comm.world_size == 4:
                part = comm.split(comm.rank % 2, comm.rank)
                answers["part"] = conformance(variant(part, backends={"cpu": backend.of(part, comm)}))
            backend.close()
        if comm.rank == 0:
            (out / f"{comm.world_size}.json").write_text(json.dumps(answers))
        world.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
