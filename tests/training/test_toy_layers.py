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
from ddnn.nn.layers import LAYERS, Affine
from ddnn.recipe.load import load_recipe
from ddnn.runs.run_dir import load_run
from ddnn.training.job import run_training
from ddnn.training.model_evaluation import evaluate_run

LAYERS_IN_RECIPE = """[
  stored: {kind: filters, size: 4, step: 4, filters: 5},
  stored: {kind: gain, largest: 3.0},
  affine: 6,
  stored: {kind: pool, positions: 6, channels: 1},
  stored: {kind: gain},
]"""  # of three frames of 4 dims; the widths of filters and gains follow


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("float32", "momentum: 0.5"), ("bf16", "name: ng-sgd, rank_in: 3")]
)
def test_a_network_of_toys_is_trained_stopped_resumed_and_evaluated(
    precision: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, layer in TOYS.items():
        monkeypatch.setitem(LAYERS, kind, layer)
    features, labels = labelled_utterances()
    data, pdfs = write_data_dir(tmp_path / "data", features), write_pdfs(tmp_path / "pdfs.txt", labels)
    text = f"optimizer: {{{optimizer}}}\nprecision: {precision}\n"
    path = write_recipe(tmp_path / "recipe.yaml", data, pdfs, text)
    short = "{hidden_layers: 1, hidden_units: 8}"
    path.write_text(path.read_text().replace(short, "{layers: " + LAYERS_IN_RECIPE + "}"))
    recipe = load_recipe(path)
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
    assert network.layers == (
        *(Filters(12, 4, 4, 5), Gain(15, 3.0), Affine(15, 6), Pool(6, 1), Gain(3)),
        Affine(3, 3, "softmax", bias_learn_rate_coef=0.1),
    )
    assert evaluate_run(whole, data, pdfs, "cpu").figures["frame_accuracy"] > 0.6
