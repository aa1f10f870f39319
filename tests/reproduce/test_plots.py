"""Plots are drawn of whatever records there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduce.synthetic import TABLES, diverged, plan, table_records

from ddnn.reproduce.entries import metrics_of, table_entries
from ddnn.reproduce.plots import draw_accuracies, draw_learning, draw_speed_ups

PNG = b"\x89PNG\r\n"
pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", ["table1", "table3", "table6"])
def test_accuracies_and_learning(name: str, tmp_path: Path) -> None:
    corpus, table = plan(), TABLES[name]
    records = table_records(corpus, [table])
    records["base-16-2"] = diverged("base", 16, 2)
    records["base-16-1"] = records["base-16-1"].model_copy(
        update={"cv_by_epoch": (None, *records["base-16-1"].cv_by_epoch[1:7])}
    )
    cells = table_entries(corpus, table, records)
    shown = metrics_of(corpus, records.values())[1:3]
    for path in (
        draw_accuracies("a_ <title>", cells, shown, tmp_path / "deep" / "a.png"),
        draw_learning("_title", [cell for cell in cells if cell.workers in (1, 16)], tmp_path / "b.png"),
    ):
        assert path.read_bytes().startswith(PNG)


def test_a_table_without_figures_is_drawn(tmp_path: Path) -> None:
    corpus, table = plan(), TABLES["table6"]
    shown = metrics_of(corpus, table_records(corpus, [table]).values())[:1]
    cells = table_entries(corpus, table, {})
    assert draw_accuracies("t", cells, shown, tmp_path / "a.png").exists()
    assert draw_learning("t", cells, tmp_path / "b.png").exists()


def test_speed_ups(tmp_path: Path) -> None:
    rows = [
        ("all-reduce", 1, 1.0, "measured"),
        ("all-reduce", 2, 1.9, "measured"),
        ("all-reduce", 16, 13.0, "predicted"),
        ("ring", 1, 1.0, "measured"),
        ("all-reduce", 12, 9.3, "paper"),
    ]
    speeds = [dict(zip(("label", "workers", "speed_up", "kind"), row, strict=True)) for row in rows]
    for number, some in enumerate((speeds, speeds[:1])):
        assert draw_speed_ups("t", some, tmp_path / f"{number}.png").read_bytes().startswith(PNG)
