"""`ddnn reproduce`: plans the runs of the tables, executes those that are missing, writes the report."""

from __future__ import annotations

import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from ddnn.distributed.signals import SignalListener
from ddnn.reproduce.entries import overloaded_runs, speed_ups
from ddnn.reproduce.executor import LocalExecutor
from ddnn.reproduce.jobs import SlurmExecutor
from ddnn.reproduce.measure import with_kaldi_wer
from ddnn.reproduce.report import build_report
from ddnn.reproduce.runs import (
    PlannedRun,
    RunRecord,
    describe_outdated,
    missing_runs,
    outdated_records,
    plan_runs,
    read_records,
    write_record,
)
from ddnn.reproduce.tables import ReproduceConfig, find_corpus, load_config, select_tables
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
    """What exists now, and what is missing: `values` are those of `--json`, `errors` by the names of runs."""

    values: dict[str, Any]
    errors: Mapping[str, UserError]

    def as_dict(self) -> dict[str, Any]:
        return {**self.values, "errors": [f"{name}: {error}" for name, error in self.errors.items()]}

    def as_text(self) -> str:
        values = {"jobs": None, "would_execute": None, **self.values, "outdated": describe_outdated(self.values)}
        return render("reproduce.txt.j2", **values, most=MAX_LINES)

    def raise_errors(self) -> None:
        """UserError: runs failed for a reason that the user must fix."""
        for name, error in self.errors.items():
            first = ", the first of them" if len(self.errors) > 1 else ""
            message = f"{plural(len(self.errors), 'run')} failed{first}: {name}: {error.message}"
            hint = f"{error.hint or 'fix it'}, then run the same command again: it executes what is missing"
            raise UserError(message, location=error.location, hint=hint)


class _Reproduction:
    """One call: the runs of its tables, and where their results go."""

    def __init__(self, names: tuple[str, ...], options: Options) -> None:
        """UserError: an option does not fit the corpus, or a package is missing that would be needed hours later."""
        self.names, self.options = names, options
        self.tables, self.folder = select_tables(names), find_corpus(options.corpus)
        self.config = load_config(self.folder)
        _check_packages(self.config, options)
        self.out = options.out or Path("exp", "reproduce", self.folder.absolute().name)
        self.records_dir = options.records or self.out / "records"
        self.report_path = _report_path(options.report or self.out / "report")
        seeds, sizes = options.seeds or self.config.seeds, options.workers or self.config.workers
        for option, values, known in (
            ("--seeds", seeds, self.config.seeds),
            ("--workers", sizes, self.config.workers),
        ):
            if unknown := sorted(set(values) - set(known)):
                message = f"{unknown[0]} found, the corpus has {', '.join(map(str, known))}"
                raise UserError(message, location=option, hint="name some of these")
        self.runs = plan_runs(self.config, self.folder, self.tables, self.out)
        self.selected = [run for run in self.runs if run.seed in seeds and run.workers in sizes]
        if not self.selected:
            known_sizes = ", ".join(map(str, sorted({run.workers for run in self.runs})))
            hint = f"name some of the workers {known_sizes}"
            raise UserError("no run of these tables has these workers", location="--workers", hint=hint)

    def to_execute(self, records: Mapping[str, RunRecord]) -> list[PlannedRun]:
        """The selected runs that are missing; with --retry-diverged also those that diverged."""
        retry = self.options.retry_diverged
        counting = {name: record for name, record in records.items() if record.failed is None or not retry}
        return [] if self.options.report_only else missing_runs(self.selected, counting)

    def result(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """What is recorded and what is missing, for `--json`."""
        missing = [run.name for run in missing_runs(self.runs, records)]
        selected = [run.name for run in self.selected]
        return {
            "tables": [table.name for table in self.tables],
            "records": len(self.runs) - len(missing),
            "missing": missing,
            "not_selected": [name for name in missing if name not in selected],
            "failed": [run.name for run in self.runs if run.is_recorded(records) and records[run.name].failure],
            **outdated_records(self.runs, records),
            "files": [],
        }

    def execute(
        self, records: Mapping[str, RunRecord], report: Callable[[str], None], lock: tuple[int, ...]
    ) -> tuple[dict[str, UserError], dict[str, Any] | None]:
        """Executes what is missing, here or as jobs; errors, and the jobs. Processes hold the `lock` until they end."""
        options, runs, start = self.options, self.to_execute(records), time.monotonic()
        recorded = len(self.runs) - len(missing_runs(self.runs, records))
        report(f"{len(self.runs)} runs, {recorded} recorded; {len(runs)} to execute in {self.out}")
        for line in describe_outdated(outdated_records(runs, records)) if not options.dry_run else ():
            report(line)
        # There are rarely GPUs where jobs are submitted.
        device = options.device if options.slurm is None or options.device == "cpu" else "auto"
        recipe, cores = self.folder / self.config.dbn_recipe, options.cores or usable_cores()
        local = LocalExecutor(self.folder, recipe, self.records_dir, device, cores, report, lock)
        if options.slurm is None:
            errors, jobs = local.execute(runs), None
        else:
            retried = {run.name for run in runs if run.is_recorded(records)}
            slurm = SlurmExecutor(local, options.device, options.slurm, retried, options.dry_run)
            errors, jobs = slurm.execute(runs), slurm.jobs
        report(f"{'executed' if jobs is None else 'jobs checked'} in {(time.monotonic() - start) / 60:.1f} min")
        return errors, jobs

    def would_execute(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """Runs by name, those that have a model and are only evaluated, seeds of RBMs, how long training takes."""
        runs, cores = self.to_execute(records), self.options.cores or usable_cores()
        untrained = [run for run in runs if not run.is_trained]
        return {
            "runs": [run.name for run in runs],
            "trained": [run.name for run in runs if run.is_trained],
            "dbns": list(dict.fromkeys(run.seed for run in untrained if run.lacks_dbn)),
            "out": str(self.out),
            "cores": cores,
            "training_seconds": training_seconds(untrained, records, cores),
        }

    def write_report(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """Writes the report of the records that count; the files, and the figures for `--json`."""
        counting = {}
        for run in self.runs:
            if run.is_recorded(records):
                record = with_kaldi_wer(records[run.name], run.run_dir, self.config.tests)
                if record != records[run.name]:
                    write_record(self.records_dir, record)
                counting[run.name] = record
        missing = [run.name for run in self.runs if run.name not in counting]
        speeds = [
            speed_up
            for table in self.tables
            if table.kind == "speed"
            for speed_up in speed_ups(table.conditions, self.config.workers, counting)
        ]
        report = build_report(self.config, self.tables, counting, self.command, missing, speeds)
        return {"files": [str(path) for path in report.write(self.report_path)], **report.summary}

    @property
    def command(self) -> str:
        """The command line that writes the report."""
        paths = {name: getattr(self.options, name) for name in ("out", "records", "report", "cores")}
        words = [word for name, value in paths.items() if value is not None for word in (f"--{name}", str(value))]
        return shlex.join(["ddnn", "reproduce", *self.names, "--corpus", self.options.corpus, *words])


def reproduce(names: tuple[str, ...], options: Options, report: Callable[[str], None]) -> ReproduceResult:
    """Everything that `ddnn reproduce` does; `report` shows the user one line. UserError: an invalid option, recipe or
    record, or another call executes runs in the same folder. KeyboardInterrupt: told to stop; the same call resumes."""
    call = _Reproduction(names, options)
    records = _read_records(call.records_dir, options)
    execute = bool(call.to_execute(records))
    if not options.dry_run:
        if execute and options.slurm is not None and shutil.which("sbatch") is None:
            message = "sbatch is not found on PATH: is this a login node of a Slurm cluster?"
            hint = "run it on one, or with --dry-run to see which jobs it would submit"
            raise UserError(message, location="--slurm", hint=hint)
        _check_writable({"--out": call.out, "--records": call.records_dir} if execute else {}, call.report_path)
    errors: dict[str, UserError] = {}
    jobs: dict[str, Any] | None = None
    if execute and options.dry_run and options.slurm is not None:
        errors, jobs = call.execute(records, report, ())
    elif execute and not options.dry_run:
        with _StopAsInterrupt(), exclusive(call.out) as lock:
            # Another call may have written records just before this one got the lock.
            records = read_records(call.records_dir)
            errors, jobs = call.execute(records, report, (lock,))
            records = read_records(call.records_dir)
    values = call.result(records)
    if jobs is not None:
        values["jobs"] = jobs
    elif options.dry_run:
        values["would_execute"] = call.would_execute(records)
    if not options.dry_run:
        values |= call.write_report(records)
    return ReproduceResult(values, errors)


def _check_packages(config: ReproduceConfig, options: Options) -> None:
    decoding = DECODING if any(test.graphs for test in config.tests) and not options.report_only else ()
    absent = [name for name in (*decoding, "matplotlib") if find_spec(name) is None]
    if absent and not options.dry_run:
        message = f"not installed: {', '.join(absent)}: the models could not be decoded, or the plots not drawn"
        raise UserError(message, hint="pip install 'ddnn[decode,report]'")


def _read_records(folder: Path, options: Options) -> dict[str, RunRecord]:
    """The existing records. UserError: the folder cannot have any, or the report would have none."""
    if folder.exists() and not folder.is_dir():
        raise UserError("a file, expected a folder of records", location=folder, hint="name a folder with --records")
    records = read_records(folder)
    if options.report_only and not records:
        message = "it has no record: the report would be empty" if folder.is_dir() else "no such folder of records"
        hint = "name the folder of the records with --records, or omit --report-only to train the runs"
        raise UserError(message, location=folder, hint=hint)
    return records


def _report_path(path: Path) -> Path:
    if path.name in ("", ".."):
        raise UserError(f"{path} is a folder, expected DIR/NAME", location="--report", hint="add a name")
    return path.with_suffix("") if path.suffix in (".md", ".html") else path


def _check_writable(folders: Mapping[str, Path], report_path: Path) -> None:
    """UserError: something could not be written hours later. Creates the folders, which are named by their options."""
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
    UserError: another call holds it, or the directory cannot be created."""
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


def training_seconds(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord], cores: int) -> float | None:
    """About how long the training of these runs takes on so many cores: each the median of the recorded core seconds,
    which hardly depend on the number of workers. None: no record has them."""
    slow = overloaded_runs(records)
    times = [(r.workers, r.time) for name, r in records.items() if r.time and r.time.seconds and name not in slow]
    if not times:
        return None
    run_seconds = median(time.seconds * min(workers, time.cores or workers) for workers, time in times)
    longest = max((run_seconds / min(run.workers, cores) for run in runs), default=0.0)
    return max(longest, len(runs) * run_seconds / cores)


class _StopAsInterrupt(SignalListener):
    """SIGTERM, SIGHUP and SIGUSR1 act as Ctrl-C: trainings that are running write their checkpoints first."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)
