"""A run dir for `ddnn report`: its recipe and metrics, and their summary. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.training.metrics import EpochRow, Metrics, read_metrics
from ddnn.training.run_status import METRICS, RECIPE
from ddnn.util.errors import DataError

SHARES = ("compute", "data", "comm", "wait")  # the fractions of the time of a worker's training thread
LEAST = 1e-9  # seconds, or frames per second, below which a row has no meaningful speed


@dataclass(frozen=True)
class Run:
    """A training, which may still be running."""

    name: str  # unique among the runs of the report
    path: Path
    recipe: Recipe | None  # as it was run; None if the run dir has none
    metrics: Metrics


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these run dirs, named by as many of their last folders as make the names different. DataError: no run
    dir, or a damaged metrics.jsonl. RecipeError: its recipe is damaged."""
    return [read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def read_run(path: Path, name: str | None = None) -> Run:
    if not (path / METRICS).is_file():
        raise DataError(f"there is no {METRICS} here", location=path, hint="name the run dir of a training")
    recipe = load_recipe(path / RECIPE, must_exist=False) if (path / RECIPE).exists() else None
    return Run(name or path.absolute().name, path, recipe, read_metrics(path / METRICS))


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ, printable; a run dir that is given twice gets a number."""
    whole = [path.absolute().parts for path in paths]
    names = ["/".join(parts) for parts in whole]
    for length in range(max(map(len, whole), default=0), 0, -1):
        shorter = ["/".join(parts[-length:]) for parts in whole]
        if len(set(shorter)) < len(set(names)):
            break
        names = shorter
    seen = [names[:n].count(name) for n, name in enumerate(names)]
    unique = [f"{name} ({n + 1})" if n else name for name, n in zip(names, seen, strict=True)]
    texts = [name.encode(errors="backslashreplace").decode() for name in unique]  # a path may not be UTF-8
    return ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) for text in texts]


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
    best_loss: float | None  # of the accepted epoch with the lowest cross-validation loss
    best_accuracy: float | None  # of the same
    seconds: float | None  # of training, without cross-validation
    frames_per_second: float | None
    frames_per_second_per_worker: float | None
    speed_up: float | None  # over the first run with one worker, if it has the same network and minibatch size
    shares: dict[str, Spread | None]  # by `SHARES`
    consensus_distance: Spread | None  # relative distance from the mean model before an averaging, in the last epoch
    bytes_per_averaging: float | None  # that a worker sends
    excluded_averagings: int  # how often a model was excluded because it was not finite


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """The summary of each run; speed-ups are over the first run with one worker, if there is one."""
    base = next((run for run in runs if number_of_workers(run) == 1 and speed(run)), None)
    return [_summary(run, base) for run in runs]


def _summary(run: Run, base: Run | None) -> Summary:
    workers, metrics, rows = number_of_workers(run), run.metrics, run.metrics.workers
    best, last = metrics.best, max((row.epoch for row in rows), default=0)
    fast, slow = speed(run), None if base is None else speed(base)
    # An epoch's mean at its end is one more; averaged gradients have none.
    one_more = run.recipe is None or run.recipe.parallel.strategy != "gradient-all-reduce"
    sent = [(row.bytes_sent, row.averagings + one_more) for row in rows if row.averagings]
    known = [(sizes, number) for sizes, number in sent if sizes is not None]
    return Summary(
        workers=workers,
        epochs=max((last, *(row.epoch for row in (*metrics.train, *metrics.cv)))),
        warmup_loss=None if metrics.warmup is None else metrics.warmup.loss,
        best_loss=None if best is None else best.loss,
        best_accuracy=None if best is None else best.frame_accuracy,
        seconds=training_seconds(run)[-1] if metrics.train else None,
        frames_per_second=fast,
        frames_per_second_per_worker=None if fast is None else fast / workers,
        speed_up=fast / slow if fast and slow and base is not None and _same_job(run, base) else None,
        shares={name: share(run, name) for name in SHARES},
        consensus_distance=_spread({row.rank: row.consensus_distance for row in rows if row.epoch == last}, max),
        bytes_per_averaging=sum(size for size, _ in known) / sum(n for _, n in known) if known else None,
        excluded_averagings=sum(row.excluded_averagings for row in rows),
    )


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


def _same_job(run: Run, base: Run) -> bool:
    sizes = {row.num_parameters for row in (*run.metrics.workers, *base.metrics.workers)} - {None}
    jobs = [(r.recipe.model, r.recipe.minibatch_size) for r in (run, base) if r.recipe is not None]
    return len(sizes) < 2 and all(job == jobs[0] for job in jobs)
