"""Columns against PyTorch's own tensor parallelism, DTensor with ColwiseParallel layers and a loss over split logits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from column_split import Float64, minibatches, new_network, on_columns
from forked_python import forked_python
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.nn.network import Network, Workspace
from ddnn.nn.objective import CrossEntropy

WORKER = Path(__file__).with_name("dtensor_worker.py")


def by_pytorch(worker: Path, folder: Path, whole: Network, x: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Loss and flat gradient of each of two processes that run the program `worker`."""
    layers = [[views["weight"], views["bias"]] for views in whole.views]
    torch.save({"x": x, "labels": labels, "layers": layers}, folder / "case.pt")
    workers = [subprocess.Popen([forked_python(), worker, str(rank), folder]) for rank in range(2)]
    try:
        assert [worker.wait(240) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    found = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return [(one["loss"], torch.cat([part.flatten() for of in one["gradients"] for part in of])) for one in found]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_loss_and_gradients_are_those_of_dtensor(tmp_path: Path) -> None:
    """Of each worker's own rows; 2 divides neither the hidden layers' width nor the pdfs."""
    whole = new_network(20, 3, 33, 27, dtype=torch.float64)
    ((x, labels),) = minibatches(whole, 1, 40)

    def work(network: Network) -> tuple[Tensor, Tensor]:
        workspace = Workspace(network, len(x), Float64())
        workspace.x.copy_(x)
        loss, _ = CrossEntropy(workspace)(workspace.forward(), Batch(workspace.x, labels), workspace.derivative)
        workspace.backward()
        return loss, workspace.gradient(torch.empty_like(network.parameters))

    expected = by_pytorch(WORKER, tmp_path, whole, x, labels)
    for own, other in zip(on_columns(2, whole, work), expected, strict=True):
        for found, wanted in zip(own, other, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
