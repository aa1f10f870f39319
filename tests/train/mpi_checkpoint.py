"""Run by mpirun: checkpoints of several workers together, judged in test_checkpoint.py."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ddnn.errors import DataError
from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import Exchange
from ddnn.train.checkpoint import Checkpoints


class Warnings(logging.Handler):
    """Keeps what was warned about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def full(descriptor: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(store: Checkpoints, n: int) -> bool:
    own = {"own": torch.tensor(10.0 * n + store.exchange.rank)}
    return store.write({"n": n} if store.exchange.rank == 0 else {}, {"shared": torch.tensor(float(n))}, own)


def newest(store: Checkpoints) -> dict[str, Any]:
    found = store.newest()
    assert found is not None
    shared, own = float(found.shared()["shared"]), float(found.part(store.exchange.rank)["own"])
    return {
        "number": found.number, "header": found.header, "workers": found.workers, "shared": shared, "own": own,
    }  # fmt: skip


def look(exchange: Exchange, folder: Path, warnings: Warnings) -> dict[str, Any]:
    """All that one worker sees."""
    directory = folder / "checkpoints"
    store = Checkpoints(directory, 2, exchange)
    assert store.newest() is None
    seen: dict[str, Any] = {"written": [write(store, 1), write(store, 2)], "newest": newest(store), "failures": {}}
    for rank in range(exchange.size):
        with mock.patch.object(os, "write", full if exchange.rank == rank else os.write):
            seen["failures"][f"disk of {rank}"] = write(store, 3)
    elsewhere = folder / "elsewhere" if exchange.rank == 1 else directory
    seen["failures"]["unseen by 1"] = write(Checkpoints(elsewhere, 2, exchange), 3)
    seen["left"] = sorted(path.name for path in directory.iterdir())
    exchange.barrier()
    second = directory / "00000002"
    if exchange.rank == 0:
        (second / "worker0001.safetensors").rename(folder / "aside")
        (second / "worker0002.safetensors").rename(second / "worker0001.safetensors")
        (folder / "aside").rename(second / "worker0002.safetensors")
    exchange.barrier()
    seen["fallback"] = newest(store)
    seen["warnings"] = list(warnings.said)
    exchange.barrier()  # all have read
    if exchange.rank == 0:
        (directory / "00000001").rename(folder / "aside")
    exchange.barrier()
    try:
        store.newest()
    except DataError as error:
        seen["none whole"] = str(error)
    exchange.barrier()
    if exchange.rank == 0:
        (folder / "aside").rename(directory / "00000001")
    return seen


def main(folder: Path) -> None:
    exchange, warnings = connect(), Warnings()
    logging.getLogger("ddnn").addHandler(warnings)
    everyone = exchange.gather(look(exchange, folder, warnings))
    if exchange.rank == 0:
        (folder / "seen.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
