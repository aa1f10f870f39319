"""Which runs the tables need, and which of them have been made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddnn.errors import RecipeError, UserError
from ddnn.recipe.keys import keys
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.reproduce.corpus import CorpusPlan, judged_by, named
from ddnn.reproduce.records import Record
from ddnn.reproduce.table import Table, sizes_of

MEANING = 1
"""To be raised when what is computed by the same recipe changes: all runs are then made again."""
BESIDE = (
    "data.cache",
    *("parallel.threads", "parallel.timeout", "parallel.on_failure", "parallel.share_devices", "parallel.transport"),
    *("data.loaders", "data.place", "data.max_missing", "graphs"),
)
"""Keys that change nothing of what a training computes, or only its last bits; those of `checkpoint` neither."""


@dataclass(frozen=True)
class Run:
    """One training that a table needs.

    Attributes:
        setting, workers, seed: which; `setting` after the corpus's `same`.
        recipe: its file.
        digest: of all that its recipe says but paths; part of the run dir's name, a changed recipe gets another.
        stack: whether it starts from the seed's stack of RBMs.
        judged: SHA-256 of what its model is tested on.
    """

    setting: str
    workers: int
    seed: int
    recipe: Path
    digest: str
    stack: bool
    judged: str

    @property
    def name(self) -> str:
        """As of its record."""
        return f"{self.setting}-{self.workers}-{self.seed}"

    @property
    def folder(self) -> str:
        """Of its run dir."""
        return f"{self.name}-{self.digest[:8]}"

    @property
    def settings(self) -> tuple[str, ...]:
        """As for --set, but for the stack."""
        return f"seed={self.seed}", f"parallel.workers={self.workers}"

    def is_made(self, records: Mapping[str, Record]) -> bool:
        """Whether a record of this very recipe and these tests is there."""
        record = records.get(self.name)
        return (
            record is not None
            and record.recipe == self.digest
            and (record.failed is not None or record.judged == self.judged)
        )


def plan_runs(plan: CorpusPlan, folder: Path, tables: Iterable[Table]) -> list[Run]:
    """The runs of these tables, each once: all of the first seed, then all of the second, and so on.

    Args:
        folder: of the corpus, with its recipes.

    Raises:
        UserError: a setting has no recipe. RecipeError: a recipe is damaged, or its data are not there.
    """
    cells: dict[tuple[str, int], None] = {}
    for table in tables:
        for setting in table.settings:
            for workers in sizes_of(setting, table, plan.workers, plan.many):
                name = plan.same.get(setting.name, setting.name)
                if not setting.beyond or recipe_of(plan, folder, name, workers).is_file():
                    cells[name, workers] = None
    stack = digest(_load(folder / plan.stack)) if _exists(folder / plan.stack, "the RBMs") else ""
    runs, judged = [], judged_by(plan.tests)
    for seed in plan.seeds:
        for setting_name, workers in sorted(cells, key=lambda cell: cell[1]):  # equal sizes share the cores best
            path = recipe_of(plan, folder, setting_name, workers)
            _exists(path, f"the setting {setting_name}")
            recipe = _load(path, (f"seed={seed}", f"parallel.workers={workers}"))
            from_stack = recipe.init == "rbm" and recipe.pretrain.from_ is None
            runs.append(
                Run(setting_name, workers, seed, path, digest(recipe, stack if from_stack else ""), from_stack, judged)
            )
    return runs


def recipe_of(plan: CorpusPlan, folder: Path, setting: str, workers: int) -> Path:
    """The recipe of a setting, whether it is there or not."""
    return folder / plan.recipes.replace("{setting}", setting).replace("{workers}", str(workers))


def _load(path: Path, settings: tuple[str, ...] = ()) -> Recipe:
    """The recipe; where it cannot be, with what to do about it."""
    try:
        return load_recipe(path, settings)
    except RecipeError as error:
        mend = "where data are missing: run it in the folder from which their paths lead to them; else mend the recipe"
        raise RecipeError(error.what, where=error.where, mend=error.mend or mend) from error


def _exists(path: Path, what: str) -> bool:
    if not path.is_file():
        raise UserError(f"{what} has no recipe on this corpus", where=path, mend="write it, or name other tables")
    return True


def digest(recipe: Recipe, stack: str = "") -> str:
    """SHA-256 of what a recipe says, and the stack's: of the data their names and sizes, not where they lie; nothing
    that changes no figure."""
    tree: dict[str, Any] = yaml.safe_load(dump_recipe(recipe))
    for name, key in keys().items():
        *above, last = name.split(".")
        place = tree
        for part in above:
            place = place.get(part, {})
        if name in BESIDE or name.startswith("checkpoint."):
            place.pop(last, None)
        elif key.is_path and last in place:
            place[last] = named(Path(place[last]))
    return hashlib.sha256(json.dumps([MEANING, tree, stack], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Stale:
    """Names of runs that have a record which does not count.

    Attributes:
        recipe: it is of another recipe, or of other data.
        tests: its model was judged on other tests, or in another way.
    """

    recipe: tuple[str, ...]
    tests: tuple[str, ...]

    def as_lines(self) -> list[str]:
        """To read: what is done about them."""
        again = "their runs are judged again, or trained again where the run dirs are gone"
        return [
            *_not_counted(self.recipe, "of another recipe or other data", "their runs are trained again"),
            *_not_counted(self.tests, "judged on other tests", again),
        ]


def _not_counted(names: tuple[str, ...], why: str, then: str) -> list[str]:
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"records {why}: {len(names)}, which do not count; {then}: {some}"] if names else []


def stale(runs: Sequence[Run], records: Mapping[str, Record]) -> Stale:
    """Those of the missing that have a record nevertheless."""
    left = [run for run in missing(runs, records) if run.name in records]
    others = [run.name for run in left if records[run.name].recipe != run.digest]
    return Stale(tuple(others), tuple(run.name for run in left if run.name not in others))


def missing(runs: Sequence[Run], records: Mapping[str, Record]) -> list[Run]:
    """Those without a record."""
    return [run for run in runs if not run.is_made(records)]
