"""Trainings as Slurm jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddnn.util.errors import UserError

MOST_SEEDS = 1000


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line says about the job: `settings` by the keys of ClusterConfig, over which they win."""

    cluster: str | None
    job_name: str | None
    settings: dict[str, Any]

    def as_words(self, workers: int | None, device: str) -> tuple[str, ...]:
        """The options of the command line that submit such a job, from any working directory."""
        cluster = (
            self.cluster if self.cluster is None or not Path(self.cluster).is_file() else Path(self.cluster).absolute()
        )
        single = {key: value for key, value in self.settings.items() if key != "options"}
        given = {"cluster": cluster, "job_name": self.job_name, **single, "workers": workers}
        given["device"] = None if device == "auto" else device
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        return ("--slurm", *words, *(f"--sbatch-option={option}" for option in self.settings.get("options", ())))


@dataclass(frozen=True)
class Seeds:
    """Seeds of trainings that differ in nothing else. `at_once`: how many of them may train at the same time."""

    numbers: tuple[int, ...]
    at_once: int | None = None

    def __str__(self) -> str:
        """As Slurm writes the tasks of an array."""
        return ",".join(map(str, self.numbers)) + (f"%{self.at_once}" if self.at_once else "")

    def run_dir(self, base: Path, seed: int) -> Path:
        return Path(f"{base}-seed{seed}")


def parse_seeds(text: str) -> Seeds:
    """Reads what `Seeds` writes, and ranges: 1,2,3 or 1-5%2. UserError: anything else."""
    hint = "give them as in --seeds 1,2,3 or --seeds 1-10%2, where at most two train at the same time"
    if not re.fullmatch(r"[0-9]{1,18}(-[0-9]{1,18})?(,[0-9]{1,18}(-[0-9]{1,18})?)*(%[1-9][0-9]{0,5})?", text):
        message = f"{text!r} found, expected whole numbers with commas between"
        raise UserError(message, location="--seeds", hint=hint)
    listed, _, at_once = text.partition("%")
    numbers: list[int] = []
    for part in listed.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), min(int(last or first), int(first) + MOST_SEEDS) + 1)
    if not numbers or len(set(numbers)) != len(numbers) or len(numbers) > MOST_SEEDS:
        message = f"{text!r} found, expected 1 to {MOST_SEEDS} different seeds"
        raise UserError(message, location="--seeds", hint=hint)
    return Seeds(tuple(numbers), int(at_once) if at_once else None)
