"""One of two workers that share a network by PyTorch's DTensor: loss and gradient of a minibatch, on gloo.

    python dtensor_worker.py RANK FOLDER

FOLDER has `case.pt`: `x`, `labels`, and the weights and biases of layers of sigmoids, the last one of logits. Leaves
RANK.pt there: the loss summed over the minibatch, and of each layer the rows of the gradients that this worker has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module


def start(rank: int, folder: Path) -> tuple[dict[str, Any], list[torch.nn.Linear], torch.nn.Sequential]:
    """Joins the other worker; the case, its layers, and the whole network of them."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    case = torch.load(folder / "case.pt")
    layers = [torch.nn.Linear(*weight.shape[::-1], dtype=weight.dtype) for weight, _ in case["layers"]]
    for layer, (weight, bias) in zip(layers, case["layers"], strict=True):
        layer.load_state_dict({"weight": weight, "bias": bias})
    return case, layers, torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Sigmoid())))[:-1]


def main(rank: int, folder: Path) -> None:
    case, layers, model = start(rank, folder)
    split = {str(2 * i): ColwiseParallel(output_layouts=Replicate()) for i in range(len(layers) - 1)}
    split[str(2 * len(layers) - 2)] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (2,)), split)
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(model(case["x"]), case["labels"], reduction="sum")
        loss.backward()
    gradients = [[p.grad.to_local() for p in layer.parameters()] for layer in layers]
    torch.save({"loss": loss.full_tensor().detach(), "gradients": gradients}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
