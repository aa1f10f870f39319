"""Trainings that are killed with -9 at random moments until so many kills have been made, and how they end.

Where a worker of several is killed, the launcher starts the job again; where the launcher or a single worker is, this
program does, with --resume=auto. Run as a program it is `make soak`: many kills, figures printed.

Then trainings with a warm-up or RBMs, on workers of unlike shards, which are also asked to stop, by SIGTERM and SIGUSR1:

    PYTHONPATH=tests python tests/training/killing.py --kills 0                         all 30 of them, once each
    PYTHONPATH=tests python tests/training/killing.py --kills 0 --only rbm --seed 2     those with rbm in their names
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe

from ddnn.data.index import assign_shards
from ddnn.runs.run_status import newest_checkpoint

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
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMIX_", "OMPI_COMM_"))}
        self.run, self.lost_a_worker = str(run), False
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


WARMUPS = {
    "single": {"warmup": "single-worker", "warmup_minibatches": 1500},
    "all-reduce": {"warmup": "all-reduce", "warmup_minibatches": 300},
}
SHARDED: dict[str, Any] = {"pretrain_data": "sharded"}
KINDS: dict[str, dict[str, Any]] = {
    "warmup-single": WARMUPS["single"],
    "warmup-all-reduce": WARMUPS["all-reduce"],
    "rbm-sharded": SHARDED,
    "rbm-replicated": {"pretrain_data": "replicated"},
    "rbm-sharded-warmup-single": SHARDED | WARMUPS["single"],
}
"""What is before the first epoch -> the section `parallel`."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "momentum": 0.3},
    "ng-sgd": {"name": "ng-sgd", "rank_in": 3, "rank_out": 4},
}
CASES = {
    f"{kind}-{optimizer}-{workers}": (workers, kind, optimizer)
    for workers, kind, optimizer in itertools.product((2, 3, 4), KINDS, OPTIMIZERS)
}


def write_case(folder: Path, name: str) -> tuple[Path, int]:
    """The recipe of one of `CASES`, as JSON, which is YAML too, and its number of workers. Five long utterances make shards
    of two to four workers unlike; that of rank 0 is the longest with NG-SGD, another with SGD."""
    workers, kind, optimizer = CASES[name]
    whole, labels = labelled_utterances(count=13, frames=1600)
    lengths = [1200 if optimizer == "ng-sgd" else 1600, *[1200] * 4, *range(40, 80, 5)]
    shards = assign_shards(np.array(lengths), range(len(lengths)), workers)
    frames_of = [sum(lengths[u] for u in shard) for shard in shards]
    assert max(frames_of) >= min(frames_of) + 200, "RBMs are to have unlike numbers of minibatches"
    features = {utterance: whole[utterance][:frames] for utterance, frames in zip(whole, lengths, strict=True)}
    (folder / "cv").write_text("".join(f"{utterance}\n" for utterance in list(features)[-3:]))
    data = write_data_dir(folder / "data", features)
    pdfs = write_pdfs(folder / "pdfs.txt", {u: labels[u][: len(rows)] for u, rows in features.items()})
    recipe = {
        "seed": list(CASES).index(name),
        "data": {"train": str(data), "alignments": str(pdfs), "splice": 1, "cv": {"utterances": str(folder / "cv")}},
        "model": {"hidden_layers": 2, "hidden_units": 12},
        "minibatch_size": 8,
        "optimizer": OPTIMIZERS[optimizer],
        "schedule": {"name": "exponential", "initial_learning_rate": 0.005, "epochs": 3},
        "parallel": {"averaging_period": 3, **KINDS[kind]},
        "checkpoint": {"interval_minibatches": 40, "keep_last": 2},
    }
    if "rbm" in kind:
        recipe |= {"init": "rbm", "pretrain": {"epochs": [4, 3], "minibatch_size": 10, "learning_rate": 0.2}}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path, workers


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def results_of(run: Path) -> list[Any]:
    """Final parameters and those of the RBMs, and the rows of warm-up, epochs and RBMs but for times."""
    dbn = run / "pretrain/dbn.safetensors"
    rows = [*rows_of(run), *(rows_of(run / "pretrain") if dbn.exists() else [])]
    times = ("seconds", "frames_per_second", "seconds_left")
    kept = [row for row in rows if row["type"] in ("warmup", "epoch", "pretrain")]
    return [
        (run / "final.safetensors").read_bytes(),
        dbn.read_bytes() if dbn.exists() else b"",
        [{key: value for key, value in row.items() if key not in times} for row in kept],
    ]


def check_unlike(run: Path) -> None:
    """The workers had unlike numbers of minibatches."""
    trained = {row["rank"]: row["minibatches"] for row in rows_of(run) if row["type"] == "worker" and row["epoch"] == 1}
    assert max(trained.values()) >= min(trained.values()) + 20, trained


def where(run: Path) -> str:
    """What a training does: starting, pretraining, warm-up (or its first cross-validation), training."""
    with suppress(OSError, ValueError):
        phase = json.loads((run / "status.json").read_text())["phase"]
        epochs = (run / "metrics.jsonl").exists() and any(row["type"] == "epoch" for row in rows_of(run))
        return str("warm-up" if phase == "training" and not epochs else phase)
    return "starting"


def interrupt(training: Several, choose: random.Random) -> str:
    """Ends it in one of four ways; which. All its processes have ended then, but where the launcher starts others."""
    way = choose.choice(("SIGTERM", "SIGUSR1", "kill a worker", "kill the launcher"))
    workers = training.workers()
    if way == "kill a worker" and workers:
        with suppress(ProcessLookupError):
            os.kill(choose.choice(workers), signal.SIGKILL)
        training.lost_a_worker = True
        return way
    number = signal.SIGKILL if way.startswith("kill") else signal.Signals[way]
    training.process.send_signal(number)
    code, until = training.process.wait(timeout=SECONDS), time.monotonic() + 30
    # 137: the launcher was asked to stop before it had noticed that a worker is dead.
    allowed = (0, 75, 128 + number, -number, *[128 + signal.SIGKILL] * training.lost_a_worker)
    assert code in allowed, f"exit code {code} after {way}"
    while training.workers() and time.monotonic() < until:
        time.sleep(0.02)
    assert not training.workers(), "a worker has outlived its job"
    return way


def wait_for_moment(training: Several, run: Path, before: int, choose: random.Random) -> None:
    """Until a random moment: after the start, after the loop has begun, or after some checkpoints or RBMs."""
    kind, until = choose.choice(("start", "loop", "checkpoint", "checkpoint")), time.monotonic() + SECONDS
    seen, changes, newest = 0, choose.randint(1, 6), newest_checkpoint(run)
    while training.ended() is None and kind != "start":
        assert time.monotonic() < until, "it hangs"
        if kind == "loop" and started(run) > before:
            break
        if newest_checkpoint(run) != newest:
            newest, seen = newest_checkpoint(run), seen + 1
            if kind == "checkpoint" and seen == changes:
                break
        time.sleep(0.005)
    until = time.monotonic() + choose.random() * {"start": 3.0, "loop": 0.6, "checkpoint": 0.1}[kind]
    while training.ended() is None and time.monotonic() < until:
        time.sleep(0.005)


def interrupt_and_compare(folder: Path, name: str, seed: int) -> tuple[bool, str]:
    """Whether a training that was interrupted two to five times ends as the same one undisturbed, and what was done."""
    choose, (recipe, workers) = random.Random(f"{seed} {name}"), write_case(folder, name)

    def finish(training: Several, run: Path) -> None:
        assert training.process.wait(timeout=SECONDS) == 0, run.with_suffix(".out").read_text()[-3000:]

    whole, run, done = folder / "whole", folder / "run", []
    finish(Several(recipe, whole, workers), whole)
    check_unlike(whole)
    training = Several(recipe, run, workers)
    for _ in range(choose.randint(2, 5)):
        wait_for_moment(training, run, started(run), choose)
        if training.ended() is not None and done:
            break
        while training.ended() is not None:  # too late: once more
            shutil.rmtree(run)
            training = Several(recipe, run, workers)
            wait_for_moment(training, run, 0, choose)
        place = where(run)
        done.append(f"{interrupt(training, choose)} ({place})")
        if training.ended() is not None:
            training = Several(recipe, run, workers)
    finish(training, run)
    parts = zip(("network", "RBMs", "rows"), results_of(run), results_of(whole), strict=True)
    different = [part for part, found, expected in parts if found != expected]
    return not different, f"{', '.join(done)}; {', '.join(different) + ' DIFFER' if different else 'the same'}"


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
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="of warm-ups and RBMs those with this in their names"
    )
    options = parser.parse_args()
    share = -(-options.kills // 3)
    wrong = 0
    for workers in (1, 2, 4) if share else ():
        with tempfile.TemporaryDirectory(prefix="ddnn-soak-") as folder:
            found = kill_and_compare(
                Path(folder), workers, share, options.seed + workers, lambda text: print(text, flush=True)
            )
        print(f"{workers} worker(s): {found}", flush=True)
        wrong += found.finished - found.same
    names = [name for name in CASES if options.only in name]
    same = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ddnn-soak-") as folder:
            ends_alike, told = interrupt_and_compare(Path(folder), name, options.seed)
        same += ends_alike
        print(f"{name}: {told}", flush=True)
    print(f"warm-ups and RBMs: {same} of {len(names)} with the same bits and rows", flush=True)
    wrong += len(names) - same
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
