"""The same results before and after: trains about thirty tiny networks and compares digests of what they leave.

    python tests/same_results.py --record FILE.json            run everything, write the results
    python tests/same_results.py --compare FILE.json           run everything, list what differs (exit 1)
    python tests/same_results.py --compare FILE.json --only ring --only resume-1 --jobs 2

`make same-results RECORD=1` records into `.same-results.json`; `make same-results` compares with it.

The results hold for one machine only: other processors, PyTorch versions and BLAS libraries round differently. Record
on the code before a change and compare on the code after it, on the same machine.

The script drives nothing but the command line (`python -m ddnn.cli`, with the interpreter that runs it) and reads
nothing but files and printed JSON, so that it runs unchanged on both sides of a change of the code. Where recipe keys
were renamed, the recipes here have the new keys, and are translated for code that refuses them. The bf16 runs use the
compiled kernels only on a processor with AVX512-BF16.

Compared are, for each run:

- parameters: SHA-256 of each tensor of the final network, sorted, so that a renamed tensor still compares;
- metrics: epoch, split, loss, frame accuracy, learning rate and acceptance of each epoch, exactly;
- outputs of evaluate, decode-prep (log-likelihoods), export (nnet1) and score on one of the networks.

A run that is stopped within an epoch and resumed must also equal the same run undisturbed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from safetensors import numpy as safetensors_numpy

Results = dict[str, Any]
Recipe = dict[str, Any]

STOPPED = 75
"""Exit code of a training that a signal ended, to be resumed."""
SECONDS = 180
"""Longest time for one command."""

# New name -> old name of recipe keys, written section.key; `schedule` differs by its name.
OLD_KEYS = {
    "minibatch_size": "minibatch",
    "cuda_graphs": "graphs",
    "data.normalize": "data.normalise",
    "data.num_pdfs": "data.pdfs",
    "data.feature_dtype": "data.store",
    "data.feature_device": "data.place",
    "data.cache_dir": "data.cache",
    "data.loader_processes": "data.loaders",
    "data.cv.speakers": "data.cv.speakers_file",
    "schedule.initial_learning_rate": "schedule.initial",
    "schedule.final_learning_rate": "schedule.final",
    "schedule.max_epochs": "schedule.epochs",
    "schedule.start_halving_impr": "schedule.start_halving",
    "schedule.end_halving_impr": "schedule.end_halving",
    "schedule.keep_lr_epochs": "schedule.keep_epochs",
    "pretrain.dbn": "pretrain.from",
    "pretrain.epochs": "pretrain.passes",
    "pretrain.minibatch_size": "pretrain.minibatch",
    "pretrain.gaussian_learning_rate": "pretrain.gauss_rate",
    "pretrain.learning_rate": "pretrain.rate",
    "parallel.strategy": "parallel.reduce",
    "parallel.averaging_period": "parallel.every",
    "parallel.warmup": "parallel.start",
    "parallel.warmup_minibatches": "parallel.start_minibatches",
    "parallel.local_momentum": "parallel.momentum_rule",
    "parallel.comm_dtype": "parallel.wire",
    "parallel.pretrain_data": "parallel.pretrain",
    "checkpoint.interval_minibatches": "checkpoint.every_minibatches",
    "checkpoint.keep_last": "checkpoint.keep",
}
OLD_VALUES = {
    ("parallel.strategy", "gradient-all-reduce"): "gradient",
    ("parallel.warmup", "single-worker"): "one-worker",
}

BASE: Recipe = {
    "seed": 3,
    "data": {
        "train": "corpus/train",
        "alignments": "corpus/ali",
        "splice": 2,
        "cv": {"speakers": "corpus/cv_speakers.txt"},
    },
    "model": {"hidden_layers": 2, "hidden_units": 32},
    "minibatch_size": 64,
    "precision": "float32",
    "schedule": {"name": "exponential", "initial_learning_rate": 0.01, "final_learning_rate": 0.004, "epochs": 2},
}
NG_SGD: Recipe = {
    "optimizer": {"name": "ng-sgd", "rank_in": 5, "rank_out": 8, "update_period": 2, "num_samples_history": 500.0}
}
RBM: Recipe = {"init": "rbm", "pretrain": {"epochs": [2, 1], "minibatch_size": 50, "learning_rate": 0.2}}
# Epochs of a second and more, so that a signal that follows a checkpoint arrives within one.
LONG: Recipe = {"minibatch_size": 8, "checkpoint": {"interval_minibatches": 60, "keep_last": 2}}


def on(workers: int, **parallel: Any) -> Recipe:
    """So many workers, which average every 5 minibatches."""
    return {"parallel": {"workers": workers, "averaging_period": 5, **parallel}}


TRAININGS: dict[str, list[Recipe]] = {
    "sgd": [],
    "sgd-relu-l2": [
        {"model": {"activation": "relu"}, "optimizer": {"l2": 1e-4}, "data": {"cmvn": "mean", "deltas": 1}}
    ],
    "sgd-bf16": [{"precision": "bf16"}],
    "ng-sgd": [NG_SGD],
    "ng-sgd-bf16": [NG_SGD, {"precision": "bf16"}],
    "momentum": [{"optimizer": {"momentum": 0.5, "l2": 1e-5}, "model": {"activation": "tanh"}}],
    "float16-features": [{"data": {"feature_dtype": "float16", "loader_processes": 2}}],
    "newbob": [
        {
            "schedule": {
                "name": "newbob",
                "initial_learning_rate": 0.4,
                "max_epochs": 5,
                "final_learning_rate": None,
                "epochs": None,
            }
        }
    ],
    "newbob-accuracy-2": [
        {
            "schedule": {
                "name": "newbob",
                "criterion": "frame-accuracy",
                "initial_learning_rate": 0.08,
                "max_epochs": 5,
                "keep_lr_epochs": 1,
                "final_learning_rate": None,
                "epochs": None,
            }
        },
        on(2),
    ],
    "rbm": [RBM],
    "rbm-2": [RBM, on(2)],
    "rbm-replicated-2": [RBM, on(2, pretrain_data="replicated")],
    "all-reduce-2": [on(2)],
    "all-reduce-4-momentum": [on(4, local_momentum="average"), {"optimizer": {"momentum": 0.5}}],
    "all-reduce-2-ng-bf16": [NG_SGD, {"precision": "bf16"}, on(2)],
    "all-reduce-3-ng": [NG_SGD, on(3)],
    "butterfly-4": [on(4, strategy="butterfly")],
    "butterfly-3": [on(3, strategy="butterfly")],
    "ring-3": [on(3, strategy="ring")],
    "hopping-ring-4": [NG_SGD, on(4, strategy="hopping-ring")],
    "gradient-2": [on(2, strategy="gradient-all-reduce")],
    "gradient-3-ng": [NG_SGD, on(3, strategy="gradient-all-reduce")],
    "bmuf-2": [on(2, strategy="bmuf", block_momentum=0.5)],
    "bmuf-4-nesterov": [on(4, strategy="bmuf", nesterov=True), {"optimizer": {"momentum": 0.3}}],
    "overlap-2": [on(2, overlap=True)],
    "overlap-3-bf16-exchange": [NG_SGD, on(3, overlap=True, comm_dtype="bfloat16")],
    "bf16-exchange-2": [on(2, comm_dtype="bfloat16")],
    "bf16-exchange-ring-3": [on(3, comm_dtype="bfloat16", strategy="ring")],
    "bf16-exchange-gradient-2": [on(2, comm_dtype="bfloat16", strategy="gradient-all-reduce")],
    "warmup-single-2": [on(2, warmup="single-worker", warmup_minibatches=20)],
    "warmup-all-reduce-3": [on(3, warmup="all-reduce", warmup_minibatches=20)],
}
"""Name -> what the recipe has beyond BASE; a number in the name is that of workers."""

RESUMED: dict[str, list[Recipe]] = {
    "resume-1": [LONG, NG_SGD, {"optimizer": {"momentum": 0.3}}],
    "resume-2-bmuf": [LONG, {"optimizer": {"momentum": 0.3}}, on(2, strategy="bmuf", local_momentum="keep")],
    "resume-3-hopping-ring": [LONG, NG_SGD, on(3, strategy="hopping-ring")],
    "resume-2-overlap": [LONG, on(2, overlap=True, comm_dtype="bfloat16")],
}
"""As TRAININGS; stopped by a signal within the first epoch, then resumed."""

REJECTING = {"newbob", "newbob-accuracy-2"}
"""Trainings that must reject an epoch, or they would not show what they are here for."""


def merged(parts: list[Recipe]) -> Recipe:
    """BASE with each of the parts laid over it, section by section; None removes a key."""
    recipe = copy.deepcopy(BASE)
    for part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                section = recipe.setdefault(key, {})
                section.update(value)
                recipe[key] = {k: v for k, v in section.items() if v is not None}
            else:
                recipe[key] = value
    return recipe


def with_old_keys(recipe: Recipe, prefix: str = "") -> Recipe:
    """The same recipe for code from before the renaming."""
    old: Recipe = {}
    for key, value in recipe.items():
        path = prefix + key
        if isinstance(value, dict):
            old[key] = with_old_keys(value, f"{path}.")
        else:
            old[OLD_KEYS.get(path, path).rpartition(".")[2]] = OLD_VALUES.get((path, str(value)), value)
    return old


class Failed(Exception):
    """A command ended otherwise than expected, or left something that cannot be compared."""


class Runner:
    """Runs commands of ddnn in one folder that holds the corpus."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.old_keys = folder, False
        foreign = ("SLURM_", "PMIX_", "OMPI_", "PMI_", "DDNN_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self.environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """`ddnn WORDS`, its output appended to `log`."""
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "ddnn.cli", *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def finish(self, process: subprocess.Popen[bytes], log: Path, expected: int = 0) -> None:
        """Waits for the end; raises Failed with the last of the output where the exit code is another one."""
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            process.terminate()
            time.sleep(5)
            process.kill()
            process.wait()
            raise Failed(f"still running after {SECONDS} s: {log.read_text()[-2000:]}") from error
        if code != expected:
            raise Failed(f"exit code {code}, expected {expected}: {log.read_text()[-2000:]}")

    def ddnn(self, name: str, *words: str) -> Path:
        """`ddnn WORDS` to its successful end; returns the file of its output."""
        log = self.folder / f"{name}.out"
        log.unlink(missing_ok=True)
        self.finish(self.start(*words, log=log), log)
        return log

    def json(self, name: str, *words: str) -> Any:
        """What `ddnn WORDS --json` printed on stdout."""
        done = subprocess.run(
            [sys.executable, "-m", "ddnn.cli", *words, "--json"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{name}: exit code {done.returncode}: {done.stderr.decode()[-2000:]}")
        return json.loads(done.stdout)

    def choose_keys(self) -> None:
        """Finds out whether the code has the recipe keys from before the renaming."""
        recipe = self.write_recipe("keys", [])
        try:
            self.ddnn("keys", "train", recipe, "--dry-run")
        except Failed:
            self.old_keys = True
            self.ddnn("keys", "train", self.write_recipe("keys", []), "--dry-run")

    def write_recipe(self, name: str, parts: list[Recipe]) -> str:
        """Writes the recipe; returns its path relative to the folder."""
        recipe = merged(parts)
        (self.folder / f"{name}.yaml").write_text(
            yaml.safe_dump(with_old_keys(recipe) if self.old_keys else recipe, sort_keys=False)
        )
        return f"{name}.yaml"

    def train(self, name: str, recipe: str) -> Path:
        """Trains into a folder of this name; returns it."""
        self.ddnn(name, "train", recipe, "--run-dir", name, "--device", "cpu")
        return self.folder / name


def sha256(data: bytes) -> str:
    """The first half of the digest, which is enough here."""
    return hashlib.sha256(data).hexdigest()[:32]


def tensors_of(path: Path) -> list[str]:
    """A digest of each tensor of a safetensors file, sorted; names and shapes may differ, values may not."""
    loaded = safetensors_numpy.load_file(path)
    return sorted(f"{array.dtype}x{array.size} {sha256(array.tobytes())}" for array in loaded.values())


def metrics_of(run: Path) -> list[list[Any]]:
    """The rows of epochs, without times and speeds."""
    kept = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("type", "epoch") == "epoch" and row.get("split") in ("train", "cv"):
            values = ("epoch", "split", "loss", "frame_accuracy", "learning_rate", "frames", "accepted")
            row["learning_rate"] = row.get(
                "schedule_learning_rate", row.get("learning_rate")
            )  # as it was recorded before
            kept.append([row.get(key, True if key == "accepted" else None) for key in values])
    return kept


def results_of(run: Path) -> Results:
    """Final parameters and metrics of a training."""
    return {"parameters": tensors_of(run / "final.safetensors"), "metrics": metrics_of(run)}


def train_once(runner: Runner, name: str, parts: list[Recipe]) -> Results:
    """One training from beginning to end."""
    results = results_of(runner.train(name, runner.write_recipe(name, parts)))
    if name in REJECTING and all(row[-1] for row in results["metrics"]):
        raise Failed("no epoch was rejected: choose a higher learning rate")
    return results


def stop_and_resume(runner: Runner, name: str, parts: list[Recipe]) -> Results:
    """One training undisturbed, then the same one stopped within its first epoch and resumed: equal, or Failed."""
    recipe = runner.write_recipe(name, parts)
    expected = results_of(runner.train(f"{name}-whole", recipe))
    run, log = runner.folder / name, runner.folder / f"{name}.out"
    words = ("train", recipe, "--run-dir", name, "--device", "cpu")
    process = runner.start(*words, log=log)
    until = time.monotonic() + SECONDS
    while process.poll() is None and not any(run.glob("checkpoints/*/*.json")):
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    runner.finish(process, log, expected=STOPPED)
    if any(row[0] > 0 for row in metrics_of(run)):
        raise Failed("the signal came after the first epoch: make the epoch longer")
    process = runner.start(*words, "--resume", log=log)
    runner.finish(process, log)
    found = results_of(run)
    for what in expected:
        if found[what] != expected[what]:
            raise Failed(f"{what} of the resumed training differ from those of the undisturbed one")
    return found


def synth(runner: Runner) -> Results:
    """The corpus of all others."""
    runner.ddnn("synth", "synth", "corpus", *["--hours", "0.05", "--speakers", "10", "--dim", "8", "--pdfs", "120"])
    corpus = runner.folder / "corpus"
    files = sorted(path for path in corpus.rglob("*") if path.is_file() and path.suffix != ".scp")
    return {str(path.relative_to(corpus)): sha256(path.read_bytes()) for path in files}


def use_network(runner: Runner) -> Results:
    """evaluate, decode-prep, score and export on one trained network."""
    recipe = runner.write_recipe("commands", [NG_SGD, {"schedule": {"epochs": 6, "initial_learning_rate": 0.02}}])
    results = results_of(runner.train("commands", recipe))
    test, ali = "corpus/test", "corpus/ali_test"
    evaluated = runner.json("evaluate", "evaluate", "commands", "--data", test, "--alignments", ali, "--device", "cpu")
    results["evaluate"] = {key: evaluated[key] for key in ("loss", "frame_accuracy", "frames")}
    runner.ddnn("decode-prep", "decode-prep", "commands", "--data", test, "--out", "decode", "--device", "cpu")
    results["decode-prep"] = [sha256(path.read_bytes()) for path in sorted(runner.folder.glob("decode/*.ark"))]
    results["counts"] = sha256((runner.folder / "decode/ali_train_pdf.counts").read_bytes())
    score = ("--graph", "corpus/graph", "--model", "corpus/ali/final.mdl", "--text", "corpus/test/text")
    scored = runner.json("score", "score", "decode", *score, "--acoustic-scale", "0.1,0.2,0.5")
    figures = ("acoustic_scale", "wer", "insertions", "deletions", "substitutions", "words")
    results["score"] = [[at[key] for key in figures] for at in scored["scales"]]
    runner.ddnn("export", "export", "commands", "--out", "nnet1")
    results["export"] = {path.name: sha256(path.read_bytes()) for path in sorted(runner.folder.glob("nnet1/*.nnet"))}
    return results


def pretrain_alone(runner: Runner) -> Results:
    """`ddnn pretrain` on two workers, then a training that starts from what it left."""
    parts = [RBM, on(2)]
    runner.ddnn("dbn-pretrain", "pretrain", runner.write_recipe("dbn", parts), "--run-dir", "dbn", "--device", "cpu")
    found = [path for name in ("stack", "dbn") for path in runner.folder.glob(f"dbn/{name}.safetensors")]
    if not found:
        raise Failed("ddnn pretrain left no dbn.safetensors")
    recipe = runner.write_recipe("from-dbn", [{"init": "rbm", "pretrain": {"dbn": "dbn"}}])
    return {"dbn": tensors_of(found[0]), **results_of(runner.train("from-dbn", recipe))}


def cached(runner: Runner) -> Results:
    """Two trainings over one cache of features, the first of which makes it."""
    recipe = runner.write_recipe("cached", [{"data": {"cache_dir": "cache", "cmvn": "mean-variance"}}])
    made, found = (results_of(runner.train(name, recipe)) for name in ("cached-first", "cached-second"))
    if made != found:
        raise Failed("the training from the cache differs from the one that made the cache")
    return found


def all_runs() -> dict[str, Callable[[Runner], Results]]:
    """Every run by its name; `synth` is the first and serves the others."""

    def training(name: str, parts: list[Recipe]) -> Callable[[Runner], Results]:
        return lambda runner: train_once(runner, name, parts)

    def resumed(name: str, parts: list[Recipe]) -> Callable[[Runner], Results]:
        return lambda runner: stop_and_resume(runner, name, parts)

    runs: dict[str, Callable[[Runner], Results]] = {"commands": use_network, "dbn": pretrain_alone, "cached": cached}
    runs |= {name: resumed(name, parts) for name, parts in RESUMED.items()}
    runs |= {name: training(name, parts) for name, parts in TRAININGS.items()}
    return runs


def run_all(options: argparse.Namespace, folder: Path) -> tuple[Results, int]:
    """The results of the chosen runs, and how many failed."""
    runner = Runner(folder)
    chosen = {name: run for name, run in all_runs().items() if not options.only or any(o in name for o in options.only)}
    results: Results = {"synth": synth(runner)}
    runner.choose_keys()
    failures = 0

    def timed(item: tuple[str, Callable[[Runner], Results]]) -> tuple[str, Results | Failed, float]:
        started = time.monotonic()
        try:
            found: Results | Failed = item[1](runner)
        except (Failed, OSError, KeyError, ValueError) as error:
            found = Failed(str(error) or repr(error))
        return item[0], found, time.monotonic() - started

    with ThreadPoolExecutor(options.jobs) as pool:
        for name, found, seconds in pool.map(timed, chosen.items()):
            if isinstance(found, Failed):
                failures += 1
                print(f"FAILED   {name}: {found}", flush=True)
                continue
            results[name] = found
            print(f"ran      {name}  {seconds:.1f} s", flush=True)
    return results, failures


def first_difference(found: Any, expected: Any) -> str:
    """Where two results differ, in a few words."""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"{len(found)} entries, {len(expected)} expected"
        at = next(i for i in range(len(found)) if found[i] != expected[i])
        return f"entry {at}: {found[at]}, expected {expected[at]}"
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        return f"{keys[0]}: {found.get(keys[0])}, expected {expected.get(keys[0])}"
    return f"{found}, expected {expected}"


def compare(found: Results, expected: Results) -> int:
    """Prints what differs; returns how many runs do. Runs that only one side has are named."""
    different = 0
    for name, results in found.items():
        if name not in expected:
            print(f"NEW      {name}: nothing recorded to compare with")
            continue
        wrong = [what for what in results if results[what] != expected[name].get(what)]
        different += bool(wrong)
        for what in wrong:
            print(f"DIFFERS  {name} {what}: {first_difference(results[what], expected[name].get(what))}")
    print(f"{len(found)} runs, {different} differ")
    return different


def machine() -> dict[str, str]:
    """What the results hold for."""
    processor = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {"processor": processor[1] if processor else platform.machine(), "python": platform.python_version()}


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE", help="write the results there; with --only, update it")
    what.add_argument("--compare", type=Path, metavar="FILE", help="compare with the results there")
    what.add_argument("--list", action="store_true", help="print the names of the runs")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only runs with this in their name; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new folder and leave it")
    options = parser.parse_args()
    if options.list:
        print("\n".join(["synth", *all_runs()]))
        return 0
    with tempfile.TemporaryDirectory(prefix="ddnn-same-results-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results, failures = run_all(options, folder.resolve())
    if options.record:
        if options.only and options.record.exists():
            results = json.loads(options.record.read_text())["runs"] | results
        options.record.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")
        print(f"{len(results)} runs recorded in {options.record}")
        return 1 if failures else 0
    recorded = json.loads(options.compare.read_text())
    if recorded["machine"] != machine():
        print(f"recorded on another machine: {recorded['machine']}; this one is {machine()}")
    return 1 if compare(results, recorded["runs"]) or failures else 0


if __name__ == "__main__":
    sys.exit(main())
