"""Trainings that are killed with -9 at random moments until so many kills have been made, and how they end.

Where a worker of several is killed, the launcher starts the job again; where the launcher or a single worker is, this
program does, with --resume=auto. Run as a program it is `make soak`: many kills, figures printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe

STARTED = "cross-validation frames; learning"
SECONDS = 900


def write_job(folder: Path, epochs: int = 8) -> Path:
    """A recipe of some seconds with checkpoints all the time."""
    features, labels = labelled_utterances(count=60, frames=100)
    data = write_data_dir(folder / "data", features)
    more = (
        "optimizer: {name: ng-sgd, rank_in: 3, rank_out: 4, momentum: 0.3}\nparallel: {averaging_period: 3}\n"
        "checkpoint: {interval_minibatches: 20, keep_last: 2}\n"
    )
    path = write_recipe(folder / "recipe.yaml", data, write_pdfs(folder / "pdfs.txt", labels), more)
    schedule = f"schedule: {{name: exponential, initial_learning_rate: 0.01, epochs: {epochs}}}"
    path.write_text(path.read_text().replace("schedule: {initial_learning_rate: 0.05, max_epochs: 3}", schedule))
    return path


def train_in_child(recipe: str, run: str) -> None:
    """In a process forked from one that has imported everything."""
    from ddnn.recipe.load import load_recipe
    from ddnn.training.job import run_training

    with Path(run).with_suffix(".out").open("a") as said:
        os.dup2(said.fileno(), 2)
        run_training(load_recipe(Path(recipe)), Path(run), "cpu", resume=True)


class Alone:
    """One worker, without a launcher."""

    def __init__(self, recipe: Path, run: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ddnn.training.job", "training.killing"])
        self.process = context.Process(target=train_in_child, args=(str(recipe), str(run)))
        self.process.start()

    def ended(self) -> int | None:
        return self.process.exitcode

    def kill(self, choose: random.Random) -> bool:
        """Kills it; whether it starts again by itself."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        return False


class Several:
    """`ddnn train --workers N`: the launcher, mpirun, the workers."""

    def __init__(self, recipe: Path, run: Path, workers: int) -> None:
        words = ["train", str(recipe), "--run-dir", str(run), "--workers", str(workers), "--device", "cpu"]
        words += ["--resume=auto", "--set", "parallel.max_restarts=1000"]  # early kills leave no checkpoint
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMIX_", "OMPI_"))}
        self.run = str(run)
        with run.with_suffix(".out").open("a") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ddnn.cli", *words],
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=said,
            )

    def ended(self) -> int | None:
        return self.process.poll()

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                rank = b"OMPI_COMM_WORLD_RANK=" in (process / "environ").read_bytes()
            except OSError:
                continue
            if rank and self.run.encode() in words and b"ddnn.cli" in words:
                found.append(int(process.name))
        return sorted(found)

    def kill(self, choose: random.Random) -> bool:
        """Kills a worker, or one time in five the launcher: then all have to end. Whether it starts again by itself."""
        workers = self.workers()
        if workers and choose.random() < 0.8:
            with suppress(ProcessLookupError):
                os.kill(choose.choice(workers), signal.SIGKILL)
            return True
        self.process.kill()
        self.process.wait(timeout=60)
        until = time.monotonic() + 30
        while self.workers() and time.monotonic() < until:
            time.sleep(0.02)
        assert not self.workers(), "a worker has outlived its job"
        return False


@dataclass
class Figures:
    """What came of it: kills, trainings that ended, how many of them with the same bits, kills before training began."""

    kills: int = 0
    finished: int = 0
    same: int = 0
    early: int = 0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)


def started(run: Path) -> int:
    """How often a training has got to its loop in this run dir."""
    log = run / "train.log"
    return log.read_text().count(STARTED) if log.exists() else 0


def kill_and_compare(
    folder: Path,
    workers: int,
    kills: int,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    longest: float = 0.6,
) -> Figures:
    """Kills trainings at random moments, up to eight times each, and compares with one that was never killed."""
    choose, figures, recipe = random.Random(seed), Figures(), write_job(folder)
    begun = time.monotonic()

    def start(run: Path) -> Alone | Several:
        return Alone(recipe, run) if workers == 1 else Several(recipe, run, workers)

    def wait(training: Alone | Several, run: Path, done: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while training.ended() is None and not done():
            assert time.monotonic() < until, "it hangs"
            time.sleep(0.005)
        assert training.ended() in (None, 0), run.with_suffix(".out").read_text()[-3000:]

    whole, run = folder / "whole", folder / "run0"
    wait(start(whole), whole, lambda: False)
    while figures.kills < kills:
        run, attempts = folder / f"run{figures.finished}", 0
        training = start(run)
        for _ in range(min(8, kills - figures.kills)):
            early = choose.random() < 0.1
            moment = choose.random() * (longest if not early else 2.0)
            wait(training, run, lambda: early or started(run) > attempts)  # noqa: B023
            until = time.monotonic() + moment
            wait(training, run, lambda: time.monotonic() > until)  # noqa: B023
            if training.ended() is not None:
                break
            figures.kills += 1
            figures.early += started(run) == attempts
            attempts = started(run)
            if not training.kill(choose):
                training = start(run)
        wait(training, run, lambda: False)
        figures.finished += 1
        same = (run / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
        figures.same += same
        say(
            f"{workers} worker(s): {figures.kills} kills, {figures.finished} finished, {figures.same} with the same bits"
        )
    figures.seconds = time.monotonic() - begun
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    share = -(-options.kills // 3)
    wrong = 0
    for workers in (1, 2, 4):
        with tempfile.TemporaryDirectory(prefix="ddnn-soak-") as folder:
            found = kill_and_compare(
                Path(folder), workers, share, options.seed + workers, lambda text: print(text, flush=True)
            )
        print(f"{workers} worker(s): {found}", flush=True)
        wrong += found.finished - found.same
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
