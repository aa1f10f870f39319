"""A run dir for `ddnn report`: its recipe, metrics and results on test sets, and their summary. Needs no torch."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddnn.distributed.cost import Layout
from ddnn.nn.figures import FIGURES
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.metrics import Metrics, read_metrics
from ddnn.runs.rows import EndRow, EpochRow, StartRow, WorkerRow
from ddnn.runs.run_status import CHECKPOINTS, FINAL, METRICS, RECIPE, is_finished, model_digest, run_dir_hint
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import printable

log = logging.getLogger(__name__)

SHARES = ("compute", "data", "comm", "wait")  # the fractions of the time of a worker's training thread
MIN_MEASURABLE = 1e-9  # seconds, or frames per second, below which a row has no meaningful speed
WER = "WER (%)"  # the label of a result
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
        """What the last start recorded; None: an older version did not."""
        return self.metrics.starts[-1] if self.metrics.starts else None

    @property
    def failure(self) -> EndRow | None:
        """How it ended, if it diverged or failed."""
        end = self.metrics.end
        return end if end is not None and end.reason in ("diverged", "failed") else None

    @cached_property
    def results(self) -> tuple[dict[str, float], list[str], dict[str, tuple[float, float]]]:
        """`read_results` of the run dir."""
        return read_results(self.path)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these run dirs, each named by as many trailing folders as distinguish it from the others. Paths
    without metrics are skipped with a warning. DataError: no path has any, or a metrics.jsonl is damaged. RecipeError: a
    recipe is damaged."""
    with_metrics = [path for path in paths if (path / METRICS).is_file()] or list(paths)[:1]
    for path in paths:
        if path not in with_metrics:
            log.warning("%s: there is no %s here: not shown", path, METRICS)
    runs = [read_run(path, name) for path, name in zip(with_metrics, _names(with_metrics), strict=True)]
    of_networks = [run for run in runs if not run.metrics.pretraining or run.metrics.starts or run.metrics.train]
    for run in runs if of_networks else ():
        if run not in of_networks:
            log.warning("%s: metrics of RBMs alone: not shown; see ddnn info", run.path)
    return of_networks or runs


def read_run(path: Path, name: str | None = None) -> Run:
    if not (path / METRICS).is_file():
        raise DataError(f"there is no {METRICS} here", location=path, hint=run_dir_hint(path, METRICS))
    recipe = load_recipe(path / RECIPE, must_exist=False) if (path / RECIPE).exists() else None
    return Run(name or path.absolute().name, path, recipe, read_metrics(path / METRICS))


class _ScaleScore(BaseModel):
    """An acoustic scale and word insertion penalty of `ddnn score`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    acoustic_scale: float = math.nan
    word_insertion_penalty: float = 0.0
    interval: tuple[float, float] | None = None  # of the WER in percent, 95 %


class _Result(BaseModel):
    """The JSON output of `ddnn evaluate` or `ddnn score`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    frame_accuracy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    wer: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    model: str | None = None  # `model_digest`; older versions have none
    scales: list[_ScaleScore] = []
    best: float | None = None  # the acoustic scale of `wer`
    best_word_insertion_penalty: float = 0.0

    def interval(self) -> tuple[float, float] | None:
        """Of `wer`, in percent: 95 %. None: it is not known."""
        best = self.best, self.best_word_insertion_penalty
        return next((s.interval for s in self.scales if (s.acoustic_scale, s.word_insertion_penalty) == best), None)

    def figures(self) -> dict[str, float]:
        """By label; empty if this is the JSON of something else."""
        figures = {"loss per frame": self.loss, WER: self.wer}
        if self.frame_accuracy is not None:
            figures["frame accuracy (%)"] = 100.0 * self.frame_accuracy
        return {label: value for label, value in figures.items() if value is not None}


def read_results(run_dir: Path) -> tuple[dict[str, float], list[str], dict[str, tuple[float, float]]]:
    """The results on test sets whose JSON was saved in a run dir or in a folder of it, as "decode_test/score: WER (%)"
    for decode_test/score.json; the names of files whose results belong to another model than the run dir has now; and
    the 95 % intervals of word error rates, by the same names as the results. Other JSON files are ignored; one that
    cannot be read is skipped with a warning."""
    results: dict[str, float] = {}
    stale, intervals = list[str](), dict[str, tuple[float, float]]()
    digest = cache(lambda: model_digest(run_dir))
    for file in [*sorted(run_dir.glob("*.json")), *sorted(run_dir.glob("*/*.json"))]:
        if file.parent.name == CHECKPOINTS:
            continue
        name = printable(str(file.relative_to(run_dir).with_suffix("")), "")
        try:
            result = _Result.model_validate_json(read_bytes_limited(file, MAX_RESULT_BYTES))
        except ValidationError:
            continue
        except OSError as error:
            log.warning("%s: cannot read: %s", file, error.strerror)
            continue
        figures = result.figures()
        if figures and result.model is not None and digest() not in (result.model, None):
            stale.append(name)
        else:
            results |= {f"{name}: {label}": value for label, value in figures.items()}
            if (interval := result.interval()) is not None:
                intervals[f"{name}: {WER}"] = interval
    return results, stale, intervals


def _names(paths: Sequence[Path]) -> list[str]:
    """Short unique names of run dirs, printable; a run dir that is given twice gets a number."""
    names = shortest_ends([path.absolute() for path in paths])
    repeats = [names[:n].count(name) for n, name in enumerate(names)]
    return [printable(f"{name} ({n + 1})" if n else name, "") for name, n in zip(names, repeats, strict=True)]


def shortest_ends(paths: Sequence[Path]) -> list[str]:
    """The paths without the leading folders that are not needed to tell them apart."""
    depth = max((len(path.parts) for path in paths), default=0)
    ends = (["/".join(path.parts[-length:]) for path in paths] for length in range(1, depth + 1))
    return next((names for names in ends if len(set(names)) == len(set(paths))), [])


Summary = dict[str, Any]
"""The summary of a run over all its epochs by the names that `ddnn report` has for its figures in CSV and JSON; None where
its metrics lack a value. Of a value that each worker has: the mean over the workers, and the worst with its rank."""


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """The summary of each run; speed-ups are relative to those of `runs` that have one worker."""
    return [_summary(run, runs) for run in runs]


def _summary(run: Run, runs: Sequence[Run]) -> Summary:
    workers, metrics, start, fast = number_of_workers(run), run.metrics, run.start, speed(run)
    model, lowest = metrics.last_accepted, metrics.lowest_loss
    trained = next((row for row in metrics.train if model and row.epoch == model.epoch), None)
    base, reason = _base(run, runs) if workers > 1 and fast else (None, None)
    speed_up = fast / (speed(base) or 1.0) if fast and base else None
    # The mean at the end of an epoch is one more averaging; averaged gradients have none.
    final_mean = run.recipe is None or run.recipe.parallel.strategy != "gradient-all-reduce"
    sending = [row for row in metrics.workers if row.averagings and row.bytes_sent is not None]
    averagings = sum(row.averagings + final_mean for row in sending)
    last, shape = metrics.last_worker_rows, layout(run)
    within = [
        ((row.column_bytes or 0) + (row.pipe_bytes or 0)) / row.minibatches
        for row in metrics.workers
        if row.minibatches
    ]
    return {
        **{name: start and getattr(start, name) for name in ("date", "host", "machine", "precision", "version")},
        "workers": workers,
        "layout": str(shape),  # replicas x columns x stages
        "epochs": max(
            [0, *(row.epoch for row in (*metrics.train, *metrics.cv)), *(row.epoch for row in metrics.workers)]
        ),
        "warmup_loss": metrics.warmup and metrics.warmup.loss,
        "ended": metrics.end and metrics.end.reason,
        "finished": is_finished(run.path),  # there is a final model
        "model_epoch": model and model.epoch,  # of the final model, or the model so far
        "model_combination": metrics.combination,  # which mean the final model is; empty: the model of that epoch
        # training figures are those of the model's epoch, while the parameters changed
        **{f"model_train_{name}": trained and trained.figures.get(name) for name in FIGURES},
        **{f"model_cv_{name}": model and model.figures.get(name) for name in FIGURES},
        "lowest_cv_loss": lowest and lowest.loss,  # of an epoch whose model was not kept, if lower
        "lowest_cv_loss_epoch": lowest and lowest.epoch,
        "learning_rate": metrics.train[-1].learning_rate if metrics.train else None,  # as it was applied
        "seconds": training_seconds(run)[-1] if metrics.train else None,  # without cross-validation
        "frames_per_second": fast,
        "frames_per_second_per_worker": fast and fast / workers,
        "speed_up": speed_up,
        "speed_up_over": base and base.name,
        "efficiency": None if speed_up is None else speed_up / workers,  # the scaling factor of papers
        "no_speed_up": reason,
        "compute_cpu_fraction": compute_cpu_fraction(metrics),
        **{name: value for share in SHARES for name, value in _spread(f"{share}_fraction", metrics.workers).items()},
        **_spread("consensus_distance", last),  # in the last epoch, before an averaging
        **_spread("column_fraction", metrics.workers),
        **_spread("bubble_share", metrics.workers),
        "shared_bytes_per_minibatch": fmean(within) if within and shape.shared_by > 1 else None,
        "bytes_per_averaging": sum(row.bytes_sent or 0 for row in sending) / averagings if sending else None,
        "excluded_averagings": sum(row.excluded_averagings for row in metrics.workers),
    }


def _base(run: Run, runs: Sequence[Run]) -> tuple[Run | None, str | None]:
    """The fastest of `runs` with one worker whose speed compares with that of `run`; or why there is none."""
    alone = [other for other in runs if number_of_workers(other) == 1 and speed(other)]
    alone.sort(key=lambda other: -(speed(other) or 0.0))
    reasons = [incomparable(run, other) for other in alone]
    if None in reasons:
        return alone[reasons.index(None)], None
    return None, min(filter(None, reasons), key=len, default="there is no run with one worker")


def incomparable(run: Run, other: Run, ignored: Sequence[str] = ()) -> str | None:
    """Why the speeds of two runs do not compare, conditions of the `ignored` names apart; None: they do."""
    own, others = _conditions(run), _conditions(other)
    both = ({**others, **own}, {**own, **others})
    differ = [name for name in both[0] if name not in ignored and both[0][name] != both[1][name]]
    return f"it does not compare with {other.name}: {', '.join(differ)}" if differ else None


def _conditions(run: Run) -> dict[str, Any]:
    """What must be the same if the speeds of two runs are to compare, by name. NaN is never the same: the speed of that
    run compares with no other."""
    recipe, start, starts = run.recipe, run.start, run.metrics.starts
    if recipe is None or start is None:
        return {f"{METRICS} of an older version, or no {RECIPE}": math.nan}
    resumed = len({(each.machine, each.precision, each.world_size) for each in starts}) > 1
    on_gpu = any(row.device.startswith("cuda") for row in run.metrics.workers)
    shared = min(each.cores_per_worker or 0.0 for each in starts) < (1 if on_gpu else start.cpu_threads)
    grows = not isinstance(recipe.minibatch_size, int)  # then the speed is an average over all epochs
    return {
        "network": (recipe.model.summary(), next((row.num_parameters for row in run.metrics.workers), None)),
        "training data": (start.train_frames, start.train_digest),
        "minibatch_size": (str(recipe.minibatch_size), grows and len(run.metrics.train)),
        **({"minibatch_scope": recipe.minibatch_scope} if number_of_workers(run) > 1 else {}),
        **{f"optimizer.{key}": value for key, value in recipe.optimizer},
        **{name: getattr(start, name) for name in ("precision", "cpu_threads", "machine")},
        "workers that shared cores or GPUs": math.nan if shared else None,
        "a resume with another machine, precision or number of workers": math.nan if resumed else None,
    }


def warnings(run: Run) -> list[str]:
    """What may make a run's model or speed a bad one, a sentence each."""
    failed = run.failure.reason_text if run.failure is not None else None
    return list(filter(None, (overload(run), run.metrics.warning, failed)))


def compares(runs: Sequence[Run]) -> bool:
    """Whether the figures of cross-validation of all runs are of the same criterion and utterances."""
    criteria = (run.recipe and getattr(run.recipe.criterion, "name", run.recipe.criterion) for run in runs)
    return len({(run.start and run.start.cv_digest, name) for run, name in zip(runs, criteria, strict=True)}) == 1


def overload(run: Run) -> str | None:
    """A warning if other processes used the cores of a run, so that its times are too long; else None."""
    fraction = compute_cpu_fraction(run.metrics)
    if fraction is None or fraction >= OVERLOADED:
        return None
    return f"only {100 * fraction:.0f} % of its compute time was CPU time: the cores were overloaded"


def compute_cpu_fraction(metrics: Metrics) -> float | None:
    """CPU time divided by wall-clock time of the computation on CPUs; several threads give more than 1."""
    rows = [row for row in metrics.workers if row.compute_cpu_seconds is not None and row.device == "cpu"]
    compute = sum((row.seconds or 0.0) * (row.compute_fraction or 0.0) for row in rows)
    return sum(row.compute_cpu_seconds or 0.0 for row in rows) / compute if compute >= MIN_MEASURABLE else None


def remarks(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[str]:
    """What a reader must know who compares these runs, a sentence each."""
    remarks = []
    by_digest: defaultdict[str, list[str]] = defaultdict(list)
    for run, summary in zip(runs, summaries, strict=True):
        by_digest[run.start.cv_digest if run.start else ""].append(run.name)
        base, reason, stale = summary["speed_up_over"], summary["no_speed_up"], run.results[1]
        another = f"of another model than {FINAL} is now (was it trained longer?)"
        notes = (
            base and f"its speed-up is relative to {base}, the fastest comparable run with one worker",
            reason and f"no speed-up: {reason}",
            *(f"warning: {warning}" for warning in warnings(run)),
            stale and f"{', '.join(stale)}: {another}, not shown: evaluate or decode again",
        )
        remarks += [f"{run.name}: {note}" for note in notes if note]
    unknown = by_digest.pop("", [])
    if len(by_digest) > 1:
        sets = " | ".join(", ".join(names) for names in by_digest.values())
        remarks.append(f"CV sets differ: CV losses compare only within {sets}")
    if unknown and len(runs) > 1:
        remarks.append(f"CV set not recorded (older version): CV losses of {', '.join(unknown)} may not compare")
    return remarks


def number_of_workers(run: Run) -> int:
    """How many workers wrote rows; if none did, the number in the recipe."""
    return run.metrics.num_workers or (1 if run.recipe is None else run.recipe.parallel.workers)


def layout(run: Run) -> Layout:
    """How its workers share models."""
    split = max(((row.columns, row.stages, row.microbatches) for row in run.metrics.workers), default=(1, 1, 1))
    return Layout(number_of_workers(run) // (split[0] * split[1]), *split)


def training_seconds(run: Run) -> list[float]:
    """Wall-clock seconds of training up to the end of each row of `run.metrics.train`."""
    return list(accumulate(map(_wall, run.metrics.train)))


def _wall(row: EpochRow) -> float:
    rate = row.frames_per_second or 0.0
    return row.frames / rate if row.frames and rate >= MIN_MEASURABLE else row.seconds or 0.0


def speed(run: Run) -> float | None:
    """Frames per second of all workers together, over all epochs."""
    timed = [(row.frames or 0, _wall(row)) for row in run.metrics.train if _wall(row) >= MIN_MEASURABLE]
    return sum(frames for frames, _ in timed) / sum(seconds for _, seconds in timed) if timed else None


def means_by_rank(rows: Sequence[WorkerRow], field: str) -> dict[int, float]:
    """Rank -> mean of a field over its rows that have it, weighted by their seconds."""
    values: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if (value := getattr(row, field)) is not None:
            values[row.rank].append((row.seconds or 0.0, value))
    totals = {rank: sum(seconds for seconds, _ in known) for rank, known in values.items()}
    return {
        rank: sum(seconds * value for seconds, value in known) / totals[rank]
        for rank, known in sorted(values.items())
        if totals[rank]
    }


def _spread(field: str, rows: Sequence[WorkerRow]) -> dict[str, float | None]:
    """Of the workers' means: their `mean`, and the `worst` with its `rank`, which is the lowest for compute."""
    means = means_by_rank(rows, field)
    worst = (min if field == "compute_fraction" else max)(means, key=means.__getitem__, default=None)
    figures = {"mean": fmean(means.values()) if means else None, "worst": means.get(worst or 0), "rank": worst}
    return {f"{field}_{name}": value for name, value in figures.items()}
