"""What `tables.yaml` holds: the paper's tables as conditions, numbers of workers, published figures and hypotheses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from ddnn.util.errors import UserError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.' -]{1,60}$")]
Workers = Literal["all"] | tuple[Literal[1, "max"], ...]
"""Columns of a table: all sizes of the corpus, or one worker, or the corpus's `max_workers`."""
Side = tuple[Name, Literal[1, "max"]]
"""A condition and its number of workers."""
BASE = "base"
"""The condition that others are compared with."""


class FrozenModel(BaseModel):
    """Data from a file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Condition(FrozenModel):
    """A row of a table."""

    name: Name = ""
    """Of its recipe: CONDITION.yaml of the corpus."""
    label: str
    """What a reader sees."""
    extension: bool = False
    """Not in the paper; a corpus may have no recipe for it."""
    workers: Workers | None = None
    """Its own columns; None: those of the table."""
    several_workers_only: bool = False
    """A strategy: one worker averages nothing, and is `base` whatever the strategy."""


class Hypothesis(FrozenModel):
    """What the paper says of two conditions: `expected_better` makes fewer errors than `expected_worse`."""

    statement: str
    """The paper's finding in words."""
    expected_better: Side
    expected_worse: Side
    published: bool = True
    """It is the paper's; else it is asked here only."""


class Table(FrozenModel):
    """A table of the paper, or one like them."""

    name: Name
    """As given to `ddnn reproduce`."""
    title: str
    kind: Literal["accuracy", "speed"] = "accuracy"
    """Whether it compares accuracies or times."""
    workers: Workers
    conditions: tuple[Condition, ...]
    hypotheses: tuple[Hypothesis, ...] = ()
    published: dict[tuple[Name, int], dict[Name, float]] = Field(default={})
    """Condition and GPUs -> test set -> word error rate in percent."""
    note: str = ""
    """What a reader has to know."""

    def columns(self, condition: Condition, sizes: tuple[int, ...], max_workers: int) -> tuple[int, ...]:
        """Numbers of workers with which a condition is trained, on a corpus with these sizes."""
        selected = condition.workers or self.workers
        if selected != "all":
            sizes = tuple(max_workers if size == "max" else size for size in selected)
        return tuple(size for size in sizes if size > 1 or not condition.several_workers_only)

    def condition(self, name: str) -> Condition:
        """The row of this name."""
        return next(condition for condition in self.conditions if condition.name == name)


class Paper(FrozenModel):
    """All of the file."""

    source: str
    """Where the published figures are from, and what they are."""
    published_speed_ups: dict[Name, dict[int, float]]
    """Condition -> GPUs -> speed-up over one."""
    tables: dict[Name, Table]
    """In the paper's order."""


@cache
def paper() -> Paper:
    """The paper's tables."""
    tree = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
    wer = tree.pop("published_wer")
    for name, table in tree["tables"].items():
        rows = table["conditions"].items()
        selected = table.pop("published", {})
        tree["tables"][name] = {
            **table,
            "name": name,
            "conditions": [{"name": condition, **row} for condition, row in rows],
            "published": {(row, gpus): wer[row][gpus] for row, numbers in selected.items() for gpus in numbers},
        }
    return Paper.model_validate(tree)


def select_tables(names: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables of these names, each once; "all" is all of them.

    Raises:
        UserError: no table has one of these names.
    """
    tables: Mapping[str, Table] = paper().tables
    for name in names:
        if name != "all" and name not in tables:
            raise UserError(f"there is no table {name!r}", hint=f"name one or more of: {', '.join(tables)}, all")
    return tuple(tables.values()) if "all" in names else tuple(tables[name] for name in dict.fromkeys(names))
