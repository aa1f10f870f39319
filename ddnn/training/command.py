"""A `ddnn train` or `ddnn pretrain` as its options say. Imports nothing heavy: every command needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ALLOW_PIPES = "data.allow_pipes=true"  # --allow-pipes, as a setting


@dataclass(frozen=True)
class TrainingCommand:
    """A `ddnn train` or `ddnn pretrain`. `recipe`: to `resume` a training, also its run dir. `run_dir`, `workers`: None
    where they are not given. `settings`: those of --set."""

    kind: Literal["training", "pretraining"]
    recipe: Path
    run_dir: Path | None
    settings: tuple[str, ...]
    workers: int | None
    device: str
    resume: Literal["no", "yes", "auto"] = "no"

    @property
    def location(self) -> Path:
        """The run dir, or its default."""
        if self.run_dir is not None:
            return self.run_dir
        if self.resume != "no" and self.recipe.is_dir():
            return self.recipe
        return Path("exp", self.recipe.stem if self.kind == "training" else f"{self.recipe.stem}-rbm")

    @property
    def all_settings(self) -> tuple[str, ...]:
        """With the number of workers, where it is given."""
        return self.settings if self.workers is None else (*self.settings, f"parallel.workers={self.workers}")

    def with_setting(self, setting: str) -> TrainingCommand:
        return replace(self, settings=(*self.settings, setting))

    def arguments(self) -> list[str]:
        """Of `ddnn`, that say the same; the recipe is the last."""
        words = ["train" if self.kind == "training" else "pretrain", f"--run-dir={self.location}"]
        if self.workers is not None:
            words.append(f"--workers={self.workers}")
        words.append(f"--device={self.device}")
        words += {"no": [], "yes": ["--resume"], "auto": ["--resume=auto"]}[self.resume]
        # Behind --, so that a name that begins with a dash is no option.
        return [*words, *(f"--set={setting}" for setting in self.settings), "--", str(self.recipe)]
