"""A run dir for `ddnn report`: its recipe and metrics, and their summary. Needs no torch."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.metrics import EpochRow, Metrics, StartRow, read_metrics
from ddnn.runs.run_status import CHECKPOINTS, METRICS, RECIPE, is_finished, model_digest, run_dir_hint
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import plural, printable

log = logging.getLogger(__name__)

SHARES = ("compute", "data", "comm", "wait")  # the fractions of the time of a worker's training thread
LEAST = 1e-9  # seconds, or frames per second, below which a row has no meaningful speed
MAX_RESULT_BYTES = 64 << 20
OVERLOADED = 0.8  # of the compute time as CPU time: with less, other processes took the cores


@dataclass(frozen=True)
class Run:
    """A training, which may still be running."""

    name: str  # unique among the runs of the report
    path: Path
    recipe: Recipe | None  # as it was run; None if the run dir has none
    metrics: Metrics

    @property
    def start(self) -> StartRow | None:
        """What the last start found; None: recorded by an older version."""
        return self.metrics.starts[-1] if self.metrics.starts else None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these run dirs, named by as many of their last folders as make the names different. What has no
    metrics is named in a warning. DataError: nothing has, or a metrics.jsonl is damaged. RecipeError: a recipe is
    damaged."""
    found = [path for path in paths if (path / METRICS).is_file()] or list(paths)[:1]
    for path in paths:
        if path not in found and len(paths) > 1:
            log.warning("%s: there is no %s here: not shown", path, METRICS)
    runs = [read_run(path, name) for path, name in zip(found, _names(found), strict=True)]
    of_rbms = [run for run in runs if run.metrics.pretraining and not (run.metrics.starts or run.metrics.train)]
    if len(of_rbms) == len(runs):
        return runs
    for run in of_rbms:
        log.warning("%s: metrics of RBMs alone: not shown; see ddnn info", run.path)
    return [run for run in runs if run not in of_rbms]


def read_run(path: Path, name: str | None = None) -> Run:
    if not (path / METRICS).is_file():
        raise DataError(f"there is no {METRICS} here", location=path, hint=run_dir_hint(path, METRICS))
    recipe = load_recipe(path / RECIPE, must_exist=False) if (path / RECIPE).exists() else None
    return Run(name or path.absolute().name, path, recipe, read_metrics(path / METRICS))


class _Result(BaseModel):
    """What `ddnn evaluate --json` or `ddnn score --json` printed."""

    model_config = ConfigDict(strict=True, extra="ignore")

    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    frame_accuracy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    wer: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    model: str | None = None  # `model_digest`; older versions have none


def read_results(path: Path) -> tuple[dict[str, float], list[str]]:
    """The results on test sets whose JSON was saved in a run dir or in a folder of it: "decode_test/score: WER (%)" of
    decode_test/score.json; and the names of those that are of another model than the run's is now. Other JSON files are
    passed over; one that cannot be read is named in a warning."""
    results, of_others, now = dict[str, float](), list[str](), cache(lambda: model_digest(path))
    files = [*sorted(path.glob("*.json")), *sorted(path.glob("*/*.json"))]
    for file in (one for one in files if one.parent.name != CHECKPOINTS):
        name = printable(str(file.relative_to(path).with_suffix("")), "")
        try:
            found = _Result.model_validate_json(read_bytes_limited(file, MAX_RESULT_BYTES))
        except ValidationError:
            continue
        except OSError as error:
            log.warning("%s: cannot read: %s", file, error.strerror)
            continue
        is_result = found.wer is not None or (found.loss is not None and found.frame_accuracy is not None)
        if is_result and found.model is not None and now() not in (found.model, None):
            of_others.append(name)
        elif found.wer is not None:
            results[f"{name}: WER (%)"] = found.wer
        elif found.loss is not None and found.frame_accuracy is not None:
            results[f"{name}: loss per frame"] = found.loss
            results[f"{name}: frame accuracy (%)"] = 100.0 * found.frame_accuracy
    return results, of_others


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ, printable; a run dir that is given twice gets a number."""
    names = shortest_ends([path.absolute() for path in paths])
    seen = [names[:n].count(name) for n, name in enumerate(names)]
    unique = [f"{name} ({n + 1})" if n else name for name, n in zip(names, seen, strict=True)]
    return [printable(name, "") for name in unique]


def shortest_ends(paths: Sequence[Path]) -> list[str]:
    """The paths, less the folders that are not needed to tell them apart."""
    whole = [path.parts for path in paths]
    names = ["/".join(parts) for parts in whole]
    for length in range(max(map(len, whole), default=0), 0, -1):
        shorter = ["/".join(parts[-length:]) for parts in whole]
        if len(set(shorter)) < len(set(names)):
            break
        names = shorter
    return names


@dataclass(frozen=True)
class Spread:
    """A value of several workers: their mean, and the worst with its rank."""

    mean: float
    worst: float
    rank: int


@dataclass(frozen=True)
class Summary:
    """The summary of a run over all its epochs; None if its metrics do not have a value."""

    workers: int
    epochs: int  # number of the last one
    warmup_loss: float | None
    ended: str | None  # why its last start ended, as a word: `ddnn.runs.metrics.EndReason`
    finished: bool  # there is a final model
    model_epoch: int | None  # of the final model, or of the model so far: the last accepted epoch
    model_combination: str  # which mean the final model is in place of that epoch's; empty where it is that epoch's
    model_train_loss: float | None  # of the model's epoch, while the parameters changed
    model_train_accuracy: float | None
    model_cv_loss: float | None  # the model's cross-validation
    model_cv_accuracy: float | None
    lowest_cv_loss: float | None  # of another epoch's model, which was not kept, if it was lower
    lowest_cv_loss_epoch: int | None
    learning_rate: float | None  # of the last epoch, as it was applied
    seconds: float | None  # of training, without cross-validation
    frames_per_second: float | None
    frames_per_second_per_worker: float | None
    speed_up: float | None  # over the fastest run with one worker that compares
    speed_up_over: str | None  # name of that run
    efficiency: float | None  # speed-up divided by workers, 0 to 1: the scaling factor of papers
    no_speed_up: str | None  # why a run with several workers has none
    compute_cpu_fraction: float | None  # CPU time in compute time, on CPUs: much less than 1 on overloaded cores
    shares: dict[str, Spread | None]  # by `SHARES`
    consensus_distance: Spread | None  # relative distance from the mean model before an averaging, in the last epoch
    bytes_per_averaging: float | None  # that a worker sends
    excluded_averagings: int  # how often a model was excluded because it was not finite


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """The summary of each run; speed-ups are over those of `runs` that have one worker."""
    return [_summary(run, runs) for run in runs]


def _summary(run: Run, runs: Sequence[Run]) -> Summary:
    workers, metrics, rows = number_of_workers(run), run.metrics, run.metrics.workers
    model, lowest, fast = metrics.last_accepted, metrics.lowest_loss, speed(run)
    trained = next((row for row in metrics.train if model and row.epoch == model.epoch), None)
    last = max((row.epoch for row in rows), default=0)
    base = reason = None
    if workers > 1 and fast:
        base, reason = _base(run, runs)
    # An epoch's mean at its end is one more; averaged gradients have none.
    one_more = run.recipe is None or run.recipe.parallel.strategy != "gradient-all-reduce"
    sent = [(row.bytes_sent, row.averagings + one_more) for row in rows if row.averagings]
    known = [(sizes, number) for sizes, number in sent if sizes is not None]
    return Summary(
        workers=workers,
        epochs=max((last, *(row.epoch for row in (*metrics.train, *metrics.cv)))),
        warmup_loss=None if metrics.warmup is None else metrics.warmup.loss,
        ended=None if metrics.end is None else metrics.end.reason,
        finished=is_finished(run.path),
        model_epoch=None if model is None else model.epoch,
        model_combination=metrics.combination,
        model_train_loss=None if trained is None else trained.loss,
        model_train_accuracy=None if trained is None else trained.frame_accuracy,
        model_cv_loss=None if model is None else model.loss,
        model_cv_accuracy=None if model is None else model.frame_accuracy,
        lowest_cv_loss=None if lowest is None else lowest.loss,
        lowest_cv_loss_epoch=None if lowest is None else lowest.epoch,
        learning_rate=metrics.train[-1].learning_rate if metrics.train else None,
        seconds=training_seconds(run)[-1] if metrics.train else None,
        frames_per_second=fast,
        frames_per_second_per_worker=None if fast is None else fast / workers,
        speed_up=(speed_up := (fast or 0.0) / (speed(base) or 1.0) if base else None),
        speed_up_over=base.name if base else None,
        efficiency=None if speed_up is None else speed_up / workers,
        no_speed_up=reason,
        compute_cpu_fraction=compute_cpu_fraction(run.metrics),
        shares={name: share(run, name) for name in SHARES},
        consensus_distance=_spread({row.rank: row.consensus_distance for row in rows if row.epoch == last}, max),
        bytes_per_averaging=sum(size for size, _ in known) / sum(n for _, n in known) if known else None,
        excluded_averagings=sum(row.excluded_averagings for row in rows),
    )


def _base(run: Run, runs: Sequence[Run]) -> tuple[Run, None] | tuple[None, str]:
    """The fastest of `runs` with one worker over which `run` has a speed-up; or why there is none."""
    alone = [(speed(other) or 0.0, other) for other in runs if number_of_workers(other) == 1 and speed(other)]
    reasons = [incomparable(run, other) for _, other in alone]
    found = [pair for pair, reason in zip(alone, reasons, strict=True) if reason is None]
    if found:
        return max(found, key=lambda pair: pair[0])[1], None
    return None, min(filter(None, reasons), key=len, default="there is no run with one worker")


def incomparable(run: Run, other: Run) -> str | None:
    """Why the speeds of two runs do not compare; None: they do."""
    for one in (run, other):
        reason = speed_problem(one)
        if reason is not None:
            return reason if one is run else f"{one.name}: {reason}"
    own, others = _conditions(run), _conditions(other)
    differ = [f"{name} ({own[name]}, {others[name]})" for name in own if others.get(name, own[name]) != own[name]]
    return f"other {', '.join(differ)} than {other.name}" if differ else None


def speed_problem(run: Run) -> str | None:
    """Why the speed of a run compares with that of no other; None: it may compare."""
    if run.recipe is None or run.start is None:
        return "recorded by an older version" if run.recipe else f"it has no {RECIPE}"
    kinds = {"kind of machine": "machine", "precision": "precision", "number of workers": "world_size"}
    for name, field in kinds.items():
        if len({getattr(start, field) for start in run.metrics.starts}) > 1:
            return f"resumed with another {name}"
    needed = 1 if _on_gpu(run) else run.start.cpu_threads
    cores = min((start.cores_per_worker or 0.0 for start in run.metrics.starts), default=0.0)
    if cores < needed:
        unit = "GPUs" if _on_gpu(run) else "cores"
        return f"its workers shared {unit}: {cores:.2g} for each, which computed in {plural(needed, 'thread')}"
    return None


def _conditions(run: Run) -> dict[str, str]:
    """What must be the same if the speeds of two runs are to compare, by name."""
    recipe, start = run.recipe, run.start
    assert recipe is not None and start is not None
    parameters = next((row.num_parameters for row in run.metrics.workers), None)
    return {
        "network": f"{recipe.model.summary()}, {parameters} parameters",
        "training data": f"{start.train_frames} frames {start.train_digest[:6]}",
        "minibatch size": _minibatch(run, recipe),
        **({"minibatch_scope": recipe.minibatch_scope} if number_of_workers(run) > 1 else {}),
        "precision": start.precision,
        "threads of a worker": str(start.cpu_threads),
        "kind of machine": printable(start.machine, ""),
        **{f"optimizer.{key}".removesuffix(".name"): str(value) for key, value in recipe.optimizer},
    }


def _minibatch(run: Run, recipe: Recipe) -> str:
    """The size; of one that grows also for how many epochs, as the speed is that of all epochs."""
    size = str(recipe.minibatch_size)
    return size if isinstance(recipe.minibatch_size, int) else f"{size}, {len(run.metrics.train)} trained"


def _on_gpu(run: Run) -> bool:
    return any(row.device.startswith("cuda") for row in run.metrics.workers)


def overload(run: Run) -> str | None:
    """A warning if other processes used the cores of a run, so that its times are too long; else None."""
    fraction = compute_cpu_fraction(run.metrics)
    if fraction is None or fraction >= OVERLOADED:
        return None
    return f"only {100 * fraction:.0f} % of its compute time was CPU time: the cores were overloaded"


def compute_cpu_fraction(metrics: Metrics) -> float | None:
    """CPU time over wall-clock time of what the workers computed on CPUs; several threads give more than 1."""
    rows = [row for row in metrics.workers if row.compute_cpu_seconds is not None and row.device == "cpu"]
    compute = sum((row.seconds or 0.0) * (row.compute_fraction or 0.0) for row in rows)
    return sum(row.compute_cpu_seconds or 0.0 for row in rows) / compute if compute >= LEAST else None


def remarks(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[str]:
    """What a reader must know who compares these runs, a sentence each."""
    found = []
    for run, s in zip(runs, summaries, strict=True):
        if s.speed_up is not None:
            found.append(f"{run.name}: speed-up over {s.speed_up_over}, the fastest one-worker run that compares")
        elif s.no_speed_up is not None:
            found.append(f"{run.name}: no speed-up: {s.no_speed_up}")
        overloaded = overload(run)
        found += [f"{run.name}: warning: {overloaded}"] if overloaded else []
    by_digest: defaultdict[str, list[str]] = defaultdict(list)
    for run in runs:
        by_digest[run.start.cv_digest if run.start else ""].append(run.name)
    unknown = by_digest.pop("", [])
    if len(by_digest) > 1:
        *sets, last = (names[0] if len(names) == 1 else f"({', '.join(names)})" for names in by_digest.values())
        found.append(f"CV sets differ: CV losses of {', '.join(sets)} and {last} do not compare")
    if unknown and len(runs) > 1:
        found.append(f"CV set not recorded (older version): CV losses of {', '.join(unknown)} may not compare")
    return found


def number_of_workers(run: Run) -> int:
    """How many workers wrote rows; if none did, the number in the recipe."""
    return run.metrics.num_workers or (1 if run.recipe is None else run.recipe.parallel.workers)


def training_seconds(run: Run) -> list[float]:
    """Wall-clock seconds of training up to the end of each row of `run.metrics.train`."""
    return list(accumulate(map(_wall, run.metrics.train)))


def _wall(row: EpochRow) -> float:
    rate = row.frames_per_second or 0.0
    return row.frames / rate if row.frames and rate >= LEAST else row.seconds or 0.0


def speed(run: Run) -> float | None:
    """Frames per second of all workers together, over all epochs."""
    timed = [(row.frames or 0, _wall(row)) for row in run.metrics.train if _wall(row) >= LEAST]
    return sum(frames for frames, _ in timed) / sum(seconds for _, seconds in timed) if timed else None


def share(run: Run, name: str) -> Spread | None:
    """The fraction of the time spent in one of `SHARES`; the worst is the smallest for compute, else the largest."""
    return _spread(shares_by_rank(run, name), min if name == "compute" else max)


def shares_by_rank(run: Run, name: str) -> dict[int, float | None]:
    """Rank -> fraction of its time over all epochs that was spent in one of `SHARES`."""
    sums: dict[int, tuple[float, float]] = {}
    for row in run.metrics.workers:
        value: float | None = getattr(row, f"{name}_fraction")
        if value is not None and row.seconds:
            spent, seconds = sums.get(row.rank, (0.0, 0.0))
            sums[row.rank] = spent + value * row.seconds, seconds + row.seconds
    ranks = sorted({row.rank for row in run.metrics.workers})
    return {rank: sums[rank][0] / sums[rank][1] if rank in sums else None for rank in ranks}


def consensus_distances(run: Run) -> list[tuple[int, list[float]]]:
    """Epoch and the workers' consensus distances in it, for epochs that have any."""
    by_epoch: defaultdict[int, list[float]] = defaultdict(list)
    for row in run.metrics.workers:
        if row.consensus_distance is not None:
            by_epoch[row.epoch].append(row.consensus_distance)
    return sorted(by_epoch.items())


def _spread(values: dict[int, float | None], worst: Callable[[Iterable[float]], float]) -> Spread | None:
    known = {rank: value for rank, value in values.items() if value is not None}
    if not known:
        return None
    extreme = worst(known.values())
    return Spread(fmean(known.values()), extreme, next(rank for rank, value in known.items() if value == extreme))
