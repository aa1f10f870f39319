"""Run by mpirun: each way of averaging, stopped somewhere and gone on with, against the same training never stopped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mpi_training import Recorder, setup

from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Checkpoint, Optimizer, Parallel
from ddnn.train.checkpoint import Checkpoints
from ddnn.train.loop import Setup, train
from ddnn.train.saving import Saver
from ddnn.train.state import Saved, mean_of_parts, own_state, read_header
from ddnn.train.stopping import Stopped, StopRequest

NG = Optimizer(name="ng-sgd", rank_in=3, rank_out=4, momentum=0.3)
MOMENTUM = Optimizer(momentum=0.5)
WAYS: dict[str, tuple[Parallel, Optimizer]] = {
    "all-reduce": (Parallel(every=3), MOMENTUM),
    "all-reduce, overlap": (Parallel(every=3, overlap=True), MOMENTUM),
    "all-reduce, 16 bits": (Parallel(every=3, wire="bfloat16"), Optimizer()),
    "all-reduce, 16 bits, overlap": (Parallel(every=2, wire="bfloat16", overlap=True), NG),
    "average momentum": (Parallel(every=3, momentum_rule="average"), MOMENTUM),
    "butterfly": (Parallel(every=1, reduce="butterfly"), NG),
    "hopping ring, overlap": (Parallel(every=1, reduce="hopping-ring", overlap=True), MOMENTUM),
    "gradient": (Parallel(every=3, reduce="gradient"), NG),
    "bmuf": (Parallel(every=3, reduce="bmuf", nesterov=True), MOMENTUM),
    "bmuf, overlap": (Parallel(every=3, reduce="bmuf", overlap=True), Optimizer()),
}


class StopAfter(StopRequest):
    """Asks to stop at the meeting number `meetings`."""

    def __init__(self, meetings: int) -> None:
        super().__init__()
        self.meetings = meetings

    @property  # type: ignore[misc]
    def received(self) -> str | None:
        self.meetings -= 1
        return "SIGTERM" if self.meetings < 0 else None

    @received.setter
    def received(self, name: str | None) -> None: ...


def made(exchange: Exchange, folder: Path, way: str, stop: StopRequest, saved: Saved | None) -> Setup:
    options, optimizer = WAYS[way]
    # Unequal shards: some workers have a tail, in which there are no averagings.
    fresh = setup(exchange, options, optimizer=optimizer, frames=(20 + exchange.rank) * 16, rate=0.002)
    checkpoints = Checkpoints(folder, 2, exchange)
    saver = Saver(checkpoints, Checkpoint(), stop, recipe="", data="", first=exchange.rank == 0)
    return replace(fresh, saver=saver, saved=saved)


def bits(ready: Setup) -> list[torch.Tensor]:
    """The model, and what this worker alone has at the end."""
    own = own_state(ready, ready.saver.standing, exact=False)  # type: ignore[union-attr,arg-type]
    return [ready.model.network.parameters.clone(), *(own[name].clone() for name in sorted(own) if "fisher" in name)]


def rows_of(run: Recorder) -> list[dict[str, Any]]:
    """What does not depend on time."""
    kept = ("epoch", "split", "rank", "loss", "frame_accuracy", "frames", "minibatches", "averagings", "divergence")
    return [{key: row[key] for key in kept if key in row} for row in run.rows]


def newest(exchange: Exchange, folder: Path, exact: bool = True) -> Saved:
    found = Checkpoints(folder, 2, exchange).newest()
    assert found is not None
    own = found.part(exchange.rank) if exact else mean_of_parts(found.part(r) for r in range(found.workers))
    return Saved(read_header(found.header, found.path), found.shared(), own, exact, found.path)


def check(exchange: Exchange, folder: Path, way: str, meetings: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    whole, whole_run = made(exchange, folder / "whole", way, StopRequest(), None), Recorder()
    train(whole, whole_run)
    whole.averaging.close()
    stopped, run = made(exchange, folder / "stopped", way, StopAfter(meetings), None), Recorder()
    ended = None
    try:
        train(stopped, run)
    except Stopped as error:
        ended = error.received
    stopped.averaging.close()
    saved = newest(exchange, folder / "stopped")
    run.rows = [row for row in run.rows if row["epoch"] <= saved.header.epoch]
    again = made(exchange, folder / "stopped", way, StopRequest(), saved)
    train(again, run)
    again.averaging.close()
    same = all(torch.equal(a, b) for a, b in zip(bits(whole), bits(again), strict=True))
    everyone = exchange.gather([same, ended is not None, rows_of(whole_run) == rows_of(run)])
    return {
        "within": saved.header.share > 0,
        "epoch": saved.header.epoch,
        "same": all(one[0] for one in everyone),
        "stopped": all(one[1] for one in everyone),
        "rows": all(one[2] for one in everyone),
    }


def main(out: Path, seed: int) -> None:
    exchange, found = connect(), {}
    generator = torch.Generator().manual_seed(seed)
    for way in WAYS:
        meetings = int(torch.randint(1, 20, (), generator=generator))
        found[way] = check(exchange, out / way.replace(" ", "-"), way, meetings)
    # The first averaging of all makes the reference that those of 16 bits remember.
    found["at once"] = check(exchange, out / "at-once", "all-reduce, 16 bits, overlap", 0)
    if exchange.rank == 0:
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
