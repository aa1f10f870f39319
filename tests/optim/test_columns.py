"""Trainings of networks that workers hold by columns are those of one worker, to rounding. Workers are threads."""

from __future__ import annotations

import pytest
import torch
from column_split import Float64, difference, minibatches, new_network, on_columns, trained
from torch import Tensor

from ddnn.nn.arithmetic import Float32
from ddnn.nn.network import Network
from ddnn.optim.sgd import Sgd, SgdOptions

STEPS = 20
PLAIN = {
    "plain": SgdOptions(),
    "momentum and l2": SgdOptions(momentum=0.9, l2=1e-5),
    "short gradients": SgdOptions(momentum=0.5, max_gradient_norm=0.05),
}


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sgd(columns: int, name: str, dtype: torch.dtype) -> None:
    whole = new_network(40, 3, 64, 50, dtype=dtype)
    data, arithmetic = minibatches(whole, STEPS, 64), Float64() if dtype == torch.float64 else Float32()

    def train(network: Network) -> list[Tensor]:
        network = Network(network.layers, network.parameters.clone(), partition=network.partition)
        return trained(network, lambda network: Sgd(network, PLAIN[name]), data, arithmetic, 2e-3)[0]

    expected = train(whole)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    for found in on_columns(columns, whole, train):
        assert max(map(difference, found, expected)) <= bound
