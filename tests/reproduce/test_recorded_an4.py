"""The figures of docs/results follow from its records, to 12 digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddnn.recipe.source import read_yaml
from ddnn.reproduce.report import build_report
from ddnn.reproduce.runs import read_records
from ddnn.reproduce.tables import ReproduceConfig, select_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two values of JSON's types differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [d for key in expected for d in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return [d for i, value in enumerate(expected) for d in differences(found[i], value, f"{where}[{i}]")]
    equal = found == (pytest.approx(expected, rel=1e-12, abs=1e-12) if isinstance(expected, float) else expected)
    return [] if equal else [f"{where}: {found} found, expected {expected}"]


def test_the_recorded_runs_that_did_not_train() -> None:
    """SGD, and 1024 frames in a minibatch, both on 16 workers, and no others; nothing is concluded from them."""
    records = read_records(RESULTS / "an4" / "records") | read_records(RESULTS / "an4-reduce" / "records")
    assert all(record.baseline is not None for record in records.values())
    failed = {f"{name}-16-{seed}" for name in ("sgd", "minibatch-1024") for seed in (1, 2, 3)}
    assert {name for name, record in records.items() if record.failure is not None} == failed
    results = json.loads((RESULTS / "an4.json").read_text())["hypotheses"]
    incomparable = {(found["table"], found["statement"]) for found in results if found["verdict"] == "not comparable"}
    expected = {("table4", "1024 is better than 256, on many"), ("table6", "NG-SGD is better than SGD, on many")}
    assert incomparable == expected
    points = [metric["difference"] for found in results for metric in found["metrics"]]
    text = (RESULTS / "an4.md").read_text()
    assert "+91" not in text and "tested instead: NG-SGD is better than SGD at half the learning rate" in text
    assert len(points) == 4 * 14 and max(map(abs, points)) < 20.0


@pytest.mark.parametrize("name", ["an4", "an4-reduce"])
def test_recorded_figures(name: str) -> None:
    expected = json.loads((RESULTS / f"{name}.json").read_text())
    tree = read_yaml(ROOT / "recipes" / "an4" / "reproduce.yaml").nested()
    config = ReproduceConfig.model_validate(tree)
    tables, records = select_tables(tuple(expected["tables"])), read_records(RESULTS / name / "records")
    report = build_report(config, tables, records, "", [])
    found = json.loads(json.dumps({"tables": expected["tables"], **report.summary}))
    assert differences(found, expected) == []
