"""Imported by workers of `ddnn train` as sitecustomize: one of them dies where the environment says.

DEATHS is a JSON list with an entry for each attempt of the job, [rank, where, number]: this rank dies when it comes to
this place for the number-th time.

    minibatch    killed before a step
    exchange     killed in an all-reduce of parameters that the others are in the midst of
    checkpoint   killed with its part of a checkpoint written, before the checkpoint is complete
    commit       rank 0 killed before it names a complete checkpoint
    stop         stopped (SIGSTOP) before a step
    raise        raises before a step
    ask          is asked to stop before a step, as by the signal of a launcher (SIGUSR1)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

DEATHS = "DDNN_TEST_DEATHS"
SIGNALS = {"stop": signal.SIGSTOP, "ask": signal.SIGUSR1}


def arrange(rank: int, where: str, number: int) -> None:
    """Patches the place."""
    from ddnn.distributed.mpi import MpiBackend
    from ddnn.runs.checkpoint import CheckpointStore
    from ddnn.training.step import EagerStep

    comes = 0

    def die() -> None:
        nonlocal comes
        comes += 1
        if comes != number:
            return
        if where == "raise":
            raise ZeroDivisionError("made up")
        if where == "exchange":
            time.sleep(0.05)  # the others are in it by now
        os.kill(os.getpid(), SIGNALS.get(where, signal.SIGKILL))

    def patch(owner: Any, name: str, after: bool = False, counts: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(owner, name)

        def patched(*arguments: Any) -> Any:
            if not after and counts(*arguments):
                die()
            result = real(*arguments)
            if after:
                die()
            return result

        setattr(owner, name, patched)

    if where == "exchange":
        patch(MpiBackend, "all_reduce", counts=lambda _, tensor: tensor.numel() > 50)
    elif where == "checkpoint":
        patch(CheckpointStore, "_write_tensors", after=True)
    elif where == "commit":
        patch(CheckpointStore, "_commit")
    else:
        patch(EagerStep, "__call__")


def main() -> None:
    deaths = json.loads(os.environ.get(DEATHS, "[]"))
    attempt = json.loads(os.environ.get("DDNN_RESTART", '{"number": 0}'))["number"]
    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank is None or "ddnn.cli" not in sys.orig_argv or attempt >= len(deaths):
        return
    victim, where, number = deaths[attempt]
    if int(rank) == victim:
        arrange(victim, where, number)


if __name__ == "sitecustomize":
    main()
