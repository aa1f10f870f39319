"""Trains one network with several layouts of workers that share it, for `ddnn report` and `ddnn scale`.

    python tests/measure_layouts.py FOLDER [--network 440-4x512-616] [--runs 1x1x1:256,1x2x1:256,1x1x2:256:4] [--rounds 3]
        [--frames 30000] [--epochs 2] [--processor-time]
    python tests/measure_layouts.py FOLDER --compare

A run is a layout, replicas x columns x stages, the frames in a minibatch and, of stages, the number of microbatches. Runs take turns,
a round of all after another. Of each run the round with the median speed stays, as a run dir FOLDER/LAYOUT-MINIBATCH; its name and the
speeds of all rounds are printed. With `--processor-time` all seconds in metrics.jsonl are those of the processor in which the thread
that trains computed or waited for a message: with more workers than cores the time in which a worker had no core is not in them, so that
what a stage or column computes can be compared with a run of one worker. What its messages took then has no meaning.
`--compare` prints what the workers of each run dir in the folder compute for a minibatch, without their messages, and what the model has for
it, whose R and tau are those of the runs with one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median_low
from typing import Any

from compare import ddnn_recipe, write_frames

from ddnn.distributed.cost import minibatch_seconds
from ddnn.report.measured import read_measured
from ddnn.report.scaling import calibrate, machine, scaled

NO_SECONDS = 1e-15  # of a byte
PROCESSOR_TIME = "import time\ntime.perf_counter = time.thread_time\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--network", default="440-4x512-616", help="dims; the input is 11 frames")
    parser.add_argument("--runs", default="1x1x1:256,1x2x1:256,1x1x2:256:4")
    parser.add_argument("--frames", type=int, default=30_000, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        compare(options.folder)
        return 0
    options.precision, runs = "float32", options.runs.split(",")
    speeds: dict[str, dict[str, float]] = {name: {} for name in runs}
    with tempfile.TemporaryDirectory() as text:
        corpus, made = Path(text), options.folder / "rounds"
        write_frames(corpus, options)
        (corpus / "sitecustomize.py").write_text(PROCESSOR_TIME if options.processor_time else "")
        for number in range(options.rounds):
            for name in runs:
                run_dir = made / f"{name.replace(':', '-')}-{number + 1}"
                speeds[name][str(run_dir)] = train(name, corpus, run_dir, options)
                print(f"{run_dir}: {speeds[name][str(run_dir)]:,.0f} frames/s", file=sys.stderr, flush=True)
    for name, rounds in speeds.items():
        middle = median_low(rounds.values())
        kept = options.folder / "-".join(name.split(":")[:2])
        shutil.move(next(path for path, speed in rounds.items() if speed == middle), kept)
        print(f"{kept}: {middle:,.0f} frames/s ({min(rounds.values()):,.0f} to {max(rounds.values()):,.0f})")
    shutil.rmtree(made)
    return 0


def train(name: str, corpus: Path, run_dir: Path, options: argparse.Namespace) -> float:
    """Frames per second of the last epoch."""
    layout, minibatch, *microbatches = name.split(":")
    replicas, columns, stages = map(int, layout.split("x"))
    options.minibatch, workers = int(minibatch), replicas * columns * stages
    recipe: dict[str, Any] = ddnn_recipe("ddnn", corpus, options)
    recipe["parallel"] |= {"columns": columns, "stages": stages}
    if microbatches:
        recipe["parallel"]["microbatches"] = int(microbatches[0])
    path = corpus / "recipe.json"
    path.write_text(json.dumps(recipe))
    command = [str(Path(sys.executable).with_name("ddnn")), "train", str(path), f"--workers={workers}", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(corpus)}
    result = subprocess.run(
        [*command, f"--run-dir={run_dir}", "--device=cpu"], env=environment, capture_output=True, text=True
    )
    if result.returncode not in (0, 3):  # a few minibatches may teach it nothing
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([row for row in rows if row["type"] == "epoch" and row["split"] == "train"][-1]["frames_per_second"])


def compare(folder: Path) -> None:
    measured = [read_measured(path)[0] for path in sorted(folder.iterdir()) if (path / "final.safetensors").is_file()]
    constants = calibrate([m for m in measured if m.workers == 1], 0.0, NO_SECONDS).constants
    for m in measured:
        alike = machine(scaled(constants, m.job))
        model = 1e3 * minibatch_seconds(alike, m.job.layers, m.job.minibatch, m.layout)
        own = 1e3 * ((m.compute or 0.0) - m.shared_comm) / m.minibatches
        print(f"{m.source}: {own:.2f} ms, model {model:.2f} ms, {100 * (model / own - 1):+.1f} %")


if __name__ == "__main__":
    sys.exit(main())
