"""Run by mpirun: a training by run_training in which workers kill themselves, where they are told to.

Each death is RANK:WHERE:NUMBER: the worker that was RANK at first dies when it comes for the NUMBER-th time, from 1,
to WHERE: a `minibatch`, or an `exchange` of parameters, which the others are in the middle of. Where WHERE is `mistake`
it meets a user's mistake in that minibatch, `bug` an exception of ours, `nan` a model that is not finite from then on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ddnn.errors import UserError
from ddnn.parallel.carriers import OverMpi
from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.failures import all_stop_on_error
from ddnn.recipe.load import load_recipe
from ddnn.train.averaging import Averaging
from ddnn.train.command import run_training


def die_at(exchange: Exchange, deaths: list[str]) -> None:
    """Arranges the deaths of this worker."""
    mine = [
        (where, int(number)) for rank, where, number in (d.split(":") for d in deaths) if int(rank) == exchange.rank
    ]
    left = dict(mine)

    def count(where: str) -> None:
        if where in left:
            left[where] -= 1
            if left[where] == 0:
                if where == "exchange":
                    time.sleep(0.05)  # the others are in it by now
                if where == "mistake":
                    raise UserError("a made-up mistake")
                if where == "bug":
                    raise RuntimeError("a made-up bug")
                os.kill(os.getpid(), signal.SIGKILL)

    step, total = Averaging.after_minibatch, OverMpi.sum_in_place

    def after_minibatch(self: Averaging, frames: int) -> bool:
        count("minibatch")
        count("mistake")
        count("bug")
        if "nan" in left:
            left["nan"] -= 1
            if left["nan"] <= 0:
                self.parameters[0] = float("nan")
        return step(self, frames)

    def sum_in_place(self: OverMpi, buffer: Tensor) -> None:
        if buffer.numel() > 50:  # parameters, no small message
            count("exchange")
        total(self, buffer)

    patched: Any = Averaging
    patched.after_minibatch = after_minibatch
    patched = OverMpi
    patched.sum_in_place = sum_in_place


def main(recipe: Path, run: Path, deaths: list[str]) -> None:
    exchange = connect()
    die_at(exchange, deaths)
    with all_stop_on_error(exchange) as job:
        run_training(load_recipe(recipe), run, "cpu", job=job)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
