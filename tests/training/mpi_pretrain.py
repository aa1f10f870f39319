"""Run by mpirun: a pretraining in which worker 1 meets NaN in two minibatches; its result is checked in test_pretrain.py.

Arguments: the recipe and the run dir.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor

from ddnn.distributed.mpi import init_communicator
from ddnn.nn.rbm import Cd1Options, Rbm, cd1_step
from ddnn.recipe.load import load_recipe
from ddnn.training import pretraining
from ddnn.training.job import run_pretraining

DAMAGED: dict[str, int] = {"gauss": 4, "bernoulli": 1}
"""The minibatch, counted from 0, of the first RBM of each kind that is damaged."""


def damaged_step(rbm: Rbm, visible: Tensor, options: Cd1Options, generator: torch.Generator) -> Tensor:
    """As `cd1_step`, of NaN in the minibatches of `DAMAGED`."""
    kind = "gauss" if rbm.gauss else "bernoulli"
    remaining = DAMAGED[kind] = DAMAGED[kind] - 1
    return cd1_step(rbm, torch.full_like(visible, torch.nan) if remaining == -1 else visible, options, generator)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    comm = init_communicator()
    if comm.rank == 1:
        pretraining.cd1_step = damaged_step
    settings = ["parallel.averaging_period=3", "parallel.pretrain_data=sharded"]
    run_pretraining(load_recipe(Path(sys.argv[1]), settings), Path(sys.argv[2]), "cpu", comm)
