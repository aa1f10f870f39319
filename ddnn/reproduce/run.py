"""Makes the runs that are missing: stacks of RBMs, trainings, then what came of them, side by side on the cores."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddnn.errors import DIVERGED, UserError
from ddnn.reproduce.children import Children
from ddnn.reproduce.corpus import CorpusPlan
from ddnn.reproduce.measure import measure_run
from ddnn.reproduce.plan import Run
from ddnn.reproduce.records import Record, write_record
from ddnn.reproduce.slots import Slots
from ddnn.slurm.job import Job, read_job
from ddnn.train.run_dir_files import FINAL

STACK = "stack.safetensors"


@dataclass(frozen=True)
class Place:
    """Where things go.

    Attributes:
        out: `stacks/SEED`, `runs/NAME` and `logs/NAME.txt` lie in it.
        records: folder of the records.
    """

    out: Path
    records: Path

    def run_dir(self, run: Run) -> Path:
        """Of one run."""
        return self.out / "runs" / run.folder

    def stack(self, seed: int, digest: str) -> Path:
        """Of the RBMs of one seed."""
        return self.out / "stacks" / f"{seed}-{digest[:8]}"


class Workshop:
    """Runs trainings; one object for one call of `ddnn reproduce`."""

    def __init__(
        self, plan: CorpusPlan, folder: Path, stack_digest: str, place: Place, device: str, cores: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`folder` is the corpus's; `say` tells the user one line."""
        self.plan, self.folder, self.stack_digest = plan, folder, stack_digest
        self.place, self.device, self.say = place, device, say
        self.slots, self.children = Slots(cores), Children()
        self._stacks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def make(self, runs: Sequence[Run]) -> list[str]:
        """Makes these runs and their records; what went wrong, a sentence for each run that has no record now.

        Raises:
            KeyboardInterrupt: after all trainings that were under way have been stopped.
        """
        problems: list[str] = []
        done = 0
        began = time.monotonic()
        self._stacks = {run.seed: threading.Lock() for run in runs}
        context = multiprocessing.get_context("spawn")
        with (
            ProcessPoolExecutor(self.slots.number, mp_context=context) as judges,
            ThreadPoolExecutor(self.slots.number + 1) as threads,
        ):
            waiting = [threads.submit(self._one, run, judges) for run in runs]
            try:
                for run, future in zip(runs, waiting, strict=True):
                    said = _outcome(run, future, problems)
                    done += 1
                    left = (time.monotonic() - began) / done * (len(runs) - done)
                    self.say(f"{done}/{len(runs)} {said}{f'; about {left / 60:.0f} min left' if left else ''}")
            except BaseException:
                self.say("stopping: trainings write a checkpoint, the same command goes on with them")
                for future in waiting:
                    future.cancel()
                self.children.stop()
                raise
        return problems

    def _one(self, run: Run, judges: ProcessPoolExecutor) -> str:
        """One run, from whatever of it is there to its record; what came out, in a line."""
        stack = self.place.stack(run.seed, self.stack_digest) if run.stack else None
        run_dir = self.place.run_dir(run)
        failed = None
        command = train_arguments(run, run_dir, stack, self.device)
        if not (run_dir / FINAL).exists():
            if stack is not None:
                self._make_stack(run.seed, stack)
            with self.slots.taken(run.workers):
                failed = self._train(run, command)
        record = Record(
            setting=run.setting, workers=run.workers, seed=run.seed, recipe=run.digest, failed=failed,
            command=shlex.join(["ddnn", *command]),
        )  # fmt: skip
        if failed is None:
            with self.slots.taken(1):
                record = judges.submit(measure_run, run_dir, record, self.plan.tests, self.device).result()
            record = _as_of_job(record, read_job(run_dir))
        write_record(self.place.records, record)
        return f"{run.name}: {summary(record)}"

    def _make_stack(self, seed: int, path: Path) -> None:
        """The seed's stack of RBMs, made by the first run that needs it while the others wait."""
        with self._stacks[seed]:
            if not (path / STACK).exists():
                arguments = ["pretrain", str(self.folder / self.plan.stack), "--set", f"seed={seed}"]
                arguments += ["--run-dir", str(path), "--device", self.device]
                with self.slots.taken(1):
                    self._call(arguments, f"stack-{seed}")
                self.say(f"RBMs of seed {seed}: {path}")

    def _train(self, run: Run, arguments: Sequence[str]) -> str | None:
        """Trains, or goes on; why it diverged, where it did."""
        try:
            self._call(arguments, run.name)
        except _CommandFailed as error:
            if DIVERGED not in error.said:
                raise
            return next(line.strip() for line in error.said.splitlines() if DIVERGED in line)
        return None

    def _call(self, arguments: Sequence[str], name: str) -> None:
        output = self.place.out / "logs" / f"{name}.txt"
        code, said = self.children.run(arguments, output)
        if code:
            raise _CommandFailed(shlex.join(["ddnn", *arguments]), code, said, output)


class _CommandFailed(UserError):
    def __init__(self, command: str, code: int, said: str, output: Path) -> None:
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        self.said = said
        mend = f"see there, then again; it ran: {command}"
        super().__init__(f"exit code {code}: {last[:300]}", where=output, mend=mend)


def _outcome(run: Run, future: Future[str], problems: list[str]) -> str:
    try:
        return future.result()
    except UserError as error:
        problems.append(f"{run.name}: {error}")
        return f"{run.name}: failed: {error.what}"


def _as_of_job(record: Record, job: Job | None) -> Record:
    """Where a job trained, the processor of the machine that judges it and its cores are those of another machine."""
    if job is None or record.time is None:
        return record
    time = record.time.model_copy(update={"cores": job.workers})  # each has a GPU or cores of its own
    return record.model_copy(update={"machine": f"Slurm, {job.nodes} node{'s' * (job.nodes > 1)}", "time": time})


def train_arguments(run: Run, run_dir: Path, stack: Path | None, device: str) -> list[str]:
    """Of `ddnn`, which trains this run, or goes on with it."""
    arguments = ["train", str(run.recipe), "--run-dir", str(run_dir), "--device", device, "--resume"]
    return arguments + [word for setting in settings_of(run, stack) for word in ("--set", setting)]


def settings_of(run: Run, stack: Path | None) -> tuple[str, ...]:
    """As for --set, with the stack that the training starts from, where it does from one."""
    pretrain = {"from": str(stack), "passes": None}
    return run.settings if stack is None else (*run.settings, "pretrain=" + json.dumps(pretrain))


def summary(record: Record) -> str:
    """What a run came to, in a line."""
    if record.failed is not None:
        return record.failed
    parts = [] if record.cv is None else [f"CV frame accuracy {100 * record.cv.frame_accuracy:.2f} %"]
    parts += [f"{name} {100 * figures.frame_accuracy:.2f} %" for name, figures in record.tests.items()]
    parts += [f"WER {name} {words.wer:.2f} %" for name, words in record.wers.items()]
    return ", ".join(parts)
