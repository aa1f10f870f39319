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
from torch import Tensor

from ddnn.errors import UserError
from ddnn.parallel.bmuf import BlockMomentum
from ddnn.parallel.carriers import OverGroup
from ddnn.parallel.connect import connect, over, require_threads
from ddnn.parallel.exchange import CPU, Exchange
from ddnn.parallel.mean import SixteenBitAllReduce, mean, mean_of_differences
from ddnn.parallel.strategies import STRATEGIES, Strategy
from ddnn.parallel.traffic import Traffic

PARAMETERS = 37
"""Divisible by no number of workers: the chunks of the 16-bit mean are padded."""
LARGE = 300_001
ROUNDS = 12


def parameters(rank: int, seed: int = 0, size: int = PARAMETERS) -> Tensor:
    return torch.from_numpy(np.random.default_rng([rank, seed]).standard_normal(size).astype(np.float32))


def weight(rank: int) -> float:
    """Frames of a worker's shard, unequal and not exact in float32."""
    return 16_777_217.0 + 2_345_678.0 * rank


def everyone(exchange: Exchange, buffer: Tensor) -> list[list[float]]:
    return exchange.all_gather(buffer).tolist()


def all_reduce_checks(exchange: Exchange) -> dict[str, Any]:
    weighted, large = parameters(exchange.rank), parameters(exchange.rank, size=LARGE)
    STRATEGIES["all-reduce"](exchange, weighted, 0, weight(exchange.rank))
    STRATEGIES["all-reduce"](exchange, large, 0, 10.0)
    truth = np.mean([parameters(r, size=LARGE).double().numpy() for r in range(exchange.size)], axis=0)
    return {
        "weighted": everyone(exchange, weighted),
        "large error": max(exchange.gather(float(np.abs(large.numpy() - truth).max()))),
        "large digests": exchange.gather(hashlib.sha256(large.numpy().tobytes()).hexdigest()),
    }


def trajectory(exchange: Exchange, name: str) -> list[list[list[float]]]:
    """All workers' parameters after 0, 1, ..., ROUNDS averagings: (ROUNDS + 1, n, PARAMETERS)."""
    theta = parameters(exchange.rank)
    after = [everyone(exchange, theta)]
    for number in range(ROUNDS):
        STRATEGIES[name](exchange, theta, number, weight(exchange.rank))
        after.append(everyone(exchange, theta))
    return after


def block_momentum(exchange: Exchange, nesterov: bool) -> dict[str, Any]:
    """Five blocks: what each worker has before each averaging follows from its change and from what it was given."""
    theta = parameters(99)
    state = BlockMomentum(theta, exchange.size, nesterov=nesterov)
    starts, models = [], []
    for block in range(5):
        theta.add_(parameters(exchange.rank, block + 1), alpha=0.1)
        state.average(exchange, theta, block, weight(exchange.rank))
        starts.append(everyone(exchange, theta))
        models.append(state.model().tolist())
    return {"starts": starts, "models": models, "momentum": state.momentum}


def sixteen_bit_all_reduce(exchange: Exchange, narrow: Exchange) -> dict[str, Any]:
    """The same run of small changes over both wires."""
    state, first, second = SixteenBitAllReduce(), parameters(exchange.rank), parameters(exchange.rank)
    for block in range(6):
        change = 1e-3 * parameters(exchange.rank, block + 1)
        first.add_(change)
        second.add_(change)
        STRATEGIES["all-reduce"](exchange, first, block, weight(exchange.rank))
        state.average(narrow, second, block, weight(exchange.rank))
    difference = parameters(exchange.rank)
    mean_of_differences(narrow, difference, weight(exchange.rank))
    return {
        "float32": everyone(exchange, first),
        "bfloat16": everyone(exchange, second),
        "one mean": everyone(exchange, difference),
    }


def left_out(exchange: Exchange, narrow: Exchange) -> dict[str, Any]:
    """Worker 0 has gone NaN and is left out; who has what after one averaging, and for gossip after many."""
    healthy = exchange.rank != 0
    results: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        theta = parameters(exchange.rank) if healthy else torch.full((PARAMETERS,), float("nan"))
        strategy(exchange, theta, 0, float(healthy))
        results[name] = everyone(exchange, theta)
    for name, using in (("mean", exchange), ("16-bit mean", narrow)):
        theta = parameters(exchange.rank) if healthy else torch.full((PARAMETERS,), float("nan"))
        mean_of_differences(using, theta, float(healthy))
        results[name] = everyone(exchange, theta)
    try:
        mean(exchange, parameters(exchange.rank), 0.0)
        results["nobody left"] = exchange.gather(None)
    except UserError as error:
        results["nobody left"] = exchange.gather(str(error))
    return results


def communicator_checks(exchange: Exchange) -> dict[str, Any]:
    n, rank = exchange.size, exchange.rank
    sums = {}
    for dtype in (torch.float32, torch.float64, torch.int64):
        buffer = torch.tensor([rank, 1], dtype=dtype)
        exchange.sum_in_place(buffer)
        sums[str(dtype)] = buffer.tolist()
    received = exchange.send_receive(torch.tensor([10 * rank]), (rank + 1) % n, (rank - 1) % n)
    value, where = int(received), received.data_ptr()
    again = exchange.send_receive(torch.tensor([7]), (rank + 1) % n, (rank - 1) % n)
    swapped = exchange.all_to_all(torch.arange(n) + 100 * rank).tolist()
    told = torch.tensor([float(rank)])
    exchange.broadcast(told, root=n - 1)
    refused = []
    for bad in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, 4)[:, 0], torch.ones(4, dtype=torch.float16)):
        try:
            exchange.sum_in_place(bad)
        except TypeError as error:
            refused.append(str(error))
    exchange.barrier()
    return {
        "sums": sums,
        "received": exchange.gather(value),
        "buffer kept": all(exchange.gather(again.data_ptr() == where and int(again) == 7)),
        "swapped": exchange.gather(swapped),
        "told": exchange.gather(told.tolist()),
        "least": exchange.agree_min(1000 - rank),
        "gathered": exchange.gather({"rank": rank, "text": "ü" * rank, "none": None}),
        "local": exchange.gather([exchange.local_rank, exchange.local_size]),
        "refused": refused,
    }


def traffic(exchange: Exchange, narrow: Exchange) -> dict[str, list[int]]:
    """Bytes that each kind of averaging sent, on every worker; and whether time was counted on both accounts."""
    compressed = SixteenBitAllReduce()
    compressed.average(exchange, parameters(0, size=LARGE), 0, 1.0)
    ways = {name: (strategy, exchange) for name, strategy in STRATEGIES.items()}
    ways |= {"butterfly 16-bit": (STRATEGIES["butterfly"], narrow), "all-reduce 16-bit": (compressed.average, narrow)}
    sent: dict[str, list[int]] = {}
    for name, (average, using) in ways.items():
        before = using.traffic.copy()
        average(using, parameters(exchange.rank, size=LARGE), 1, 1.0)
        spent = using.traffic - before
        sent[name] = exchange.gather([spent.bytes_sent, spent.transfer_seconds > 0, spent.waiting_seconds > 0])
    return sent


def every_averaging(exchange: Exchange, narrow: Exchange, device: torch.device = CPU) -> dict[str, list[list[float]]]:
    """What three averagings of every kind leave on every worker, the last worker left out of the second."""
    blocks = BlockMomentum(parameters(99).to(device), exchange.size)
    ways: dict[str, tuple[Strategy, Exchange]] = {name: (way, exchange) for name, way in STRATEGIES.items()}
    ways |= {f"{name} 16-bit": (way, narrow) for name, way in STRATEGIES.items() if name != "all-reduce"}
    ways |= {"all-reduce 16-bit": (SixteenBitAllReduce().average, narrow), "bmuf": (blocks.average, exchange)}
    after = {}
    for name, (average, using) in ways.items():
        theta = parameters(exchange.rank).to(device)
        for number in range(3):
            left = number == 1 and exchange.size > 1 and exchange.rank == exchange.size - 1
            average(using, theta, number, 0.0 if left else weight(exchange.rank))
        after[name] = everyone(exchange, theta.cpu())
    return after


def beside(exchange: Exchange, narrow: Exchange) -> dict[str, Any]:
    """The same averagings here, on a thread beside this one, and with a process group that moves the tensors."""
    require_threads(exchange)
    results = {"here": every_averaging(exchange, narrow)}
    with ThreadPoolExecutor(1) as pool:
        results["thread"] = pool.submit(every_averaging, exchange, narrow).result()
    if exchange.size > 1:
        group = OverGroup(exchange, "gloo", CPU, seconds=60)
        grouped, narrow_grouped = (
            Exchange(**{**vars(using), "carriers": {"cpu": group}, "_kept": {}}) for using in (exchange, narrow)
        )
        results["group"] = every_averaging(grouped, narrow_grouped)
        told = torch.tensor([exchange.rank, 7], dtype=torch.int16)
        grouped.broadcast(told, root=exchange.size - 1)
        results["told"] = grouped.gather(told.tolist())
        group.close()
    return results


def checks(exchange: Exchange) -> dict[str, Any]:
    narrow = Exchange(**{**vars(exchange), "wire": "bfloat16", "traffic": Traffic(), "_kept": {}})
    return {
        "communicator": communicator_checks(exchange),
        "all-reduce": all_reduce_checks(exchange),
        "gossip": {name: trajectory(exchange, name) for name in STRATEGIES},
        "gossip 16-bit": {name: trajectory(narrow, name) for name in STRATEGIES if name != "all-reduce"},
        "bmuf": {str(nesterov): block_momentum(exchange, nesterov) for nesterov in (False, True)},
        "bmuf 16-bit": block_momentum(narrow, False),
        "16-bit": sixteen_bit_all_reduce(exchange, narrow),
        "traffic": traffic(exchange, narrow),
        "beside": beside(exchange, narrow),
        "left out": left_out(exchange, narrow) if exchange.size > 1 else {},
    }


def main(out: Path) -> None:
    world = connect()
    for first in (8, 1, 2, 3, 4):
        group = over(world.communicator.Split(color=int(world.rank >= first), key=world.rank))
        results = checks(group)
        if group.rank == 0 and (world.rank == 0 or group.size != first):
            (out / f"{group.size}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
