"""`ddnn reproduce`: plans the runs of the tables, makes those that are missing, writes the report."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import NoReturn

from ddnn.errors import DataError, UserError
from ddnn.recipe.load import load_recipe
from ddnn.reproduce.cells import counted
from ddnn.reproduce.corpus import CorpusPlan, find_corpus, load_corpus_plan
from ddnn.reproduce.jobs import Jobs
from ddnn.reproduce.lock import alone
from ddnn.reproduce.measure import words_by_kaldi
from ddnn.reproduce.needs import check_packages
from ddnn.reproduce.outcome import Intent, Reproduction
from ddnn.reproduce.plan import Run, digest, missing, plan_runs, stale
from ddnn.reproduce.records import Record, WordErrors, read_records, write_record
from ddnn.reproduce.report import build_report, write_report
from ddnn.reproduce.run import Place, Workshop
from ddnn.reproduce.speed import speed_ups
from ddnn.reproduce.table import Table
from ddnn.reproduce.tables import chosen
from ddnn.slurm.options import SlurmOptions
from ddnn.train.run_dir_files import FINAL, STACK


@dataclass(frozen=True)
class Options:
    """Of the command line.

    Attributes:
        corpus: its name or folder.
        out: for run dirs, stacks, logs.
        records: folder of the records; None is `out`/records.
        report: the report's files without their ending; None is `out`/report.
        seeds, workers: only these are run; None runs all. The report has all that there are.
        cores: to share out; None takes all that this process may use.
        dry_run: say what is missing, run nothing, write nothing.
        only_report: run nothing.
        again: also what diverged before.
        slurm: make the runs as jobs; None makes them here.
    """

    corpus: str
    out: Path | None
    records: Path | None
    report: Path | None
    seeds: tuple[int, ...] | None
    workers: tuple[int, ...] | None
    device: str
    cores: int | None
    dry_run: bool
    only_report: bool
    again: bool
    slurm: SlurmOptions | None = None


def reproduce(names: tuple[str, ...], options: Options, say: Callable[[str], None]) -> Reproduction:
    """Everything that `ddnn reproduce` does.

    Raises:
        UserError: an option, a recipe or a record that cannot be, or another call makes runs into the same folder.
        KeyboardInterrupt: told to stop; the same call goes on.
    """
    tables = chosen(names)
    folder = find_corpus(options.corpus)
    plan = load_corpus_plan(folder)
    if not options.dry_run:
        check_packages(() if options.only_report else plan.tests)
    _check(options, plan)
    out = options.out or Path("exp", "reproduce", folder.absolute().name)
    place = Place(out, options.records or out / "records")
    report_at = _report_at(options, out)
    runs = plan_runs(plan, folder, tables)
    wanted = _wanted(runs, options)
    records = _records(place.records, options)
    making = bool(_to_make(wanted, records, options)) and not options.only_report
    if not options.dry_run:
        if making and options.slurm is not None:
            from ddnn.reproduce.as_jobs import check_sbatch

            check_sbatch()
        _check_folders({"--out": out, "--records": place.records} if making else {}, report_at)
    problems: list[str] = []
    jobs = None
    if making and (options.slurm or not options.dry_run):
        with _told_to_stop(), nullcontext() if options.dry_run else alone(out) as lock:
            records = read_records(place.records)  # with those of a call that ended just before this one was alone
            problems, jobs = _make(plan, folder, place, runs, wanted, records, options, say, lock)
        records = records if options.dry_run else read_records(place.records)
    left = tuple(run.name for run in missing(runs, records))
    others = tuple(run.name for run in missing([run for run in runs if run not in wanted], records))
    found = {run.name: records[run.name] for run in runs if run.is_made(records)}
    there = Reproduction(_names(tables), len(found), left, others, stale(runs, records), tuple(problems), (), {}, jobs)
    if options.dry_run:
        to_make = _to_make(wanted, records, options) if making else []
        return there if jobs is not None else replace(there, intent=_intent(plan, folder, place, to_make, options))
    found = _with_words_of_kaldi(plan, place, runs, found)
    files, summary = _report(plan, tables, found, left, names, options, report_at)
    return replace(there, files=files, summary=summary)


def _wanted(runs: Sequence[Run], options: Options) -> list[Run]:
    """The runs that are asked for; UserError where none is."""
    wanted = [
        run
        for run in runs
        if (options.seeds is None or run.seed in options.seeds)
        and (options.workers is None or run.workers in options.workers)
    ]
    if runs and not wanted:
        seeds, sizes = sorted({run.seed for run in runs}), sorted({run.workers for run in runs})
        raise UserError(
            "no run of these tables is of these seeds and workers",
            where="--seeds, --workers",
            mend=f"name some of the seeds {', '.join(map(str, seeds))} and of the workers {', '.join(map(str, sizes))}",
        )
    return wanted


def _to_make(wanted: Sequence[Run], records: Mapping[str, Record], options: Options) -> list[Run]:
    """Those of the wanted that are not there; with --again those that diverged are not there."""
    there = {name: record for name, record in records.items() if record.failed is None or not options.again}
    return missing(wanted, there)


def _records(folder: Path, options: Options) -> dict[str, Record]:
    """The records that there are; UserError where they can be none, or a report would be made of none."""
    if folder.exists() and not folder.is_dir():
        raise UserError("a file, expected a folder of records", where=folder, mend="name a folder with --records")
    records = read_records(folder)
    if options.only_report and not records:
        raise UserError(
            "no record in it: the report would be empty" if folder.is_dir() else "no such folder of records",
            where=folder,
            mend="name the folder of the records with --records, or leave --only-report out: the runs are then trained",
        )
    return records


def _report_at(options: Options, out: Path) -> Path:
    """The report's files without their ending."""
    path = options.report or out / "report"
    path = path.with_suffix("") if path.suffix in (".md", ".html") else path
    if path.name in ("", ".."):
        raise UserError(f"{options.report} is a folder, expected DIR/NAME", where="--report", mend="add a name")
    return path


def _check_folders(folders: Mapping[str, Path], report_at: Path) -> None:
    """UserError where, after hours, something could not be written. The folders, by their options, are made."""
    for option, folder in {**folders, "--report": report_at.parent}.items():
        mend = f"name another folder with {option}, or make this one writable"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"cannot be written into: {error.strerror}", where=folder, mend=mend) from error
    if report_at.exists() and not report_at.is_dir():
        mend = "name another with --report, or move it away"
        raise UserError("a file, expected none, or the folder of the report's plots", where=report_at, mend=mend)


def _intent(plan: CorpusPlan, folder: Path, place: Place, runs: Sequence[Run], options: Options) -> Intent:
    from ddnn.reproduce.measure import cores

    stack = digest(load_recipe(folder / plan.stack)) if any(run.stack for run in runs) else ""
    trained = [run.name for run in runs if (place.run_dir(run) / FINAL).exists()]
    seeds = dict.fromkeys(run.seed for run in runs if run.stack and run.name not in trained)
    stacks = [seed for seed in seeds if not (place.stack(seed, stack) / STACK).exists()]
    names = tuple(run.name for run in runs)
    return Intent(names, tuple(trained), tuple(stacks), place.out, options.cores or cores())


def _make(
    plan: CorpusPlan, folder: Path, place: Place, runs: Sequence[Run], wanted: Sequence[Run],
    records: Mapping[str, Record], options: Options, say: Callable[[str], None], lock: int | None,
) -> tuple[list[str], Jobs | None]:  # fmt: skip
    """Makes what is missing of the wanted, here or as jobs of which those that have ended are judged; what went wrong,
    and the jobs. `lock` is held until the last process has ended."""
    from ddnn.reproduce.measure import cores

    to_make, began = _to_make(wanted, records, options), time.monotonic()
    there = len(runs) - len(missing(runs, records))
    say(f"{len(runs)} runs, {there} of them there; {len(to_make)} to make in {place.out}")
    for line in stale(to_make, records).as_lines() if not options.dry_run else ():
        say(line)
    stack = digest(load_recipe(folder / plan.stack)) if any(run.stack for run in to_make) else ""
    device, jobs, problems = options.device, None, list[str]()
    if options.slurm is not None:
        from ddnn.reproduce.as_jobs import Sender, send_jobs

        sender = Sender(plan, folder, stack, place, device, options.slurm)
        again = {run.name for run in to_make if run.is_made(records)}
        jobs, problems = send_jobs(sender, to_make, again, dry_run=options.dry_run)
        to_make = [] if options.dry_run else [run for run in to_make if run.name in jobs.finished]
        device = "cpu" if device == "cpu" else "auto"  # where jobs are submitted there are rarely GPUs
    if to_make:
        held = () if lock is None else (lock,)
        problems += Workshop(plan, folder, stack, place, device, options.cores or cores(), say, held).make(to_make)
    say(f"{'made' if jobs is None else 'looked after'} in {(time.monotonic() - began) / 60:.1f} min")
    return problems, jobs


def _names(tables: tuple[Table, ...]) -> tuple[str, ...]:
    return tuple(table.name for table in tables)


def _check(options: Options, plan: CorpusPlan) -> None:
    """UserError where only runs are asked for that the corpus does not have."""
    for given, known, option in ((options.seeds, plan.seeds, "--seeds"), (options.workers, plan.workers, "--workers")):
        unknown = sorted(set(given or ()) - set(known))
        if unknown:
            raise UserError(
                f"{unknown[0]} found, the corpus has {', '.join(map(str, known))}",
                where=option,
                mend="name some of these",
            )


def _report(
    plan: CorpusPlan, tables: tuple[Table, ...], records: Mapping[str, Record], left: tuple[str, ...],
    names: tuple[str, ...], options: Options, report_at: Path,
) -> tuple[tuple[Path, ...], dict[str, object]]:  # fmt: skip
    given = {"out": options.out, "records": options.records, "report": options.report, "cores": options.cores}
    settings = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    command = shlex.join(["ddnn", "reproduce", *names, "--corpus", options.corpus, *settings])
    speeds = [
        speed for table in tables if table.kind == "speed" for speed in speed_ups(table.settings, plan.workers, records)
    ]
    document = build_report(plan, tables, records, command, left, speeds)
    return tuple(write_report(document, report_at)), document.summary


def _with_words_of_kaldi(
    plan: CorpusPlan, place: Place, runs: list[Run], records: Mapping[str, Record]
) -> dict[str, Record]:
    """The records with the word error rates that Kaldi's scoring has left in the run dirs since."""
    found = dict(records)
    by_kaldi = [test for test in plan.tests if not test.graphs]
    for run in runs if by_kaldi else []:
        record = found.get(run.name)
        if record is None or record.failed is not None:
            continue
        wers: dict[str, WordErrors] = {}
        for test in by_kaldi:
            more = words_by_kaldi(place.run_dir(run), test)
            if both := wers.keys() & more.keys():
                raise DataError(
                    f"two test sets have a {min(both)}", where=place.run_dir(run), mend="give them other names"
                )
            wers |= more
        if wers and wers != record.wers:
            found[run.name] = record.model_copy(update={"wers": {**record.wers, **wers}})
            write_record(place.records, found[run.name])
    return found


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """A SIGTERM or SIGHUP is a Ctrl-C: trainings that are under way write their checkpoints first."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(reproduction: Reproduction) -> None:
    """UserError where runs failed for a reason that the user must mend."""
    if reproduction.problems:
        first, *others = reproduction.problems
        failed = (
            f"{counted(len(reproduction.problems), 'run')} failed{', the first of them' if others else ''}: {first}"
        )
        then = "then give the same command again: it goes on with what is missing"
        if "  mend:" in first:  # one such line is enough
            raise UserError(f"{failed}; {then}")
        raise UserError(failed, mend=f"mend it, {then}")
