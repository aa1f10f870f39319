"""Trainings that are killed with -9 at random moments and gone on with, until so many kills have been made.

Run as a program it is `make soak`: many kills, figures printed.
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
from dataclasses import dataclass, field
from pathlib import Path

from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe

STARTED = "frames to train on"
SECONDS = 240


def write_job(folder: Path) -> Path:
    """A recipe of about four seconds with checkpoints all the time."""
    features, labels = labelled_utterances(count=60, frames=100)
    data = write_data_dir(folder / "data", features)
    more = (
        "optimizer: {name: ng-sgd, rank_in: 3, rank_out: 4, momentum: 0.3}\nparallel: {every: 3}\n"
        "checkpoint: {every_minibatches: 20, keep: 2}\n"
    )
    path = write_recipe(folder / "recipe.yaml", data, write_pdfs(folder / "pdfs.txt", labels), more)
    schedule = "schedule: {name: exponential, initial: 0.01, epochs: 8}"
    path.write_text(path.read_text().replace("schedule: {initial: 0.05, epochs: 3}", schedule))
    return path


def train_in_child(recipe: str, run: str) -> None:
    """In a process forked from one that has imported everything."""
    from ddnn.recipe.load import load_recipe
    from ddnn.train.command import run_training

    with Path(run).with_suffix(".out").open("a") as said:
        os.dup2(said.fileno(), 2)
        run_training(load_recipe(Path(recipe)), Path(run), "cpu", resume=True)


class Alone:
    """One worker, without a launcher."""

    def __init__(self, recipe: Path, run: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ddnn.train.command", "train.killing"])
        self.process = context.Process(target=train_in_child, args=(str(recipe), str(run)))
        self.process.start()

    def ended(self) -> int | None:
        return self.process.exitcode

    def kill(self, choose: random.Random) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Several:
    """`ddnn train --workers N`: the launcher, mpirun, the workers."""

    def __init__(self, recipe: Path, run: Path, workers: int) -> None:
        words = ["train", str(recipe), "--run-dir", str(run), "--workers", str(workers), "--device", "cpu", "--resume"]
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

    def kill(self, choose: random.Random) -> None:
        """The launcher, or any of the workers; the rest has to end by itself."""
        workers = self.workers()
        victim = choose.choice([self.process.pid, *workers])
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.wait(timeout=60)
        until = time.monotonic() + 30
        while self.workers() and time.monotonic() < until:
            time.sleep(0.02)
        assert not self.workers(), "a worker has outlived its job"


@dataclass
class Figures:
    """What came of it: kills, trainings that ended, how many of them in the same bits, kills before the first row."""

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


def kill_and_go_on(
    folder: Path,
    workers: int,
    kills: int,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    longest: float = 0.6,
) -> Figures:
    """Kills trainings at random moments, goes on with each to its end, and compares with one that was never killed."""
    choose, figures, recipe = random.Random(seed), Figures(), write_job(folder)
    begun = time.monotonic()

    def start(run: Path) -> Alone | Several:
        return Alone(recipe, run) if workers == 1 else Several(recipe, run, workers)

    def finish(run: Path) -> bytes:
        training = start(run)
        until = time.monotonic() + SECONDS
        while training.ended() is None:
            assert time.monotonic() < until, "it hangs"
            time.sleep(0.02)
        assert training.ended() == 0, run.with_suffix(".out").read_text()[-3000:]
        return (run / "final.safetensors").read_bytes()

    expected = finish(folder / "whole")
    while figures.kills < kills:
        run = folder / f"run{figures.finished}"
        while figures.kills < kills:
            before, training = started(run), start(run)
            early = choose.random() < 0.1
            moment = choose.random() * (longest if not early else 2.0)
            until = time.monotonic() + SECONDS
            while training.ended() is None and not early and started(run) == before:
                assert time.monotonic() < until, "it hangs"
                time.sleep(0.005)
            until = time.monotonic() + moment
            while training.ended() is None and time.monotonic() < until:
                time.sleep(0.002)
            if training.ended() is not None:
                assert training.ended() == 0, run.with_suffix(".out").read_text()[-3000:]
                break
            training.kill(choose)
            if not (run / "final.safetensors").exists():
                figures.kills += 1
                figures.early += started(run) == before
        same = finish(run) == expected
        figures.finished += 1
        figures.same += same
        say(f"{workers} worker(s): {figures.kills} kills, {figures.finished} finished, {figures.same} in the same bits")
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
            found = kill_and_go_on(
                Path(folder), workers, share, options.seed + workers, lambda text: print(text, flush=True)
            )
        print(f"{workers} worker(s): {found}", flush=True)
        wrong += found.finished - found.same
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
