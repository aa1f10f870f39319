"""Which files and functions of ddnn a minibatch, a checkpoint, a resume and decode-prep run through: numbers of the table in
docs/development/design.md.

    python tests/structure.py        -v names the files

Trains a tiny network in this process and follows the calls of ddnn's own functions with `sys.setprofile`. A file and a
function count once, a call each time.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from distributed.threads import run_workers
from jobs import make_job

import ddnn
from ddnn.decoding.prepare import prepare_decoding
from ddnn.distributed.communicator import Communicator
from ddnn.recipe.load import load_recipe
from ddnn.training.job import build_trainer, run_training
from ddnn.training.state import CheckpointPolicy

PACKAGE = str(Path(ddnn.__file__).parent) + "/"


@contextmanager
def followed(name: str, function: Callable[..., Any], first: int = 1, minibatches: int = 0) -> Iterator[None]:
    """Prints what the `first` call of `function` runs through; or all that so many minibatches do, each of which ends with
    a call of `function`, from the one after that call on."""
    code, calls, number, inside = function.__code__, list[tuple[str, str]](), 0, False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number, inside
        if frame.f_code is code and event == "call":
            number += 1
            inside = inside or (number == first and not minibatches)
        if inside and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))
        if frame.f_code is code and event == "return":
            inside = first <= number < first + minibatches

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
    files = sorted({file for file, _ in calls})
    print(f"| {name} | {len(set(calls))} | {len(files)} | {len(calls)} |", flush=True)
    if "-v" in sys.argv:
        print("   ", ", ".join(files))


def main() -> None:
    print("| | functions | files | calls |\n|---|---|---|---|")
    folder = Path(tempfile.mkdtemp())
    job = make_job(folder / "job")
    minibatch = CheckpointPolicy.after_minibatch

    def train(run: Path, *settings: str, comm: Communicator | None = None, resume: bool = False) -> None:
        run_training(load_recipe(job.recipe, settings), run, "cpu", comm, resume=resume)

    with followed("minibatch, SGD", minibatch, 12, 1):
        train(folder / "sgd")
    ng_sgd = ("optimizer={name: ng-sgd, rank_in: 3, rank_out: 4}",)
    with followed("minibatch, NG-SGD", minibatch, 12, 1):
        train(folder / "ng-sgd", *ng_sgd)

    def work(comm: Communicator) -> None:
        settings = (*ng_sgd, "parallel.averaging_period=4", "parallel.workers=2")
        if comm.rank:
            train(folder / "two", *settings, comm=comm)
        else:
            with followed("four minibatches and an averaging, NG-SGD, two workers", minibatch, 4, 4):
                train(folder / "two", *settings, comm=comm)

    run_workers(2, work)
    with followed("a checkpoint is written, NG-SGD", CheckpointPolicy._save):
        train(folder / "saved", *ng_sgd)
    interrupted = ("schedule.max_epochs=4",)
    with followed("`build_trainer` on a resume", build_trainer):
        train(folder / "sgd", *interrupted, resume=True)
    with followed("`decode-prep`", prepare_decoding):
        prepare_decoding(folder / "sgd", job.data, folder / "decode")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
