"""Checkpoints as fuzz targets: the manifest, the files of tensors, and what a training takes from them."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from fuzz.child import Target
from fuzz.targets_models import TENSORS, apart, tiny_model, with_header

from ddnn.errors import DataError
from ddnn.model.acoustic import describe_model, transform_tensors
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.train.checkpoint import Checkpoints, Found
from ddnn.train.checkpoint_manifest import Manifest, manifest_bytes
from ddnn.train.resume import check_same_recipe
from ddnn.train.state import Saved, read_header

NUMBER = "checkpoints/00000001"
RECIPE = "data: {train: /x, alignments: /x, splice: 1}\nmodel: {hidden_layers: 2, hidden_units: 4}\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(n + 1)}: &{chr(n + 1)} {{{', '.join(f'{k}: *{chr(n)}' for k in range(8))}}}\n" for n in range(97, 112)
)
HEADER = (
    b'"header":',
    b'"epoch":',
    b'"share":',
    b'"schedule":',
    b'"model":',
    b'"layers":',
    b'"recipe":',
    b'"rows":',
    b'{"$float":"7ff0000000000000"}',
    b'"files":',
    b'"workers":',
    b'"worker0001.safetensors"',
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
        "epoch": 2,
        "minibatch": 7,
        "share": 0.5,
        "schedule": {"rate": 0.1, "halving": False},
        "precision": "float32",
        "model": describe_model(model),
        "recipe": dump_recipe(_recipe()),
        "data": "0" * 64,
        "rows": [{"epoch": 2, "split": "cv", "loss": float("inf")}],
    }
    parameters = model.network.parameters
    shared = {"best": parameters, **transform_tensors(model)}
    assert Checkpoints(folder / "checkpoints", 2, Exchange()).write(
        header, shared, {"parameters": parameters, "momentum": torch.zeros(3)}
    )


@cache
def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _lay(Path(folder))
        return {path.name: path.read_bytes() for path in (Path(folder) / NUMBER).iterdir()}


def _newest(folder: Path) -> Found:
    found = Checkpoints(folder / "checkpoints", 2, Exchange()).newest()
    if found is None:
        raise DataError("none")
    return found


def _read(folder: Path) -> None:
    found = _newest(folder)
    header = read_header(found.header, found.path)
    check_same_recipe(header.recipe, _recipe(), found.path)
    Saved(header, found.shared(), found.part(0), True, found.path).model()


def _sealed_manifest(inner: bytes) -> bytes:
    """A manifest whose sha256 is right, where it still is JSON."""
    try:
        value = json.loads(inner)
        told = {key: part for key, part in value.items() if key != "sha256"}
        text = json.dumps(told, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
        value = {**told, "sha256": hashlib.sha256(text).hexdigest()}
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return inner


def _with_shared(folder: Path) -> None:
    """The damaged shared file under a manifest that an adversary made for it."""
    data = (folder / NUMBER / "shared.safetensors").read_bytes()
    told = json.loads(_files()["checkpoint.json"])
    files = {name: (size, sha256) for name, (size, sha256) in told["files"].items()}
    files["shared.safetensors"] = len(data), hashlib.sha256(data).hexdigest()
    manifest = Manifest(1, 1, files, _newest_header())
    (folder / NUMBER / "checkpoint.json").write_bytes(manifest_bytes(manifest))
    _read(folder)


@cache
def _newest_header() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _lay(Path(folder))
        return replace(_newest(Path(folder))).header


def _crafted() -> tuple[bytes, ...]:
    """Manifests whose header is an adversary's."""
    told = json.loads(_files()["checkpoint.json"])
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
        {"share": 2},
        {"epoch": 2**53},
        {"schedule": {"rate": 10**400}},
        {"model": {}},
        {"rows": [{}] * 5000},
        {"model": {**told["header"]["model"], "layers": []}},
        {"recipe": "&a [*a]"},
        {"recipe": "a: &a {b: *a}"},
    ]
    return tuple(json.dumps({**told, "header": {**told["header"], **change}}).encode() for change in wrong)


_tensors = partial(Target, beside=_lay, tokens=TENSORS, inputs=60)


def checkpoint_targets() -> list[Target]:
    """The manifest raw and resealed, the files of tensors."""
    files = _files()
    return [
        Target(
            "checkpoint, manifest",
            f"{NUMBER}/checkpoint.json",
            _read,
            (files["checkpoint.json"],),
            (b"[" * 60_000, b" " * 2_000_000),
            beside=_lay,
            tokens=HEADER,
            per_byte=300,
            inputs=60,
        ),
        Target(
            "checkpoint, manifest resealed",
            f"{NUMBER}/checkpoint.json",
            _read,
            (files["checkpoint.json"],),
            _crafted(),
            beside=_lay,
            pack=_sealed_manifest,
            tokens=HEADER,
            per_byte=300,
            inputs=60,
        ),
        _tensors(
            "checkpoint, shared tensors",
            f"{NUMBER}/shared.safetensors",
            _read,
            (files["shared.safetensors"],),
        ),
        _tensors(
            "checkpoint, shared tensors resealed",
            f"{NUMBER}/shared.safetensors",
            _with_shared,
            (apart(files["shared.safetensors"]),),
            pack=with_header,
        ),
        _tensors(
            "checkpoint, a worker's tensors",
            f"{NUMBER}/worker0000.safetensors",
            _read,
            (files["worker0000.safetensors"],),
        ),
    ]
