"""The run dir: everything a training leaves behind.

recipe.yaml              the recipe as it was run, includes and --set resolved
train.log                what the training said
pretrain/                the stack of RBMs, where the training made one
metrics.jsonl            one JSON object a line: per epoch and split
best.safetensors         the best network so far, while training runs
final.safetensors        the trained model
ali_train_pdf.counts     frames per pdf of the training alignment: the priors
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from ddnn.errors import DataError, UserError
from ddnn.files import make_directory, write_text
from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.model.acoustic import AcousticModel, load_model, save_model

COUNTS = "ali_train_pdf.counts"
FINAL = "final.safetensors"
RECIPE = "recipe.yaml"
LOG = "train.log"
PRETRAIN = "pretrain"
BEST = "best.safetensors"


class RunDir:
    """A new run dir, made by the training that owns it."""

    def __init__(self, path: Path) -> None:
        """Makes the directory, or takes one over in which no training has begun: its recipe or data were refused.

        Raises:
            UserError: it exists already with something in it, or cannot be made.
        """
        if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - {RECIPE, LOG, PRETRAIN}):
            raise UserError(
                "the run dir exists already and is not empty",
                where=path,
                mend="name another with --run-dir, or remove this one if it is not needed",
            )
        make_directory(path)
        self.path = path
        self.log_handler = logging.FileHandler(path / LOG, mode="w", encoding="utf-8")
        self.log_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def write_recipe(self, text: str) -> None:
        """The resolved recipe."""
        write_text(self.path / RECIPE, text)

    def record(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl; null stands for what is not finite."""
        finite = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in metrics.items()}
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(finite, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write metrics.jsonl: {error.strerror}", where=self.path, mend="free disk space"
            ) from error

    def save_best(self, model: AcousticModel) -> None:
        """Keeps the best network so far, so that a crash loses one epoch at most."""
        save_model(self.path / BEST, model)

    def finish(self, model: AcousticModel, pdf_counts: np.ndarray) -> None:
        """Writes the trained model and its priors; the last thing that a training does."""
        write_pdf_counts(self.path / COUNTS, pdf_counts)
        save_model(self.path / FINAL, model)
        (self.path / BEST).unlink(missing_ok=True)


def load_run(path: Path) -> AcousticModel:
    """The final model of a run dir.

    Raises:
        DataError: no run dir, no final model in it yet, or a damaged one.
    """
    if not path.is_dir():
        raise DataError("there is no such run dir", where=path, mend="name the --run-dir of a finished training")
    if not (path / FINAL).exists() and (path / RECIPE).exists():
        raise DataError(
            "this training has not finished: there is no final.safetensors", where=path, mend="let it finish first"
        )
    return load_model(path / FINAL)
