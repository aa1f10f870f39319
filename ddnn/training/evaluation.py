"""Loss per frame and frame accuracy: of a model on labelled frames, and of an epoch while it trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddnn.data.batches import EVAL_BATCH
from ddnn.data.dataset import AcousticDataset, FrameSubset, labels_of
from ddnn.data.index import MAX_SKIPPED_FRACTION
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.pipeline import open_data_dir
from ddnn.data.source import check_not_swapped
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments, check_same_tree, read_alignments, read_pdf_counts, transition_digest
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.arithmetic import Float32, Precision
from ddnn.nn.figures import FIGURES, FRAME_ACCURACY, LOSS, Figure, describe, texts
from ddnn.nn.network import evaluation_workspace, tensor_like
from ddnn.nn.objective import CrossEntropy, MakeObjective
from ddnn.nn.scorer import forward_batches
from ddnn.runs.metrics import iterate_rows
from ddnn.runs.rows import StartRow, no_better_than_baseline
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import CV_UTTERANCES, METRICS, PDF_COUNTS, model_digest, run_dir_of
from ddnn.training.data_identity import utterance_digest
from ddnn.training.memory import frames_memory, require_host_memory
from ddnn.util.errors import DataError, DivergedError, UserError
from ddnn.util.progress import progress_bar
from ddnn.util.system import choose_device
from ddnn.util.text import definitions, printable

log = logging.getLogger(__name__)

FEWEST_FRAMES, MOST_FRAMES = 1_000, 100_000
"""Fewer say nothing about the kind of features, more say no more."""


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
    did that was excluded from the averaging counts nowhere. `excludes`: whether workers are excluded. Otherwise a loss
    that is not finite ends the training."""

    CHECK_PERIOD = 500  # minibatches between two checks of a single worker's loss; a check waits for the device

    def __init__(
        self, device: torch.device, figures: Sequence[Figure] = CrossEntropy.figures, *, excludes: bool
    ) -> None:
        self.excludes = excludes
        self.committed, self.interval = FigureSums(device, figures), FigureSums(device, figures)
        self.epoch, self.learning_rate, self._minibatches = 0, 0.0, 0  # of the epoch under way, for messages
        self.hint = ""  # where it has diverged

    def add(self, sums: Sequence[Tensor], frames: int) -> None:
        self.interval.add(sums, frames)
        self._minibatches += 1
        if self._minibatches % self.CHECK_PERIOD == 0:
            self.check()

    def check(self) -> None:
        """DivergedError where the loss is not finite and no other worker can make up for it."""
        if not self.excludes and self.interval.frames:
            raise_if_diverged("training", self.interval.result(), self.epoch, self.learning_rate, self.hint)

    def commit(self) -> None:
        """Counts the interval, unless it is to be excluded; waits for the device."""
        if not self.excludes or math.isfinite(self.interval.sums[0].item()):
            self.committed.add(self.interval.sums, self.interval.frames)
        self.interval.reset()

    def so_far(self) -> str:
        """Of this worker, which is rank 0, in the epoch under way, for a person; waits for the device."""
        *sums, frames = (self.committed.to_tensor() + self.interval.to_tensor()).tolist()
        figures = {name: value / max(frames, 1) for name, value in zip(self.committed.names, sums, strict=True)}
        return describe(figures) + (" (worker 0)" if self.excludes else "")

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
        self._minibatches = 0


def raise_if_diverged(split: str, result: EvalResult, epoch: int, learning_rate: float, hint: str) -> None:
    if not math.isfinite(result.loss):
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
) -> EvalResult:
    """The objective's figures of `model` over all of `frames`; with `comm` those are this worker's shard, and all
    workers, which evaluate the same model, get the same figures. `arithmetic`: that of the training whose
    cross-validation it is; float32 where it is not given, so that models compare, whatever they were trained in."""
    arithmetic = arithmetic or Float32()
    workspace = evaluation_workspace(model.network, max(1, min(EVAL_BATCH, len(frames))), arithmetic)
    objective = make_objective(workspace)
    sums = FigureSums(model.network.parameters.device, objective.figures)
    for batch, outputs in forward_batches(model, frames, workspace):
        sums.add(objective(outputs, batch, workspace.of(batch.num_frames).derivative), batch.num_frames)
        if comm is not None:
            comm.watchdog.heartbeat()
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
    return _of_frequencies(train_counts, cv_counts)


def _of_frequencies(train_counts: Tensor, cv_counts: Tensor) -> EvalResult:
    """On frames of `cv_counts`, of a model that answers the relative frequencies of `train_counts`; float64 (pdfs,)."""
    priors = (train_counts + 0.5) / (train_counts.sum() + 0.5 * len(train_counts))
    frequencies, total = cv_counts / cv_counts.sum(), int(cv_counts.sum())
    figures = {LOSS.name: -float(frequencies @ priors.log()), FRAME_ACCURACY.name: float(frequencies.max())}
    return EvalResult(figures, total)


def evaluate_parts(
    model: AcousticModel, corpus: AcousticDataset, by: Literal["speaker", "utterance"]
) -> dict[str, EvalResult]:
    """Results by the name of the speaker or utterance. DataError: the data dir has no utt2spk."""
    names = corpus.utterances if by == "utterance" else corpus.speakers
    if names is None:
        raise DataError("utt2spk does not exist; it is needed for results by speaker", hint="use --by utterance")
    members: dict[str, list[int]] = {}
    for u, name in enumerate(names):
        members.setdefault(name, []).append(u)
    parts = ((name, evaluate(model, corpus.subset(utterances))) for name, utterances in members.items())
    return {name: replace(result, precision=None) for name, result in parts}


def evaluate_run(
    run_dir: Path, data: Path, alignments: Path, device: str = "auto", allow_pipes: bool = False,
    by: Literal["speaker", "utterance"] | None = None, transforms: Path | None = None,
) -> EvalResult:  # fmt: skip
    """Loss and frame accuracy of a run's final model, or of a model file, on a data dir and its alignment, also `by` speaker or utterance.
    `transforms`: the Kaldi dir of the data's, if the model was trained with such. DataError for damaged input, another
    feature dimension or number of pdfs than the model's."""
    on = choose_device(device)
    model, digest = load_run(run_dir), model_digest(run_dir)
    check_not_swapped(Corpus(data, alignments, ("--data", "--alignments")))
    labels = read_alignments(alignments)
    most = model.network.output_dim
    # The pdfs of a final.mdl are all that its tree has; an archive of pdf-ids may lack the last ones.
    if labels.num_pdfs > most or (alignments.is_dir() and labels.num_pdfs != most):
        beyond = next((f"; utterance {u} has more" for u, ids in labels.pdfs.items() if (ids >= most).any()), "")
        message = f"the alignment has {labels.num_pdfs} pdfs, the model {most}{beyond}"
        hint = "use an alignment made with the same final.mdl as the training alignment"
        raise DataError(message, location=alignments, hint=hint)
    check_same_tree(transition_digest(alignments), model.transition_digest, alignments, f"the model of {run_dir}")
    corpus = load_for_model(model, data, labels, allow_pipes=allow_pipes, transforms=transforms)
    model, corpus = model.to(on), corpus.to(on)
    parts = {} if by is None else evaluate_parts(model, corpus, by)
    everything = corpus.subset(range(len(corpus.utterances)))
    result = replace(
        evaluate(model, everything), utterances=corpus.counts, parts=parts, model=digest, data=str(data),
        alignments=str(alignments),
    )  # fmt: skip
    _warn_of_training_data(corpus, run_dir_of(run_dir), data)
    found = torch.bincount(labels_of(corpus, everything.indices, torch.device("cpu")), minlength=most)
    _warn_of_doubtful(result, found.double(), run_dir_of(run_dir), data, alignments)
    return result


def _warn_of_training_data(corpus: AcousticDataset, run_dir: Path, data: Path) -> None:
    """By ids and lengths of the utterances, wherever they are stored: all of them, or those that were not held out."""
    digests = {row.train_digest for row in iterate_rows(run_dir / METRICS) if isinstance(row, StartRow)}
    held_out = set[str]()
    with suppress(OSError, UnicodeDecodeError):
        held_out = {*(run_dir / CV_UTTERANCES).read_text().split("\n")}
    utterances = [(name, int(frames)) for name, frames in zip(corpus.utterances, corpus.num_frames, strict=True)]
    trained = [pair for pair in utterances if pair[0] not in held_out]
    if digests & {utterance_digest(utterances), utterance_digest(trained)}:
        message = "%s: the network was trained on %d of these %d utterances: its figures on other data will be worse"
        log.warning(message, data, len(trained), len(utterances))


def _warn_of_other_features(model: AcousticModel, corpus: AcousticDataset, data: Path) -> None:
    """Where the normalized input is not normalized: measured on two corpora of filter banks, 3 of 40 dims are so of the
    other corpus, none of one's own test set. Of a frame itself, without its neighbors."""
    transform = model.transform
    rows = corpus.subset(range(len(corpus.utterances))).indices
    if transform.shift is None or transform.scale is None or len(rows) < FEWEST_FRAMES:
        return
    frames = corpus.features[rows[:: -(-len(rows) // MOST_FRAMES)]].float()
    center = min(range(len(transform.offsets)), key=lambda i: abs(transform.offsets[i]))
    shift, scale = (v.view(len(transform.offsets), -1)[center].cpu() for v in (transform.shift, transform.scale))
    mean, std = (frames.mean(dim=0).cpu() + shift) * scale, frames.std(dim=0).cpu() * scale.abs()
    # A constant dim may have been constant in training.
    unlike = (std > 0) & ((std < 0.5) | (std > 2.0) | (mean.abs() > 1.0))
    if (count := int(unlike.sum())) >= max(2.0, len(unlike) / 20):
        message = (
            "%s: the features seem to be of another kind than those that the network was trained on: %d of %d dims "
            "of the normalized input have a mean beyond 1 or a standard deviation outside 0.5 to 2 (dim %d: %.2f, %.2f)"
        )
        worst = int(unlike.nonzero()[0])
        log.warning(message, data, count, len(unlike), worst, mean[worst], std[worst])


def _warn_of_doubtful(result: EvalResult, counts: Tensor, run_dir: Path, data: Path, alignments: Path) -> None:
    """Where so many utterances are missing that a training would refuse them, and where equal probabilities for all
    pdfs, or the relative frequencies that they have in the run's training alignment, would do as well. `counts`: of the
    evaluated labels, float64 (pdfs,)."""
    total = sum(count for reason, count in result.utterances.items() if reason != "trimmed")
    missing = total - result.utterances["used"]
    if missing > MAX_SKIPPED_FRACTION * total:
        message = (
            "%s: the figures lack %d of %d utterances (%.1f %%): check that features and alignments belong together"
        )
        log.warning(message, data, missing, total, 100 * missing / total)
    if (num_pdfs := len(counts)) > 1 and not result.loss < math.log(num_pdfs):
        message = "%s: the loss of %.4f is not below that of equal probabilities for all %d pdfs, %.4f: the alignments "
        message += "seem to be of another model, or the features of another kind"
        log.warning(message, alignments, result.loss, num_pdfs, math.log(num_pdfs))
    elif num_pdfs > 1 and result.figures[FRAME_ACCURACY.name] < 1:
        trained = counts
        with suppress(DataError):  # a model without its counts, such as an imported one: those of the evaluated labels
            trained = torch.from_numpy(read_pdf_counts(run_dir / PDF_COUNTS))
        best = _of_frequencies(trained if len(trained) == num_pdfs else counts, counts)
        if problem := no_better_than_baseline(result.figures, best.figures, where=""):
            log.warning("%s: %s: the alignments or features seem to be of another kind", alignments, problem)


def load_for_model(
    model: AcousticModel,
    data: Path,
    alignments: Alignments | None,
    *,
    allow_pipes: bool,
    transforms: Path | None = None,
) -> AcousticDataset:
    """A data dir as `model` reads it: its CMVN, deltas, transforms (of this data, a Kaldi dir) and context. Utterances that cannot be used are skipped.
    DataError for damaged input, features of other dims than the model's, or no utterance that can be used. UserError:
    `transforms` given to a model without, or not to one that needs them."""
    trained_with = model.features.transforms
    if (transforms is None) != (trained_with is None):
        needs = "no transforms" if trained_with is None else f"Kaldi's transforms ({trained_with.as_text()})"
        hint = "leave out --transforms, or take the model that was trained with them"
        if trained_with is not None:
            hint = "give those of this data by --transforms, such as exp/tri4/decode_test"
        raise UserError(f"the model was trained with {needs}", location="--transforms", hint=hint)
    features, progress = replace(model.features, splice=model.transform.context), progress_bar("loading")
    config = DataConfig(features, allow_pipes=allow_pipes, max_skipped_fraction=None, progress=progress)
    corpus = load_data_dir(data, alignments, config, transforms)
    model.check_features(corpus.dim, location=data)
    _warn_of_other_features(model, corpus, data)
    return corpus


def load_data_dir(
    data: Path, alignments: Alignments | None, config: DataConfig, transforms: Path | None = None
) -> AcousticDataset:
    """A whole data dir in host memory. DataError: as `open_data_dir`; not enough memory."""
    source, comm = open_data_dir(data, alignments, config, transforms), SingleProcess()
    utterances = range(len(source.index.entries))
    require_host_memory(frames_memory(source, utterances), data, comm, level=logging.DEBUG)  # a process takes much more
    return source.load(utterances, comm)
