"""Executes runs on this machine: `ddnn train` and an evaluation for each, side by side on its cores, then its record."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ddnn.reproduce import measure
from ddnn.reproduce.runs import PlannedRun, RunRecord, read_record, write_record
from ddnn.util.errors import DivergedError, UserError
from ddnn.util.process import ProcessGroup, signal_name

GRACE = 300.0  # seconds that a training has for its checkpoint


def command_error(command: Sequence[str], returncode: int, output_tail: str, log: Path) -> UserError:
    """Of a process that did not end with exit code 0. `command` as the user would give it; `returncode` is negative if a
    signal ended it."""
    lines = [line.strip() for line in output_tail.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"ddnn: (worker \d+ on \S+: )?error:", line)]
    if returncode == DivergedError.exit_code:
        return DivergedError(errors[-1].partition("error: ")[2] if errors else "the training diverged")
    ended = f"ended by {signal_name(-returncode)}" if returncode < 0 else f"exit code {returncode}"
    last = (errors or lines or ["it wrote nothing"])[-1]
    hint = f"see the log, then try again; it ran: {shlex.join(command)}"
    return UserError(f"{ended}: {last[:300]}", location=log, hint=hint)


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

    def execute(self, runs: Sequence[PlannedRun]) -> dict[str, UserError]:
        """Makes the records of these runs, after the RBMs that are missing; returns the errors of the runs that have
        none, by name. The caller holds the lock of the output directory, from before it read which runs are missing.
        KeyboardInterrupt: after all trainings that were running have been stopped."""
        dbns = {run.dbn_name: run for run in runs if run.lacks_dbn}
        total = len(dbns) + len(runs)
        self._progress = (f"{number}/{total}" for number in count(1))
        failed = self._map(self._pretrain, dbns, 1)
        errors = {run.name: failed[run.dbn_name] for run in runs if run.lacks_dbn and run.dbn_name in failed}
        for workers in sorted({run.workers for run in runs}):
            possible = {run.name: run for run in runs if run.workers == workers and run.name not in errors}
            errors |= self._map(self._execute_run, possible, workers)
        return errors

    def _map(
        self, work: Callable[[PlannedRun], str], runs: dict[str, PlannedRun], workers: int
    ) -> dict[str, UserError]:
        """Calls `work` with each run, as many at a time as have a core for each worker; reports the results, and returns
        the errors."""
        errors: dict[str, UserError] = {}
        with ThreadPoolExecutor(max(1, self.cores // workers)) as threads:
            try:
                futures: dict[str, Future[str]] = {name: threads.submit(work, run) for name, run in runs.items()}
                for name, future in futures.items():
                    try:
                        result = future.result()
                    except UserError as error:
                        errors[name], result = error, f"failed: {error.message}"
                    self.report(f"{next(self._progress)} {name}: {result}")
            except BaseException:
                self.report("stopping: trainings write a checkpoint, and the same command resumes them")
                threads.shutdown(wait=False, cancel_futures=True)
                self.processes.terminate(GRACE)
                raise
        return errors

    def _pretrain(self, run: PlannedRun) -> str:
        """Trains the RBMs that this run and the others of its seed start from."""
        arguments = ["pretrain", str(self.dbn_recipe), "--set", f"seed={run.seed}", "--run-dir", str(run.dbn_dir)]
        self._call("ddnn.cli", [*arguments, "--device", self.device], run, run.dbn_name)
        return str(run.dbn_dir)

    def _execute_run(self, run: PlannedRun) -> str:
        """One run, from whatever of it exists to its record; returns the result in a line."""
        arguments = train_arguments(run, self.device)
        try:
            if not run.is_trained:
                self._call("ddnn.cli", arguments, run, run.name)
            record = self._evaluate(run, new_record(run, arguments))
        except DivergedError as error:
            record = new_record(run, arguments, error.message)
        write_record(self.records, record)
        results = ", ".join(f"{metric} {value:.2f} %" for metric, value in record.percentages.items())
        return results if record.failure is None else f"did not train: {record.failure}"

    def _evaluate(self, run: PlannedRun, record: RunRecord) -> RunRecord:
        """The record with results, by a process of its own. UserError: it failed, was killed or told to stop."""
        folder = run.run_dir / measure.EVALUATION
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
            raise command_error([*program, *arguments], returncode, output_tail, path)


def train_arguments(run: PlannedRun, device: str) -> list[str]:
    """For `ddnn`, which trains this run, or resumes it."""
    arguments = ["train", str(run.recipe), "--run-dir", str(run.run_dir), "--device", device, "--resume=auto"]
    return arguments + [word for override in run.overrides for word in ("--set", override)]


def new_record(run: PlannedRun, arguments: Sequence[str], failed: str | None = None) -> RunRecord:
    names = {"condition": run.condition, "workers": run.workers, "seed": run.seed, "recipe": run.digest}
    return RunRecord.model_validate({**names, "failed": failed, "command": shlex.join(["ddnn", *arguments])})
