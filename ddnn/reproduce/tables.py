"""What to run: the paper's tables, as conditions, numbers of workers, published figures and hypotheses (`tables.yaml`),
and a corpus with its sizes, seeds and tests (`reproduce.yaml` beside its recipes)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import ddnn
from ddnn.recipe.source import first_error, read_yaml
from ddnn.util.errors import DataError, UserError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.' -]{1,60}$")]
Workers = Literal["all"] | tuple[Literal[1, "max"], ...]
"""Columns of a table: all sizes of the corpus, or one worker, or the corpus's `max_workers`."""
Side = tuple[Name, Literal[1, "max"]]  # a condition and its number of workers
BASE = "base"  # the condition that others are compared with
FILE = "reproduce.yaml"
README = "README.md"  # beside it, where there is one: says where the data come from
RENAMED_KEYS = {"stack": "dbn_recipe", "same": "aliases", "many": "max_workers"}
_HINT = "docs/reproduce.md describes its keys"


class FrozenModel(BaseModel):
    """Data from a file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Condition(FrozenModel):
    """A row of a table."""

    name: Name = ""  # of its recipe: CONDITION.yaml of the corpus
    label: str  # what a reader sees
    extension: bool = False  # not in the paper; a corpus may have no recipe for it
    workers: Workers | None = None  # its own columns; None: those of the table
    several_workers_only: bool = False  # a strategy: one worker averages nothing, and is `base` whatever the strategy


class Hypothesis(FrozenModel):
    """What the paper says about two conditions: `expected_better` makes fewer errors than `expected_worse`."""

    statement: str
    expected_better: Side
    expected_worse: Side
    published: bool = True  # by the paper; otherwise it is only asked here
    instead_of: Side | None = None  # tests what the table's other hypotheses ask about this side, if its runs failed


class Table(FrozenModel):
    """A table of the paper, or one like them."""

    name: Name  # as given to `ddnn reproduce`
    title: str
    kind: Literal["accuracy", "speed"] = "accuracy"  # what it compares
    workers: Workers
    conditions: tuple[Condition, ...]
    hypotheses: tuple[Hypothesis, ...] = ()
    published: dict[tuple[Name, int], dict[Name, float]] = Field(default={})  # condition, GPUs -> test set -> WER in %
    note: str = ""  # what a reader has to know

    def columns(self, condition: Condition, sizes: tuple[int, ...], max_workers: int) -> tuple[int, ...]:
        """The numbers of workers that a condition is trained with, on a corpus with these sizes."""
        selected = condition.workers or self.workers
        if selected != "all":
            sizes = tuple(max_workers if size == "max" else size for size in selected)
        return tuple(size for size in sizes if size > 1 or not condition.several_workers_only)

    def condition(self, name: str) -> Condition:
        return next(condition for condition in self.conditions if condition.name == name)


class Paper(FrozenModel):
    """The whole file; `source` says where the published figures are from, and what they are."""

    source: str
    published_speed_ups: dict[Name, dict[int, float]]  # condition -> GPUs -> speed-up over one
    tables: dict[Name, Table]  # in the paper's order


@cache
def paper() -> Paper:
    tree = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
    wer = tree.pop("published_wer")
    for name, table in tree["tables"].items():
        table["name"] = name
        table["conditions"] = [{"name": row, **values} for row, values in table["conditions"].items()]
        published = table.get("published", {}).items()
        table["published"] = {(row, gpus): wer[row][gpus] for row, numbers in published for gpus in numbers}
    return Paper.model_validate(tree)


def select_tables(names: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables with these names, each once, or "all" of them. UserError: there is no table with a name."""
    tables = paper().tables
    for name in names:
        if name not in (*tables, "all"):
            raise UserError(f"there is no table {name!r}", hint=f"name one or more of: {', '.join(tables)}, all")
    return tuple(tables[name] for name in (tables if "all" in names else dict.fromkeys(names)))


class TestSet(FrozenModel):
    """What every model is tested on. Paths are relative to the working directory, then to the file."""

    __test__ = False  # not one of pytest's

    name: Name  # what the tables call it
    data: Path  # a Kaldi data dir
    alignments: Path | None = None  # its alignments, for the frame accuracy
    text: Path | None = None  # the reference; with `graphs`
    graphs: dict[Name, Path] = Field(default={})  # language model -> Kaldi graph dir; none: WERs come from Kaldi
    model: Path | None = None  # the final.mdl that the graphs were made with
    # For each run the best one counts.
    acoustic_scales: tuple[Annotated[float, Field(gt=0.0, lt=100.0)], ...] = (0.07, 0.1, 0.143)


class ReproduceConfig(FrozenModel):
    """What to run on a corpus, which the tables call `name`."""

    name: Name
    recipes: str = "tables/{condition}.yaml"  # relative to this file; `{workers}` if each size has a recipe of its own
    dbn_recipe: str = "tables/base.yaml"  # trains the RBMs; the runs of a seed share one DBN
    aliases: dict[Name, Name] = Field(default={})  # condition -> the one that it equals here, whose runs it shares
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2, 3)
    workers: tuple[Annotated[int, Field(ge=1, le=10_000)], ...]  # smallest first
    max_workers: Annotated[int, Field(ge=2, le=10_000)]  # of tables that compare one worker with many
    notes: dict[Name, Annotated[str, Field(max_length=4000)]] = Field(
        default={}
    )  # table -> a note on it; `all`: at the top
    tests: tuple[TestSet, ...] = ()  # a mapping by name in the file

    def recipe_name(self, condition: str) -> str:
        """The condition whose recipe and runs count for this one."""
        return self.aliases.get(condition, condition)


def find_corpus(name: str) -> Path:
    """The folder of a corpus: `recipes/NAME` in the working directory, a folder with a reproduce.yaml, that file, or
    `recipes/NAME` in ddnn's checkout. UserError: there is no such corpus."""
    if Path(name).name == FILE and Path(name).is_file():
        return Path(name).parent
    candidates = [Path("recipes", name), Path(name)]
    if Path(name).name == name:  # in an installed package there are no recipes
        candidates.append(Path(ddnn.__file__).parents[1] / "recipes" / name)
    for folder in candidates:
        if (folder / FILE).is_file():
            return folder
    message = f"no corpus {name!r}: neither {' nor '.join(str(folder / FILE) for folder in candidates)}"
    hint = f"name a folder with a {FILE}, as DDNN/recipes/{Path(name).name or 'NAME'} where DDNN is ddnn's checkout"
    raise UserError(message, location=Path.cwd(), hint=hint)


def load_config(folder: Path) -> ReproduceConfig:
    """Reads reproduce.yaml and resolves its paths. DataError: a value is invalid, or a path does not exist."""
    path = folder / FILE
    source = read_yaml(path)
    for problem in source.problems:  # anchors, tags and the like are refused as in recipes
        raise DataError(problem.text, location=problem.source, hint=_HINT)
    tree = source.nested()
    for old in RENAMED_KEYS.keys() & tree.keys():
        raise DataError(f"unknown key {old!r}", location=path, hint=f"the key is now called {RENAMED_KEYS[old]!r}")
    tests = tree.get("tests")
    if isinstance(tests, dict):  # by name in the file, so that no two have the same
        tree["tests"] = [{"name": name, **test} if isinstance(test, dict) else test for name, test in tests.items()]
    try:
        config = ReproduceConfig.model_validate(tree)
    except ValidationError as error:
        raise DataError(first_error(error), location=path, hint=_HINT) from error
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise DataError(f"seeds: {list(config.seeds)} found, expected one or more, each once", location=path)
    if "{condition}" not in config.recipes:
        raise DataError(f"recipes: expected {{condition}} in {config.recipes!r}", location=path, hint=_HINT)
    sizes = list(config.workers)
    if 1 not in sizes or config.max_workers not in sizes or sizes != sorted(set(sizes)):
        expected = f"rising sizes with 1 and {config.max_workers} (`max_workers`) among them"
        raise DataError(f"workers: {sizes} found, expected {expected}", location=path)
    return config.model_copy(update={"tests": tuple(_with_absolute_paths(test, folder) for test in config.tests)})


def _with_absolute_paths(test: TestSet, folder: Path) -> TestSet:
    if test.graphs and (test.model is None or test.text is None):
        raise DataError(f"test {test.name}: graphs need `model` and `text`", location=folder / FILE)

    def resolve(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: resolve(path, f"{key}.{name}") for name, path in value.items()}
        if not isinstance(value, Path):
            return value
        candidates = list(dict.fromkeys((Path.cwd() / value, folder.absolute() / value)))
        for candidate in candidates:
            if candidate.exists():
                return candidate.resolve()
        source = f"; {folder / README} says where they come from" if (folder / README).is_file() else ""
        missing = f"{value} does not exist: there is no {' and no '.join(map(str, candidates))}"
        hint = f"run it in the folder from which this path leads to the data, or put the data there{source}"
        raise DataError(f"{key}: {missing}", location=folder / FILE, hint=hint)

    return test.model_copy(update=resolve(dict(test), f"tests.{test.name}"))


def test_digest(tests: Sequence[TestSet]) -> str:
    """SHA-256 of what models are tested on and how: names and sizes of files, not the folders that contain them."""
    fields = [
        [t.name, list(t.acoustic_scales), [file_fingerprint(p) for p in (t.data, t.alignments, t.text, t.model)]]
        + [[name, file_fingerprint(path)] for name, path in sorted(t.graphs.items())]
        for t in tests
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def file_fingerprint(path: Path | None) -> list[object]:
    """Identifies a file or folder wherever it is: its name, and the size of the file, or of the files directly in the
    folder except .scp files, which contain paths."""
    if path is None:
        return []
    files = list(path.iterdir()) if path.is_dir() else [path]
    return [path.name, sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".scp")]
