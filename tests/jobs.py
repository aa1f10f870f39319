"""A user's whole small job on disk: data dir, alignment dir, recipe, graph; and what must hold when it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from corpora import labelled_utterances, write_ali_dir, write_data_dir, write_graph_dir, write_recipe

RunCli = Callable[..., Any]
BEFORE_TRAINING = {"recipe.yaml", "train.log", "status.json", "ali_train_pdf.counts", "cv_utterances"}


@dataclass(frozen=True)
class Job:
    """24 utterances of 20 frames, 4 dims, 3 pdfs, 4 speakers; everything lies under `root`."""

    root: Path
    features: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        """Utterance ids in the order of the files."""
        return sorted(self.features)

    @property
    def data(self) -> Path:
        """The data dir."""
        return self.root / "data"

    @property
    def scp(self) -> Path:
        """Its script file."""
        return self.data / "feats.scp"

    @property
    def ark(self) -> Path:
        """Its archive."""
        return self.data / "feats.ark"

    @property
    def ali(self) -> Path:
        """The alignment dir."""
        return self.root / "ali"

    @property
    def run(self) -> Path:
        """Where the run goes."""
        return self.root / "run"

    @property
    def recipe(self) -> Path:
        """A recipe that trains for an epoch in a moment."""
        return self.root / "recipe.yaml"

    def write(self) -> None:
        """Writes everything as it should be, over what was damaged."""
        for path in (*self.data.glob("*"), *self.ali.glob("*")):
            path.unlink()
        self.write_features(self.features)
        write_ali_dir(self.ali, self.labels)
        write_recipe(self.recipe, self.data, self.ali)
        self.recipe.write_text(self.recipe.read_text().replace("epochs: 3", "epochs: 1"))

    def write_features(self, features: dict[str, np.ndarray]) -> None:
        """The data dir with other features."""
        write_data_dir(self.data, features)
        (self.data / "text").write_text("".join(f"{name} a b\n" for name in sorted(features)))

    def offset(self, utterance: str) -> int:
        """Where an utterance's record begins in the archive."""
        (line,) = [line for line in self.scp.read_text().splitlines() if line.split()[0] == utterance]
        return int(line.rpartition(":")[2])


def make_job(root: Path) -> Job:
    """A job under `root`, whole."""
    features, labels = labelled_utterances(count=24, frames=20)
    root.mkdir(parents=True, exist_ok=True)
    job = Job(root, features, labels)
    job.write()
    write_graph_dir(root / "graph")
    return job


def assert_refused(result: Any, *said: str) -> None:
    """Exit code 2 and one message, which holds every part of `said`; no traceback."""
    assert result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr and "Logging error" not in result.stderr
    assert result.stderr.count("ddnn: error: ") == 1
    message = result.stderr.partition("ddnn: error: ")[2]
    assert "location: " in message
    for part in said:
        assert part in message, f"{part!r} not in {message!r}"


def files_in(folder: Path) -> set[str]:
    """Names of everything in `folder`, of no folder none; there must be no temporary file among them."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert not [name for name in names if ".tmp" in name]
    return names


def assert_trains(run_cli: RunCli, job: Job, settings: Iterable[str] = (), *, run: Path | None = None) -> None:
    """A training into the job's run dir ends well."""
    options = [word for setting in settings for word in ("--set", setting)]
    result = run_cli("train", job.recipe, "--run-dir", run or job.run, "--device", "cpu", *options)
    assert result.exit_code == 0, result.stderr
    assert files_in(run or job.run) == {
        *BEFORE_TRAINING,
        "metrics.jsonl",
        "final.safetensors",
        "checkpoints",
        "report.html",
    }
