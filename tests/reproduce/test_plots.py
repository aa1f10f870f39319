"""Plots are drawn of whatever records there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from reproduce.synthetic import TABLES, diverged, epoch, plan, table_records

from ddnn.reproduce import plots
from ddnn.reproduce.clusters import CLUSTERS, costs
from ddnn.reproduce.comparison import compare
from ddnn.reproduce.entries import metrics_of, table_entries
from ddnn.reproduce.plots import (
    VERDICT_COLORS,
    draw_accuracies,
    draw_forest,
    draw_learning,
    draw_speed_ups,
    table_pictures,
)

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
        draw_accuracies("a_ <title>", cells, shown, tmp_path / "deep" / "a.svg"),
        draw_learning("_title", [cell for cell in cells if cell.workers in (1, 16)], tmp_path / "b.svg"),
    ):
        assert path.read_text().startswith("<svg ")


def test_a_table_without_figures_is_drawn(tmp_path: Path) -> None:
    corpus, table = plan(), TABLES["table6"]
    shown = metrics_of(corpus, table_records(corpus, [table]).values())[:1]
    cells = table_entries(corpus, table, {})
    assert draw_accuracies("t", cells, shown, tmp_path / "a.svg").exists()
    assert draw_learning("t", cells, tmp_path / "b.svg").exists()


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
        assert draw_speed_ups("t", some, tmp_path / f"{number}.svg").read_text().startswith("<svg ")


def test_only_what_was_measured_has_full_markers(tmp_path: Path) -> None:
    """A predicted and a published point are hollow; in the legend, too."""
    rows = [(1, 1.0, "measured"), (2, 1.9, "measured"), (1, 1.0, "predicted"), (16, 13.0, "predicted")]
    speeds = [{"label": "ring", "workers": n, "speed_up": value, "kind": kind} for n, value, kind in rows]
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_svg", lambda figure, path: drawn.append(figure) or path)
        draw_speed_ups("t", speeds, tmp_path / "x.svg")
    _, measured, predicted = drawn[0].axes[0].lines
    assert measured.get_markerfacecolor() == measured.get_color() and predicted.get_markerfacecolor() == "white"


def test_the_legend_of_learning_curves_has_the_conditions_of_all_panels(tmp_path: Path) -> None:
    corpus, table = plan(), TABLES["table1"]
    entries = table_entries(corpus, table, table_records(corpus, [table]))
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_svg", lambda figure, path: drawn.append(figure) or path)
        draw_learning("t", [entry for entry in entries if entry.workers in (1, 16)], tmp_path / "x.svg")
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == list(dict.fromkeys(entry.condition.label for entry in entries))


def test_a_picture_is_the_same_each_time_and_fits_a_dark_page(tmp_path: Path) -> None:
    corpus, table = plan(), TABLES["table6"]
    records = table_records(corpus, [table], {"sgd": 0.03})
    results = [compare(corpus, table, hypothesis, records) for hypothesis in table.hypotheses]
    first, second = (draw_forest(results, tmp_path / name).read_text() for name in "ab")
    assert first == second and "prefers-color-scheme:dark" in first
    assert "#000000" not in first and "#ffffff" not in first and "<metadata" not in first
    assert re.findall('id="verdict-([0-9]+)"', first) == ["0", "1", "2"]
    assert first.count(">confirmed</text>") == [result.verdict for result in results].count("confirmed") > 0
    assert VERDICT_COLORS["confirmed"].lower() in first


def test_costs(tmp_path: Path) -> None:
    corpus, table = plan(), TABLES["schemes"]
    records = table_records(corpus, [table])
    measured = {
        run: record.model_copy(update={"measured": epoch(record.workers, 10.0)}) for run, record in records.items()
    }
    entries = table_entries(corpus, table, measured)
    metrics = metrics_of(corpus, measured.values())
    known = costs(entries, "test frame accuracy", table.network)
    pictures = table_pictures(corpus, table, entries, metrics, [], known)
    text = pictures["schemes-costs.svg"](tmp_path / "costs.svg").read_text()
    assert all(name in text for name in (*CLUSTERS, "GB sent by a worker", "elastic averaging"))
    assert costs(table_entries(corpus, table, records), "test frame accuracy", table.network) == []
    assert "schemes-costs.svg" not in table_pictures(corpus, table, entries, metrics, [])
