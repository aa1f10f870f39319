"""What a run dir, a pretraining dir, a model, metrics or a recipe hold, in a glance."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ddnn.info.checkpoints import newest_checkpoint, resume_command
from ddnn.info.status_text import duration
from ddnn.train.read_metrics import EpochRow, read_metrics, read_pretraining
from ddnn.train.run_dir_files import FINAL, METRICS, STACK

GLANCE_BYTES = 64 << 20
"""Larger text files are not read for a glance."""


def model_facts(path: Path) -> dict[str, Any]:
    from ddnn.model.acoustic import load_model  # torch takes a second; the other kinds do without

    model = load_model(path)
    layers = model.network.layers
    return {
        "network": "-".join(str(dim) for dim in [layers[0].inputs, *(layer.outputs for layer in layers)]),
        "activations": list(dict.fromkeys(layer.activation for layer in layers)),
        "parameters": model.network.parameters.numel(),
        "pdfs": layers[-1].outputs,
        "cmvn": model.pipeline.cmvn,
        "deltas": model.pipeline.deltas,
    }


def run_facts(path: Path) -> dict[str, Any]:
    """The model, where there is one, and how its training went; of one that has not finished, where it can go on."""
    facts: dict[str, Any] = {"finished": (path / FINAL).exists()}
    if not facts["finished"]:
        facts |= resume_facts(path)
    if facts["finished"]:
        facts |= model_facts(path / FINAL)
    if (path / METRICS).exists():
        facts |= metrics_facts(path / METRICS)
    return facts


def resume_facts(path: Path) -> dict[str, Any]:
    """The newest checkpoint, and the command that goes on with it."""
    problems: list[str] = []
    found = newest_checkpoint(path, problems.append)
    facts: dict[str, Any] = {"damaged": problems} if problems else {}
    if found is not None:
        facts["checkpoint"] = f"{found.as_text()}, {duration(max(0.0, time.time() - found.written))} ago"
        facts["go_on_by"] = resume_command(path)
    return facts


def pretraining_facts(path: Path) -> dict[str, Any]:
    """The stack of RBMs as far as it has come: its last pass, or the finished stack's shape."""
    facts: dict[str, Any] = {"finished": (path / STACK).exists()}
    if facts["finished"]:
        facts |= {k: v for k, v in model_facts(path / STACK).items() if k != "pdfs"}
    if (path / METRICS).exists():
        last = {row.layer: row for row in read_pretraining(path / METRICS)}
        for layer, row in sorted(last.items()):
            figure = "not finite" if row.error is None else f"{row.error:.4f}"
            facts[f"rbm_{layer}"] = f"{row.pass_} passes, reconstruction error {figure} over all of them"
    return facts


def metrics_facts(path: Path) -> dict[str, Any]:
    """Epochs, the last cross-validation and the best accepted one; how many workers, where they wrote rows."""
    metrics = read_metrics(path)
    cv = metrics.cv
    if not cv:
        return {"epochs": 0}
    facts: dict[str, Any] = {"epochs": cv[-1].epoch, "last_cross_validation": _figures(cv[-1])}
    sound = [(row.loss, row) for row in cv if row.accepted and row.loss is not None]
    if sound:
        facts["best_cross_validation"] = _figures(min(sound, key=lambda pair: pair[0])[1])
    if metrics.workers:
        facts["workers"] = len({row.rank for row in metrics.workers})
    return facts


def _figures(row: EpochRow) -> str:
    percent = "none" if row.frame_accuracy is None else f"{100 * row.frame_accuracy:.2f} %"
    loss = "not finite" if row.loss is None else f"{row.loss:.4f}"
    return f"epoch {row.epoch}: loss {loss}, frame accuracy {percent}{'' if row.accepted else ', rejected'}"


def recipe_facts(path: Path) -> dict[str, Any]:
    from ddnn.recipe.load import load_recipe

    recipe = load_recipe(path, must_exist=False)
    model = recipe.model
    return {
        "train": str(recipe.data.train),
        "alignments": str(recipe.data.alignments),
        "model": f"{model.hidden_layers} x {model.hidden_units} {model.activation}",
        "training": f"{recipe.optimizer.name}, {recipe.schedule.name} from {recipe.schedule.initial:g}",
        "minibatch": recipe.minibatch,
    }
