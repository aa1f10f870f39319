"""Makes the runs that are missing: stacks of RBMs, trainings, then what came of them, side by side on the cores."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddnn.errors import DIVERGED, UserError
from ddnn.reproduce.children import Children, CommandFailed
from ddnn.reproduce.corpus import CorpusPlan
from ddnn.reproduce.judge import Task, judge_run
from ddnn.reproduce.measure import cores, refuse_lost
from ddnn.reproduce.plan import Run
from ddnn.reproduce.records import Record, read_record, write_record
from ddnn.reproduce.slots import Slots
from ddnn.slurm.job import Job, read_job
from ddnn.train.run_dir_files import FINAL, METRICS, STACK


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
        say: Callable[[str], None], held: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`folder` is the corpus's; `say` tells the user one line; processes keep the descriptors `held` open."""
        self.plan, self.folder, self.stack_digest = plan, folder, stack_digest
        self.place, self.device, self.say = place, device, say
        self.slots, self.children = Slots(cores), Children(held)
        self._stacks: dict[int, Future[None]] = {}

    def make(self, runs: Sequence[Run]) -> list[str]:
        """Makes these runs and their records; what went wrong, a sentence for each run that has no record now.

        The caller is alone in the folder (`ddnn.reproduce.lock.alone`), from before it read which runs there are.

        Raises:
            KeyboardInterrupt: after all trainings that were under way have been stopped.
        """
        with ThreadPoolExecutor(self.slots.number + 1) as threads:
            try:
                return self._make(runs, threads)
            except BaseException:
                self.say("stopping: trainings write a checkpoint, the same command goes on with them")
                threads.shutdown(wait=False, cancel_futures=True)
                self.children.stop()
                raise

    def _make(self, runs: Sequence[Run], threads: ThreadPoolExecutor) -> list[str]:
        """The stacks first, then the runs that need none of these, which compute while stacks are made."""
        problems: list[str] = []
        began = time.monotonic()
        seeds = dict.fromkeys(run.seed for run in runs if self._missing_stack(run))
        self._stacks = {seed: threads.submit(self._make_stack, seed) for seed in seeds}
        order = sorted(runs, key=self._missing_stack)
        waiting = [threads.submit(self._one, run) for run in order]
        for done, (run, future) in enumerate(zip(order, waiting, strict=True), 1):
            said = _outcome(run, future, problems)
            left = (time.monotonic() - began) / done * (len(runs) - done)
            self.say(f"{done}/{len(runs)} {said}{f'; about {left / 60:.0f} min left' if left else ''}")
        return problems

    def _missing_stack(self, run: Run) -> bool:
        """Whether the run is still to be trained, from RBMs that are not there."""
        trained = (self.place.run_dir(run) / FINAL).exists()
        return run.stack and not trained and not (self.place.stack(run.seed, self.stack_digest) / STACK).exists()

    def _make_stack(self, seed: int) -> None:
        path = self.place.stack(seed, self.stack_digest)
        arguments = ["pretrain", str(self.folder / self.plan.stack), "--set", f"seed={seed}"]
        arguments += ["--run-dir", str(path), "--device", self.device]
        with self.slots.taken(1):
            self.children.call(arguments, self._output(f"stack-{seed}"))
        self.say(f"RBMs of seed {seed}: {path}")

    def _one(self, run: Run) -> str:
        """One run, from whatever of it is there to its record; what came out, in a line."""
        stack = self.place.stack(run.seed, self.stack_digest) if run.stack else None
        run_dir = self.place.run_dir(run)
        failed, whole = None, False
        command = train_arguments(run, run_dir, stack, self.device)
        if not (run_dir / FINAL).exists():
            if stack is not None and run.seed in self._stacks:
                self._stacks[run.seed].result()
            whole = not (run_dir / METRICS).exists()
            with self.slots.taken(run.workers):
                failed = self._train(run, command)
        refuse_lost(run_dir)
        record = Record(
            setting=run.setting, workers=run.workers, seed=run.seed, recipe=run.digest, failed=failed,
            command=shlex.join(["ddnn", *command]),
        )  # fmt: skip
        if failed is None:
            task = Task(record=record, tests=self.plan.tests, device=self.device)
            with self.slots.taken(1):
                record = judge_run(self.children, run_dir, task, self._output(run.name))
            record = self._with_origin(record, read_job(run_dir), whole, stack)
        write_record(self.place.records, record)
        return f"{run.name}: {summary(record)}"

    def _train(self, run: Run, arguments: Sequence[str]) -> str | None:
        """Trains, or goes on; why it diverged, where it did."""
        try:
            self.children.call(arguments, self._output(run.name))
        except CommandFailed as error:
            if DIVERGED not in error.said:
                raise
            return next(line.strip() for line in error.said.splitlines() if DIVERGED in line)
        return None

    def _output(self, name: str) -> Path:
        return self.place.out / "logs" / f"{name}.txt"

    def _with_origin(self, record: Record, job: Job | None, whole: bool, stack: Path | None) -> Record:
        """With the machine that trained, its cores, and the RBMs that it began with: the judge knows its own alone.

        Args:
            job: that trained it; None where none did.
            whole: whether it was trained here and now from the beginning; else what an earlier record of this very
                training says counts, and without one they are not known.
            stack: dir of the RBMs; None where it begins with none.
        """
        if record.time is None:
            return record
        name, number = "", 0
        rbms = "" if stack is None or not (whole or job) else digest_of_stack(stack / STACK)
        if job is not None:
            name, number = f"Slurm, {job.nodes} node{'s' * (job.nodes > 1)}", job.workers  # a core or GPU for each
        elif whole:
            name, number = record.machine, cores()
        elif (path := self.place.records / f"{record.name}.json").is_file():
            before = read_record(path)
            if before.recipe == record.recipe and before.time and before.time.seconds == record.time.seconds:
                name, number, rbms = before.machine, before.time.cores, before.stack
        spent = record.time.model_copy(update={"cores": number})
        return record.model_copy(update={"machine": name, "stack": rbms, "time": spent})


def digest_of_stack(path: Path) -> str:
    """The first 12 digits of the SHA-256 of a finished stack's file; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return ""


def _outcome(run: Run, future: Future[str], problems: list[str]) -> str:
    try:
        return future.result()
    except UserError as error:
        problems.append(f"{run.name}: {error}")
        return f"{run.name}: failed: {error.what}"


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
