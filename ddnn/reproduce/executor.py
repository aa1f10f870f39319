"""Executes runs on this machine: `ddnn train` and an evaluation for each, side by side on its cores, then its record."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddnn.reproduce import measure
from ddnn.reproduce.runs import PlannedRun, RunRecord, read_record, write_record
from ddnn.util.errors import DivergedError, UserError
from ddnn.util.process import ProcessGroup, signal_name

GRACE = 300.0  # seconds that a training has for its checkpoint


class CommandFailed(UserError):
    """A process that did not end with exit code 0; `divergence`: how the training diverged, if it did."""

    def __init__(self, command: Sequence[str], returncode: int, output_tail: str, log: Path) -> None:
        """`command` as the user would give it; `returncode` is negative if a signal ended it."""
        lines = [line.strip() for line in output_tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ddnn: error:")]
        self.divergence = None
        if returncode == DivergedError.exit_code:
            self.divergence = errors[-1].partition("error: ")[2] if errors else "the training diverged"
        ended = f"ended by {signal_name(-returncode)}" if returncode < 0 else f"exit code {returncode}"
        last = (errors or lines or ["it wrote nothing"])[-1]
        hint = f"see the log, then try again; it ran: {shlex.join(command)}"
        super().__init__(f"{ended}: {last[:300]}", location=log, hint=hint)


@dataclass
class LocalExecutor:
    """Trains runs, evaluates them and writes their records; one object for one call of `ddnn reproduce`."""

    corpus: Path  # its folder
    dbn_recipe: Path
    records: Path
    device: str
    cores: int
    report: Callable[[str], None]  # shows the user one line
    lock: Sequence[int] = ()  # descriptors that all processes keep open

    def __post_init__(self) -> None:
        self.processes = ProcessGroup(self.lock)
        self._failed_dbns: dict[int, UserError] = {}  # by seed

    def execute(self, runs: Sequence[PlannedRun]) -> dict[str, UserError]:
        """Makes the records of these runs, after the RBMs that are missing; returns the errors of the runs that have
        none, by name. The caller holds the lock of the output directory, from before it read which runs are missing.
        KeyboardInterrupt: after all trainings that were running have been stopped."""
        start, done = time.monotonic(), 0
        errors: dict[str, UserError] = {}

        def report_run(run: PlannedRun, future: Future[str]) -> None:
            nonlocal done
            done += 1
            try:
                result = future.result()
            except UserError as error:
                errors[run.name] = error
                result = f"failed: {error.message}"
            remaining = (time.monotonic() - start) / done * (len(runs) - done)
            estimate = f"; about {remaining / 60:.0f} min remaining" if remaining else ""
            self.report(f"{done}/{len(runs)} {run.name}: {result}{estimate}")

        dbns = {run.seed: run for run in runs if run.lacks_dbn and not run.is_trained}
        self._map(self._pretrain, list(dbns.values()), 1, lambda run, future: self.report(future.result()))
        for workers in sorted({run.workers for run in runs}):
            self._map(self._execute_run, [run for run in runs if run.workers == workers], workers, report_run)
        return errors

    def _map(
        self,
        work: Callable[[PlannedRun], str],
        runs: Sequence[PlannedRun],
        workers: int,
        done: Callable[[PlannedRun, Future[str]], None],
    ) -> None:
        """Calls `work` with each run, as many at a time as have a core for each worker, and `done` in their order."""
        with ThreadPoolExecutor(max(1, self.cores // workers)) as threads:
            try:
                futures = [threads.submit(work, run) for run in runs]
                for run, future in zip(runs, futures, strict=True):
                    done(run, future)
            except BaseException:
                self.report("stopping: trainings write a checkpoint, and the same command resumes them")
                threads.shutdown(wait=False, cancel_futures=True)
                self.processes.terminate(GRACE)
                raise

    def _pretrain(self, run: PlannedRun) -> str:
        """Trains the RBMs that this run and the others of its seed start from."""
        arguments = ["pretrain", str(self.dbn_recipe), "--set", f"seed={run.seed}", "--run-dir", str(run.dbn_dir)]
        try:
            self._call("ddnn.cli", [*arguments, "--device", self.device], run, run.dbn_name)
        except CommandFailed as error:
            self._failed_dbns[run.seed] = error  # which is that of all these runs
            return f"RBMs of seed {run.seed} failed"
        return f"RBMs of seed {run.seed}: {run.dbn_dir}"

    def _execute_run(self, run: PlannedRun) -> str:
        """One run, from whatever of it exists to its record; returns the result in a line."""
        arguments, diverged = train_arguments(run, self.device), None
        if not run.is_trained:
            if run.seed in self._failed_dbns and run.dbn_digest:
                raise self._failed_dbns[run.seed]
            try:
                self._call("ddnn.cli", arguments, run, run.name)
            except CommandFailed as error:
                if error.divergence is None:
                    raise
                diverged = error.divergence
        record = new_record(run, arguments, diverged)
        if diverged is None:
            record = self._evaluate(run, record)
        write_record(self.records, record)
        return summarize(record)

    def _evaluate(self, run: PlannedRun, record: RunRecord) -> RunRecord:
        """The record with results, by a process of its own. UserError: it failed, was killed or told to stop."""
        before, folder = self.records / f"{run.name}.json", run.run_dir / measure.EVALUATION
        if before.is_file() and (earlier := read_record(before)).recipe == record.recipe:
            record = record.model_copy(update={"dbn": earlier.dbn})
        shutil.rmtree(folder, ignore_errors=True)
        try:
            draft = write_record(folder, record)
            self._call(measure.MODULE, [str(draft), str(self.corpus), self.device], run, run.name)
            return read_record(draft)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _call(self, module: str, arguments: Sequence[str], run: PlannedRun, log: str) -> None:
        """Runs the program of a module with these arguments, in one thread: as many as the cores run at once."""
        path = run.output_dir / "logs" / f"{log}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        returncode, output_tail = self.processes.run(module, arguments, path, environment)
        if returncode:
            program = ["ddnn"] if module == "ddnn.cli" else ["python", "-m", module]
            raise CommandFailed([*program, *arguments], returncode, output_tail, path)


def train_arguments(run: PlannedRun, device: str) -> list[str]:
    """For `ddnn`, which trains this run, or resumes it."""
    arguments = ["train", str(run.recipe), "--run-dir", str(run.run_dir), "--device", device, "--resume=auto"]
    return arguments + [word for override in run.overrides for word in ("--set", override)]


def new_record(run: PlannedRun, arguments: Sequence[str], diverged: str | None) -> RunRecord:
    names = {"condition": run.condition, "workers": run.workers, "seed": run.seed, "recipe": run.digest}
    return RunRecord.model_validate({**names, "failed": diverged, "command": shlex.join(["ddnn", *arguments])})


def summarize(record: RunRecord) -> str:
    if record.failure is not None:
        return f"did not train: {record.failure}"
    return ", ".join(f"{metric.label} {value:.2f} %" for metric, value in record.percentages.items())
