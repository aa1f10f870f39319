"""`ddnn reproduce`: plans the runs of the tables, executes those that are missing, writes the report."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from ddnn.distributed.signals import SignalListener
from ddnn.reproduce.executor import LocalExecutor
from ddnn.reproduce.jobs import SlurmExecutor
from ddnn.reproduce.measure import with_other_wers
from ddnn.reproduce.report import build_report
from ddnn.reproduce.runs import PlannedRun, RunRecord, plan_runs, read_records, write_record
from ddnn.reproduce.tables import find_corpus, load_config, select_tables
from ddnn.slurm.options import SlurmOptions
from ddnn.util.errors import UserError
from ddnn.util.files import FileLock, ensure_directory, require_kind
from ddnn.util.system import usable_cores
from ddnn.util.text import plural, render

LOCK = "jobs.lock"  # held while runs are executed or submitted, so that two calls do not execute the same
MAX_LINES = 20  # of names that are printed
NOT_SHOWN = ("--report-only", "--json")  # of the command line, in the report: the command there trains what is missing
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
    conditions: tuple[str, ...] | None
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
    errors: Mapping[str, UserError] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**self.values, "errors": [f"{name}: {error}" for name, error in self.errors.items()]}

    def as_text(self) -> str:
        return render("reproduce.txt.j2", **{"jobs": None, **self.values}, most=MAX_LINES)

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
        self.options = options
        self.tables, self.folder = select_tables(names), find_corpus(options.corpus)
        self.config = config = load_config(self.folder)
        decoding = DECODING if any(test.graphs for test in config.tests.values()) and not options.report_only else ()
        absent = [name for name in (*decoding, "matplotlib") if find_spec(name) is None]
        if absent and not options.dry_run:
            message = f"not installed: {', '.join(absent)}: the models could not be decoded, or the plots not drawn"
            raise UserError(message, hint="pip install 'ddnn[decode,report]'")
        self.out = options.out or Path("exp", "reproduce", self.folder.absolute().name)
        self.records_dir, report = options.records or self.out / "records", options.report or self.out / "report"
        if report.name in ("", ".."):
            message = f"{report} is a folder, expected DIR/NAME"
            raise UserError(message, location="--report", hint="add a name")
        self.report_path = report.with_suffix("") if report.suffix in (".md", ".html") else report
        self.cores = options.cores or usable_cores()
        self.runs = self.selected = plan_runs(config, self.folder, self.tables, self.out)
        selections: dict[str, Sequence[Any] | None] = {"seed": options.seeds, "workers": options.workers}
        for name, chosen in {**selections, "condition": options.conditions}.items():
            known = sorted({getattr(run, name) for run in self.runs})
            if chosen and (unknown := set(chosen) - set(known)):
                message = f"{min(unknown)} found, the runs of these tables have {', '.join(map(str, known))}"
                raise UserError(message, location=f"--{name.rstrip('s')}s", hint="name some of these")
            self.selected = [run for run in self.selected if getattr(run, name) in (chosen or known)]

    def read_records(self) -> dict[str, RunRecord]:
        """The existing records. UserError: the folder cannot have any, or the report would have none."""
        folder, records = self.records_dir, read_records(self.records_dir)
        if folder.exists() and not folder.is_dir():
            require_kind(folder, "directory")
        if self.options.report_only and not records:
            message = "it has no record: the report would be empty" if folder.is_dir() else "no such folder of records"
            hint = "name the folder of the records with --records, or omit --report-only to train the runs"
            raise UserError(message, location=folder, hint=hint)
        return records

    def check_writable(self, execute: bool) -> None:
        """UserError: something could not be written hours later. Creates the folders."""
        folders = {"--out": self.out, "--records": self.records_dir} if execute else {}
        for option, folder in {**folders, "--report": self.report_path.parent}.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()
            except OSError as error:
                hint = f"name another folder with {option}, or make this one writable"
                raise UserError(f"not writable: {error.strerror}", location=folder, hint=hint) from error
        if self.report_path.exists() and not self.report_path.is_dir():
            require_kind(self.report_path, "directory")  # for the report's plots

    def to_execute(self, records: Mapping[str, RunRecord]) -> list[PlannedRun]:
        """The selected runs that are missing; with --retry-diverged also those that diverged."""
        retried = [
            name for name, record in records.items() if self.options.retry_diverged and record.failed is not None
        ]
        missing = [run for run in self.selected if run.name in retried or not run.is_recorded(records)]
        return [] if self.options.report_only else missing

    def result(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """What is recorded, what is missing, and what this call would execute, for `--json`."""
        missing = [run for run in self.runs if not run.is_recorded(records)]
        names = [run.name for run in missing]
        same_recipe = {run.name: records[run.name].recipe == run.digest for run in missing if run.name in records}
        return {
            "tables": [table.name for table in self.tables],
            "records": len(self.runs) - len(missing),
            "missing": names,
            "not_selected": [run.name for run in missing if run not in self.selected],
            "failed": [run.name for run in self.runs if run not in missing and records[run.name].failure],
            "outdated_recipe": [name for name, same in same_recipe.items() if not same],
            "outdated_tests": [name for name, same in same_recipe.items() if same],
            "would_execute": self.would_execute(records),
            "files": [],
        }

    def would_execute(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """Runs by name, those that have a model and are only evaluated, seeds of RBMs, how long training takes: by the
        median of the recorded core seconds, which hardly depend on the number of workers."""
        runs, times = self.to_execute(records), [(run.workers, run.time) for run in records.values() if run.time]
        untrained = [run for run in runs if not run.is_trained]
        core_seconds = [time.seconds * min(workers, time.cores or workers) for workers, time in times]
        return {
            "runs": [run.name for run in runs],
            "trained": [run.name for run in runs if run.is_trained],
            "dbns": list(dict.fromkeys(run.seed for run in untrained if run.lacks_dbn)),
            "out": str(self.out),
            "cores": self.cores,
            "training_seconds": median(core_seconds) * len(untrained) / self.cores if core_seconds else None,
        }

    def execute(
        self, records: Mapping[str, RunRecord], report: Callable[[str], None], lock: tuple[int, ...]
    ) -> tuple[dict[str, UserError], dict[str, Any] | None]:
        """Executes what is missing, here or as jobs; errors, and the jobs. Processes hold the `lock` until they end."""
        options, runs = self.options, self.to_execute(records)
        # There are rarely GPUs where jobs are submitted.
        device = options.device if options.slurm is None or options.device == "cpu" else "auto"
        recipe = self.folder / self.config.dbn_recipe
        local = LocalExecutor(self.folder, recipe, self.records_dir, device, self.cores, report, lock)
        if options.slurm is None:
            return local.execute(runs), None
        retried = {run.name for run in runs if run.is_recorded(records)}
        slurm = SlurmExecutor(local, options.device, options.slurm, retried, options.dry_run)
        return slurm.execute(runs), slurm.jobs

    def write_report(self, records: Mapping[str, RunRecord]) -> dict[str, Any]:
        """Writes the report of the records that count; the files, and the figures for `--json`."""
        counting = {}
        for run in self.runs:
            if run.is_recorded(records):
                counting[run.name] = with_other_wers(records[run.name], run.run_dir, self.config.tests)
                if counting[run.name] != records[run.name]:
                    write_record(self.records_dir, counting[run.name])
        missing = [run.name for run in self.runs if run.name not in counting]
        command = shlex.join(["ddnn", *(word for word in sys.argv[1:] if word not in NOT_SHOWN)])
        report = build_report(self.config, self.tables, counting, command, missing)
        return {"files": [str(path) for path in report.write(self.report_path)], **report.summary}


def reproduce(names: tuple[str, ...], options: Options, report: Callable[[str], None]) -> ReproduceResult:
    """Everything that `ddnn reproduce` does; `report` shows the user one line. UserError: an invalid option, recipe or
    record, or another call executes runs in the same folder. KeyboardInterrupt: told to stop; the same call resumes."""
    call = _Reproduction(names, options)
    records = call.read_records()
    execute = bool(call.to_execute(records))
    errors: dict[str, UserError] = {}
    jobs: dict[str, Any] | None = None
    if not options.dry_run:
        call.check_writable(execute)
    if execute and options.dry_run and options.slurm is not None:
        errors, jobs = call.execute(records, report, ())
    elif execute and not options.dry_run:
        with _StopAsInterrupt(), exclusive(call.out) as lock:
            # Another call may have written records just before this one got the lock.
            records = read_records(call.records_dir)
            report(ReproduceResult(call.result(records)).as_text())
            errors, jobs = call.execute(records, report, (lock,))
            records = read_records(call.records_dir)
    values = call.result(records)
    if jobs is not None:
        values["jobs"] = jobs
    if not options.dry_run:
        values |= call.write_report(records)
    return ReproduceResult(values, errors)


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


class _StopAsInterrupt(SignalListener):
    """SIGTERM, SIGHUP and SIGUSR1 act as Ctrl-C: trainings that are running write their checkpoints first."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)
