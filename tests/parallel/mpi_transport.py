"""Run by mpirun on 2 processes: what transports can be had, and on GPUs (argv[2] cuda) what they do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from mpi_checks import every_averaging
from torch import Tensor

from ddnn.device import choose_device
from ddnn.errors import UserError
from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import CPU, Exchange
from ddnn.parallel.strategies import STRATEGIES
from ddnn.parallel.traffic import Traffic
from ddnn.parallel.transport import Staging, choose_transport, cuda_aware


def refusal(name: str, device: torch.device, exchange: Exchange) -> str:
    try:
        return choose_transport(name, device, exchange)
    except UserError as error:
        return error.what


def averagings(exchange: Exchange, device: torch.device) -> dict[str, Any]:
    narrow = Exchange(**{**vars(exchange), "wire": "bfloat16", "traffic": Traffic(), "_kept": {}})
    return every_averaging(exchange, narrow, device)


def by_host(exchange: Exchange, theta: Tensor) -> list[float]:
    """One averaging of GPU parameters through pinned host memory."""
    staging = Staging(theta, "host")
    STRATEGIES["all-reduce"](exchange, staging.fetch(theta), 0, 1.0)
    staging.store(theta)
    values: list[float] = theta.cpu().tolist()
    return values


def main(out: Path, name: str) -> None:
    exchange = connect()
    device = choose_device(name, exchange.local_rank)
    aware = cuda_aware(exchange.communicator)
    found: dict[str, Any] = {"aware": exchange.gather(aware)}
    if device.type == "cpu":
        found["chosen"] = exchange.gather(choose_transport("auto", device, exchange))
        found |= {way: exchange.gather(refusal(way, device, exchange)) for way in ("device", "nccl")}
    else:
        mine = torch.full((5,), float(exchange.rank), device=device)
        found["cpu"] = {**averagings(exchange, CPU), "pinned": [(exchange.size - 1) / 2] * 5}
        found["averaged"] = {"host": {"pinned": by_host(exchange, mine)}}
        for way in ("device", "nccl"):
            if refusal(way, device, exchange) == way:
                found["averaged"][way] = averagings(exchange, device)
    if exchange.rank == 0:
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
