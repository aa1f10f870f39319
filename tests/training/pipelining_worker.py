"""One of two workers that share a network by PyTorch's torch.distributed.pipelining: loss and gradient of a minibatch, on gloo.

    python pipelining_worker.py RANK FOLDER

FOLDER has `case.pt`: `x`, `labels`, and the weights and biases of layers of sigmoids, the last one of logits. Each worker has
half of the layers. Leaves RANK.pt there: the loss summed over the minibatch (0 on the first worker), and the gradients of the own
layers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    case = torch.load(folder / "case.pt")
    layers = [torch.nn.Linear(*weight.shape[::-1], dtype=weight.dtype) for weight, _ in case["layers"]]
    for layer, (weight, bias) in zip(layers, case["layers"], strict=True):
        layer.load_state_dict({"weight": weight, "bias": bias})
    half = len(layers) // 2
    modules = [module for layer in layers for module in (layer, torch.nn.Sigmoid())][:-1]
    own = torch.nn.Sequential(*(modules[2 * half :] if rank else modules[: 2 * half]))
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    schedule, losses = ScheduleGPipe(stage, 4, loss_fn=criterion, scale_grads=False), list[torch.Tensor]()
    if rank == 0:
        schedule.step(case["x"])
    else:
        schedule.step(target=case["labels"], losses=losses)
    gradients = [[p.grad for p in layer.parameters()] for layer in (layers[half:] if rank else layers[:half])]
    torch.save({"loss": sum(losses, torch.zeros(())).detach(), "gradients": gradients}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
