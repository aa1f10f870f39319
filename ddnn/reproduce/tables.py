"""What `tables.yaml` holds: the paper's tables as conditions, numbers of workers, published figures and hypotheses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from ddnn.util.errors import UserError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.' -]{1,60}$")]
Workers = Literal["all"] | tuple[Literal[1, "max"], ...]
"""Columns of a table: all sizes of the corpus, or one worker, or the corpus's `max_workers`."""
Side = tuple[Name, Literal[1, "max"]]  # a condition and its number of workers
BASE = "base"  # the condition that others are compared with


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
    """What the paper says of two conditions: `expected_better` makes fewer errors than `expected_worse`."""

    statement: str
    expected_better: Side
    expected_worse: Side
    published: bool = True  # by the paper; else it is asked here only


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
        """Numbers of workers with which a condition is trained, on a corpus with these sizes."""
        selected = condition.workers or self.workers
        if selected != "all":
            sizes = tuple(max_workers if size == "max" else size for size in selected)
        return tuple(size for size in sizes if size > 1 or not condition.several_workers_only)

    def condition(self, name: str) -> Condition:
        return next(condition for condition in self.conditions if condition.name == name)


class Paper(FrozenModel):
    """All of the file; `source` says where the published figures are from, and what they are."""

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
    """The tables of these names, each once, or "all" of them; UserError where there is none of a name."""
    tables = paper().tables
    for name in names:
        if name != "all" and name not in tables:
            raise UserError(f"there is no table {name!r}", hint=f"name one or more of: {', '.join(tables)}, all")
    return tuple(tables[name] for name in (tables if "all" in names else dict.fromkeys(names)))
