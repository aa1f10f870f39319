"""Which runs the tables need, and which of them have a record that counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddnn.recipe.keys import keys
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.reproduce.corpus import ReproduceConfig, file_fingerprint, test_digest
from ddnn.reproduce.records import RunRecord
from ddnn.reproduce.tables import Table
from ddnn.util.errors import RecipeError, UserError

RESULT_VERSION = 1
"""To be raised when what is computed by the same recipe changes: all runs are then trained again."""
NON_RESULT_KEYS = (
    "data.cache_dir",
    *("parallel.cpu_threads", "parallel.hang_timeout", "parallel.max_restarts", "parallel.oversubscribe_gpus"),
    "parallel.gpu_transport",
    *("data.loader_processes", "data.feature_device", "data.max_skipped_fraction", "cuda_graphs"),
)
"""Keys that change nothing that a training computes, or only its last bits; those of `checkpoint` neither."""


@dataclass(frozen=True)
class PlannedRun:
    """One training that a table needs.

    Attributes:
        condition, workers, seed: which; `condition` after the corpus's `aliases`.
        recipe: its file.
        digest: of all that its recipe says but paths; part of the run dir's name, so that a changed recipe gets another.
        from_dbn: whether it starts from the seed's RBMs.
        test_digest: SHA-256 of what its model is tested on.
    """

    condition: str
    workers: int
    seed: int
    recipe: Path
    digest: str
    from_dbn: bool
    test_digest: str

    @property
    def name(self) -> str:
        """As of its record."""
        return f"{self.condition}-{self.workers}-{self.seed}"

    @property
    def folder(self) -> str:
        """Of its run dir."""
        return f"{self.name}-{self.digest[:8]}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """As for --set, without the RBMs."""
        return f"seed={self.seed}", f"parallel.workers={self.workers}"

    def is_recorded(self, records: Mapping[str, RunRecord]) -> bool:
        """Whether a record of this very recipe and these tests exists."""
        record = records.get(self.name)
        return (
            record is not None
            and record.recipe == self.digest
            and (record.failed is not None or record.test_digest == self.test_digest)
        )


@dataclass(frozen=True)
class OutputLayout:
    """Where results go.

    Attributes:
        output_dir: has `dbns/SEED-DIGEST`, `runs/NAME-DIGEST` and `logs/NAME.txt`.
        records: folder of the records.
        dbn_digest: of the recipe of the RBMs; empty where no run starts from them.
    """

    output_dir: Path
    records: Path
    dbn_digest: str

    def run_dir(self, run: PlannedRun) -> Path:
        """Of one run."""
        return self.output_dir / "runs" / run.folder

    def dbn_dir(self, seed: int) -> Path:
        """Of the RBMs of one seed."""
        return self.output_dir / "dbns" / f"{seed}-{self.dbn_digest[:8]}"

    def log(self, name: str) -> Path:
        """Output of a process."""
        return self.output_dir / "logs" / f"{name}.txt"


def plan_runs(config: ReproduceConfig, folder: Path, tables: Iterable[Table]) -> list[PlannedRun]:
    """The runs of these tables, each once: all of the first seed, then all of the second, and so on.

    Args:
        folder: of the corpus, with its recipes.

    Raises:
        UserError: a condition has no recipe. RecipeError: a recipe is damaged, or its data do not exist.
    """
    cells: dict[tuple[str, int], None] = {}
    for table in tables:
        for condition in table.conditions:
            for workers in table.columns(condition, config.workers, config.max_workers):
                name = config.recipe_name(condition.name)
                if not condition.extension or recipe_path(config, folder, name, workers).is_file():
                    cells[name, workers] = None
    dbn_path = folder / config.dbn_recipe
    _check_exists(dbn_path, "the RBMs")
    dbn, tests = recipe_digest(_load(dbn_path)), test_digest(config.tests)
    runs = []
    for seed in config.seeds:
        for name, workers in sorted(cells, key=lambda cell: cell[1]):  # equal sizes share the cores best
            path = recipe_path(config, folder, name, workers)
            _check_exists(path, f"the condition {name}")
            recipe = _load(path, (f"seed={seed}", f"parallel.workers={workers}"))
            from_dbn = recipe.init == "rbm" and recipe.pretrain.dbn is None
            digest = recipe_digest(recipe, dbn if from_dbn else "")
            runs.append(PlannedRun(name, workers, seed, path, digest, from_dbn, tests))
    return runs


def recipe_path(config: ReproduceConfig, folder: Path, condition: str, workers: int) -> Path:
    """The recipe of a condition, whether it exists or not."""
    return folder / config.recipes.replace("{condition}", condition).replace("{workers}", str(workers))


def _load(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    try:
        return load_recipe(path, overrides)
    except RecipeError as error:
        hint = "if data are missing, run it in the folder from which their paths lead to them; else fix the recipe"
        raise RecipeError(error.message, location=error.location, hint=error.hint or hint) from error


def _check_exists(path: Path, subject: str) -> None:
    if not path.is_file():
        raise UserError(f"{subject} has no recipe on this corpus", location=path, hint="write it, or name other tables")


def recipe_digest(recipe: Recipe, dbn: str = "") -> str:
    """SHA-256 of what a recipe says, and the digest of its RBMs' recipe.

    Of data the names and sizes count, not where they are; keys that change no result do not count.
    """
    tree: dict[str, Any] = yaml.safe_load(dump_recipe(recipe))
    for name, key in keys().items():
        *above, last = name.split(".")
        section = tree
        for part in above:
            section = section.get(part, {})
        if name in NON_RESULT_KEYS or name.startswith("checkpoint."):
            section.pop(last, None)
        elif key.is_path and last in section:
            section[last] = file_fingerprint(Path(section[last]))
    return hashlib.sha256(json.dumps([RESULT_VERSION, tree, dbn], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class OutdatedRecords:
    """Names of runs that have a record which does not count.

    Attributes:
        recipe: it is of another recipe, or of other data.
        tests: its model was evaluated on other tests, or in another way.
    """

    recipe: tuple[str, ...]
    tests: tuple[str, ...]

    def to_lines(self) -> list[str]:
        """What is done about them, in words."""
        again = "their runs are evaluated again, or trained again if the run dirs are gone"
        return [
            *_not_counted(self.recipe, "of another recipe or other data", "their runs are trained again"),
            *_not_counted(self.tests, "evaluated on other tests", again),
        ]


def _not_counted(names: tuple[str, ...], why: str, consequence: str) -> list[str]:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"records {why}: {len(names)}, which do not count; {consequence}: {shown}"] if names else []


def missing_runs(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord]) -> list[PlannedRun]:
    """Those without a record that counts."""
    return [run for run in runs if not run.is_recorded(records)]


def outdated_runs(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord]) -> OutdatedRecords:
    """Those of the missing that have a record nevertheless."""
    names = [run for run in missing_runs(runs, records) if run.name in records]
    recipe = tuple(run.name for run in names if records[run.name].recipe != run.digest)
    return OutdatedRecords(recipe, tuple(run.name for run in names if run.name not in recipe))
