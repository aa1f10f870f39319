"""How fast ddnn trains, compared with what a user would otherwise write: PyTorch in one process, DistributedDataParallel over
gloo, PyTorch's own averaging of models, and its own pipelines. The same network, minibatch, frames and arithmetic, one thread per
worker.

    python tests/compare.py [--network 440-4x512-616] [--minibatch 256] [--precision float32] [--rounds 5] [--workers 2]
        [--programs torch,ddnn,...] [--json FILE]

Programs take turns, a round of all after another, each as a process of its own on frames that lie in one folder. The figure of a
round is the speed of its last epoch, without start and loading; medians are printed as a table in Markdown. PyTorch gets its
frames spliced, as one tensor in memory; ddnn reads a Kaldi data dir and splices as it trains. Rates and rules are equal, so
that losses agree but for the order of frames, initial parameters and, on two workers, who has which frames. Where the CPU time is far below 100 % of
the computing time (of PyTorch's whole epoch, with waiting for the other worker), other processes used the cores. Workers that
share a model share each minibatch, too: they do what the programs of one worker do. `--json` writes the figures for
`tests/benchmark_plot.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from corpora import write_data_dir, write_pdfs
from torch import nn

from ddnn.distributed.cost import partition
from ddnn.report.measured import network_layers
from ddnn.util.errors import DivergedError
from ddnn.util.system import cpu_name, usable_cores

SPLICE, UTTERANCE, RATE, PERIOD = 5, 500, 2e-3, 10
"""Frames of context on each side, frames of an utterance, the rate that multiplies the sum over a minibatch, and
minibatches between two averagings."""
PROGRAMS = {
    "torch": "PyTorch, a loop",
    "ddnn": "ddnn",
    "torch-gradients": "PyTorch, DistributedDataParallel (gloo)",
    "ddnn-gradients": "ddnn, gradient-all-reduce",
    "torch-averaging": f"PyTorch, PeriodicModelAverager every {PERIOD} (gloo)",
    "ddnn-averaging": f"ddnn, all-reduce every {PERIOD}",
    "torch-stages": "PyTorch, torch.distributed.pipelining (ScheduleGPipe, gloo)",
    "ddnn-stages": "ddnn, a pipeline of stages",
    "ddnn-columns": "ddnn, columns",
}
SHARED = {"ddnn-stages": "stages", "ddnn-columns": "columns"}
"""The programs whose workers share a model, with their key of a recipe."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="440-4x512-616", help="dims; the input is 11 frames")
    parser.add_argument("--minibatch", type=int, default=256, help="frames, of each worker")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--frames", type=int, default=100_000, help="of an epoch, of all workers")
    parser.add_argument("--epochs", type=int, default=3, help="of each program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="of the programs that average")
    parser.add_argument("--microbatches", type=int, default=4, help="of the pipelines")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="with commas between")
    parser.add_argument("--torch-run", help=argparse.SUPPRESS)  # this process is a PyTorch program, on this folder
    options = parser.parse_args()
    if options.torch_run:
        train_torch(Path(options.torch_run), options)
        return 0
    names = options.programs.split(",")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        write_frames(Path(folder), options)
        for number in range(options.rounds):
            for name in names:
                found[name].append(run(name, Path(folder), options))
                print(f"round {number + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(table(found, options))
    if options.json:
        options.json.write_text(figures(found, options))
    return 0


def write_frames(folder: Path, options: argparse.Namespace) -> None:
    """A data dir, its pdf-ids, and the same frames spliced and normalized for PyTorch. Each pdf-id has a mean of its own."""
    dims = [layer.in_shape[0] for layer in network_layers(options.network)]
    pdfs, dim = network_layers(options.network)[-1].out_shape[0], dims[0] // (2 * SPLICE + 1)
    rng = np.random.default_rng(1)
    labels = rng.integers(
        0, pdfs, options.frames + UTTERANCE, dtype=np.int32
    )  # the last utterance is for cross-validation
    labels[:pdfs] = np.arange(pdfs)
    means = rng.normal(0.0, 1.0, (pdfs, dim)).astype(np.float32)
    frames = means[labels] + rng.normal(0.0, 1.0, (len(labels), dim)).astype(np.float32)
    cuts = range(UTTERANCE, len(labels), UTTERANCE)
    names = [f"speaker{i:05d}-u" for i in range(len(cuts) + 1)]
    utterances = dict(zip(names, np.split(frames, cuts), strict=True))
    write_data_dir(folder / "data", utterances)
    write_pdfs(folder / "pdfs", dict(zip(names, np.split(labels, cuts), strict=True)))
    (folder / "cv").write_text(f"{names[-1]}\n")
    padded = [np.pad(frame, ((SPLICE, SPLICE), (0, 0)), mode="edge") for frame in utterances.values()]
    windows = [np.lib.stride_tricks.sliding_window_view(x, 2 * SPLICE + 1, axis=0).swapaxes(1, 2) for x in padded[:-1]]
    spliced = np.concatenate(windows).reshape(-1, dims[0])
    np.save(folder / "x.npy", (spliced - spliced.mean(axis=0)) / spliced.std(axis=0))
    np.save(folder / "labels.npy", labels[: len(spliced)].astype(np.int64))


def run(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Of the last epoch: frames per second of all workers, the training loss, and the share of its computing time in which
    a worker had a core, the lowest of all workers: far below 1, other processes used the cores."""
    workers = options.workers if "-" in name else 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if name.startswith("torch"):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
        same = [
            f"--{key}={getattr(options, key)}"
            for key in ("network", "minibatch", "precision", "microbatches", "epochs")
        ]
        command = [sys.executable, *launch, __file__, f"--torch-run={folder}", f"--programs={name}", *same]
    else:
        recipe, run_dir = folder / f"{name}.json", folder / f"{name}-run"
        recipe.write_text(json.dumps(ddnn_recipe(name, folder, options)))
        command = [str(Path(sys.executable).with_name("ddnn")), "train", str(recipe), f"--workers={workers}", "--quiet"]
        command += [f"--run-dir={run_dir}", "--device=cpu"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode not in (0, DivergedError.exit_code):  # a few minibatches of a large network teach it nothing
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    if name.startswith("torch"):
        return dict(json.loads(result.stdout.splitlines()[-1]))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    row = [row for row in rows if row["type"] == "epoch" and row["split"] == "train"][-1]
    for path in sorted(run_dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    last = [worker for worker in rows if worker["type"] == "worker" and worker["epoch"] == options.epochs]
    shares = [worker["compute_cpu_seconds"] / (worker["compute_fraction"] * worker["seconds"]) for worker in last]
    return {"frames_per_second": row["frames_per_second"], "loss": row["loss"], "cpu_share": min(shares)}


def ddnn_recipe(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    hidden = [layer.out_shape[0] for layer in network_layers(options.network)[:-1]]
    shared = {SHARED[name]: options.workers} if name in SHARED else {}
    if name == "ddnn-stages":
        shared["microbatches"] = options.microbatches
    strategy = "gradient-all-reduce" if name == "ddnn-gradients" else "all-reduce"
    data = {"train": str(folder / "data"), "alignments": str(folder / "pdfs"), "splice": SPLICE}
    return {
        "data": {**data, "cv": {"utterances": str(folder / "cv")}},
        "model": {"hidden_layers": len(hidden), "hidden_units": hidden[0]},
        "minibatch_size": options.minibatch,
        "precision": options.precision,
        "schedule": {
            "name": "exponential",
            "initial_learning_rate": RATE,
            "final_learning_rate": RATE,
            "epochs": options.epochs,
        },
        "parallel": {"strategy": strategy, "averaging_period": PERIOD, "cpu_threads": 1, **shared},
    }


def train_torch(folder: Path, options: argparse.Namespace) -> None:
    """The PyTorch programs, as a tutorial has them; the last rank prints the figures."""
    from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(1)
    program, rank, workers = options.programs, 0, 1
    if program != "torch":
        init_process_group("gloo")
        rank, workers = get_rank(), get_world_size()
    readers = 1 if program == "torch-stages" else workers  # who share the frames
    x, labels = (
        torch.from_numpy(np.load(folder / f"{part}.npy")[rank % readers :: readers]) for part in ("x", "labels")
    )
    modules: list[nn.Module] = []
    for layer in network_layers(options.network):
        modules += [nn.Linear(layer.in_shape[0], layer.out_shape[0]), nn.Sigmoid()]
    model: nn.Module = nn.Sequential(*modules[:-1])
    average: Callable[[], None] = lambda: None  # noqa: E731
    if program == "torch-gradients":
        model = DistributedDataParallel(model)
    elif program == "torch-averaging":
        averager = PeriodicModelAverager(period=PERIOD)
        average = lambda: averager.average_parameters(model.parameters())  # noqa: E731
    criterion, size, bf16 = nn.CrossEntropyLoss(), options.minibatch, options.precision == "bf16"

    def minibatch(x: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = criterion(model(x), labels)
        loss.backward()
        return float(loss.detach())

    step = minibatch
    if program == "torch-stages":
        model = nn.Sequential(*modules[:-1][stage_of(modules[:-1], rank, workers)])
        step = pipeline_step(model, criterion, rank, workers, options.microbatches)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * size * readers)
    for _ in range(options.epochs):
        begin, cpu, total = time.perf_counter(), time.process_time(), 0.0
        for index in torch.randperm(len(x))[: len(x) // size * size].split(size):
            optimizer.zero_grad()
            total += step(x[index], labels[index])
            optimizer.step()
            average()
        seconds, minibatches = time.perf_counter() - begin, len(x) // size
        share = (time.process_time() - cpu) / seconds
    if rank == workers - 1:
        speed = readers * minibatches * size / seconds
        print(json.dumps({"frames_per_second": speed, "loss": total / minibatches, "cpu_share": share}))
    if workers > 1:
        destroy_process_group()


def stage_of(modules: list[nn.Module], rank: int, stages: int) -> slice:
    """Which modules this rank has: `stages` parts of consecutive layers, as ddnn divides them."""
    costs = [float(module.weight.numel()) for module in modules if isinstance(module, nn.Linear)]
    layers = partition(costs, stages)[rank]
    return slice(2 * layers.start, 2 * layers.stop)


def pipeline_step(
    stage: nn.Module, criterion: nn.Module, rank: int, stages: int, microbatches: int
) -> Callable[[torch.Tensor, torch.Tensor], float]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    schedule = ScheduleGPipe(PipelineStage(stage, rank, stages, torch.device("cpu")), microbatches, loss_fn=criterion)

    def step(x: torch.Tensor, labels: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(**({"target": labels, "losses": losses} if rank == stages - 1 else {}))
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def table(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """Speed-ups over PyTorch in one process and over its program of the same kind are medians of the ratios in a round."""
    lines = [
        f"{options.network}, minibatch {options.minibatch}, {options.precision}, {options.rounds} rounds of {options.epochs} epochs of "
        f"{options.frames:,} frames; {date.today()}, {cpu_name()}, {usable_cores()} cores, torch {torch.__version__}, "
        f"load {os.getloadavg()[1]:.1f}",
        "",
        "| program | workers | frames/s (rounds) | over PyTorch's of its kind | over PyTorch, a loop | CPU time (%) | training loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, results in found.items():
        speeds = [result["frames_per_second"] for result in results]
        of_kind, of_loop = (_ratio(speeds, found.get(other, [])) for other in (re.sub("^ddnn", "torch", name), "torch"))
        over = of_kind if name.startswith("ddnn") else ""
        spread = f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        workers = options.workers if "-" in name else 1
        share = 100 * median(result["cpu_share"] for result in results)
        lines.append(
            f"| {PROGRAMS[name]} | {workers} | {spread} | {over} | {of_loop} | {share:.0f} | {results[-1]['loss']:.4f} |"
        )
    return "\n".join(lines)


def _ratio(speeds: list[float], others: list[dict[str, float]]) -> str:
    ratios = [speed / other["frames_per_second"] for speed, other in zip(speeds, others, strict=False)]
    return f"{median(ratios):.2f}" if ratios else ""


def figures(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """As `tests/benchmark_plot.py` draws them."""
    rows = [
        {
            "name": f"{PROGRAMS[name]}{f', {options.workers} workers' if '-' in name else ''}",
            "of": "ddnn" if name.startswith("ddnn") else "others",
            "frames_per_second": [round(result["frames_per_second"]) for result in results],
        }
        for name, results in found.items()
    ]
    made = {
        "title": f"{options.network}, minibatch {options.minibatch}, {options.precision}: frames/s in training",
        "machine": f"{cpu_name()}, {usable_cores()} cores, {date.today()}; medians of {options.rounds} alternating rounds",
        "rows": rows,
    }
    return f"{json.dumps(made, indent=1)}\n"


if __name__ == "__main__":
    sys.exit(main())
