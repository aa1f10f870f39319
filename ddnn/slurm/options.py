"""What the command line says about seeds and jobs. Imports nothing heavy: every command needs it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddnn.training.command import TrainingCommand
from ddnn.util.errors import UserError

MAX_SEEDS = 1000


@dataclass(frozen=True)
class Seeds:
    """Seeds of trainings that differ in nothing else. `at_once`: how many of them may train at the same time."""

    numbers: tuple[int, ...]
    at_once: int | None = None

    def __str__(self) -> str:
        """As Slurm writes the tasks of an array."""
        return ",".join(map(str, self.numbers)) + (f"%{self.at_once}" if self.at_once else "")

    def commands(self, command: TrainingCommand) -> dict[int, TrainingCommand]:
        """The training with each seed, in RUN_DIR-seedN. UserError: it has its own seed, or is one that is resumed."""
        if command.recipe.is_dir():
            hint = "name the recipe; to resume one training, name its run dir without --seeds"
            raise UserError(f"{command.recipe} is a run dir, --seeds needs a recipe", location="--seeds", hint=hint)
        if any(setting.partition("=")[0].strip() == "seed" for setting in command.settings):
            raise UserError("the seed is given twice, by --seeds and by --set", location="--seeds", hint="remove one")
        folders = {seed: Path(f"{command.location}-seed{seed}") for seed in self.numbers}
        return {seed: replace(command, run_dir=path).with_setting(f"seed={seed}") for seed, path in folders.items()}


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
        numbers += range(int(first), min(int(last or first), int(first) + MAX_SEEDS) + 1)
    if not numbers or len(set(numbers)) != len(numbers) or len(numbers) > MAX_SEEDS:
        message = f"{text!r} found, expected 1 to {MAX_SEEDS} different seeds"
        raise UserError(message, location="--seeds", hint=hint)
    return Seeds(tuple(numbers), int(at_once) if at_once else None)


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line says about the job: `settings` by the keys of ClusterConfig, over which they win."""

    cluster: str | None
    job_name: str | None
    settings: dict[str, Any]

    def as_words(self, command: TrainingCommand) -> tuple[str, ...]:
        """The options of the command line that submit such a job, from any working directory."""
        options = {"cluster": self.cluster, "job_name": self.job_name, **self.settings, "workers": command.workers}
        if self.cluster is not None and Path(self.cluster).is_file():
            options["cluster"] = Path(self.cluster).absolute()
        if command.device != "auto":
            options["device"] = command.device
        sbatch = [f"--sbatch-option={option}" for option in options.pop("options", ())]
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return ("--slurm", *words, *sbatch)
