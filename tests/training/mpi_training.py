"""Run by mpirun: trainings of all workers together on a small network, whose results test_averaging.py checks.

Each check leaves its figures in one JSON file, written by the first worker.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from toy import MINIBATCH, Recorder, toy_model, toy_shard, toy_trainer, train_to_end
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging.strategy import NoFiniteModelError
from ddnn.data.batches import Batch, ShuffledSampler
from ddnn.data.dataset import AcousticDataset, gather
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.mpi import init_communicator
from ddnn.nn.network import Workspace
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.recipe.schema import ParallelConfig
from ddnn.training.loop import warm_up
from ddnn.training.step import EagerStep
from ddnn.training.trainer import Trainer


def parameters_after(
    comm: Communicator, options: ParallelConfig, **settings: Any
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The trained parameters and what was recorded."""
    trainer = toy_trainer(comm, options, **settings)
    rows = train_to_end(trainer)
    return trainer.model.network.parameters, rows


def one_worker_with_large_minibatches(n: int, epochs: int, momentum: float, l2: float, rate: float) -> Tensor:
    """What one worker makes of minibatches that are those of all n workers together."""
    start = toy_model()
    sgd = Sgd(start.network, SgdOptions(momentum, l2))
    shards = [toy_shard(rank, 20 * MINIBATCH) for rank in range(n)]
    ends = np.cumsum([0] + [len(one) for one in shards])
    stores = torch.cat([one.dataset.features for one in shards])
    labels = torch.cat([one.dataset.labels for one in shards])
    corpus = AcousticDataset(stores, labels, ("u",), ("s",), np.array([0]), np.array([len(stores)]), 0)
    workspace = Workspace(start.network, n * MINIBATCH)
    step = EagerStep(workspace, sgd)
    for epoch in range(1, epochs + 1):
        sgd.clear_momentum()
        orders = [ShuffledSampler(one, MINIBATCH, seed=1, rank=rank).epoch(epoch) for rank, one in enumerate(shards)]
        for rows in zip(*orders, strict=True):
            together = torch.cat([ends[rank] + one for rank, one in enumerate(rows)])
            gather(corpus, start.transform, together, workspace.x, workspace.arithmetic.gather_kernel)
            step(Batch(workspace.x, corpus.labels[together].long()), rate)
    return start.network.parameters


def features_of(trainer: Trainer) -> Tensor:
    """This worker's frames, (frames, DIM)."""
    return trainer.batches.frames.dataset.features


def equal_to_one_worker(comm: Communicator) -> dict[str, Any]:
    """Averaging after every minibatch against one worker with n times the minibatch: largest differences."""
    differences = {}
    for momentum, rule in ((0.0, None), (0.9, "average"), (0.9, "keep")):
        truth = one_worker_with_large_minibatches(comm.world_size, 3, momentum, 1e-3, 0.01)
        sgd = make_optimizer_config(momentum=momentum, l2=1e-3)
        for name, options in (
            ("all-reduce", make_parallel_config(averaging_period=1, local_momentum=rule)),
            ("gradient-all-reduce", make_parallel_config(strategy="gradient-all-reduce")),
            ("bfloat16", make_parallel_config(averaging_period=1, local_momentum=rule, comm_dtype="bfloat16")),
        ):
            found, _ = parameters_after(comm, options, optimizer=sgd)
            differences[f"{name} {momentum:g} {rule}"] = float((found - truth).abs().max())
    return {"differences": differences, "moved": float((truth - toy_model().network.parameters).abs().max())}


def overlapped(comm: Communicator) -> dict[str, Any]:
    """Overlap without any change of the worker's own against blocking, and a training with it."""
    results: dict[str, Any] = {}
    for name in ("all-reduce", "butterfly", "ring", "hopping-ring"):
        found = []
        for overlap in (False, True):
            trainer = toy_trainer(comm, make_parallel_config(strategy=name, averaging_period=1, overlap=overlap))
            averager, parameters = trainer.averager, trainer.model.network.parameters
            averager.begin_epoch(20, 20 * MINIBATCH)
            parameters.add_(torch.randn(parameters.shape, generator=torch.Generator().manual_seed(comm.rank)))
            averager.after_minibatch(MINIBATCH)  # with overlap the averaging starts
            averager.wait()  # nothing was trained in between
            found.append(comm.all_gather(parameters).clone())
            averager.end_epoch()
            averager.close()
        results[name] = {
            "difference": float((found[0] - found[1]).abs().max()),
            "spread": float((found[0][0] - found[0][-1]).abs().max()),
        }
    _, rows = parameters_after(
        comm, make_parallel_config(averaging_period=3, overlap=True), frames=(20 + comm.rank) * MINIBATCH
    )
    results["rows"] = rows
    return results


def every_strategy(comm: Communicator) -> dict[str, Any]:
    """Trainings on shards of very different size: all end, with the same bits on every worker."""
    results: dict[str, Any] = {}
    frames = (7 + 10 * comm.rank) * MINIBATCH
    for options in (
        make_parallel_config(),
        make_parallel_config(comm_dtype="bfloat16", averaging_period=3),
        make_parallel_config(strategy="butterfly", averaging_period=3),
        make_parallel_config(strategy="ring", averaging_period=3, comm_dtype="bfloat16"),
        make_parallel_config(strategy="hopping-ring", averaging_period=3),
        make_parallel_config(strategy="gradient-all-reduce"),
        make_parallel_config(strategy="gradient-all-reduce", comm_dtype="bfloat16"),
        make_parallel_config(strategy="bmuf", averaging_period=3),
        make_parallel_config(strategy="bmuf", averaging_period=3, nesterov=True),
        make_parallel_config(strategy="bmuf", averaging_period=3, local_momentum="average"),
        make_parallel_config(strategy="elastic", averaging_period=3),
        make_parallel_config(strategy="1-bit", averaging_period=3),
        make_parallel_config(strategy="async", averaging_period=3),
        make_parallel_config(strategy="async", averaging_period=3, warmup="all-reduce", warmup_minibatches=5),
        make_parallel_config(averaging_period=3, warmup="single-worker", warmup_minibatches=30),
        make_parallel_config(strategy="gradient-all-reduce", warmup="single-worker", warmup_minibatches=5),
        make_parallel_config(strategy="ring", averaging_period=3, warmup="all-reduce", warmup_minibatches=5),
    ):
        for name in ("sgd", "ng-sgd"):
            sgd = (
                make_optimizer_config(name=name, momentum=0.5, rank_in=2, rank_out=3)
                if name == "ng-sgd"
                else make_optimizer_config()
            )
            found, rows = parameters_after(comm, options, frames=frames, optimizer=sgd)
            everyone = comm.all_gather(found)
            key = " ".join(f"{k}={getattr(options, k)}" for k in sorted(options.model_fields_set)) + f" {name}"
            results[key] = {"same": bool((everyone == everyone[0]).all()), "rows": rows}
    return results


def one_goes_nan(comm: Communicator) -> dict[str, Any]:
    """The last worker's model becomes NaN in the midst of training, by one of its frames; then everyone's."""
    results: dict[str, Any] = {}
    for options in (
        make_parallel_config(averaging_period=2),
        make_parallel_config(averaging_period=2, comm_dtype="bfloat16"),
        make_parallel_config(averaging_period=2, strategy="ring"),
        make_parallel_config(averaging_period=2, strategy="butterfly"),
        make_parallel_config(averaging_period=2, strategy="gradient-all-reduce"),
        make_parallel_config(averaging_period=2, strategy="bmuf"),
        make_parallel_config(averaging_period=2, strategy="1-bit"),
        make_parallel_config(averaging_period=2, overlap=True),
        make_parallel_config(averaging_period=2, strategy="async"),
    ):
        for name in ("sgd", "ng-sgd"):
            trainer = toy_trainer(
                comm, options, optimizer=make_optimizer_config(name=name, momentum=0.5, rank_in=2, rank_out=3)
            )
            if comm.rank == comm.world_size - 1:
                features_of(trainer)[17] = float("nan")
            rows = train_to_end(trainer)
            overlapping = " overlap" if options.overlap else ""
            results[f"{options.strategy} {options.comm_dtype}{overlapping} {name}"] = {
                "finite": bool(trainer.model.network.parameters.isfinite().all()),
                "rows": rows,
            }
    trainer = toy_trainer(comm, make_parallel_config(averaging_period=50), epochs=1)
    if comm.rank == comm.world_size - 1:
        features_of(trainer)[17] = float("nan")
    rows = train_to_end(trainer)
    results["at the end"] = [row["excluded_averagings"] for row in rows if row["type"] == "worker"]
    trainer = toy_trainer(comm, make_parallel_config(averaging_period=2))
    features_of(trainer).fill_(float("nan"))
    try:
        train_to_end(trainer)
        results["everyone"] = "training continued"
    except NoFiniteModelError as error:
        results["everyone"] = str(error)
    return results


def gradients_drift(comm: Communicator) -> dict[str, Any]:
    """Workers whose models differ at the end of an epoch, as on machines of different kinds."""
    trainer = toy_trainer(comm, make_parallel_config(strategy="gradient-all-reduce"))
    network = trainer.model.network
    first, parameters = network.parameters.clone(), network.parameters
    parameters.add_(1e-3 * comm.rank)
    network.parameters_changed()
    trainer.averager.begin_epoch(1, MINIBATCH)
    trainer.averager.end_epoch()
    return {"all as the first": comm.all_gather_object(bool((parameters == first).all()))}


def slow_worker(comm: Communicator, strategy: str = "all-reduce") -> dict[str, Any]:
    """The last worker takes three times as long for every minibatch, and says so."""
    trainer = toy_trainer(comm, make_parallel_config(strategy, averaging_period=5), epochs=1)
    step = trainer.optimizer.step

    def slow(*arguments: Any) -> None:
        step(*arguments)
        time.sleep(0.012 if comm.rank == comm.world_size - 1 else 0.004)

    trainer.optimizer.step = slow  # type: ignore[method-assign]
    return {"rows": train_to_end(trainer)}


def warm_ups(comm: Communicator) -> dict[str, Any]:
    """A warm-up on one worker against the same by hand."""
    run = Recorder()
    trainer = toy_trainer(comm, make_parallel_config(warmup="single-worker", warmup_minibatches=25), run=run)
    warm_up(trainer)
    found = trainer.model.network.parameters
    by_hand = toy_trainer(SingleProcess(), make_parallel_config())
    batches = (batch for number in range(2) for batch in by_hand.batches.epoch(10**6 + number))
    for batch in islice(batches, 25):
        by_hand.eager_step(batch, 0.01)
    return {
        "difference": float((found - by_hand.model.network.parameters).abs().max()),
        "same": len({one.tobytes() for one in comm.all_gather(found).numpy()}) == 1,
        "rows": run.rows,
    }


def frozen_layers(comm: Communicator) -> dict[str, Any]:
    """Trainings with the first and the last layer frozen: whether these, and no others, keep their bits."""
    results, before = {}, toy_model().network.views
    for options in (
        make_parallel_config(averaging_period=3),
        make_parallel_config(averaging_period=3, comm_dtype="bfloat16"),
        make_parallel_config(averaging_period=3, overlap=True),
        make_parallel_config(strategy="ring", averaging_period=3, comm_dtype="bfloat16"),
        make_parallel_config(strategy="bmuf", averaging_period=3, nesterov=True, local_momentum="average"),
        make_parallel_config(strategy="gradient-all-reduce", comm_dtype="bfloat16"),
    ):
        sgd = make_optimizer_config(name="ng-sgd", momentum=0.5, l2=0.01, rank_in=2, rank_out=3)
        trainer = toy_trainer(comm, options, optimizer=sgd, frozen=(0, 2))
        train_to_end(trainer)
        same = [
            all(torch.equal(now[name], then[name]) for name in now)
            for now, then in zip(trainer.model.network.views, before, strict=True)
        ]
        key = " ".join(f"{k}={getattr(options, k)}" for k in sorted(options.model_fields_set))
        results[key] = comm.all_gather_object(same)
    return results


CHECKS = {
    "frozen": frozen_layers,
    "equal": equal_to_one_worker,
    "overlap": overlapped,
    "strategies": every_strategy,
    "nan": one_goes_nan,
    "drift": gradients_drift,
    "slow": slow_worker,
    "slow, async": partial(slow_worker, strategy="async"),
    "warm": warm_ups,
}


def main(out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from parameter_check import install

    install()
    torch.set_num_threads(1)
    logging.getLogger("ddnn").setLevel(logging.ERROR)
    comm = init_communicator()
    for name, check in CHECKS.items():
        results = check(comm)
        if comm.rank == 0:
            (out / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
