"""Run by mpirun: trainings of all workers together on a little network, judged in test_averaging.py.

Each check leaves its figures in one JSON file, written by the first worker.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddnn.data.corpus import Corpus, FeaturePipeline
from ddnn.data.minibatches import FrameSet, shuffled_minibatches
from ddnn.data.transform import plain_splice
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Buffers, Network, hidden_stack
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import Sgd, make_optimizer
from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import AllLeftOut
from ddnn.recipe.schema import Optimizer, Parallel, Schedule
from ddnn.train.averaging import Averaging, no_averaging
from ddnn.train.loop import Setup, train, train_minibatch, warm_start
from ddnn.train.run_dir import NoRunDir

DIM, PDFS, MINIBATCH = 6, 5, 16


class Recorder(NoRunDir):
    """A run dir that only remembers what was recorded."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.rows: list[dict[str, Any]] = []

    def record(self, metrics: dict[str, Any]) -> None:
        self.rows.append(metrics)


def shard(rank: int, frames: int) -> FrameSet:
    """Frames of five classes; those of each rank differ, and are the same wherever they are made."""
    generator = torch.Generator().manual_seed(100 + rank)
    labels = torch.randint(0, PDFS, (frames,), generator=generator, dtype=torch.int32)
    means = torch.randn(PDFS, DIM, generator=torch.Generator().manual_seed(7))
    store = means[labels.long()] + 0.5 * torch.randn(frames, DIM, generator=generator)
    corpus = Corpus(store, labels, ("u",), ("s",), np.array([0]), np.array([frames]), 0)
    return FrameSet(corpus, torch.arange(frames))


def model() -> AcousticModel:
    network = Network(hidden_stack(DIM, 2, 8, PDFS, "sigmoid"))
    initialise_randomly(network, 3)
    return AcousticModel(FeaturePipeline(), plain_splice(DIM, 0), network)


def setup(
    exchange: Exchange,
    options: Parallel,
    *,
    frames: int = 20 * MINIBATCH,
    optimizer: Optimizer | None = None,
    epochs: int = 3,
    rate: float = 0.01,
) -> Setup:
    start = model()
    sgd = make_optimizer(optimizer or Optimizer(), start.network)
    averaging = Averaging(exchange, options, start.network.parameters, sgd, MINIBATCH)
    averaging.share()
    schedule = make_schedule(Schedule(name="exponential", initial=rate, final=rate, epochs=epochs))
    train_set = shard(exchange.rank, frames)
    return Setup(start, sgd, schedule, train_set, shard(50 + exchange.rank, 40), MINIBATCH, 1, averaging)


def parameters_after(exchange: Exchange, options: Parallel, **settings: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    """The trained parameters and what was recorded."""
    run, ready = Recorder(), setup(exchange, options, **settings)
    trained = train(ready, run)
    ready.averaging.close()
    return trained.network.parameters, run.rows


def one_worker_with_large_minibatches(n: int, epochs: int, momentum: float, l2: float, rate: float) -> Tensor:
    """What one worker makes of minibatches that are those of all n workers together."""
    start = model()
    sgd = Sgd(start.network, momentum=momentum, l2=l2)
    shards = [shard(rank, 20 * MINIBATCH) for rank in range(n)]
    ends = np.cumsum([0] + [len(one) for one in shards])
    stores = torch.cat([one.corpus.store for one in shards])
    labels = torch.cat([one.corpus.labels for one in shards])
    corpus = Corpus(stores, labels, ("u",), ("s",), np.array([0]), np.array([len(stores)]), 0)
    everything = FrameSet(corpus, torch.arange(len(stores)))
    alone = no_averaging(start.network.parameters, sgd, n * MINIBATCH)
    ready = Setup(start, sgd, make_schedule(Schedule()), everything, everything, n * MINIBATCH, 1, alone)
    buffers = Buffers(start.network, n * MINIBATCH)
    for epoch in range(1, epochs + 1):
        sgd.clear_momentum()
        orders = [
            shuffled_minibatches(one, MINIBATCH, seed=1, epoch=epoch, rank=rank) for rank, one in enumerate(shards)
        ]
        for rows in zip(*orders, strict=True):
            together = torch.cat([ends[rank] + one for rank, one in enumerate(rows)])
            train_minibatch(ready, buffers, together, rate)
    return start.network.parameters


def equal_to_one_worker(exchange: Exchange) -> dict[str, Any]:
    """Averaging after every minibatch against one worker with n times the minibatch: largest differences."""
    differences = {}
    for momentum, rule in ((0.0, None), (0.9, "average"), (0.9, "keep")):
        truth = one_worker_with_large_minibatches(exchange.size, 3, momentum, 1e-3, 0.01)
        sgd = Optimizer(momentum=momentum, l2=1e-3)
        for name, options in (
            ("all-reduce", Parallel(every=1, momentum_rule=rule)),
            ("gradient", Parallel(reduce="gradient")),
            ("bfloat16", Parallel(every=1, momentum_rule=rule, wire="bfloat16")),
        ):
            found, _ = parameters_after(exchange, options, optimizer=sgd)
            differences[f"{name} {momentum:g} {rule}"] = float((found - truth).abs().max())
    return {"differences": differences, "moved": float((truth - model().network.parameters).abs().max())}


def overlapped(exchange: Exchange) -> dict[str, Any]:
    """Overlap without any change of the worker's own against blocking, and a training with it."""
    results: dict[str, Any] = {}
    for name in ("all-reduce", "butterfly", "ring", "hopping-ring"):
        found = []
        for overlap in (False, True):
            ready = setup(exchange, Parallel(reduce=name, every=1, overlap=overlap))
            averaging, parameters = ready.averaging, ready.model.network.parameters
            averaging.start_epoch(20)
            parameters.add_(torch.randn(parameters.shape, generator=torch.Generator().manual_seed(exchange.rank)))
            averaging.after_minibatch(MINIBATCH)  # overlap: departs
            if overlap:
                averaging.arrive()  # nothing was trained in between
            found.append(exchange.all_gather(parameters).clone())
            averaging.finish_epoch()
            averaging.close()
        results[name] = {
            "difference": float((found[0] - found[1]).abs().max()),
            "spread": float((found[0][0] - found[0][-1]).abs().max()),
        }
    _, rows = parameters_after(exchange, Parallel(every=3, overlap=True), frames=(20 + exchange.rank) * MINIBATCH)
    results["rows"] = rows
    return results


def every_strategy(exchange: Exchange) -> dict[str, Any]:
    """Trainings on shards of very different size: all end, with the same bits on every worker."""
    results: dict[str, Any] = {}
    frames = (7 + 23 * exchange.rank) * MINIBATCH
    for options in (
        Parallel(),
        Parallel(wire="bfloat16", every=3),
        Parallel(reduce="butterfly", every=3),
        Parallel(reduce="ring", every=3, wire="bfloat16"),
        Parallel(reduce="hopping-ring", every=3),
        Parallel(reduce="gradient"),
        Parallel(reduce="gradient", wire="bfloat16"),
        Parallel(reduce="bmuf", every=3),
        Parallel(reduce="bmuf", every=3, nesterov=True),
        Parallel(reduce="bmuf", every=3, momentum_rule="average"),
        Parallel(every=3, start="one-worker", start_minibatches=30),
        Parallel(reduce="gradient", start="one-worker", start_minibatches=5),
        Parallel(reduce="ring", every=3, start="all-reduce", start_minibatches=5),
    ):
        for name in ("sgd", "ng-sgd"):
            sgd = Optimizer(name=name, momentum=0.5, rank_in=2, rank_out=3) if name == "ng-sgd" else Optimizer()
            found, rows = parameters_after(exchange, options, frames=frames, optimizer=sgd)
            everyone = exchange.all_gather(found)
            key = " ".join(f"{k}={getattr(options, k)}" for k in sorted(options.model_fields_set)) + f" {name}"
            results[key] = {"same": bool((everyone == everyone[0]).all()), "rows": rows}
    return results


def one_goes_nan(exchange: Exchange) -> dict[str, Any]:
    """The last worker's model becomes NaN in the midst of training, by one of its frames; then everyone's."""
    results: dict[str, Any] = {}
    for options in (
        Parallel(every=2),
        Parallel(every=2, wire="bfloat16"),
        Parallel(every=2, reduce="ring"),
        Parallel(every=2, reduce="butterfly"),
        Parallel(every=2, reduce="gradient"),
        Parallel(every=2, reduce="bmuf"),
        Parallel(every=2, overlap=True),
    ):
        for name in ("sgd", "ng-sgd"):
            run = Recorder()
            ready = setup(exchange, options, optimizer=Optimizer(name=name, momentum=0.5, rank_in=2, rank_out=3))
            if exchange.rank == exchange.size - 1:
                ready.train.corpus.store[17] = float("nan")
            trained = train(ready, run)
            ready.averaging.close()
            overlapping = " overlap" if options.overlap else ""
            results[f"{options.reduce} {options.wire}{overlapping} {name}"] = {
                "finite": bool(trained.network.parameters.isfinite().all()),
                "rows": run.rows,
            }
    run, ready = Recorder(), setup(exchange, Parallel(every=50), epochs=1)
    if exchange.rank == exchange.size - 1:
        ready.train.corpus.store[17] = float("nan")
    train(ready, run)
    results["at the end"] = [row["left_out"] for row in run.rows if row["split"] == "worker"]
    ready = setup(exchange, Parallel(every=2))
    ready.train.corpus.store.fill_(float("nan"))
    try:
        train(ready, Recorder())
        results["everyone"] = "went on"
    except AllLeftOut as error:
        results["everyone"] = str(error)
    return results


def gradients_drift(exchange: Exchange) -> dict[str, Any]:
    """Workers whose models have drifted apart, as on machines of different kinds, at the end of an epoch."""
    ready = setup(exchange, Parallel(reduce="gradient"))
    parameters = ready.model.network.parameters
    first = parameters.clone()
    parameters.add_(1e-3 * exchange.rank)
    ready.averaging.start_epoch(1)
    ready.averaging.finish_epoch()
    return {"all as the first": exchange.gather(bool((parameters == first).all()))}


def slow_worker(exchange: Exchange) -> dict[str, Any]:
    """The last worker takes three times as long for every minibatch, and says so."""
    ready, run = setup(exchange, Parallel(every=5), epochs=1), Recorder()
    step = ready.optimizer.step

    def slow(*arguments: Any) -> None:
        step(*arguments)
        time.sleep(0.012 if exchange.rank == exchange.size - 1 else 0.004)

    ready.optimizer.step = slow  # type: ignore[method-assign]
    train(ready, run)
    return {"rows": run.rows}


def warm_starts(exchange: Exchange) -> dict[str, Any]:
    """One worker's warm start against the same by hand; all-reduce's against one worker with large minibatches."""
    run, ready = Recorder(), setup(exchange, Parallel(start="one-worker", start_minibatches=25))
    warm_start(ready, Buffers(ready.model.network, MINIBATCH), run)
    found = ready.model.network.parameters
    by_hand = setup(Exchange(), Parallel())
    first, buffers = shard(0, 20 * MINIBATCH), Buffers(by_hand.model.network, MINIBATCH)
    by_hand = Setup(**{**vars(by_hand), "train": first})
    orders = [shuffled_minibatches(first, MINIBATCH, seed=1, epoch=10**6 + number) for number in range(2)]
    for rows in [rows for order in orders for rows in order][:25]:
        train_minibatch(by_hand, buffers, rows, 0.01)
    return {
        "difference": float((found - by_hand.model.network.parameters).abs().max()),
        "same": len({one.tobytes() for one in exchange.all_gather(found).numpy()}) == 1,
        "rows": run.rows,
    }


CHECKS = {
    "equal": equal_to_one_worker,
    "overlap": overlapped,
    "strategies": every_strategy,
    "nan": one_goes_nan,
    "drift": gradients_drift,
    "slow": slow_worker,
    "warm": warm_starts,
}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("ddnn").setLevel(logging.ERROR)
    exchange = connect()
    for name, check in CHECKS.items():
        results = check(exchange)
        if exchange.rank == 0:
            (out / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
