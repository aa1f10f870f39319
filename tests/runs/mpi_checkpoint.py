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

from ddnn.distributed.communicator import Communicator
from ddnn.distributed.mpi import init_communicator
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.util.errors import DataError


class Warnings(logging.Handler):
    """Keeps what was warned about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def full(descriptor: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(store: CheckpointStore, n: int) -> bool:
    own = {"own": torch.tensor(10.0 * n + store.comm.rank)}
    return store.save({"n": n} if store.comm.rank == 0 else {}, {"shared": torch.tensor(float(n))}, own)


def newest(store: CheckpointStore) -> dict[str, Any]:
    found = store.latest()
    assert found is not None
    shared, own = float(found.global_state["shared"]), float(found.rank_state(store.comm.rank)["own"])
    return {
        "number": found.number, "header": found.metadata, "workers": found.world_size, "shared": shared, "own": own,
    }  # fmt: skip


def look(comm: Communicator, folder: Path, warnings: Warnings) -> dict[str, Any]:
    """All that one worker sees."""
    directory = folder / "checkpoints"
    store = CheckpointStore(directory, 2, comm)
    assert store.latest() is None
    seen: dict[str, Any] = {"written": [write(store, 1), write(store, 2)], "newest": newest(store), "failures": {}}
    for rank in range(comm.world_size):
        with mock.patch.object(os, "write", full if comm.rank == rank else os.write):
            seen["failures"][f"disk of {rank}"] = write(store, 3)
    elsewhere = folder / "elsewhere" if comm.rank == 1 else directory
    seen["failures"]["unseen by 1"] = write(CheckpointStore(elsewhere, 2, comm), 3)
    seen["left"] = sorted(path.name for path in directory.iterdir())
    comm.barrier()
    second = directory / "00000002"
    if comm.rank == 0:
        (second / "rank0001.safetensors").rename(folder / "aside")
        (second / "rank0002.safetensors").rename(second / "rank0001.safetensors")
        (folder / "aside").rename(second / "rank0002.safetensors")
    comm.barrier()
    seen["fallback"] = newest(store)
    seen["warnings"] = list(warnings.said)
    comm.barrier()  # all have read
    if comm.rank == 0:
        (directory / "00000001").rename(folder / "aside")
    comm.barrier()
    try:
        store.latest()
    except DataError as error:
        seen["none whole"] = str(error)
    comm.barrier()
    if comm.rank == 0:
        (folder / "aside").rename(directory / "00000001")
    return seen


def main(folder: Path) -> None:
    comm, warnings = init_communicator(), Warnings()
    logging.getLogger("ddnn").addHandler(warnings)
    everyone = comm.all_gather_object(look(comm, folder, warnings))
    if comm.rank == 0:
        (folder / "seen.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
