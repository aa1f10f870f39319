"""How long a checkpoint takes, and what share of the training time that is: run by hand, printed.

    PYTHONPATH=tests python tests/training/checkpoint_cost.py --directory RUN_DIRS_DISK

Trains nothing: it saves and reads tensors of the sizes that a training with NG-SGD has (parameters and the best
parameters in float32, momentum with --momentum, the Fisher matrices of ranks 20 and 80), as one worker.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from ddnn.distributed.communicator import SingleProcess
from ddnn.runs.checkpoint import CheckpointStore

NETWORKS = {"AN4, 440-4x512-616": [440, *[512] * 4, 616], "Switchboard, 440-6x2048-8806": [440, *[2048] * 6, 8806]}
RANK_IN, RANK_OUT = 20, 80


def state_of(widths: list[int], *, momentum: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The global tensors and those of one worker, of a training of this network."""
    sizes = list(pairwise(widths))
    parameters = torch.randn(sum((inputs + 1) * outputs for inputs, outputs in sizes))
    rank = {"network.parameters": parameters.clone(), "losses.sums": torch.zeros(2, 3, dtype=torch.float64)}
    if momentum:
        rank["momentum_buffer"] = torch.randn(len(parameters))
    for layer, (inputs, outputs) in enumerate(sizes):
        rank[f"preconditioner.{2 * layer}.w"] = torch.randn(min(RANK_IN, inputs), inputs + 1)
        rank[f"preconditioner.{2 * layer + 1}.w"] = torch.randn(min(RANK_OUT, outputs - 1), outputs)
    return {"best.parameters": parameters}, rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: the temporary directory)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=2.0, help="checkpoint.interval_minutes")
    parser.add_argument("--momentum", action="store_true")
    options = parser.parse_args()
    for name, widths in NETWORKS.items():
        shared, own = state_of(widths, momentum=options.momentum)
        size = sum(t.numel() * t.element_size() for part in (shared, own) for t in part.values())
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            store, seconds = CheckpointStore(Path(folder) / "checkpoints", 2, SingleProcess()), []
            for number in range(options.repeats):
                started = time.perf_counter()
                assert store.save({"epoch": number, "minibatch": 0}, shared, own)
                seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            assert store.latest() is not None
            reading = time.perf_counter() - started
        median = statistics.median(seconds)
        print(
            f"{name}: {own['parameters'].numel() / 1e6:.1f} M parameters, {size / 1e6:.0f} MB; saved in "
            f"{median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), {100 * median / (60 * options.minutes):.2f} % "
            f"of {options.minutes:g} minutes; read in {reading:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
