"""A run dir for `ddnn report`: its recipe and metrics, and their summary. Needs no torch."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddnn.nn.figures import FIGURES, Figure
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.metrics import Metrics, read_metrics
from ddnn.runs.rows import EpochRow, StartRow
from ddnn.runs.run_status import CHECKPOINTS, FINAL, METRICS, RECIPE, is_finished, model_digest, run_dir_hint
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import plural, printable

log = logging.getLogger(__name__)

SHARES = ("compute", "data", "comm", "wait")  # the fractions of the time of a worker's training thread
MIN_MEASURABLE = 1e-9  # seconds, or frames per second, below which a row has no meaningful speed
MAX_RESULT_BYTES = 64 << 20
OVERLOADED = 0.8  # of the compute time as CPU time: with less, other processes took the cores


def figure(row: EpochRow | None, kind: Figure) -> float | None:
    """A figure of the objective in a metrics row; None: not finite, not recorded, or there is no such row."""
    return row.figures.get(kind.name) if row else None


def name_of(kind: Figure) -> str:
    return kind.label if kind.percent else f"{kind.label} per frame"


def key_of(kind: Figure) -> str:
    """In the summary of a run."""
    return kind.name.removeprefix("frame_")


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

    @cached_property
    def results(self) -> tuple[dict[str, float], list[str]]:
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
    """The JSON output of `ddnn evaluate` or `ddnn score`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    frame_accuracy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    wer: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    model: str | None = None  # `model_digest`; older versions have none

    def figures(self) -> dict[str, float]:
        """By label; empty if this is the JSON of something else."""
        if self.wer is not None:
            return {"WER (%)": self.wer}
        if self.loss is None or self.frame_accuracy is None:
            return {}
        return {"loss per frame": self.loss, "frame accuracy (%)": 100.0 * self.frame_accuracy}


def read_results(run_dir: Path) -> tuple[dict[str, float], list[str]]:
    """The results on test sets whose JSON was saved in a run dir or in a folder of it, as "decode_test/score: WER (%)"
    for decode_test/score.json; and the names of files whose results belong to another model than the run dir has now.
    Other JSON files are ignored; one that cannot be read is skipped with a warning."""
    results: dict[str, float] = {}
    stale = []
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
    return results, stale


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


Spread = dict[str, Any]
"""A value that each worker has: their `mean`, and the `worst` with its `rank`."""
Summary = dict[str, Any]
"""The summary of a run over all its epochs, as `ddnn report --json` prints it; None where its metrics lack a value."""


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """The summary of each run; speed-ups are relative to those of `runs` that have one worker."""
    return [_summary(run, runs) for run in runs]


def _summary(run: Run, runs: Sequence[Run]) -> Summary:
    workers, metrics, fast = number_of_workers(run), run.metrics, speed(run)
    model, lowest = metrics.last_accepted, metrics.lowest_loss
    trained = next((row for row in metrics.train if model and row.epoch == model.epoch), None)
    base = reason = speed_up = None
    if workers > 1 and fast:
        base, reason = _base(run, runs)
        speed_up = fast / (speed(base) or 1.0) if base else None
    # The mean at the end of an epoch is one more averaging; averaged gradients have none.
    final_mean = run.recipe is None or run.recipe.parallel.strategy != "gradient-all-reduce"
    sending = [row for row in metrics.workers if row.averagings and row.bytes_sent is not None]
    averagings = sum(row.averagings + final_mean for row in sending)
    distances = {row.rank: row.consensus_distance for row in metrics.last_worker_rows}
    return {
        "workers": workers,
        "epochs": max(
            [0, *(row.epoch for row in (*metrics.train, *metrics.cv)), *(row.epoch for row in metrics.workers)]
        ),
        "warmup_loss": metrics.warmup and metrics.warmup.loss,
        "ended": metrics.end and metrics.end.reason,
        "finished": is_finished(run.path),  # there is a final model
        "model_epoch": model and model.epoch,  # of the final model, or the model so far
        "model_combination": metrics.combination,  # which mean the final model is; empty: the model of that epoch
        # training figures are those of the model's epoch, while the parameters changed
        **{f"model_train_{key_of(kind)}": figure(trained, kind) for kind in FIGURES.values()},
        **{f"model_cv_{key_of(kind)}": figure(model, kind) for kind in FIGURES.values()},
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
        "shares": {name: share(run, name) for name in SHARES},
        "consensus_distance": _spread(distances, max),  # in the last epoch, before an averaging
        "bytes_per_averaging": sum(row.bytes_sent or 0 for row in sending) / averagings if sending else None,
        "excluded_averagings": sum(row.excluded_averagings for row in metrics.workers),
        "results": run.results[0],
    }


def _base(run: Run, runs: Sequence[Run]) -> tuple[Run, None] | tuple[None, str]:
    """The fastest of `runs` with one worker whose speed compares with that of `run`; or why there is none."""
    alone = sorted(
        (run for run in runs if number_of_workers(run) == 1 and speed(run)), key=lambda run: -(speed(run) or 0.0)
    )
    reasons = {other.name: incomparable(run, other) for other in alone}
    for other in alone:
        if reasons[other.name] is None:
            return other, None
    return None, min(filter(None, reasons.values()), key=len, default="there is no run with one worker")


def incomparable(run: Run, other: Run) -> str | None:
    """Why the speeds of two runs do not compare; None: they do."""
    if (reason := speed_problem(run)) is not None:
        return reason
    if (reason := speed_problem(other)) is not None:
        return f"{other.name}: {reason}"
    own, others = _conditions(run), _conditions(other)
    differ = [f"{name} ({own[name]}, {others[name]})" for name in own if others.get(name, own[name]) != own[name]]
    return f"other {', '.join(differ)} than {other.name}" if differ else None


def speed_problem(run: Run) -> str | None:
    """Why the speed of a run compares with that of no other; None: it may compare."""
    if run.recipe is None or run.start is None:
        return "recorded by an older version" if run.recipe else f"it has no {RECIPE}"
    conditions = {"kind of machine": "machine", "precision": "precision", "number of workers": "world_size"}
    for name, field in conditions.items():
        if len({getattr(start, field) for start in run.metrics.starts}) > 1:
            return f"resumed with another {name}"
    on_gpu = any(row.device.startswith("cuda") for row in run.metrics.workers)
    needed, unit = (1, "GPUs") if on_gpu else (run.start.cpu_threads, "cores")
    cores = min(start.cores_per_worker or 0.0 for start in run.metrics.starts)
    if cores < needed:
        return f"its workers shared {unit}: {cores:.2g} for each, which computed in {plural(needed, 'thread')}"
    return None


def _conditions(run: Run) -> dict[str, str]:
    """What must be the same if the speeds of two runs are to compare, by name."""
    recipe, start = run.recipe, run.start
    assert recipe is not None and start is not None
    parameters = next((row.num_parameters for row in run.metrics.workers), None)
    size = str(recipe.minibatch_size)
    if not isinstance(recipe.minibatch_size, int):  # it grows: the speed is an average over all epochs
        size += f", {len(run.metrics.train)} trained"
    return {
        "network": f"{recipe.model.summary()}, {parameters} parameters",
        "training data": f"{start.train_frames} frames {start.train_digest[:6]}",
        "minibatch size": size,
        **({"minibatch_scope": recipe.minibatch_scope} if number_of_workers(run) > 1 else {}),
        "precision": start.precision,
        "threads of a worker": str(start.cpu_threads),
        "kind of machine": printable(start.machine, ""),
        **{f"optimizer.{key}".removesuffix(".name"): str(value) for key, value in recipe.optimizer},
    }


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
    found = []
    by_digest: defaultdict[str, list[str]] = defaultdict(list)
    for run, summary in zip(runs, summaries, strict=True):
        by_digest[run.start.cv_digest if run.start else ""].append(run.name)
        if summary["speed_up_over"] is not None:
            base = summary["speed_up_over"]
            found.append(f"{run.name}: speed-up over {base}, the fastest one-worker run that compares")
        elif summary["no_speed_up"] is not None:
            found.append(f"{run.name}: no speed-up: {summary['no_speed_up']}")
        if (warning := overload(run)) is not None:
            found.append(f"{run.name}: warning: {warning}")
        if stale := run.results[1]:
            files = f"{run.name}: {', '.join(stale)}"
            found.append(
                f"{files}: of another model than {FINAL} is now (was it trained longer?), not shown: evaluate or decode "
                "again"
            )
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
    return row.frames / rate if row.frames and rate >= MIN_MEASURABLE else row.seconds or 0.0


def speed(run: Run) -> float | None:
    """Frames per second of all workers together, over all epochs."""
    timed = [(row.frames or 0, _wall(row)) for row in run.metrics.train if _wall(row) >= MIN_MEASURABLE]
    return sum(frames for frames, _ in timed) / sum(seconds for _, seconds in timed) if timed else None


def share(run: Run, name: str) -> Spread | None:
    """The fraction of the time spent in one of `SHARES`; the worst is the smallest for compute, else the largest."""
    return _spread(shares_by_rank(run, name), min if name == "compute" else max)


def shares_by_rank(run: Run, name: str) -> dict[int, float | None]:
    """Rank -> fraction of its time over all epochs that was spent in one of `SHARES`."""
    spent: defaultdict[int, float] = defaultdict(float)
    total: defaultdict[int, float] = defaultdict(float)
    for row in run.metrics.workers:
        fraction, seconds = getattr(row, f"{name}_fraction"), row.seconds or 0.0
        spent[row.rank] += seconds * (fraction or 0.0)
        total[row.rank] += seconds if fraction is not None else 0.0
    return {rank: spent[rank] / total[rank] if total[rank] else None for rank in sorted(spent)}


def consensus_distances(run: Run) -> dict[int, list[float]]:
    """Epoch -> the workers' consensus distances in it, for epochs that have any."""
    by_epoch: defaultdict[int, list[float]] = defaultdict(list)
    for row in run.metrics.workers:  # sorted by epoch
        if row.consensus_distance is not None:
            by_epoch[row.epoch].append(row.consensus_distance)
    return by_epoch


def _spread(values: dict[int, float | None], worst: Callable[..., int]) -> Spread | None:
    known = {rank: value for rank, value in values.items() if value is not None}
    if not known:
        return None
    rank = worst(known, key=known.__getitem__)
    return {"mean": fmean(known.values()), "worst": known[rank], "rank": rank}
