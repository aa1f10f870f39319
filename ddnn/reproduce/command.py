"""`ddnn reproduce`: plans the runs of the tables, executes those that are missing, writes the report."""

from __future__ import annotations

import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from ddnn.distributed.signals import SignalListener
from ddnn.reproduce.cells import overloaded_runs, speed_ups
from ddnn.reproduce.executor import JobReport, LocalExecutor, SlurmExecutor
from ddnn.reproduce.measure import with_kaldi_wer
from ddnn.reproduce.report import build_report
from ddnn.reproduce.runs import (
    OutputLayout,
    PlannedRun,
    RunRecord,
    describe_outdated,
    missing_runs,
    outdated_records,
    plan_runs,
    read_records,
)
from ddnn.reproduce.tables import ReproduceConfig, Table, find_corpus, load_config, select_tables
from ddnn.slurm.options import SlurmOptions
from ddnn.util.errors import UserError
from ddnn.util.files import FileLock, ensure_directory
from ddnn.util.system import usable_cores
from ddnn.util.text import plural, render

LOCK = "jobs.lock"  # held while runs are executed or submitted, so that two calls do not execute the same
MAX_LINES = 20  # of names that are printed
DECODING = ("kaldi_decoder", "kaldifst", "kaldialign")


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    corpus: str  # its name or folder
    out: Path | None  # for run dirs, RBMs, logs; None is exp/reproduce/CORPUS
    records: Path | None  # folder of the records; None is `out`/records
    report: Path | None  # the report's files without their suffix; None is `out`/report
    seeds: tuple[int, ...] | None  # only these are executed; None: all. The report has all that exist
    workers: tuple[int, ...] | None
    device: str
    cores: int | None  # to share; None: all that this process may use
    dry_run: bool  # show what is missing, execute nothing, write nothing
    report_only: bool  # execute nothing
    retry_diverged: bool  # also execute what diverged before
    slurm: SlurmOptions | None = None  # execute the runs as jobs; None: on this machine


@dataclass(frozen=True)
class ReproduceResult:
    """What exists now, and what is missing. Tables and runs by their names."""

    tables: tuple[str, ...]
    records: int  # how many of the runs have one that counts
    missing: tuple[str, ...]  # runs that have none
    not_selected: tuple[str, ...]  # those of the missing that --seeds and --workers exclude
    outdated: Mapping[str, Sequence[str]]  # `outdated_records`
    errors: tuple[str, ...] = ()  # why runs failed, a sentence each
    files: tuple[Path, ...] = ()  # that were written
    summary: Mapping[str, object] | None = None  # of the report, for `--json`
    jobs: JobReport | None = None  # of --slurm, where there was something to do
    would_execute: Mapping[str, Any] | None = None  # of --dry-run on this machine
    failed: tuple[str, ...] = ()  # recorded runs that did not train

    def as_dict(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("tables", "records", "missing", "not_selected", "failed")},
            **{f"outdated_{why}": names for why, names in self.outdated.items()},
            "errors": self.errors,
            "files": [str(path) for path in self.files],
            **({} if self.jobs is None else {"jobs": self.jobs.to_dict()}),
            **({} if self.would_execute is None else {"would_execute": self.would_execute}),
            **(self.summary or {}),
        }

    def as_text(self) -> str:
        outdated = describe_outdated(self.outdated)
        return render("reproduce.txt.j2", result=self, outdated=outdated, most=MAX_LINES)

    def raise_errors(self) -> None:
        """UserError where runs failed for a reason that the user must fix."""
        if not self.errors:
            return
        first, *others = self.errors
        failed = f"{plural(len(self.errors), 'run')} failed{', the first of them' if others else ''}: {first}"
        failed, _, hint = failed.partition("\n  hint: ")
        failed, _, location = failed.partition("\n  location: ")
        hint = f"{hint or 'fix it'}, then run the same command again: it executes what is missing"
        raise UserError(failed, location=location or None, hint=hint)


@dataclass(frozen=True)
class _Plan:
    """The runs of a call, on which corpus, and where their results go."""

    config: ReproduceConfig
    folder: Path
    tables: tuple[Table, ...]
    runs: list[PlannedRun]
    selected: list[PlannedRun]
    layout: OutputLayout
    options: Options

    def to_execute(self, records: Mapping[str, RunRecord]) -> list[PlannedRun]:
        """The selected runs that are missing; with --retry-diverged those that diverged are."""
        retry = self.options.retry_diverged
        return missing_runs(self.selected, {n: r for n, r in records.items() if r.failed is None or not retry})


def reproduce(names: tuple[str, ...], options: Options, report: Callable[[str], None]) -> ReproduceResult:
    """Everything that `ddnn reproduce` does; `report` shows the user one line. UserError: an invalid option, recipe or
    record, or another call executes runs in the same folder. KeyboardInterrupt: told to stop; the same call resumes."""
    plan = _make_plan(names, options)
    layout, report_path = plan.layout, _report_path(options, plan.layout.output_dir)
    records = _read_records(layout.records, options)
    execute = bool(plan.to_execute(records)) and not options.report_only
    if not options.dry_run:
        if execute and options.slurm is not None and shutil.which("sbatch") is None:
            message = "sbatch is not found on PATH: is this a login node of a Slurm cluster?"
            hint = "run it on one, or with --dry-run to see which jobs it would submit"
            raise UserError(message, location="--slurm", hint=hint)
        _check_writable({"--out": layout.output_dir, "--records": layout.records} if execute else {}, report_path)
    errors: list[str] = []
    jobs = None
    if execute and (options.slurm or not options.dry_run):
        with _StopAsInterrupt(), nullcontext() if options.dry_run else exclusive(layout.output_dir) as lock:
            records = read_records(layout.records)  # with those of a call that ended just before this one had the lock
            errors, jobs = _execute(plan, records, report, lock)
        records = records if options.dry_run else read_records(layout.records)
    missing = tuple(run.name for run in missing_runs(plan.runs, records))
    others = [run for run in plan.runs if run not in plan.selected]
    result = ReproduceResult(
        tables=tuple(table.name for table in plan.tables),
        records=len(plan.runs) - len(missing),
        missing=missing,
        not_selected=tuple(run.name for run in missing_runs(others, records)),
        outdated=outdated_records(plan.runs, records),
        failed=tuple(run.name for run in plan.runs if run.is_recorded(records) and records[run.name].failure),
        errors=tuple(errors),
        jobs=jobs,
    )
    if options.dry_run:
        return result if jobs is not None else replace(result, would_execute=_would_execute(plan, records, execute))
    counting = {run.name: records[run.name] for run in plan.runs if run.is_recorded(records)}
    run_dirs = {run.name: layout.run_dir(run) for run in plan.runs}
    counting = with_kaldi_wer(counting, run_dirs, layout.records, plan.config.tests)
    by_speed = [table.conditions for table in plan.tables if table.kind == "speed"]
    speeds = [speed for conditions in by_speed for speed in speed_ups(conditions, plan.config.workers, counting)]
    document = build_report(plan.config, plan.tables, counting, _command(names, options), missing, speeds)
    return replace(result, files=tuple(document.write(report_path)), summary=document.summary)


def _make_plan(names: tuple[str, ...], options: Options) -> _Plan:
    """UserError where an option does not fit the corpus, or a package is missing that would be needed hours later."""
    tables, folder = select_tables(names), find_corpus(options.corpus)
    config = load_config(folder)
    decoding = DECODING if any(test.graphs for test in config.tests) and not options.report_only else ()
    absent = [name for name in (*decoding, "matplotlib") if find_spec(name) is None]
    if absent and not options.dry_run:
        message = f"not installed: {', '.join(absent)}: the models could not be decoded, or the plots not drawn"
        raise UserError(message, hint="pip install 'ddnn[decode,report]'")
    seeds, sizes = options.seeds or config.seeds, options.workers or config.workers
    for option, values, known in (("--seeds", seeds, config.seeds), ("--workers", sizes, config.workers)):
        if unknown := sorted(set(values) - set(known)):
            message = f"{unknown[0]} found, the corpus has {', '.join(map(str, known))}"
            raise UserError(message, location=option, hint="name some of these")
    runs = plan_runs(config, folder, tables)
    selected = [run for run in runs if run.seed in seeds and run.workers in sizes]
    if runs and not selected:
        numbers = ({run.seed for run in runs}, {run.workers for run in runs})
        seeds_there, sizes_there = (", ".join(map(str, sorted(found))) for found in numbers)
        hint = f"name some of the seeds {seeds_there} and of the workers {sizes_there}"
        raise UserError("no run of these tables has these seeds and workers", location="--seeds, --workers", hint=hint)
    out = options.out or Path("exp", "reproduce", folder.absolute().name)
    layout = OutputLayout(out, options.records or out / "records")
    return _Plan(config, folder, tables, runs, selected, layout, options)


def _read_records(folder: Path, options: Options) -> dict[str, RunRecord]:
    """The existing records; UserError where the folder cannot have any, or the report would be of none."""
    if folder.exists() and not folder.is_dir():
        raise UserError("a file, expected a folder of records", location=folder, hint="name a folder with --records")
    records = read_records(folder)
    if options.report_only and not records:
        message = "it has no record: the report would be empty" if folder.is_dir() else "no such folder of records"
        hint = "name the folder of the records with --records, or omit --report-only to train the runs"
        raise UserError(message, location=folder, hint=hint)
    return records


def _report_path(options: Options, out: Path) -> Path:
    path = options.report or out / "report"
    path = path.with_suffix("") if path.suffix in (".md", ".html") else path
    if path.name in ("", ".."):
        raise UserError(f"{options.report} is a folder, expected DIR/NAME", location="--report", hint="add a name")
    return path


def _check_writable(folders: Mapping[str, Path], report_path: Path) -> None:
    """UserError where, after hours, something could not be written. The folders, by their options, are created."""
    for option, folder in {**folders, "--report": report_path.parent}.items():
        hint = f"name another folder with {option}, or make this one writable"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"not writable: {error.strerror}", location=folder, hint=hint) from error
    if report_path.exists() and not report_path.is_dir():
        hint = "name another with --report, or move it away"
        raise UserError("a file, expected none, or the folder of the report's plots", location=report_path, hint=hint)


@contextmanager
def exclusive(output_dir: Path) -> Iterator[int]:
    """Holds the lock of the output directory for the block; yields its descriptor, for processes that hold it too.
    UserError where another call holds it, or the directory cannot be created."""
    ensure_directory(output_dir)
    lock = FileLock(output_dir / LOCK)
    try:
        lock.acquire()
    except BlockingIOError as error:
        message = "another call executes these runs, or trainings of one that was killed write their checkpoints"
        raise UserError(message, location=output_dir, hint="wait until they end") from error
    try:
        yield lock.fileno()
    finally:
        lock.release()


def _would_execute(plan: _Plan, records: Mapping[str, RunRecord], execute: bool) -> dict[str, Any]:
    """Runs by name, those of them that have a model and are only evaluated, seeds of RBMs, how long training takes."""
    layout, runs = plan.layout, plan.to_execute(records) if execute else []
    cores, untrained = plan.options.cores or usable_cores(), [run for run in runs if not layout.is_trained(run)]
    return {
        "runs": [run.name for run in runs],
        "trained": [run.name for run in runs if layout.is_trained(run)],
        "dbns": list(dict.fromkeys(run.seed for run in runs if layout.needs_dbn(run))),
        "out": str(layout.output_dir),
        "cores": cores,
        "training_seconds": training_seconds(untrained, records, cores),
    }


def training_seconds(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord], cores: int) -> float | None:
    """About how long the training of these runs takes on so many cores: each the median of the recorded core seconds,
    which hardly depend on the number of workers. None: no record has them."""
    slow = overloaded_runs(records)
    times = [(r.workers, r.time) for name, r in records.items() if r.time and r.time.seconds and name not in slow]
    if not times:
        return None
    of_run = median(time.seconds * min(workers, time.cores or workers) for workers, time in times)
    longest = max((of_run / min(run.workers, cores) for run in runs), default=0.0)
    return max(longest, len(runs) * of_run / cores)


def _execute(
    plan: _Plan, records: Mapping[str, RunRecord], report: Callable[[str], None], lock: int | None
) -> tuple[list[str], JobReport | None]:
    """Executes what is missing, here or as jobs; errors, and the jobs. Processes hold the `lock` until they end."""
    options, runs, start = plan.options, plan.to_execute(records), time.monotonic()
    recorded = len(plan.runs) - len(missing_runs(plan.runs, records))
    report(f"{len(plan.runs)} runs, {recorded} recorded; {len(runs)} to execute in {plan.layout.output_dir}")
    for line in describe_outdated(outdated_records(runs, records)) if not options.dry_run else ():
        report(line)
    # Where jobs are submitted there are rarely GPUs.
    device = options.device if options.slurm is None or options.device == "cpu" else "auto"
    cores = options.cores or usable_cores()
    local = LocalExecutor(plan.config, plan.folder, plan.layout, device, cores, report, lock)
    if options.slurm is None:
        errors, jobs = local.execute(runs), None
    else:
        retried = {run.name for run in runs if run.is_recorded(records)}
        slurm = SlurmExecutor(local, options.device, options.slurm, retried, options.dry_run)
        errors, jobs = slurm.execute(runs), slurm.jobs
    report(f"{'executed' if jobs is None else 'jobs checked'} in {(time.monotonic() - start) / 60:.1f} min")
    return errors, jobs


def _command(names: tuple[str, ...], options: Options) -> str:
    """That makes what the report shows."""
    paths = {"out": options.out, "records": options.records, "report": options.report, "cores": options.cores}
    words = [word for name, value in paths.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["ddnn", "reproduce", *names, "--corpus", options.corpus, *words])


class _StopAsInterrupt(SignalListener):
    """SIGTERM, SIGHUP and SIGUSR1 act as Ctrl-C: trainings that are running write their checkpoints first."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)
