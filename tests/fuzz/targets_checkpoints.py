"""Checkpoints as fuzz targets: the manifest, the files of tensors, and what a training takes from them."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from fuzz.child import Target
from fuzz.targets_models import TENSORS, apart, tiny_model, with_header

from ddnn.distributed.communicator import SingleProcess
from ddnn.nn.acoustic_model import model_config, transform_tensors
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.checkpoint import CheckpointHandle, CheckpointStore
from ddnn.runs.checkpoint_manifest import CheckpointSummary, encode_manifest, peek_checkpoint
from ddnn.training.resume import read_metadata
from ddnn.training.resume_rules import check_same_recipe
from ddnn.training.state import LoadedCheckpoint
from ddnn.util.errors import DataError

NUMBER = "checkpoints/00000001"
RECIPE = "data: {train: /x, alignments: /x, splice: 1}\nmodel: {hidden_layers: 2, hidden_units: 4}\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(n + 1)}: &{chr(n + 1)} {{{', '.join(f'{k}: *{chr(n)}' for k in range(8))}}}\n" for n in range(97, 112)
)
HEADER = (
    b'"metadata":',
    b'"epoch":',
    b'"epoch_fraction":',
    b'"schedule":',
    b'"model":',
    b'"layers":',
    b'"recipe":',
    b'"minibatch":',
    b"NaN",
    b"-Infinity",
    b'"files":',
    b'"world_size":',
    b'"rank0001.safetensors"',
    b'"../../x"',
    b"[",
    b"]",
    b"{",
    b"}",
    b"null",
    b"1e999",
)


@cache
def _recipe() -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.yaml").write_text(RECIPE)
        return load_recipe(Path(folder) / "recipe.yaml", must_exist=False)


def _lay(folder: Path) -> None:
    """A checkpoint of one worker."""
    logging.getLogger("ddnn").addHandler(logging.NullHandler())
    model = tiny_model()
    header: dict[str, Any] = {
        "started": True,
        "epoch": 2,
        "minibatch": 7,
        "epoch_fraction": 0.5,
        "schedule": {"rate": 0.1, "halving": False, "best": float("inf")},
        "precision": "float32",
        "model": model_config(model),
        "recipe": dump_recipe(_recipe()),
        "data": {"contents": {"data.train": "12 utterances"}, "features": {"data.train": [[0.1], [1.0], [0.2]]}},
        "initial": {"loss": 2.5, "frame_accuracy": 0.01},
        "kept_epoch": 2,
        "kept": {"loss": 1.5, "frame_accuracy": 0.5},
    }
    parameters = model.network.parameters
    shared = {"best.parameters": parameters, **transform_tensors(model)}
    own = {"network.parameters": parameters, "optimizer.momentum": torch.zeros(3)}
    assert CheckpointStore(folder / "checkpoints", 2, SingleProcess()).save(header, shared, own)


@cache
def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _lay(Path(folder))
        return {path.name: path.read_bytes() for path in (Path(folder) / NUMBER).iterdir()}


def _newest(folder: Path) -> CheckpointHandle:
    found = CheckpointStore(folder / "checkpoints", 2, SingleProcess()).latest()
    if found is None:
        raise DataError("none")
    return found


def _read(folder: Path) -> None:
    peek_checkpoint(folder / "checkpoints", lambda problem: None)
    found = _newest(folder)
    metadata = read_metadata(found.metadata, found.path)
    check_same_recipe(metadata.recipe, _recipe(), found.path)
    LoadedCheckpoint(metadata, found.global_state, found.rank_state(0), True, found.path).model()


def _sealed_manifest(inner: bytes) -> bytes:
    """A manifest whose sha256 is right, where it still is JSON."""
    try:
        value = json.loads(inner)
        told = {key: part for key, part in value.items() if key != "sha256"}
        text = json.dumps(told, indent=1, sort_keys=True).encode() + b"\n"
        value = {**told, "sha256": hashlib.sha256(text).hexdigest()}
        return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return inner


def _with_shared(folder: Path) -> None:
    """The damaged shared file under a manifest that an adversary made for it."""
    data = (folder / NUMBER / "global.safetensors").read_bytes()
    told = json.loads(_files()["manifest.json"])
    files = {name: (size, sha256) for name, (size, sha256) in told["files"].items()}
    files["global.safetensors"] = len(data), hashlib.sha256(data).hexdigest()
    summary = CheckpointSummary(1, 1, files, _newest_header())
    (folder / NUMBER / "manifest.json").write_bytes(encode_manifest(summary))
    _read(folder)


@cache
def _newest_header() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _lay(Path(folder))
        return _newest(Path(folder)).metadata


def _crafted() -> tuple[bytes, ...]:
    """Manifests whose header is an adversary's."""
    told = json.loads(_files()["manifest.json"])
    wrong: list[dict[str, Any]] = [
        {"recipe": LAUGHS},
        {"recipe": "[" * 900},
        {"recipe": "? " * 5000},
        {"recipe": "a: !!python/object/apply:os.system [id]"},
        {"recipe": "- 1"},
        {"recipe": "1: 2\na: 3"},
        {"recipe": "\0"},
        {"recipe": "2026-99-99"},
        {"recipe": "a: " + "1:" * 9000 + "1"},
        {"epoch_fraction": 2},
        {"epoch": 2**53},
        {"schedule": {"rate": 10**400}},
        {"model": {}},
        {"minibatch": [{}] * 5000},
        {"epoch_fraction": float("inf")},
        {"model": {**told["metadata"]["model"], "layers": []}},
        {"recipe": "&a [*a]"},
        {"recipe": "a: &a {b: *a}"},
    ]
    return tuple(json.dumps({**told, "metadata": {**told["metadata"], **change}}).encode() for change in wrong)


_tensors = partial(Target, beside=_lay, tokens=TENSORS, inputs=60)


def checkpoint_targets() -> list[Target]:
    """The manifest raw and resealed, the files of tensors."""
    files = _files()
    return [
        Target(
            "checkpoint, manifest",
            f"{NUMBER}/manifest.json",
            _read,
            (files["manifest.json"],),
            (b"[" * 60_000, b" " * 2_000_000),
            beside=_lay,
            tokens=HEADER,
            per_byte=300,
            inputs=60,
        ),
        Target(
            "checkpoint, manifest resealed",
            f"{NUMBER}/manifest.json",
            _read,
            (files["manifest.json"],),
            _crafted(),
            beside=_lay,
            pack=_sealed_manifest,
            tokens=HEADER,
            per_byte=300,
            inputs=60,
        ),
        _tensors(
            "checkpoint, shared tensors",
            f"{NUMBER}/global.safetensors",
            _read,
            (files["global.safetensors"],),
        ),
        _tensors(
            "checkpoint, shared tensors resealed",
            f"{NUMBER}/global.safetensors",
            _with_shared,
            (apart(files["global.safetensors"]),),
            pack=with_header,
        ),
        _tensors(
            "checkpoint, a worker's tensors",
            f"{NUMBER}/rank0000.safetensors",
            _read,
            (files["rank0000.safetensors"],),
        ),
    ]
