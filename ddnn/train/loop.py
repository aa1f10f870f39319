"""THE training loop: one function that reads like the paper."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from torch import Tensor

from ddnn.data.minibatches import FrameSet, shuffled_minibatches
from ddnn.data.transform import gather
from ddnn.errors import UserError
from ddnn.model.acoustic import AcousticModel
from ddnn.model.network import Buffers, backward, cross_entropy, forward
from ddnn.optim.schedule import Schedule
from ddnn.optim.sgd import Sgd
from ddnn.progress import frame_counter
from ddnn.train.evaluate import Evaluation, Tally, evaluate
from ddnn.train.run_dir import RunDir

log = logging.getLogger(__name__)

CHECK_EVERY = 500
"""Minibatches between two looks at the loss; looking waits for the device."""


@dataclass(frozen=True)
class Setup:
    """All that the loop needs, ready on the device."""

    model: AcousticModel
    optimizer: Sgd
    schedule: Schedule
    train: FrameSet
    cv: FrameSet
    minibatch: int
    seed: int


def train_minibatch(setup: Setup, buffers: Buffers, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """One step of training on the frames at `rows`; returns their summed loss and the number classified rightly."""
    network, corpus = setup.model.network, setup.train.corpus
    gather(corpus, setup.model.transform, rows, buffers.x)
    activations = forward(network, buffers)
    loss, right = cross_entropy(activations, corpus.labels[rows].long(), buffers.derivatives[-1])
    backward(network, buffers)
    setup.optimizer.step(network, buffers, rate)
    return loss, right


def train(setup: Setup, run: RunDir) -> AcousticModel:
    """Trains until the schedule ends; returns the model with the best parameters, as the schedule judged them.

    Raises:
        UserError: the loss is no longer finite.
    """
    model, network, schedule = setup.model, setup.model.network, setup.schedule
    buffers = Buffers(network, setup.minibatch)
    best = network.parameters.clone()
    started = time.perf_counter()
    cv = evaluate(model, setup.cv)
    _check_finite("cross-validation", cv, 0, schedule.rate)
    _record(run, 0, "cv", cv, schedule.rate, time.perf_counter() - started, accepted=True)
    schedule.start(cv.loss, cv.frame_accuracy)

    epoch = 0
    while not schedule.finished:
        epoch += 1
        rate, tally, started = schedule.rate, Tally(network.parameters.device), time.perf_counter()
        setup.optimizer.start_epoch()
        with frame_counter(f"epoch {epoch}", len(setup.train)) as bar:
            for rows in shuffled_minibatches(setup.train, setup.minibatch, seed=setup.seed, epoch=epoch):
                loss, right = train_minibatch(setup, buffers, rows, rate)
                tally.add(loss, right, len(rows))
                bar.update(len(rows))
                if tally.frames % (CHECK_EVERY * setup.minibatch) == 0:
                    _check_finite("training", tally.evaluation(), epoch, rate)
        trained = tally.evaluation()
        _check_finite("training", trained, epoch, rate)
        trained_seconds = time.perf_counter() - started

        started = time.perf_counter()
        cv = evaluate(model, setup.cv)
        accepted = schedule.judge(cv.loss, cv.frame_accuracy)
        if accepted:
            _check_finite("cross-validation", cv, epoch, rate)
            best.copy_(network.parameters)
            run.save_best(model)
        else:
            network.parameters.copy_(best)
        _record(run, epoch, "train", trained, rate, trained_seconds, accepted)
        _record(run, epoch, "cv", cv, rate, time.perf_counter() - started, accepted)
    network.parameters.copy_(best)
    return model


def _check_finite(split: str, so_far: Evaluation, epoch: int, rate: float) -> None:
    if not abs(so_far.loss) < float("inf"):
        raise UserError(
            f"the {split} loss is {so_far.loss} after {so_far.frames} frames of epoch {epoch} at rate {rate:g}",
            mend="look for huge values in the features; else lower schedule.initial: the rate multiplies the gradient "
            "SUMMED over a minibatch",
        )


def _record(
    run: RunDir, epoch: int, split: str, figures: Evaluation, rate: float, seconds: float, accepted: bool
) -> None:
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
    run.record(
        {
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
    )
