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
from ddnn.reproduce.records import RunRecord
from ddnn.reproduce.tables import ReproduceConfig, Table, file_fingerprint, test_digest
from ddnn.util.errors import RecipeError, UserError

RESULT_VERSION = 1  # to be raised when what is computed by the same recipe changes: all runs are then trained again
NON_RESULT_KEYS = (
    *("data.cache_dir", "data.loader_processes", "data.feature_device", "data.max_skipped_fraction", "cuda_graphs"),
    *("parallel.cpu_threads", "parallel.hang_timeout", "parallel.max_restarts", "parallel.oversubscribe_gpus"),
    "parallel.gpu_transport",
)
"""Keys that change nothing that a training computes, or only its last bits; those of `checkpoint` neither."""


@dataclass(frozen=True)
class PlannedRun:
    """One training that a table needs."""

    condition: str  # after the corpus's `aliases`
    workers: int
    seed: int
    recipe: Path
    digest: str  # of what the recipe says; in the run dir's name, so that a changed recipe gets another
    dbn_digest: str  # of the recipe of the seed's RBMs; empty where it does not start from them
    test_digest: str  # of what its model is tested on

    @property
    def name(self) -> str:
        return f"{self.condition}-{self.workers}-{self.seed}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """As for --set, without the RBMs."""
        return f"seed={self.seed}", f"parallel.workers={self.workers}"

    def is_recorded(self, records: Mapping[str, RunRecord]) -> bool:
        """Whether a record of this very recipe and these tests exists."""
        record = records.get(self.name)
        if record is None or record.recipe != self.digest:
            return False
        return record.failed is not None or record.test_digest == self.test_digest


@dataclass(frozen=True)
class OutputLayout:
    """Where results go: into folders of `output_dir`; the records may be elsewhere."""

    output_dir: Path
    records: Path

    def run_dir(self, run: PlannedRun) -> Path:
        return self.output_dir / "runs" / f"{run.name}-{run.digest[:8]}"

    def dbn_dir(self, run: PlannedRun) -> Path:
        return self.output_dir / "dbns" / f"{run.seed}-{run.dbn_digest[:8]}"

    def log(self, name: str) -> Path:
        return self.output_dir / "logs" / f"{name}.txt"


def plan_runs(config: ReproduceConfig, folder: Path, tables: Iterable[Table]) -> list[PlannedRun]:
    """The runs of these tables, each once, seed by seed, from the recipes in the corpus's folder. UserError: a
    condition has no recipe. RecipeError: a recipe is damaged, or its data do not exist."""
    cells: dict[tuple[str, int], Path] = {}
    for table in tables:
        for condition in table.conditions:
            for workers in table.columns(condition, config.workers, config.max_workers):
                name = config.recipe_name(condition.name)
                path = folder / config.recipes.replace("{condition}", name).replace("{workers}", str(workers))
                if not condition.extension or path.is_file():
                    cells[name, workers] = path
    dbn = recipe_digest(_load(folder / config.dbn_recipe, "the RBMs"))
    tests = test_digest(config.tests)
    runs = []
    for seed in config.seeds:
        for (name, workers), path in sorted(cells.items(), key=lambda cell: cell[0][1]):  # equal sizes fit side by side
            recipe = _load(path, f"the condition {name}", (f"seed={seed}", f"parallel.workers={workers}"))
            own_dbn = dbn if recipe.init == "rbm" and recipe.pretrain.dbn is None else ""
            runs.append(PlannedRun(name, workers, seed, path, recipe_digest(recipe, own_dbn), own_dbn, tests))
    return runs


def _load(path: Path, subject: str, overrides: tuple[str, ...] = ()) -> Recipe:
    if not path.is_file():
        raise UserError(f"{subject} has no recipe on this corpus", location=path, hint="write it, or name other tables")
    try:
        return load_recipe(path, overrides)
    except RecipeError as error:
        hint = "if data are missing, run it in the folder from which their paths lead to them; else fix the recipe"
        raise RecipeError(error.message, location=error.location, hint=error.hint or hint) from error


def recipe_digest(recipe: Recipe, dbn: str = "") -> str:
    """SHA-256 of what a recipe says, and the digest of its RBMs' recipe. Of data the names and sizes count, not where
    they are; keys that change no result do not count."""
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


def missing_runs(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord]) -> list[PlannedRun]:
    """Those without a record that counts."""
    return [run for run in runs if not run.is_recorded(records)]


_OUTDATED = {
    "recipe": ("of another recipe or other data", "their runs are trained again"),
    "tests": ("evaluated on other tests", "their runs are evaluated again, or trained again if the run dirs are gone"),
}


def outdated_records(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord]) -> dict[str, list[str]]:
    """Names of the runs with a record that does not count: by `recipe`, of another recipe or other data; by `tests`, of
    a model tested otherwise."""
    outdated: dict[str, list[str]] = {why: [] for why in _OUTDATED}
    for run in missing_runs(runs, records):
        if run.name in records:
            outdated["tests" if records[run.name].recipe == run.digest else "recipe"].append(run.name)
    return outdated


def describe_outdated(outdated: Mapping[str, Sequence[str]]) -> list[str]:
    """What is done about them, in words."""
    return [
        f"records {_OUTDATED[why][0]}: {len(names)}, which do not count; {_OUTDATED[why][1]}: {', '.join(names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for why, names in outdated.items()
        if names
    ]
