"""Layers that ddnn does not have go through a whole training: checkpoints, resume, evaluation, files."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from toy_layers import TOYS, Filters, Gain, Pool

from ddnn.averaging.averager import Averager
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.nn.layer import Layer
from ddnn.nn.layers import LAYERS, Affine
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.run_dir import load_run
from ddnn.training import initial_model, options
from ddnn.training.evaluation import evaluate_run
from ddnn.training.job import run_training


def toy_network(recipe: Recipe, input_dim: int, num_pdfs: int, *, on_dbn: bool = False) -> tuple[Layer, ...]:
    """A convolution, a pooling, a gain, and two affine layers of different widths."""
    filters = Filters(input_dim, 4, 4, 5)
    pool = Pool(filters.patches // 2 * 2, 5) if filters.patches % 2 == 0 else None
    lower: list[Layer] = [filters] if pool is None else [filters, pool]
    width = lower[-1].output_dim
    return (*lower, Gain(width), Affine(width, 7, "sigmoid"), Affine(7, num_pdfs, "softmax"))


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("float32", "momentum: 0.5"), ("bf16", "name: ng-sgd, rank_in: 3")]
)
def test_a_network_of_toys_is_trained_stopped_resumed_and_evaluated(
    precision: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, layer in TOYS.items():
        monkeypatch.setitem(LAYERS, kind, layer)
    for module in (initial_model, options):
        monkeypatch.setattr(module, "network_layers", toy_network)
    features, labels = labelled_utterances()
    data, pdfs = write_data_dir(tmp_path / "data", features), write_pdfs(tmp_path / "pdfs.txt", labels)
    recipe = load_recipe(
        write_recipe(tmp_path / "recipe.yaml", data, pdfs, f"optimizer: {{{optimizer}}}\nprecision: {precision}\n")
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_training(recipe, whole, "cpu")

    after, left = Averager.after_minibatch, [20]

    def counting(self: Averager, frames: int) -> bool:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return after(self, frames)

    with monkeypatch.context() as patched:
        patched.setattr(Averager, "after_minibatch", counting)
        with pytest.raises(TrainingInterrupted):
            run_training(recipe, stopped, "cpu")
    run_training(recipe, stopped, "cpu", resume=True)
    assert (stopped / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()

    network = load_run(whole).network
    assert network.layers == toy_network(recipe, network.input_dim, network.output_dim)
    assert evaluate_run(whole, data, pdfs, "cpu").figures["frame_accuracy"] > 0.6
