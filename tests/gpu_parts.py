"""What `make gpu` tries (gpu.py): each function is a part, run in a process of its own.

A part gets where to put what it has found, the name of the device, how much of everything, and an empty folder.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from gpu import NOT_ON_CPU, ROOT, Row, shown
from idx import ConvertOptions, convert_idx, write_idx
from torch.profiler import ProfilerActivity

from ddnn.bench import step as bench_step
from ddnn.bench.step import OPTIMIZERS, machine_facts, seconds_per_call
from ddnn.bench.task import RandomTask, Shape, endless, random_task
from ddnn.distributed.mpirun import find_mpirun
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.network import Workspace
from ddnn.nn.precision import allow_tf32
from ddnn.nn.products import supports_float32_output
from ddnn.optim.ng_sgd import make_optimizer
from ddnn.optim.sgd import Sgd
from ddnn.training.evaluation import FigureSums
from ddnn.training.model_evaluation import evaluate_run
from ddnn.training.step import CudaGraphStep, EagerStep, make_step
from ddnn.util.errors import UserError
from ddnn.util.system import choose_device, usable_cores

PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")
LR = 1e-4
Steps = Callable[[int, float], bool]


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
    "rehearsal": Size(None, 512, 2.0, 100, 4, 0.03, 120, 64, 2, (3000, 500), 1, 2),
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

    def add(self, **row: Any) -> Row:
        self.rows.append(row)
        self.save()
        print("  " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)
        return row

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


@contextmanager
def trying(found: Found, what: str) -> Iterator[None]:
    """An error in the block fails the part, which continues with what comes after."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        found.expect(False, f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")


class Notes(logging.Handler):
    """What ddnn logs of its choices on a GPU, and all its warnings, as notes."""

    def __init__(self, found: Found) -> None:
        super().__init__(logging.INFO)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or "CUDA graph" in record.getMessage():
            self.found.note(f"{record.levelname.lower()}: {record.getMessage()}")


def machine(found: Found, device: str, size: Size, folder: Path) -> None:
    """What this machine is, and its speed in matrix products."""
    on = choose_device(device)
    facts = {**machine_facts(on), "cores": usable_cores(), "python": sys.version.split()[0]}
    if on.type == "cuda":
        about = torch.cuda.get_device_properties(on)
        facts |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}", "CUDA": torch.version.cuda}
        if shutil.which("nvidia-smi"):
            ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            facts["driver"] = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split("\n")[0]
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
        on = choose_device(device)
        if size.shape:
            bench_step.NETWORKS[network] = Shape(*size.shape)
        for name in ("float32", "bf16", "tf32"):
            if name == "tf32" and on.type == "cpu":
                found.note(f"tf32: {NOT_ON_CPU}")
                continue
            allow_tf32(name == "tf32", on)
            with trying(found, name):
                precision = PRECISIONS[name == "bf16"]
                for one in bench_step.run_bench((network,), device, size.seconds / 3, precisions=(precision,)).results:
                    row = {"network": network, "optimizer": one.optimizer, "precision": name}
                    row |= {"frames/s": one.frames_per_second, "min": one.spread[0], "max": one.spread[1]}
                    row |= {"of GEMM limit": one.gemm_efficiency, "time/SGD": one.time_ratio_to_sgd}
                    found.add(**row, **{f"{part} share": share for part, share in one.shares.items()})

    return measure


def profile(found: Found, device: str, size: Size, folder: Path) -> None:
    """What the host waits for in a step, how busy the GPU is, and with which kernels."""
    on = choose_device(device)
    task, activities = task_of(size, on), [ProfilerActivity.CPU]
    if on.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities):
        torch.ones(1, device=on).add_(1)  # the first takes seconds
    for precision, name, graphs in product(PRECISIONS, OPTIMIZERS, (False, True)[: len(activities)]):
        row = {"optimizer": name, "precision": precision, "step": "graph" if graphs else "eager"}
        with trying(found, " ".join(row.values())):
            optimizer = make_optimizer(OPTIMIZERS[name], task.model.network)
            run = steps(task, make_arithmetic(precision, on), optimizer, graphs)
            profile_step(found, row, run, size.profiled, on, activities)
    found.note(
        "Host waits are synchronizing CUDA calls per minibatch; NG-SGD waits for an event besides, before every minibatch "
        "that ends an update. Busy: time in kernels (in operators on a CPU) over the time of a minibatch without profiler."
    )


def profile_step(
    found: Found, row: Row, run: Steps, n: int, on: torch.device, activities: list[ProfilerActivity]
) -> None:
    """Adds what `n` minibatches show to the row."""
    gpu = on.type == "cuda"
    is_graph = run(20, LR)  # NG-SGD updates its Fisher matrices in each of the first 11
    found.expect(is_graph == (row["step"] == "graph"), f"{row}: the step is not a CUDA graph")
    row["ms"], row["host waits"] = 1e3 * seconds_per_call(lambda: run(n, LR), 1, on) / n, NOT_ON_CPU
    if gpu:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            run(n, LR)
            torch.cuda.set_sync_debug_mode("default")
        row["host waits"] = waits = sum("called a synchronizing" in str(one.message) for one in told) / n
        found.expect(row["optimizer"] != "sgd" or waits == 0, f"{row}: SGD waits for the GPU")
    with torch.profiler.profile(activities=activities) as profiler:
        run(n, LR)
        if gpu:
            torch.cuda.synchronize()
    kernels = [(one.key, one.count, 1e-3 * own_microseconds(one, gpu)) for one in profiler.key_averages()]
    kernels = sorted((one for one in kernels if one[2] > 0), key=lambda one: -one[2])
    busy = sum(ms for *_, ms in kernels) / n
    row |= {"kernels": sum(count for _, count, _ in kernels) / n, "kernels, ms": busy, "busy": busy / row["ms"]}
    found.add(**row)
    top = "; ".join(f"{100 * ms / n / max(busy, 1e-9):.0f} % {key[:60]}" for key, _, ms in kernels[:5])
    found.note(f"{row['optimizer']} {row['precision']} {row['step']}: {top}")


def memory(found: Found, device: str, size: Size, folder: Path) -> None:
    """Whether anything grows over many minibatches, while the learning rate changes nine times."""
    on = choose_device(device)
    task, gpu = task_of(size, on), on.type == "cuda"
    for name, options in OPTIMIZERS.items():
        precision = PRECISIONS[gpu]
        run = steps(task, make_arithmetic(precision, on), make_optimizer(options, task.model.network), graphs=True)
        held: list[tuple[float, ...]] = []
        for tenth in range(10):
            run(size.minibatches // 10, LR * 0.9**tenth)
            if gpu:
                torch.cuda.synchronize()
            on_gpu = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if gpu else (0, 0)
            held.append(tuple(number / 2**20 for number in (*on_gpu, resident_bytes())))
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
    threads = {"parallel.cpu_threads": max(1, min(4, usable_cores() // 4))}
    for optimizer in ("sgd", "ng-sgd"):  # beside the others, on other cores
        arguments = train_arguments(
            recipe, folder / f"cpu-{optimizer}", "cpu", {"optimizer.name": optimizer, **threads}
        )
        references[optimizer] = start(*arguments)
    done: list[tuple[Row, float, Path]] = []
    for n, (optimizer, keys, tolerance) in enumerate(TRAININGS):
        run_dir, written = folder / f"run-{n}", " ".join(f"{key}={value}" for key, value in keys.items())
        if device == "cpu" and "allow_tf32" in keys:
            found.note(f"tf32: {NOT_ON_CPU}")
            continue
        with trying(found, f"{optimizer} {written}"):
            train(found, recipe, run_dir, device, {"optimizer.name": optimizer, **keys})
            row = found.add(optimizer=optimizer, where=device, keys=written, **figures(run_dir))
            done.append((row, tolerance, run_dir))
    for optimizer, process in references.items():
        found.expect(
            process.wait() in (0, LEARNED_NOTHING),
            f"{optimizer}: the training on the CPU ended with exit code {process.returncode}",
        )
        with trying(found, f"{optimizer} on the CPU"):
            found.add(optimizer=optimizer, where="cpu", keys="", **figures(folder / f"cpu-{optimizer}"))
    for row, tolerance, run_dir in done:
        with trying(found, f"{row['optimizer']} {row['keys']}"):
            expected, losses = (cv_losses(path) for path in (folder / f"cpu-{row['optimizer']}", run_dir))
            row["difference"] = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
            words = f"{row['optimizer']} {row['keys']}: CV losses {row['difference']:.1e} from those of the CPU"
            found.expect(row["difference"] <= tolerance, f"{words}, at most {tolerance:.0e} expected")
    found.save()


def workers(found: Found, device: str, size: Size, folder: Path) -> None:
    """Two workers that share one GPU, through host memory, against two on the CPU; and `ddnn bench --workers 2`."""
    if without_mpi := why_no_mpi():
        raise NotHere(without_mpi)
    recipe, losses = speech(folder, size), []
    keys = {"optimizer.name": "ng-sgd", "schedule.epochs": 1, "parallel.workers": 2, "parallel.gpu_transport": "host"}
    keys |= {"parallel.oversubscribe_gpus": "true", "parallel.averaging_period": 10}
    for n, where in enumerate(("cpu", device)):
        run_dir = folder / f"run-{n}"
        train(found, recipe, run_dir, where, keys)
        losses.append(cv_losses(run_dir)[-1])
        found.add(what="training", where=where, workers=2, **figures(run_dir))
    found.expect(abs(losses[1] / losses[0] - 1) <= 5e-3, f"CV loss {losses[1]:.6g}, on the CPU {losses[0]:.6g}")
    if size is not SIZES["full"]:
        found.note("ddnn bench --workers 2: not in a rehearsal, where it takes a minute")
        return
    arguments = ["bench", "--workers", "2", "--network", "an4", "--device", device, "--seconds", str(size.seconds / 2)]
    one = json.loads(ddnn(*arguments, "--json"))
    row = {"frames/s": one["aggregate_fps"], "communication": one["comm_fraction"], "waiting": one["wait_fraction"]}
    found.add(what="ddnn bench", where=device, workers=2, **row, **{"speed-up over one": one["speed_up"]})


def images(found: Found, device: str, size: Size, folder: Path) -> None:
    """The comparison of the MPI study of 2018: time and accuracy on images, one and two workers, CPU and GPU."""
    without_mpi, digits = why_no_mpi(), digits_data(folder / "digits", found, size)
    large = made_up_images(folder / "images", size.images, 28)
    for name, recipe, data, epochs in (
        ("digits", "digits.yaml", digits, size.digit_epochs),
        (f"{size.images[0]} images of 28 x 28", "fashion-mnist.yaml", large, size.image_epochs),
    ):
        for where, count in product(dict.fromkeys(("cpu", device)), (1, 2)):
            if count == 2 and without_mpi:
                found.note(f"two workers: {without_mpi}")
                continue
            run_dir = folder / f"{data.name}-{where}-{count}"
            keys = {"data.train": data / "train", "data.alignments": data / "train/pdfs.ark"}
            keys |= {"schedule.epochs": epochs, "parallel.workers": count, "precision": "float32"}
            keys |= {"parallel.oversubscribe_gpus": "true"}
            with trying(found, f"{name}, {count} on {where}"):
                train(found, ROOT / "recipes/images" / recipe, run_dir, where, keys)
                result = evaluate_run(run_dir, data / "test", data / "test/pdfs.ark", where)
                row = {"data": name, "where": where, "workers": count, "epochs": epochs, **figures(run_dir)}
                found.add(**row, **{"test accuracy": result.figures["frame_accuracy"]})


# What the parts share.


def task_of(size: Size, device: torch.device) -> RandomTask:
    """The random frames of `ddnn bench`, for the network `an4`."""
    return random_task(Shape(*size.shape) if size.shape else bench_step.NETWORKS["an4"], device)


def steps(task: RandomTask, arithmetic: Float32, optimizer: Sgd, graphs: bool) -> Steps:
    """The trainer's step: so many minibatches at a learning rate, each of whose losses is added up on the device.
    Returns whether it is a CUDA graph."""
    workspace = Workspace(task.model.network, task.minibatch, arithmetic)
    loader = task.batches(workspace)
    step = make_step(EagerStep(workspace, optimizer), loader.sample, LR, graphs=graphs)
    batches, sums = endless(loader), FigureSums(workspace.x.device)

    def run(minibatches: int, lr: float) -> bool:
        for batch in islice(batches, minibatches):
            sums.add(step(batch, lr), batch.num_frames)
        return isinstance(step, CudaGraphStep) and not step.disabled

    return run


def own_microseconds(event: Any, gpu: bool) -> float:
    """Of an average of torch's profiler: the time in kernels, on a CPU in the operator itself."""
    if not gpu:
        return float(event.self_cpu_time_total)

    return float(event.self_device_time_total) if event.device_type == torch.autograd.DeviceType.CUDA else 0.0


def resident_bytes() -> int:
    """Of this process, in memory."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


def ddnn_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ddnn.cli", *map(str, arguments)]


LEARNED_NOTHING = 3  # the exit code of a training whose model is no better than one that ignores its input


def ddnn(*arguments: object, allowed: Sequence[int] = (0,)) -> str:
    """What the command prints. RuntimeError: it failed, with the end of its messages."""
    process = subprocess.run(ddnn_command(*arguments), capture_output=True, text=True, check=False)
    sys.stderr.write(process.stderr)
    if process.returncode not in allowed:
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
    ddnn(*train_arguments(recipe, run_dir, device, keys), allowed=(0, LEARNED_NOTHING))  # of a few frames in the tests
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


def why_no_mpi() -> str:
    """Why several workers cannot be started, empty where they can."""
    try:
        find_mpirun(os.environ)
    except UserError as error:
        return error.message
    asked = subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True, check=False
    )
    return f"mpi4py cannot be used: {asked.stderr.strip().splitlines()[-1]}" if asked.returncode else ""


def digits_data(out: Path, found: Found, size: Size) -> Path:
    """scikit-learn's digits as data dirs; where it is missing, made-up ones of that number and size."""
    if importlib.util.find_spec("sklearn") and size is not SIZES["tiny"]:
        subprocess.run([sys.executable, ROOT / "recipes/images/digits.py", out], check=True)
        return out
    found.note("scikit-learn is not here: the digits are made up, of the same number and size")
    return made_up_images(out, (1437, 360) if size.shape is None else (900, 60), 8)


def made_up_images(out: Path, counts: tuple[int, int], side: int) -> Path:
    """Data dirs of images of ten faint patterns in noise, of which a good classifier misses some."""
    random = np.random.default_rng(1)
    out.mkdir(parents=True)
    noise = 37.0
    amplitude = (
        4.5 * noise / math.sqrt(2 * side * side)
    )  # half of the pixels of two patterns differ: 4.5 deviations apart
    patterns = 128 + random.choice([-amplitude, amplitude], (10, side, side))
    for split, count in zip(("train", "test"), counts, strict=True):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        values = patterns[labels] + random.normal(0, noise, (count, side, side))
        files = out / f"{split}-images.idx", out / f"{split}-labels.idx"
        write_idx(files[0], values.clip(0, 255).astype(np.uint8))
        write_idx(files[1], labels)
        convert_idx(
            *files, out / split, ConvertOptions(name=split, speakers=20, images_per_utterance=max(1, count // 500))
        )
    return out


PARTS: dict[str, Callable[[Found, str, Size, Path], None]] = {
    "machine": machine,
    "tests": cuda_tests,
    "bench-an4": bench("an4"),
    "bench-swbd": bench("swbd"),
    "train": training,
    "profile": profile,
    "memory": memory,
    "workers": workers,
    "images": images,
    "bench-cnn": bench("cnn"),
}
"""By the names of gpu.py."""


def run_part(name: str, device: str, size: str, result: Path) -> None:
    """In the process of a part. Where it fails the last line that is printed says why."""
    found = Found(result)
    log = logging.getLogger("ddnn")
    log.setLevel(logging.INFO)
    log.addHandler(Notes(found))
    found.save()
    with tempfile.TemporaryDirectory(prefix="ddnn-gpu-") as folder:
        try:
            PARTS[name](found, device, SIZES[size], Path(folder))
        except NotHere as error:
            found.skipped = str(error)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}"[:800])
    found.save()
