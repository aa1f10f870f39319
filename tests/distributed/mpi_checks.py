"""Run by mpirun on 8 processes: every check for n = 1 to 8 workers, one JSON file of results for each n.

Worlds of n processes are parts of the eight: (8), (1, 7), (2, 6), (3, 5), (4, 4). What comes out is judged in
test_strategies.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed.conformance import variant
from torch import Tensor

from ddnn.averaging.strategies import BlockMomentum, Elastic, OneBit, make_strategy
from ddnn.averaging.strategy import AveragingOptions, AveragingStrategy, mean_of_deltas, weighted_mean
from ddnn.distributed.communicator import CPU, Communicator, SingleProcess
from ddnn.distributed.mpi import MpiCommunicator, init_communicator, require_thread_level
from ddnn.distributed.transport import ProcessGroupBackend
from ddnn.util.errors import UserError

PARAMETERS = 37
"""Divisible by no number of workers: the chunks of the 16-bit mean are padded."""
LARGE = 300_001
SHAPES = ((5, 6), (7,))
"""Of tensors with so many parameters."""
PLAIN = ("all-reduce", "butterfly", "ring", "hopping-ring")
"""Strategies that remember nothing."""
ROUNDS = 12


def parameters(rank: int, seed: int = 0, size: int = PARAMETERS) -> Tensor:
    return torch.from_numpy(np.random.default_rng([rank, seed]).standard_normal(size).astype(np.float32))


def strategy(comm: Communicator, name: str, comm_dtype: Any = "float32", **options: Any) -> AveragingStrategy:
    return make_strategy(AveragingOptions(strategy=name, comm_dtype=comm_dtype, **options), comm)


def weight(rank: int) -> float:
    """Frames of a worker's shard, unequal and not exact in float32."""
    return 16_777_217.0 + 2_345_678.0 * rank


def everyone(comm: Communicator, buffer: Tensor) -> list[list[float]]:
    return comm.all_gather(buffer).tolist()


def all_reduce_checks(comm: Communicator) -> dict[str, Any]:
    weighted, large = parameters(comm.rank), parameters(comm.rank, size=LARGE)
    strategy(comm, "all-reduce").average(weighted, 0, weight(comm.rank))
    strategy(comm, "all-reduce").average(large, 0, 10.0)
    truth = np.mean([parameters(r, size=LARGE).double().numpy() for r in range(comm.world_size)], axis=0)
    return {
        "weighted": everyone(comm, weighted),
        "large error": max(comm.all_gather_object(float(np.abs(large.numpy() - truth).max()))),
        "large digests": comm.all_gather_object(hashlib.sha256(large.numpy().tobytes()).hexdigest()),
    }


def trajectory(comm: Communicator, name: str, comm_dtype: str = "float32") -> list[list[list[float]]]:
    """All workers' parameters after 0, 1, ..., ROUNDS averagings: (ROUNDS + 1, n, PARAMETERS)."""
    theta, averaging = parameters(comm.rank), strategy(comm, name, comm_dtype)
    after = [everyone(comm, theta)]
    for number in range(ROUNDS):
        averaging.average(theta, number, weight(comm.rank))
        after.append(everyone(comm, theta))
    return after


def block_momentum(comm: Communicator, nesterov: bool, comm_dtype: str = "float32") -> dict[str, Any]:
    """Five blocks: what each worker has before each averaging follows from its change and from what it was given."""
    theta = parameters(99)
    state = strategy(comm, "bmuf", comm_dtype, nesterov=nesterov)
    assert isinstance(state, BlockMomentum)
    state.start(theta)
    starts, models = [], []
    for block in range(5):
        theta.add_(parameters(comm.rank, block + 1), alpha=0.1)
        state.average(theta, block, weight(comm.rank))
        starts.append(everyone(comm, theta))
        models.append(state.model().tolist())
    return {"starts": starts, "models": models, "momentum": state.momentum}


def elastic(comm: Communicator) -> dict[str, Any]:
    """As `block_momentum`, of the elastic averaging; the last worker's model is not finite in the third block."""
    theta = parameters(99)
    state = strategy(comm, "elastic", elasticity=0.7)
    assert isinstance(state, Elastic)
    state.start(theta)
    starts, centers, distances = [], [], []
    for block in range(5):
        theta.add_(parameters(comm.rank, block + 1), alpha=0.1)
        lost = block == 2 and comm.world_size > 1 and comm.rank == comm.world_size - 1
        if lost:
            theta.fill_(float("nan"))
        state.average(theta, block, 0.0 if lost else weight(comm.rank))
        starts.append(everyone(comm, theta))
        centers.append(everyone(comm, state.center))
        distances.append(comm.all_gather_object(state.distance))
    state.end_epoch(theta, 5, weight(comm.rank), 0)
    return {"starts": starts, "centers": centers, "distances": distances, "end": everyone(comm, theta)}


def one_bit(comm: Communicator) -> dict[str, Any]:
    """As `block_momentum`, of the averaging in one bit; the last worker's model is not finite in the third block."""
    theta = parameters(99)
    state = make_strategy(AveragingOptions(strategy="1-bit"), comm, SHAPES)
    assert isinstance(state, OneBit)
    state.start(theta)
    models = []
    for block in range(6):
        theta.add_(parameters(comm.rank, block + 1), alpha=0.1)
        lost = block == 2 and comm.world_size > 1 and comm.rank == comm.world_size - 1
        if lost:
            theta.fill_(float("nan"))
        if block < 5:
            state.average(theta, block, 0.0 if lost else weight(comm.rank))
        else:
            state.end_epoch(theta, block, weight(comm.rank), 0)
        models.append(everyone(comm, theta))
    return {"models": models}


def compressed_all_reduce(comm: Communicator) -> dict[str, Any]:
    """The same run of small changes, sent in both types."""
    plain, compressed = strategy(comm, "all-reduce"), strategy(comm, "all-reduce", "bfloat16")
    first, second = parameters(comm.rank), parameters(comm.rank)
    for block in range(6):
        change = 1e-3 * parameters(comm.rank, block + 1)
        first.add_(change)
        second.add_(change)
        plain.average(first, block, weight(comm.rank))
        compressed.average(second, block, weight(comm.rank))
    difference = parameters(comm.rank)
    mean_of_deltas(comm, difference, weight(comm.rank), "bfloat16")
    return {
        "float32": everyone(comm, first),
        "bfloat16": everyone(comm, second),
        "one mean": everyone(comm, difference),
    }


def excluded(comm: Communicator) -> dict[str, Any]:
    """Worker 0 has gone NaN and is excluded; who has what after one averaging, and for gossip after many."""
    healthy = comm.rank != 0
    results: dict[str, Any] = {}
    for name in PLAIN:
        theta = parameters(comm.rank) if healthy else torch.full((PARAMETERS,), float("nan"))
        strategy(comm, name).average(theta, 0, float(healthy))
        results[name] = everyone(comm, theta)
    for name, dtype in (("mean", "float32"), ("16-bit mean", "bfloat16")):
        theta = parameters(comm.rank) if healthy else torch.full((PARAMETERS,), float("nan"))
        mean_of_deltas(comm, theta, float(healthy), dtype)
        results[name] = everyone(comm, theta)
    try:
        weighted_mean(comm, parameters(comm.rank), 0.0)
        results["nobody left"] = comm.all_gather_object(None)
    except UserError as error:
        results["nobody left"] = comm.all_gather_object(str(error))
    return results


def communicator_checks(comm: Communicator) -> dict[str, Any]:
    n, rank = comm.world_size, comm.rank
    sums = {}
    for dtype in (torch.float32, torch.float64, torch.int64):
        buffer = torch.tensor([rank, 1], dtype=dtype)
        comm.all_reduce(buffer)
        sums[str(dtype)] = buffer.tolist()
    received = comm.sendrecv(torch.tensor([10 * rank]), (rank + 1) % n, (rank - 1) % n)
    value, location = int(received), received.data_ptr()
    again = comm.sendrecv(torch.tensor([7]), (rank + 1) % n, (rank - 1) % n)
    swapped = comm.all_to_all(torch.arange(n) + 100 * rank).tolist()
    told = torch.tensor([float(rank)])
    comm.broadcast(told, src=n - 1)
    refused = []
    for bad in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, 4)[:, 0], torch.ones(4, dtype=torch.float16)):
        try:
            comm.all_reduce(bad)
        except TypeError as error:
            refused.append(str(error))
    comm.barrier()
    return {
        "sums": sums,
        "received": comm.all_gather_object(value),
        "buffer kept": all(comm.all_gather_object(again.data_ptr() == location and int(again) == 7)),
        "swapped": comm.all_gather_object(swapped),
        "told": comm.all_gather_object(told.tolist()),
        "least": comm.all_reduce_min(1000 - rank),
        "gathered": comm.all_gather_object({"rank": rank, "text": "ü" * rank, "none": None}),
        "local": comm.all_gather_object([comm.local_rank, comm.local_size]),
        "refused": refused,
    }


def traffic(comm: Communicator) -> dict[str, list[int]]:
    """Bytes that each kind of averaging sent, on every worker; and whether time was counted on both accounts."""
    ways = {name: strategy(comm, name) for name in PLAIN}
    ways["butterfly 16-bit"] = strategy(comm, "butterfly", "bfloat16")
    ways["all-reduce 16-bit"] = compressed = strategy(comm, "all-reduce", "bfloat16")
    compressed.average(parameters(0, size=LARGE), 0, 1.0)
    ways["1-bit"] = in_bits = make_strategy(AveragingOptions(strategy="1-bit"), comm, [(300, 1000), (1,)])
    in_bits.start(parameters(0, size=LARGE))
    sent: dict[str, list[int]] = {}
    for name, way in ways.items():
        before = comm.stats.copy()
        way.average(parameters(comm.rank, size=LARGE), 1, 1.0)
        spent = comm.stats - before
        sent[name] = comm.all_gather_object([spent.bytes_sent, spent.comm_seconds > 0, spent.wait_seconds > 0])
    return sent


def every_averaging(comm: Communicator, device: torch.device = CPU) -> dict[str, list[list[float]]]:
    """What three averagings of every kind leave on every worker, the last worker excluded from the second."""
    ways = {name: strategy(comm, name) for name in (*PLAIN, "bmuf", "elastic", "1-bit")}
    ways |= {f"{name} 16-bit": strategy(comm, name, "bfloat16") for name in PLAIN}
    after = {}
    for name, way in ways.items():
        way.start(parameters(99).to(device))
        theta = parameters(comm.rank).to(device)
        for number in range(3):
            left = number == 1 and comm.world_size > 1 and comm.rank == comm.world_size - 1
            way.average(theta, number, 0.0 if left else weight(comm.rank))
        after[name] = everyone(comm, theta.cpu())
    return after


def beside(comm: Communicator) -> dict[str, Any]:
    """The same averagings here, on a thread beside this one, and with a process group that moves the tensors."""
    require_thread_level(comm, "overlap", "overlap sends")
    results = {"here": every_averaging(comm)}
    with ThreadPoolExecutor(1) as pool:
        results["thread"] = pool.submit(every_averaging, comm).result()
    if comm.world_size > 1:
        group = ProcessGroupBackend(comm, "gloo", CPU, seconds=60)
        grouped = variant(comm, backends={"cpu": group})
        results["group"] = every_averaging(grouped)
        told = torch.tensor([comm.rank, 7], dtype=torch.int16)
        grouped.broadcast(told, src=comm.world_size - 1)
        results["told"] = grouped.all_gather_object(told.tolist())
        group.close()
    return results


def checks(comm: Communicator) -> dict[str, Any]:
    return {
        "communicator": communicator_checks(comm),
        "all-reduce": all_reduce_checks(comm),
        "gossip": {name: trajectory(comm, name) for name in PLAIN},
        "gossip 16-bit": {name: trajectory(comm, name, "bfloat16") for name in PLAIN if name != "all-reduce"},
        "bmuf": {str(nesterov): block_momentum(comm, nesterov) for nesterov in (False, True)},
        "elastic": elastic(comm),
        "1-bit": one_bit(comm),
        "bmuf 16-bit": block_momentum(comm, False, "bfloat16"),
        "16-bit": compressed_all_reduce(comm),
        "traffic": traffic(comm),
        "beside": beside(comm),
        "excluded": excluded(comm) if comm.world_size > 1 else {},
    }


def main(out: Path) -> None:
    world = init_communicator()
    for first in (8, 1, 2, 3, 4):
        part = world.mpi_comm.Split(color=int(world.rank >= first), key=world.rank)
        group = MpiCommunicator(part) if part.size > 1 else SingleProcess()
        results = checks(group)
        if group.rank == 0 and (world.rank == 0 or group.world_size != first):
            (out / f"{group.world_size}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
