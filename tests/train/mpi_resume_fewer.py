"""Run by mpirun: two workers stop in the middle of an epoch; one goes on, from the mean of their models."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
from mpi_resume import StopAfter, made, newest
from mpi_training import Recorder

from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import Exchange
from ddnn.train.loop import train
from ddnn.train.state import restore
from ddnn.train.stopping import Stopped, StopRequest


def main(out: Path) -> None:
    exchange = connect()
    way = "all-reduce, overlap"
    stopped = made(exchange, out, way, StopAfter(9), None)  # meetings: 6 in an epoch, and at its end
    with contextlib.suppress(Stopped):
        train(stopped, Recorder())
    models = exchange.all_gather(stopped.model.network.parameters)
    if exchange.rank == 0:
        alone = Exchange()
        assert not torch.equal(models[0], models[1])
        saved = newest(alone, out, exact=False)
        again = made(alone, out, way, StopRequest(), saved)
        at = restore(again, saved)
        mean = torch.allclose(again.model.network.parameters, models.mean(dim=0), atol=1e-7)
        found = {"mean": mean, "epoch": at.epochs, "done": at.done}
        run = Recorder()
        train(again, run)
        found["finishes"] = run.rows[-1]["epoch"] == 3
        (out / "found.json").write_text(json.dumps(found))
    exchange.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
