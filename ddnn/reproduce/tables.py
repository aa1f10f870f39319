"""What to run: the paper's tables, as conditions, numbers of workers, published figures and hypotheses (`tables.yaml`),
and a corpus with its sizes, seeds and tests (`reproduce.yaml` beside its recipes)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

import ddnn
from ddnn.recipe.section import Count, NotNegativeCount, Section
from ddnn.recipe.source import find_path, first_error, read_yaml
from ddnn.util.errors import DataError, UserError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.' -]{1,60}$")]
Columns = tuple[Literal["all", "few", 1, "max"], ...]
"""Numbers of workers: all of the corpus, those up to `FEW`, one, the corpus's `max_workers`."""
FEW = 4
Side = tuple[Name, Literal[1, "max"]]  # a condition and its number of workers
BASE = "base"  # the condition that others are compared with
FILE = "reproduce.yaml"
README = "README.md"  # beside it, where there is one: says where the data come from


class Condition(Section):
    """A row of a table."""

    name: Name  # of its recipe: CONDITION.yaml of the corpus
    label: str  # what a reader sees
    extension: bool = False  # not in the paper; a corpus may have no recipe for it
    workers: Columns = ()  # its own columns; empty: those of the table
    several_workers_only: bool = False  # a strategy: one worker averages nothing, and is `base` whatever the strategy


class Hypothesis(Section):
    """What the paper says about two conditions: `expected_better` makes fewer errors than `expected_worse`."""

    statement: str
    expected_better: Side
    expected_worse: Side
    published: bool = True  # by the paper; otherwise it is only asked here
    instead_of: Side | None = None  # tests what the table's other hypotheses ask about this side, if its runs failed


class SharedTime(Section):
    """A published time of a whole training on replicas that are split into columns."""

    label: str
    replicas: Count
    columns: Count
    days: float


class SharedTimes(Section):
    """Published times of one training, whose minibatch is divided among the replicas, and what the model of its cost needs."""

    rows: tuple[SharedTime, ...]
    num_fitted: Count  # the first rows, which a second fit is made to; it predicts the others
    updates: Count  # of the whole training
    minibatch: Count  # images of all replicas
    parameters: Count
    exchanged: Count  # values of an image that two columns send each other in a direction


class Table(Section):
    """A table of the paper, or one like them."""

    name: Name  # as given to `ddnn reproduce`
    title: str
    kind: Literal["accuracy", "speed"] = "accuracy"  # what it compares
    workers: Columns
    conditions: tuple[Condition, ...]
    hypotheses: tuple[Hypothesis, ...] = ()
    published: dict[Name, tuple[int, ...]] = Field({})  # condition -> the GPUs that the paper's table has it on
    base: Name = BASE  # the condition whose runs on one worker speed-ups are measured against
    divides_minibatch: bool = False  # among the workers: minibatches are compared by their sum over the workers
    times: SharedTimes | None = None  # published, of workers that share a model
    network: str = ""  # of which the report computes bytes and times on clusters, as 440-6x2048-8806; "": none
    note: str = ""  # what a reader has to know

    def settings(self, config: ReproduceConfig) -> list[tuple[Condition, int]]:
        """The conditions with each number of workers that they are trained with on a corpus."""
        few = tuple(n for n in config.workers if n <= FEW)
        sizes = {"all": config.workers, "few": few, 1: (1,), "max": (config.max_workers,)}
        return [
            (condition, workers)
            for condition in self.conditions
            for column in condition.workers or self.workers
            for workers in sizes[column]
            if workers > 1 or not condition.several_workers_only
        ]

    def condition(self, name: str) -> Condition:
        return next(condition for condition in self.conditions if condition.name == name)


class Paper(Section):
    """The whole file; `source` says where the published figures are from, and what they are."""

    source: str
    published_wer: dict[Name, dict[int, dict[Name, float]]]  # condition -> GPUs -> test set -> WER in %
    published_speed_ups: dict[Name, dict[int, float]]  # condition -> GPUs -> speed-up over one
    tables: tuple[Table, ...]  # in the paper's order


@cache
def paper() -> Paper:
    return Paper.model_validate(yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8")))


def select_tables(names: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables with these names, each once; `all` means all. UserError: there is no such table."""
    tables = {table.name: table for table in paper().tables}
    if unknown := [name for name in names if name not in tables and name != "all"]:
        raise UserError(f"no table {unknown[0]!r}", hint=f"the tables are {', '.join(tables)}, all")
    return paper().tables if "all" in names else tuple(tables[name] for name in dict.fromkeys(names))


def _existing(path: Path, info: ValidationInfo) -> Path:
    """A path of a file in the folder of the context, made absolute; as it is without a context."""
    found = path if info.context is None else find_path(str(path), info.context, must_exist=True)
    if isinstance(found, str):
        raise ValueError(found)
    return found


ExistingPath = Annotated[Path, AfterValidator(_existing)]


class TestSet(Section):
    """What every model is tested on. Paths are relative to the working directory, then to the file."""

    __test__ = False  # not one of pytest's

    data: ExistingPath  # a Kaldi data dir
    alignments: ExistingPath | None = None  # its alignments, for the frame accuracy
    text: ExistingPath | None = None  # the reference; with `graphs`
    graphs: dict[Name, ExistingPath] = Field({})  # language model -> Kaldi graph dir; none: WERs come from Kaldi
    model: ExistingPath | None = None  # the final.mdl that the graphs were made with
    # For each run the best one counts.
    acoustic_scales: tuple[Annotated[float, Field(gt=0.0, lt=100.0)], ...] = (0.07, 0.1, 0.143)

    @model_validator(mode="after")
    def _check(self) -> TestSet:
        if self.graphs and (self.model is None or self.text is None):
            raise ValueError("graphs need `model` and `text`")
        return self


class ReproduceConfig(Section):
    """What to run on a corpus, which the tables call `name`."""

    name: Name
    recipes: Annotated[str, Field(pattern=r"\{condition\}")] = "tables/{condition}.yaml"
    """Relative to this file; with `{workers}` if each size has a recipe of its own."""
    dbn_recipe: str = "tables/base.yaml"  # trains the RBMs; the runs of a seed share one DBN
    aliases: dict[Name, Name] = Field({})  # condition -> the one that it equals here, whose runs it shares
    labels: dict[Name, str] = Field({})  # condition -> its label, if the corpus decides what it is
    seeds: Annotated[tuple[NotNegativeCount, ...], Field(min_length=1)] = (1, 2, 3)
    workers: tuple[Annotated[Count, Field(le=10_000)], ...]  # smallest first
    max_workers: Annotated[int, Field(ge=2, le=10_000)]  # of tables that compare one worker with many
    notes: dict[Name, Annotated[str, Field(max_length=4000)]] = Field({})  # table -> a note on it; `all`: at the top
    tests: dict[Name, TestSet] = Field({})

    @model_validator(mode="after")
    def _check(self) -> ReproduceConfig:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} found, expected each once")
        if "CV" in self.tests:
            raise ValueError("tests: CV is what reports call the cross-validation set: name the test set otherwise")
        if not {1, self.max_workers} <= set(self.workers) or list(self.workers) != sorted(set(self.workers)):
            expected = f"rising sizes with 1 and {self.max_workers} (`max_workers`) among them"
            raise ValueError(f"workers: {list(self.workers)} found, expected {expected}")
        return self

    def labeled(self, table: Table) -> Table:
        """The table with the labels of this corpus, also where a statement names a condition in braces."""
        labels = {condition.name: self.labels.get(condition.name, condition.label) for condition in table.conditions}
        conditions = [c.model_copy(update={"label": labels[c.name]}) for c in table.conditions]
        statements = [h.model_copy(update={"statement": h.statement.format(**labels)}) for h in table.hypotheses]
        return table.model_copy(update={"conditions": tuple(conditions), "hypotheses": tuple(statements)})

    def recipe_name(self, condition: str) -> str:
        """The condition whose recipe and runs count for this one."""
        return self.aliases.get(condition, condition)


def find_corpus(name: str) -> Path:
    """The folder of a corpus: `recipes/NAME` in the working directory, a folder with a reproduce.yaml, that file, or
    `recipes/NAME` in ddnn's checkout. UserError: there is no such corpus."""
    path, checkout = Path(name), Path(ddnn.__file__).parents[1]  # an installed package has no recipes
    folders = [path.parent] if path.name == FILE else [Path("recipes", name), path, checkout / "recipes" / name]
    for folder in folders:
        if (folder / FILE).is_file():
            return folder
    message = f"no corpus {name!r}: neither {' nor '.join(str(folder / FILE) for folder in dict.fromkeys(folders))}"
    hint = f"name a folder with a {FILE}, as DDNN/recipes/{path.name or 'NAME'} where DDNN is ddnn's checkout"
    raise UserError(message, location=Path.cwd(), hint=hint)


def load_config(folder: Path) -> ReproduceConfig:
    """Reads reproduce.yaml and resolves its paths. DataError: a value is invalid, or a path does not exist."""
    path, hint = folder / FILE, "docs/reference/reproduce.md describes its keys"
    hint += f"; {folder / README} says where the data come from" if (folder / README).is_file() else ""
    source = read_yaml(path)
    for problem in source.problems:  # anchors, tags and the like are refused as in recipes
        raise DataError(problem.text, location=problem.source, hint=hint)
    try:
        return ReproduceConfig.model_validate(source.nested(), context=folder)
    except ValidationError as error:
        raise DataError(first_error(error), location=path, hint=hint) from error


def test_digest(tests: Mapping[str, TestSet]) -> str:
    """SHA-256 of what models are tested on and how: names and sizes of files, not the folders that contain them."""
    fields = [
        [name, list(t.acoustic_scales), [file_fingerprint(p) for p in (t.data, t.alignments, t.text, t.model)]]
        + [[graph, file_fingerprint(path)] for graph, path in sorted(t.graphs.items())]
        for name, t in tests.items()
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def file_fingerprint(path: Path | None) -> list[object]:
    """Identifies a file or folder wherever it is: its name, and the size of the file, or of the files directly in the
    folder except .scp files, which contain paths."""
    if path is None:
        return []
    files = list(path.iterdir()) if path.is_dir() else [path]
    return [path.name, sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".scp")]
