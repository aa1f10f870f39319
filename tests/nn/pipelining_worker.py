"""One of two workers that share a network by PyTorch's torch.distributed.pipelining: loss and gradient of a minibatch, on gloo.

    python pipelining_worker.py RANK FOLDER

FOLDER has `case.pt`: `x`, `labels`, and the weights and biases of layers of sigmoids, the last one of logits. Each worker has
half of the layers. Leaves RANK.pt there: the loss summed over the minibatch (0 on the first worker), and the gradients of the own
layers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from dtensor_worker import start
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main(rank: int, folder: Path) -> None:
    case, layers, model = start(rank, folder)
    half = len(layers) // 2
    own = model[2 * half :] if rank else model[: 2 * half]
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
