"""What a table is: settings, sizes, the published figures, contrasts between settings. `tables.py` has the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Columns = Literal["every size", "one and many", "many"]
"""Sizes of a table: those of the corpus; one worker and the corpus's `many`; `many` alone."""


@dataclass(frozen=True)
class Setting:
    """A row of a table.

    Attributes:
        name: of its recipe.
        label: what a reader sees.
        beyond: it is not in the paper; a corpus may do without its recipe.
        columns: its own sizes; None has those of the table.
    """

    name: str
    label: str
    beyond: bool = False
    columns: Columns | None = None


@dataclass(frozen=True)
class Contrast:
    """What the paper says of two settings: `better` has fewer errors than `worse`.

    Attributes:
        claim: a sentence, with the paper's finding.
        better, worse: a setting and its size, "one" or "many" workers.
        published: the paper has this contrast; else it is asked here only.
    """

    claim: str
    better: tuple[str, Literal["one", "many"]]
    worse: tuple[str, Literal["one", "many"]]
    published: bool = True


@dataclass(frozen=True)
class Table:
    """A table of the paper, or one of its kind.

    Attributes:
        name: as given to `ddnn reproduce`.
        title: of the table.
        settings: its rows.
        columns: its sizes.
        contrasts: what to test.
        paper: setting and workers -> test set -> word error rate in percent.
        kind: "accuracy" tables compare settings; "speed" ones are about time.
        note: what a reader has to know.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    columns: Columns
    contrasts: tuple[Contrast, ...]
    paper: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    kind: Literal["accuracy", "speed"] = "accuracy"
    note: str = ""


BASE = Setting("base", "RBM, NG-SGD, all-reduce every 10")
_AVERAGING = {"butterfly", "ring", "hopping-ring", "gradient", "bmuf", "overlap", "wire-16"}


def sizes(table: Table, workers: tuple[int, ...], many: int) -> tuple[int, ...]:
    """The columns of a table for a corpus with these sizes."""
    return _of(table.columns, workers, many)


def sizes_of(setting: Setting, table: Table, workers: tuple[int, ...], many: int) -> tuple[int, ...]:
    """The columns in which a row has figures. One worker averages nothing: all strategies are `base` then."""
    columns = _of(setting.columns or table.columns, workers, many)
    return tuple(n for n in columns if n > 1 or setting.name not in _AVERAGING)


def _of(columns: Columns, workers: tuple[int, ...], many: int) -> tuple[int, ...]:
    return {"every size": workers, "one and many": (1, many), "many": (many,)}[columns]
