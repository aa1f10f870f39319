"""THE training loop: one function that reads like the paper."""

from __future__ import annotations

import logging
import math
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from torch import Tensor

from ddnn.data.minibatches import FrameSet, Orders, num_minibatches, shuffled_minibatches
from ddnn.data.transform import gather, labels_of, normalise
from ddnn.errors import DIVERGED, UserError
from ddnn.model.acoustic import AcousticModel
from ddnn.model.loss import cross_entropy_in_place
from ddnn.model.network import Buffers, Precision, backward, forward
from ddnn.optim.schedule import Schedule
from ddnn.optim.sgd import Sgd
from ddnn.progress import frame_counter
from ddnn.train.averaging import Averaging, no_averaging
from ddnn.train.evaluate import Evaluation, Tally, evaluate
from ddnn.train.run_dir import RunDir
from ddnn.train.saving import Saver
from ddnn.train.state import Saved, Standing, restore
from ddnn.train.step import CHECKED, CudaGraph, Feed, GraphedStep, Inputs, Step, checked
from ddnn.train.telemetry import worker_row

log = logging.getLogger(__name__)

CHECK_EVERY = 500
"""Minibatches between two looks at the loss of a single worker; looking waits for the device."""


@dataclass(frozen=True)
class Setup:
    """All that the loop needs, ready on the device of this worker.

    Attributes:
        train, cv: this worker's shards.
        averaging: this worker's part in the averagings.
        precision: of forward and backward passes in training; the same on every worker.
        graphs: on a GPU, whether the step may be captured as a CUDA graph.
        saver: writes checkpoints; None for none.
        saved: what to go on from; None to begin.
    """

    model: AcousticModel
    optimizer: Sgd
    schedule: Schedule
    train: FrameSet
    cv: FrameSet
    minibatch: int
    seed: int
    averaging: Averaging
    precision: Precision = "float32"
    graphs: bool = True
    saver: Saver | None = None
    saved: Saved | None = None


def train_minibatch(setup: Setup, buffers: Buffers, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """One step of training on the frames at `rows`; returns their summed loss and the number classified rightly."""
    gather(setup.train.corpus, setup.model.transform, rows, buffers.x)
    labels = labels_of(setup.train.corpus, rows, buffers.x.device)
    setup.averaging.clock.lap("data")
    return learn(setup, buffers, labels, rate)


def learn(setup: Setup, buffers: Buffers, labels: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The rest of `train_minibatch`, from the network's input in `buffers.x` and its labels (frames,) int64."""
    network = setup.model.network
    forward(network, buffers)
    loss, right = cross_entropy_in_place(buffers, labels)
    backward(network, buffers)
    averaging = setup.averaging
    setup.optimizer.step(network, buffers, rate, averaging.average_gradient if averaging.of_gradients else None)
    return loss, right


def plain_step(setup: Setup, buffers: Buffers) -> Step:
    """The step for minibatches of a `Feed`: of rows, or of spliced frames and their labels."""

    def step(inputs: Inputs, rate: float) -> tuple[Tensor, Tensor]:
        if len(inputs) == 1:
            return train_minibatch(setup, buffers, inputs[0], rate)
        frames, labels = inputs
        normalise(buffers.x.copy_(frames), setup.model.transform)
        return learn(setup, buffers, labels.long(), rate)

    return step


def fastest_step(setup: Setup, buffers: Buffers, feed: Feed) -> Step:
    """The plain step, or on a GPU the same as a CUDA graph where that is allowed and does the same here."""
    plain, network, averaging = plain_step(setup, buffers), setup.model.network, setup.averaging
    device = network.parameters.device
    if device.type != "cuda" or not setup.graphs or averaging.of_gradients:
        return plain
    graphed = GraphedStep(plain, network, setup.optimizer, CudaGraph(device))
    return checked(graphed, feed.some(CHECKED), setup.schedule.rate * averaging.rate_scale)


def train(setup: Setup, run: RunDir) -> AcousticModel:
    """Trains until the schedule ends; returns the model with the best parameters, as the schedule judged them.

    All workers run it together: each trains on its shard, all judge and keep the same mean model.

    Raises:
        UserError: the loss is no longer finite.
        AllLeftOut: no worker's model is.
    """
    model, network, schedule, averaging = setup.model, setup.model.network, setup.schedule, setup.averaging
    exchange, saver = averaging.exchange, setup.saver
    buffers = Buffers(network, setup.minibatch, setup.precision)
    if setup.saved is None:
        warm_start(setup, buffers, run)
    feed = Feed(setup.train, model.transform, setup.minibatch, buffers.x.device, averaging.clock.lap)
    step = fastest_step(setup, buffers, feed)
    orders = Orders(
        setup.train, setup.minibatch, seed=setup.seed, rank=exchange.rank, ahead=buffers.x.device.type == "cuda"
    )
    at = begin(setup, run) if setup.saved is None else restore(setup, setup.saved)
    if saver is not None:
        saver.begin(setup, at)

    while not schedule.finished:
        epoch, rate, at.begun = at.epochs + 1, schedule.rate, time.perf_counter() - at.seconds
        if at.length is None:  # else it is one that was broken off, and all is as it was
            setup.optimizer.clear_momentum()
            at.length = at.done + averaging.start_epoch(num_minibatches(setup.train, setup.minibatch) - at.done)
        with (
            frame_counter(f"epoch {epoch}", len(setup.train), done=at.done * setup.minibatch) as bar,
            closing(feed.over(orders.of(epoch, after=at.done))) as inputs,
        ):
            for minibatch in islice(inputs, at.length - at.done):
                loss, right = step(minibatch, rate * averaging.rate_scale)
                at.block.add(loss, right, setup.minibatch)
                at.done += 1
                bar.update(setup.minibatch)
                if averaging.after_minibatch(setup.minibatch):
                    at.tally.take_over(at.block)  # what was lost with a model left out is in no figure
                elif averaging.alone and at.block.frames % (CHECK_EVERY * setup.minibatch) == 0:
                    _check_finite("training", at.block.evaluation(), epoch, rate)
                if averaging.asked and saver is not None:
                    if averaging.alone:
                        _check_finite("training", at.block.evaluation(), epoch, rate)
                    saver.save(setup, at, run)
        averaging.finish_epoch()
        _record_workers(run, setup, epoch)
        if not averaging.alone:
            at.tally.take_over(at.block)
        trained = (at.block if averaging.alone else at.tally).over_workers(exchange)
        _check_finite("training", trained, epoch, rate)
        trained_seconds = at.elapsed()

        started = time.perf_counter()
        cv = evaluate(model, setup.cv, exchange)
        accepted = schedule.judge(cv.loss, cv.frame_accuracy)
        if accepted:
            _check_finite("cross-validation", cv, epoch, rate)
            at.best.copy_(network.parameters)
            with exchange.busy():
                run.save_best(model)
        else:
            network.parameters.copy_(at.best)
            averaging.restart()
        at.rows = [
            _record(run, epoch, "train", trained, rate, trained_seconds, accepted),
            _record(run, epoch, "cv", cv, rate, time.perf_counter() - started, accepted),
        ]
        at.end_epoch()
        if saver is not None and not schedule.finished:
            averaging.meet()
            saver.save(setup, at, run)
    orders.close()
    network.parameters.copy_(at.best)
    return model


def begin(setup: Setup, run: RunDir) -> Standing:
    """Judges the initial network, which is epoch 0."""
    started = time.perf_counter()
    cv = evaluate(setup.model, setup.cv, setup.averaging.exchange)
    _check_finite("cross-validation", cv, 0, setup.schedule.rate)
    _record(run, 0, "cv", cv, setup.schedule.rate, time.perf_counter() - started, accepted=True)
    setup.schedule.start(cv.loss, cv.frame_accuracy)
    return Standing(setup.model.network.parameters.clone())


def warm_start(setup: Setup, buffers: Buffers, run: RunDir) -> None:
    """`parallel.start`: minibatches before the first epoch, on the first worker alone or averaged after each."""
    averaging, options = setup.averaging, setup.averaging.options
    if averaging.alone or options.start == "none":
        return
    one, started = options.start == "one-worker", time.perf_counter()
    if one:  # the others take no part, not even where gradients are averaged
        by_itself = no_averaging(setup.model.network.parameters, setup.optimizer, setup.minibatch)
        setup = replace(setup, averaging=by_itself)
    rate = setup.schedule.rate * (1 if one else averaging.rate_scale)
    limit, setup.optimizer.shared_by = setup.optimizer.shared_by, 1 if one else setup.optimizer.shared_by
    tally, last = (Tally(setup.model.network.parameters.device) for _ in range(2))
    if not one or averaging.exchange.rank == 0:
        passes = (
            shuffled_minibatches(
                setup.train, setup.minibatch, seed=setup.seed, epoch=10**6 + number, rank=averaging.exchange.rank
            )
            for number in count()
        )
        for rows in islice((rows for order in passes for rows in order), options.start_minibatches):
            last.add(*train_minibatch(setup, buffers, rows, rate), len(rows))
            if one:
                continue
            if not averaging.of_gradients:
                averaging.mean_now()
            tally.take_over(last)
    setup.optimizer.shared_by = limit
    averaging.share()
    trained = (last if one else tally).over_workers(averaging.exchange)
    _check_finite("warm start's", trained, 0, rate)
    _record(run, 0, "start", trained, setup.schedule.rate, time.perf_counter() - started, accepted=True)


def _check_finite(split: str, so_far: Evaluation, epoch: int, rate: float) -> None:
    if not math.isfinite(so_far.loss):
        raise UserError(
            f"{DIVERGED}: the {split} loss is {so_far.loss} after {so_far.frames} frames of epoch {epoch} "
            f"at rate {rate:g}",
            mend="look for huge values in the features; else lower schedule.initial: the rate multiplies the gradient "
            "SUMMED over a minibatch",
        )


def _record_workers(run: RunDir, setup: Setup, epoch: int) -> None:
    """A row of every worker, and a warning of each that was left out."""
    averaging, parameters = setup.averaging, setup.model.network.parameters
    row = worker_row(
        epoch,
        averaging.exchange,
        parameters.device,
        averaging.clock,
        averaging.counts,
        parameters=parameters.numel(),
        overlap=averaging.options.overlap,
    )
    for one in averaging.exchange.gather(row):
        run.record(one)
        if one["left_out"]:
            log.warning(
                "epoch %2d worker %d on %s was left out of averaging %d time(s): its model was not finite",
                *(epoch, one["rank"], one["host"], one["left_out"]),
            )


def _record(
    run: RunDir, epoch: int, split: str, figures: Evaluation, rate: float, seconds: float, accepted: bool
) -> dict[str, Any]:
    speed = figures.frames / max(seconds, 1e-9)
    log.info(
        "epoch %2d %-5s loss %.4f  frame accuracy %5.2f %%  rate %.6g  %.1f s  %.0f frames/s%s",
        epoch,
        split,
        figures.loss,
        100 * figures.frame_accuracy,
        rate,
        seconds,
        speed,
        "" if accepted else "  rejected",
    )
    row = {
        "epoch": epoch,
        "split": split,
        "loss": figures.loss,
        "frame_accuracy": figures.frame_accuracy,
        "learning_rate": rate,
        "frames": figures.frames,
        "seconds": round(seconds, 4),
        "frames_per_second": round(speed, 1),
        "accepted": accepted,
    }
    run.record(row)
    return row
