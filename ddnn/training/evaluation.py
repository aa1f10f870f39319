"""Figures of a model: over frames, over an epoch while it trains, and in validation, by which a training accepts its epochs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ddnn.data.batches import EVAL_BATCH, Sampler
from ddnn.data.dataset import FrameSubset, labels_of
from ddnn.distributed.communicator import Communicator
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.arithmetic import Float32, Precision
from ddnn.nn.figures import FIGURES, FRAME_ACCURACY, LOSS, Figure, texts
from ddnn.nn.network import evaluation_workspace, tensor_like
from ddnn.nn.objective import CrossEntropy, MakeObjective
from ddnn.nn.scorer import forward_batches
from ddnn.util.errors import DataError, DivergedError
from ddnn.util.text import definitions, printable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalResult:
    """What a model reaches on some frames. `figures`: means per frame of an objective, by name (`ddnn.nn.figures`), the
    first of which schedules go by; of cross-entropy the loss in nats, and the share of frames whose most probable pdf is the
    aligned one."""

    figures: Mapping[str, float]
    frames: int
    utterances: dict[str, int] = field(default_factory=dict)  # of a data dir: used, skipped (by reason), trimmed
    parts: dict[str, EvalResult] = field(default_factory=dict)  # by speaker or utterance, if that was asked for
    model: str | None = None  # `model_digest` of the run whose model it is
    precision: Precision | None = None  # that the network computed in; of parts, see the whole
    data: str | None = None  # the data dir, as it was named
    alignments: str | None = None

    @property
    def loss(self) -> float:
        """The figure that training minimizes, NaN where there is none."""
        return next(iter(self.figures.values()), math.nan)

    @property
    def quality(self) -> float:
        """The last figure, turned so that more is better: parts are sorted by it."""
        name, value = list(self.figures.items())[-1]
        return value if FIGURES[name].better == "higher" else -value

    def as_dict(self) -> dict[str, Any]:
        rest = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        rest["parts"] = {name: part.as_dict() for name, part in self.parts.items()}
        optional = ("parts", "model", "precision", "data", "alignments")
        return {name: value for name, value in {**self.figures, **rest}.items() if value or name not in optional}

    def as_text(self) -> str:
        """One line, one more where utterances were skipped or trimmed, and one for each part, the worst first."""
        loss, *others = texts(self.figures)
        figures = ", ".join([f"{loss} per frame", *others, f"{self.frames} frames", *filter(None, [self.precision])])
        notable = [f"{count} {reason.replace('_', ' ')}" for reason, count in self.utterances.items() if count]
        lines = [figures] if len(notable) < 2 else [figures, f"utterances: {', '.join(notable)}"]
        worst_first = sorted(self.parts.items(), key=lambda part: part[1].quality)
        parts = definitions([(printable(name, ""), part.as_text()) for name, part in worst_first], indent="  ")
        return "\n".join([*lines, *([parts] if parts else [])])


def no_result(names: Iterable[str]) -> EvalResult:
    """Before there is one: figures of these names, NaN, on no frames."""
    return EvalResult(dict.fromkeys(names, math.nan), 0)


class FigureSums:
    """Sums of an objective's figures over frames; on the device, so that adding never waits for it."""

    def __init__(self, device: torch.device, figures: Sequence[Figure] = CrossEntropy.figures) -> None:
        self.names = [figure.name for figure in figures]
        self.sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in figures]
        self.frames = 0

    def add(self, sums: Sequence[Tensor], frames: int) -> None:
        for total, value in zip(self.sums, sums, strict=True):
            total += value
        self.frames += frames

    def result(self, comm: Communicator | None = None) -> EvalResult:
        """The means; over all workers' frames where there is `comm`, the same bits on each. Waits for the device."""
        total = self.to_tensor() if comm is None else comm.all_gather(self.to_tensor()).sum(dim=0)
        *sums, frames = total.tolist()
        if frames == 0:
            return no_result(self.names)
        return EvalResult({name: value / frames for name, value in zip(self.names, sums, strict=True)}, int(frames))

    def to_tensor(self) -> Tensor:
        """(figures + 1,) float64, the frames last, for a checkpoint."""
        return torch.tensor([*(total.item() for total in self.sums), self.frames], dtype=torch.float64)

    def load_tensor(self, sums: Tensor) -> None:
        *values, frames = sums.tolist()
        for total, value in zip(self.sums, values, strict=True):
            total.fill_(value)
        self.frames = int(frames)

    def reset(self) -> None:
        self.load_tensor(torch.zeros(len(self.sums) + 1))


class EpochFigures:
    """The figures of an epoch of training. Sums of the current interval are kept apart until it is averaged: what a worker
    did that was excluded from the averaging counts nowhere. `excludes`: whether workers are excluded. Otherwise
    `raise_if_diverged` is called with the figures of the interval from time to time."""

    CHECK_PERIOD = 500  # minibatches between two checks of a single worker's loss; a check waits for the device

    def __init__(
        self,
        device: torch.device,
        figures: Sequence[Figure],
        raise_if_diverged: Callable[[EvalResult], None],
        *,
        excludes: bool,
    ) -> None:
        self.figures, self.raise_if_diverged, self.excludes = figures, raise_if_diverged, excludes
        self.committed, self.interval = FigureSums(device, figures), FigureSums(device, figures)

    def add(self, sums: Sequence[Tensor], frames: int, minibatch: int) -> None:
        """Those of a minibatch, the epoch's number `minibatch` from 1."""
        self.interval.add(sums, frames)
        if minibatch % self.CHECK_PERIOD == 0:
            self.check()

    def check(self) -> None:
        """DivergedError where the loss is not finite and no other worker can make up for it."""
        if not self.excludes and self.interval.frames:
            self.raise_if_diverged(self.interval.result())

    def commit(self) -> None:
        """Counts the interval, unless it is to be excluded; waits for the device."""
        if not self.excludes or math.isfinite(self.interval.sums[0].item()):
            self.committed.add(self.interval.sums, self.interval.frames)
        self.interval.reset()

    @property
    def frames(self) -> int:
        """Of this worker in the epoch under way."""
        return self.committed.frames + self.interval.frames

    def so_far(self) -> str:
        """Of this worker, which is rank 0, in the epoch under way, for a person; waits for the device."""
        *sums, frames = (self.committed.to_tensor() + self.interval.to_tensor()).tolist()
        parts = [figure.text(value / max(frames, 1)) for figure, value in zip(self.figures, sums, strict=True)]
        return ", ".join(parts) + (" (worker 0)" if self.excludes else "")

    def state_dict(self) -> dict[str, Tensor]:
        """`sums` (2, figures + 1) float64: sums of the figures and frames of the epoch and of the interval. DivergedError as
        `check`."""
        self.check()
        return {"sums": torch.stack([self.committed.to_tensor(), self.interval.to_tensor()])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`; DataError where it does not fit."""
        like = torch.stack([self.committed.to_tensor(), self.interval.to_tensor()])
        sums = tensor_like(like, state, "sums")
        if not bool((sums.abs() < 2**53).all()):  # false for NaN too
            raise DataError("sums of an epoch expected, found others")
        self.committed.load_tensor(sums[0])
        self.interval.load_tensor(sums[1])

    def reset(self) -> None:
        self.committed.reset()
        self.interval.reset()


def raise_if_diverged(split: str, result: EvalResult, epoch: int, learning_rate: float, hint: str) -> None:
    if result.figures and not math.isfinite(result.loss):
        where = f"after {result.frames} frames of epoch {epoch} at learning rate {learning_rate:g}"
        hint = f"lower schedule.initial_learning_rate and check the features for outliers; {hint}"
        raise DivergedError(f"the training diverged: the {split} loss is {result.loss} {where}", hint=hint)


def learning_rate_hint(learning_rate: float, minibatch_size: int, lr_scale: float) -> str:
    """What to know of this `schedule.initial_learning_rate` where a training diverged, or learned nothing.
    `minibatch_size`: of each worker; `lr_scale`: what the workers multiply the learning rate by."""
    scaled = f" times {lr_scale:g} (workers)" if lr_scale > 1 else ""
    return (
        f"learning rates multiply the gradient summed over a minibatch: {learning_rate:g}{scaled} is "
        f"{learning_rate * lr_scale * minibatch_size:.6g} on the mean gradient of {minibatch_size} frames; "
        f"one that was meant for mean gradients has to be divided by {minibatch_size * lr_scale:g}"
    )


def evaluate(
    model: AcousticModel,
    frames: FrameSubset,
    comm: Communicator | None = None,
    arithmetic: Float32 | None = None,
    make_objective: MakeObjective = CrossEntropy,
    sampler: Sampler | None = None,
) -> EvalResult:
    """The objective's figures of `model` over all of `frames`, in the minibatches of `sampler` if given; with `comm` those are this worker's shard, and all
    workers, which evaluate the same model, get the same figures. `arithmetic`: that of the training whose
    cross-validation it is; float32 where it is not given, so that models compare, whatever they were trained in."""
    arithmetic = arithmetic or Float32()
    size = max(1, min(EVAL_BATCH, len(frames))) if sampler is None else sampler.batch_size
    workspace = evaluation_workspace(model.network, size, arithmetic)
    objective = make_objective(workspace)
    sums = FigureSums(model.network.parameters.device, objective.figures)
    for batch, outputs in forward_batches(model, frames, workspace, sampler):
        sums.add(objective(outputs, batch, workspace.of(batch.num_frames).derivative), batch.num_frames)
        if comm is not None:
            comm.watchdog.heartbeat()
    sums.load_tensor(model.network.partition.of_last_stage(sums.to_tensor()))
    return replace(sums.result(comm), precision=arithmetic.precision)


def baseline_result(train: FrameSubset, cv: FrameSubset, num_pdfs: int, comm: Communicator) -> EvalResult:
    """What models that ignore their input reach on the cross-validation set: the loss of the relative frequencies of the
    pdfs in the training labels, with half a frame added to each; the frame accuracy of the best constant answer, the
    set's own most frequent pdf (another may be the most frequent in training). `train` and `cv` are this worker's
    shards; all workers get the same figures. Collective."""
    counts = torch.zeros(2 * num_pdfs, dtype=torch.float64)
    train_counts, cv_counts = counts.view(2, num_pdfs)
    for frames, of_set in ((train, train_counts), (cv, cv_counts)):
        for rows in torch.split(frames.indices, 1 << 20):  # all labels at once would take twice their memory
            of_set += torch.bincount(labels_of(frames.dataset, rows, counts.device), minlength=num_pdfs)
    comm.all_reduce(counts)
    return of_frequencies(train_counts, cv_counts)


def of_frequencies(train_counts: Tensor, cv_counts: Tensor) -> EvalResult:
    """On frames of `cv_counts`, of a model that answers the relative frequencies of `train_counts`; float64 (pdfs,)."""
    priors = (train_counts + 0.5) / (train_counts.sum() + 0.5 * len(train_counts))
    frequencies, total = cv_counts / cv_counts.sum(), int(cv_counts.sum())
    figures = {LOSS.name: -float(frequencies @ priors.log()), FRAME_ACCURACY.name: float(frequencies.max())}
    return EvalResult(figures, total)


class Validation:
    """No validation: every epoch is accepted and the last model is delivered. For schedules whose
    learning rates depend on the number of epochs alone. `baseline`: what a model that ignores its input reaches."""

    baseline = no_result(())

    def evaluate(self, model: AcousticModel) -> EvalResult:
        """The figures by which `model` is accepted or rejected, equal on all workers; none without validation. Collective."""
        return no_result(())

    def is_better(self, result: EvalResult, initial: EvalResult) -> bool:
        """Whether a training has improved on the `initial` network."""
        return True

    def learned_nothing(self, result: EvalResult) -> bool:
        """Whether a model is no better, by any figure, than one that ignores its input. Of one pdf none can be better."""
        reached = self.baseline.figures
        figures = {name: result.figures.get(name, math.nan) for name in reached}
        no_better = [FIGURES[name].is_no_better(figures[name], value) for name, value in reached.items()]
        return self.baseline.loss > 0.0 and all(no_better)


@dataclass
class CrossValidation(Validation):
    """On `frames`, this worker's shard of the cross-validation set, in the arithmetic of the training."""

    frames: FrameSubset
    comm: Communicator
    arithmetic: Float32
    make_objective: MakeObjective = CrossEntropy
    sampler: Sampler | None = None
    baseline: EvalResult = field(default_factory=lambda: no_result(()))

    def evaluate(self, model: AcousticModel) -> EvalResult:
        return evaluate(model, self.frames, self.comm, self.arithmetic, self.make_objective, self.sampler)

    def is_better(self, result: EvalResult, initial: EvalResult) -> bool:
        """By the loss; of one pdf it is 0."""
        return result.loss < initial.loss or result.loss == 0.0
