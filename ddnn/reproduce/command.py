"""`ddnn reproduce`: plans the runs of the tables, makes those that are missing, writes the report."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ddnn.errors import DataError, UserError
from ddnn.recipe.load import load_recipe
from ddnn.reproduce.corpus import CorpusPlan, find_corpus, load_corpus_plan
from ddnn.reproduce.jobs import Jobs
from ddnn.reproduce.lock import alone
from ddnn.reproduce.measure import words_by_kaldi
from ddnn.reproduce.needs import check_packages
from ddnn.reproduce.plan import Run, digest, missing, plan_runs
from ddnn.reproduce.records import Record, WordErrors, read_records, write_record
from ddnn.reproduce.report import build_report, write_report
from ddnn.reproduce.run import Place, Workshop
from ddnn.reproduce.speed import speed_ups
from ddnn.reproduce.table import Table
from ddnn.reproduce.tables import chosen
from ddnn.slurm.options import SlurmOptions


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


@dataclass(frozen=True)
class Reproduction:
    """What there is now: records of the tables' runs, names of runs that are missing, files that were written, jobs."""

    tables: tuple[str, ...]
    records: int
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    files: tuple[Path, ...]
    summary: dict[str, object]
    jobs: Jobs | None = None

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "tables": list(self.tables),
            "records": self.records,
            "missing": list(self.missing),
            "problems": list(self.problems),
            "files": [str(path) for path in self.files],
            **({} if self.jobs is None else {"jobs": self.jobs.as_dict()}),
            **self.summary,
        }

    def as_text(self) -> str:
        """A few lines."""
        lines = [f"{', '.join(self.tables)}: {self.records} runs there, {len(self.missing)} missing"]
        if self.jobs is not None:
            lines += self.jobs.as_lines()
        else:
            lines += [f"missing: {name}" for name in self.missing[:20]]
            lines += [f"and {len(self.missing) - 20} more"] if len(self.missing) > 20 else []
        return "\n".join([*lines, *(f"report: {path}" for path in self.files)])


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
    out = options.out or Path("exp", "reproduce", folder.name)
    place = Place(out, options.records or out / "records")
    runs = plan_runs(plan, folder, tables)
    records = read_records(place.records)
    problems: list[str] = []
    jobs = None
    if _to_make(runs, records, options) and not options.only_report and (options.slurm or not options.dry_run):
        with _told_to_stop(), nullcontext() if options.dry_run else alone(out) as lock:
            records = read_records(place.records)  # with those of a call that ended just before this one was alone
            problems, jobs = _make(plan, folder, place, runs, records, options, say, lock)
        records = records if options.dry_run else read_records(place.records)
    left = tuple(run.name for run in missing(runs, records))
    found = {run.name: records[run.name] for run in runs if run.is_made(records)}
    if options.dry_run:
        return Reproduction(_names(tables), len(found), left, (), (), {}, jobs)
    found = _with_words_of_kaldi(plan, place, runs, found)
    files, summary = _report(plan, tables, found, left, names, options, out)
    return Reproduction(_names(tables), len(found), left, tuple(problems), files, summary, jobs)


def _to_make(runs: Sequence[Run], records: Mapping[str, Record], options: Options) -> list[Run]:
    """The runs that are asked for and not there; with --again those that diverged are not there."""
    wanted = [run for run in runs if _is_wanted(run, options)]
    there = {name: record for name, record in records.items() if record.failed is None or not options.again}
    return missing(wanted, there)


def _make(
    plan: CorpusPlan, folder: Path, place: Place, runs: Sequence[Run], records: Mapping[str, Record], options: Options,
    say: Callable[[str], None], lock: int | None,
) -> tuple[list[str], Jobs | None]:  # fmt: skip
    """Makes what is missing of the runs, here or as jobs of which those that have ended are judged; what went wrong,
    and the jobs. `lock` is held until the last process has ended."""
    from ddnn.reproduce.measure import cores

    to_make, began = _to_make(runs, records, options), time.monotonic()
    there = len(runs) - len(missing(runs, records))
    say(f"{len(runs)} runs, {there} of them there; {len(to_make)} to make in {place.out}")
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


def _is_wanted(run: Run, options: Options) -> bool:
    return (options.seeds is None or run.seed in options.seeds) and (
        options.workers is None or run.workers in options.workers
    )


def _report(
    plan: CorpusPlan, tables: tuple[Table, ...], records: Mapping[str, Record], left: tuple[str, ...],
    names: tuple[str, ...], options: Options, out: Path,
) -> tuple[tuple[Path, ...], dict[str, object]]:  # fmt: skip
    given = {"out": options.out, "records": options.records, "report": options.report, "cores": options.cores}
    settings = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    command = shlex.join(["ddnn", "reproduce", *names, "--corpus", options.corpus, *settings])
    speeds = [
        speed for table in tables if table.kind == "speed" for speed in speed_ups(table.settings, plan.workers, records)
    ]
    document = build_report(plan, tables, records, command, left, speeds)
    return tuple(write_report(document, options.report or out / "report")), document.summary


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
        raise UserError(
            f"{len(reproduction.problems)} runs failed: {reproduction.problems[0]}",
            mend="mend it, then give the same command again: it goes on with what is missing",
        )
