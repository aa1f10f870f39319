"""Trainings by four workers of which some die, where they are told to or at random, and how well they end.

Run as a program it draws deaths: so many runs, figures printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from train.launching import mpi_script

WORKERS = 4
CLOSE = 0.03
"""How far the frame accuracy may be from that of three workers: some ten of the frames that are judged."""


def write_job(folder: Path) -> Path:
    """A recipe of a moment for four workers that go on without each other."""
    features, labels = labelled_utterances(count=40)
    data = write_data_dir(folder / "data", features)
    more = "parallel: {workers: 4, every: 2, on_failure: continue, timeout: 30}\noptimizer: {momentum: 0.3}\n"
    path = write_recipe(folder / "recipe.yaml", data, write_pdfs(folder / "pdfs.txt", labels), more)
    path.write_text(path.read_text().replace("schedule: {initial: 0.05", "schedule: {initial: 0.01"))
    return path


def rows(run: Path, split: str) -> list[dict[str, Any]]:
    """The rows of one kind of metrics.jsonl."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["split"] == split]


def accuracy_of_three(recipe: Path) -> float:
    """Frame accuracy that three workers reach from the start."""
    three = recipe.with_name("three.yaml")
    three.write_text(recipe.read_text().replace("workers: 4", "workers: 3"))
    mpi_script("mpi_dying.py", 3, three, recipe.with_name("three"))
    return float(rows(recipe.with_name("three"), "cv")[-1]["frame_accuracy"])


def draw(choose: random.Random, first: int) -> list[str]:
    """Deaths of worker `first` and of one or no other, in compute or in an exchange."""
    others = [rank for rank in range(WORKERS) if rank != first]
    ranks = [first, *choose.sample(others, choose.randint(0, 1))]
    plans = {"minibatch": (1, 40), "exchange": (1, 20)}
    wheres = [choose.choice(list(plans)) for _ in ranks]
    return [f"{rank}:{where}:{choose.randint(*plans[where])}" for rank, where in zip(ranks, wheres, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    choose, deaths, bad = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="ddnn-deaths-") as folder:
        recipe = write_job(Path(folder))
        expected = accuracy_of_three(recipe)
        for number in range(options.runs):
            plan, run = draw(choose, number % WORKERS), recipe.with_name(f"run{number}")
            try:
                mpi_script("mpi_dying.py", WORKERS, recipe, run, *plan, tolerant=True)
                accuracy, lost = rows(run, "cv")[-1]["frame_accuracy"], len(rows(run, "lost"))
                well = lost > 0 and (run / "final.safetensors").exists() and abs(accuracy - expected) < CLOSE
            except (AssertionError, OSError) as error:  # it ended with another code, or left no metrics
                accuracy, lost, well = float("nan"), 0, False
                print(error)
            deaths, bad = deaths + lost, bad + (not well)
            print(f"{number + 1}: {' '.join(plan)}: {lost} lost, accuracy {accuracy:.4f}, well: {well}", flush=True)
    print(f"{options.runs} runs, {deaths} deaths, {options.runs - bad} ended well; three workers reach {expected:.4f}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
