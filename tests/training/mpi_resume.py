"""Run by mpirun: each way of averaging, stopped somewhere and resumed, against the same training never stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from training.toy import SIZES, Recorder, toy_trainer, train_to_end, with_combination
from variants import make_optimizer_config, make_parallel_config

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.mpi import init_communicator
from ddnn.distributed.signals import GracefulShutdown, TrainingInterrupted
from ddnn.optim.schedule import MinibatchSizes
from ddnn.recipe.schema import OptimizerConfig, ParallelConfig
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.training.resume import merge_rank_states, read_metadata
from ddnn.training.state import CheckpointPolicy, LoadedCheckpoint
from ddnn.training.trainer import Trainer

NG = make_optimizer_config(name="ng-sgd", rank_in=3, rank_out=4, momentum=0.3)
MOMENTUM = make_optimizer_config(momentum=0.5)
WAYS: dict[str, tuple[ParallelConfig, OptimizerConfig]] = {
    "all-reduce": (make_parallel_config(averaging_period=3), MOMENTUM),
    "all-reduce, overlap": (make_parallel_config(averaging_period=3, overlap=True), MOMENTUM),
    "all-reduce, 16 bits": (make_parallel_config(averaging_period=3, comm_dtype="bfloat16"), make_optimizer_config()),
    "all-reduce, 16 bits, overlap": (make_parallel_config(averaging_period=2, comm_dtype="bfloat16", overlap=True), NG),
    "average momentum": (make_parallel_config(averaging_period=3, local_momentum="average"), MOMENTUM),
    "butterfly": (make_parallel_config(averaging_period=1, strategy="butterfly"), NG),
    "hopping ring, overlap": (
        make_parallel_config(averaging_period=1, strategy="hopping-ring", overlap=True),
        MOMENTUM,
    ),
    "gradient-all-reduce": (make_parallel_config(averaging_period=3, strategy="gradient-all-reduce"), NG),
    "bmuf": (make_parallel_config(averaging_period=3, strategy="bmuf", nesterov=True), MOMENTUM),
    "elastic": (make_parallel_config(averaging_period=3, strategy="elastic", elasticity=0.7), MOMENTUM),
    "1-bit": (make_parallel_config(averaging_period=2, strategy="1-bit"), MOMENTUM),
    "1-bit, overlap": (make_parallel_config(averaging_period=1, strategy="1-bit", overlap=True), NG),
    "bmuf, overlap": (make_parallel_config(averaging_period=3, strategy="bmuf", overlap=True), make_optimizer_config()),
}
ONCE: dict[str, tuple[ParallelConfig, OptimizerConfig]] = {
    "once an epoch": (make_parallel_config(averaging_frames="epoch", averaging_period=3), MOMENTUM),
    "bmuf once an epoch": (make_parallel_config(strategy="bmuf", averaging_frames="epoch", averaging_period=3), NG),
}
"""With few requests, so that these are stopped at each: test_resume.py."""

GROWING = {"average momentum", "butterfly", "gradient-all-reduce", "bmuf"}
"""Ways with another minibatch size in each epoch."""


class StopAfter(GracefulShutdown):
    """Asks to stop when it is asked after `requests` other times: after an averaging, or at the end of an epoch."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.requests = requests

    @property  # type: ignore[misc]
    def signal_name(self) -> str | None:
        self.requests -= 1
        return "SIGTERM" if self.requests < 0 else None

    @signal_name.setter
    def signal_name(self, name: str | None) -> None: ...


def resumable(
    comm: Communicator, folder: Path, way: str, shutdown: GracefulShutdown, loaded: LoadedCheckpoint | None
) -> Trainer:
    """A training that writes checkpoints in `folder`, restored from `loaded`."""
    options, optimizer = (WAYS | ONCE)[way]
    run = Recorder()
    checkpoints = CheckpointPolicy(CheckpointStore(folder, 2, comm), shutdown, run)
    # Unequal shards: some workers have a remainder, in which there are no averagings.
    trainer = toy_trainer(
        comm,
        options,
        optimizer=optimizer,
        frames=(20 + comm.rank) * 16,
        learning_rate=0.002,
        checkpoints=checkpoints,
        run=run,
        sizes=MinibatchSizes(8, 16, 3) if way in GROWING else SIZES,
    )
    with_combination(trainer)
    if loaded is not None:
        trainer.restore(loaded)
    return trainer


def interrupted(trainer: Trainer) -> str | None:
    """Trains; the signal that has ended the training, None where none has."""
    try:
        train_to_end(trainer)
    except TrainingInterrupted as error:
        return error.signal_name
    return None


def bits(trainer: Trainer) -> list[torch.Tensor]:
    """The model, and what this worker alone has at the end."""
    state = trainer.optimizer.state_dict()
    means = [parameters.clone() for _, parameters in trainer.combination.candidates()]
    return [trainer.model.network.parameters.clone(), *means, *(state[name].clone() for name in sorted(state))]


def rows_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on time."""
    kept = (
        "type",
        "epoch",
        "split",
        "rank",
        "loss",
        "frame_accuracy",
        "frames",
        "minibatches",
        "averagings",
        "consensus_distance",
    )
    return [{key: row[key] for key in kept if key in row} for row in rows]


def latest(comm: Communicator, folder: Path, *, bitwise: bool = True) -> LoadedCheckpoint:
    found = CheckpointStore(folder, 2, comm).latest()
    assert found is not None
    states = (found.rank_state(rank) for rank in range(found.world_size))
    state = found.rank_state(comm.rank) if bitwise else merge_rank_states(states)
    return LoadedCheckpoint(read_metadata(found.metadata, found.path), found.global_state, state, bitwise, found.path)


def check(comm: Communicator, folder: Path, way: str, requests: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    whole = resumable(comm, folder / "whole", way, GracefulShutdown(), None)
    whole_rows = train_to_end(whole)
    stopped = resumable(comm, folder / "stopped", way, StopAfter(requests), None)
    ended = interrupted(stopped)
    loaded = latest(comm, folder / "stopped")
    rows = [row for row in stopped.run.rows if row["epoch"] <= loaded.metadata.epoch]
    again = resumable(comm, folder / "stopped", way, GracefulShutdown(), loaded)
    rows += train_to_end(again)
    same = all(torch.equal(a, b) for a, b in zip(bits(whole), bits(again), strict=True))
    everyone = comm.all_gather_object([same, ended == "SIGTERM", rows_of(whole_rows) == rows_of(rows)])
    return {
        "within": loaded.metadata.epoch_fraction > 0,
        "epoch": loaded.metadata.epoch,
        "models": len(torch.unique(comm.all_gather(stopped.model.network.parameters), dim=0)),
        "fisher": any("preconditioner" in name for name in whole.optimizer.state_dict()),
        "same": all(one[0] for one in everyone),
        "stopped": all(one[1] for one in everyone),
        "rows": all(one[2] for one in everyone),
    }


def one_worker_resumes(comm: Communicator, folder: Path) -> dict[str, Any]:
    """The workers stop in the middle of an epoch; one resumes, from the mean of their models."""
    way = "all-reduce, overlap"
    stopped = resumable(comm, folder, way, StopAfter(9), None)  # 6 requests in an epoch, and one at its end
    interrupted(stopped)
    models = comm.all_gather(stopped.model.network.parameters)
    found: dict[str, Any] = {}
    if comm.rank == 0:
        alone = SingleProcess()
        assert not torch.equal(models[0], models[1])
        again = resumable(alone, folder, way, GracefulShutdown(), latest(alone, folder, bitwise=False))
        progress = again.progress
        found["mean"] = torch.allclose(again.model.network.parameters, models.mean(dim=0), atol=1e-7)
        found |= {"epoch": progress.epoch, "minibatch": progress.minibatch}
        found["finishes"] = train_to_end(again)[-1]["epoch"] == 3
    comm.barrier()
    return found


def main(out: Path, seed: int) -> None:
    comm, found = init_communicator(), {}
    generator = torch.Generator().manual_seed(seed)
    for way in WAYS:
        requests = int(torch.randint(1, 20, (), generator=generator))
        found[way] = check(comm, out / way.replace(" ", "-"), way, requests)
    # The first averaging of all makes the reference that those of 16 bits remember.
    found["at once"] = check(comm, out / "at-once", "all-reduce, 16 bits, overlap", 0)
    fewer = one_worker_resumes(comm, out / "fewer")
    if comm.rank == 0:
        (out / "found.json").write_text(json.dumps({"same": found, "fewer": fewer}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
