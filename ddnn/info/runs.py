"""What a run dir, a pretraining dir, a model, metrics or a recipe hold, in a glance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddnn.errors import DataError

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
    """The model, where there is one, and how its training went."""
    facts: dict[str, Any] = {"finished": (path / "final.safetensors").exists()}
    if facts["finished"]:
        facts |= model_facts(path / "final.safetensors")
    if (path / "metrics.jsonl").exists():
        facts |= metrics_facts(path / "metrics.jsonl")
    return facts


def pretraining_facts(path: Path) -> dict[str, Any]:
    """The stack of RBMs as far as it has come: its last pass, or the finished stack's shape."""
    facts: dict[str, Any] = {"finished": (path / "stack.safetensors").exists()}
    if facts["finished"]:
        facts |= {k: v for k, v in model_facts(path / "stack.safetensors").items() if k != "pdfs"}
    if (path / "metrics.jsonl").exists():
        rows = _rows(path / "metrics.jsonl", ("layer", "pass", "reconstruction_error_all_passes"))
        for layer in sorted({row["layer"] for row in rows}):
            last = [row for row in rows if row["layer"] == layer][-1]
            error = last["reconstruction_error_all_passes"]
            figure = f"{error:.4f}" if isinstance(error, (int, float)) else "not finite"
            facts[f"rbm_{layer}"] = f"{last['pass']} passes, reconstruction error {figure} over all of them"
    return facts


def metrics_facts(path: Path) -> dict[str, Any]:
    """Epochs, the last cross-validation and the best accepted one."""
    names = ("split", "epoch", "loss", "frame_accuracy", "learning_rate", "accepted")
    cv = [row for row in _rows(path, names) if row["split"] == "cv"]
    if not cv:
        return {"epochs": 0}
    sound = [row for row in cv if row["accepted"] and isinstance(row["loss"], float)]
    facts = {"epochs": cv[-1]["epoch"], "last_cross_validation": _figures(cv[-1])}
    if sound:
        facts["best_cross_validation"] = _figures(min(sound, key=lambda row: float(row["loss"])))
    return facts


def _rows(path: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """These values of every line of a metrics.jsonl; DataError where a line lacks one."""
    if path.stat().st_size > GLANCE_BYTES:
        raise DataError(f"{path.stat().st_size} bytes found, expected a line per epoch and split", where=path)
    rows: list[dict[str, Any]] = []
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            try:
                row = json.loads(line)
                rows.append({name: row[name] for name in names})
                if not all(type(row[name]) is int for name in ("layer", "pass", "epoch") if name in names):
                    raise ValueError("a number of a layer, pass or epoch is none")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise DataError(f"line {number} is no metrics of a training: {line[:60]!r}", where=path) from error
    return rows


def _figures(row: dict[str, Any]) -> str:
    accuracy = row["frame_accuracy"]
    percent = f"{100 * accuracy:.2f} %" if isinstance(accuracy, (int, float)) else "none"
    loss = f"{row['loss']:.4f}" if isinstance(row["loss"], (int, float)) else "not finite"
    return f"epoch {row['epoch']}: loss {loss}, frame accuracy {percent}{'' if row['accepted'] else ', rejected'}"


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
