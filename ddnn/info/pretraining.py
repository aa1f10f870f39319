"""How far a pretraining is, by the files of its dir. Needs no torch."""

from __future__ import annotations

import shlex
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from ddnn.errors import UserError
from ddnn.recipe.schema import Recipe
from ddnn.slurm.submit import PRETRAINING_RECIPE
from ddnn.train.read_metrics import PretrainingRow, read_pretraining
from ddnn.train.run_dir_files import FINAL, JOB_FILES, LOG, METRICS, RECIPE, STACK


def is_pretraining(path: Path, recipe: Recipe | None) -> bool:
    """Whether this is a dir of `ddnn pretrain`, by what only it has. In its first pass it has only a recipe; a run dir
    of a training has a train.log or the files of a job before that."""
    if any((path / name).exists() for name in (STACK, _rbm(1), PRETRAINING_RECIPE)):
        return True
    if any((path / name).exists() for name in (FINAL, LOG, *JOB_FILES)):
        return False
    if not (path / METRICS).exists():
        return recipe is not None and recipe.init == "rbm" and recipe.pretrain.from_ is None
    try:
        return bool(read_pretraining(path / METRICS))
    except UserError:
        return False


def rbms(path: Path, recipe: Recipe | None, rows: list[PretrainingRow]) -> dict[str, Any]:
    """Finished RBMs (`done`) of how many (`most`); of the last finished pass its RBM (`layer`), its number (`passes`)
    and the reconstruction `error` over all passes of this RBM. None where it is not known."""
    last = rows[-1] if rows else None
    return {
        "done": sum(1 for _ in takewhile(lambda layer: (path / _rbm(layer)).exists(), count(1))),
        "most": None if recipe is None else recipe.model.hidden_layers,
        "layer": None if last is None else last.layer,
        "passes": None if last is None else last.pass_,
        "error": None if last is None else last.error,
    }


def go_on_command(path: Path) -> str:
    """What goes on with the pretraining of a dir: its own recipe says all that the stack depends on."""
    return f"ddnn pretrain {shlex.quote(str(path / RECIPE))} --run-dir {shlex.quote(str(path))}"


def _rbm(layer: int) -> str:
    return f"rbm{layer}.safetensors"
