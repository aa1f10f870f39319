"""metrics.jsonl as it may lie on disk: of a run that goes on, of an older version, damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import epoch_row, rows_of, worker_row

from ddnn.errors import DataError
from ddnn.train import read_metrics as module
from ddnn.train.read_metrics import read_metrics


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_rows_are_told_apart_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*reversed(rows_of(workers=3, epochs=2))))
    found = read_metrics(path)
    assert [row.epoch for row in found.train] == [1, 2]
    assert [row.epoch for row in found.cv] == [0, 1, 2]
    assert [(row.epoch, row.rank) for row in found.workers] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert found.workers[1].compute_share == 0.91


def test_what_is_not_finite_is_null_and_later_versions_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = epoch_row(1, "cv", loss=None, frame_accuracy=None, new_in_a_later_version=[1])
    path.write_text(lines(row, worker_row(1, 0, divergence=None, block_seconds=None), {"split": "of a later version"}))
    found = read_metrics(path)
    assert (found.cv[0].loss, found.workers[0].divergence) == (None, None)


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_that_is_being_written_is_passed_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(epoch_row(0, "cv")) + json.dumps(epoch_row(1, "train"))[:cut])
    assert [row.epoch for row in read_metrics(path).cv] == [0]
    path.write_text(lines(json.dumps(epoch_row(1, "train"))[:cut], epoch_row(1, "cv")))
    with pytest.raises(DataError, match="line 1 is no metrics of a training"):
        read_metrics(path)


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("", "no JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "no JSON"),
        ('{"split": "cv", "epoch": 1, "loss": NaN, "frame_accuracy": 0.5}', "null stands for what is not finite"),
        ('{"split": "cv", "epoch": 1, "loss": 1e999, "frame_accuracy": 0.5}', "loss: inf found"),
        ('{"split": "cv", "epoch": 1' + "0" * 5000 + "}", "no JSON"),
        (without(epoch_row(1, "cv"), "split"), "no split"),
        (epoch_row(1, ["cv"]), "no split"),  # type: ignore[arg-type]
        (without(epoch_row(1, "cv"), "loss"), "loss: missing"),
        (epoch_row(1, "cv", epoch=-1), "epoch: -1 found"),
        (epoch_row(1, "cv", epoch=1.0), "epoch: 1.0 found"),
        (epoch_row(1, "cv", epoch=True), "epoch: True found"),
        (epoch_row(1, "cv", accepted="yes"), "accepted: 'yes' found"),
        (worker_row(1, 0, compute_share=57.0), "compute_share: 57.0 found"),
        (worker_row(1, 0, rank="0"), "rank: '0' found"),
        (worker_row(1, 0, seconds=-3.0), "seconds: -3.0 found"),
        (worker_row(1, 0, host="x" * 5000), "host: 'xxx"),
        (without(worker_row(1, 0), "frames"), "frames: missing"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, row: object, said: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(epoch_row(0, "cv"), row))
    with pytest.raises(DataError, match="line 2 is no metrics of a training") as caught:
        read_metrics(path)
    assert said in str(caught.value)
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 1000


def test_two_rows_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(worker_row(1, 0), worker_row(1, 1), worker_row(1, 0)))
    with pytest.raises(DataError, match="line 3: a second row of worker 0 for epoch 1"):
        read_metrics(path)


def test_what_is_no_file_and_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("gone", "pipe", "loop", "."):
        with pytest.raises(DataError, match="no such file"):
            read_metrics(tmp_path / name)
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    (tmp_path / "large").write_text(lines(*rows_of(1)))
    with pytest.raises(DataError, match="expected at most 1000"):
        read_metrics(tmp_path / "large")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    rows = rows_of(workers=2, epochs=1)
    row = data.draw(st.sampled_from(rows))
    row[data.draw(st.sampled_from(sorted(row)))] = data.draw(VALUES)
    text = bytearray(lines(*rows).encode())
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=5))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text)
    try:
        found = read_metrics(path)
    except DataError as error:
        assert error.where == str(path)
    else:
        assert len(found.train) + len(found.cv) + len(found.workers) <= len(rows)


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumed = {"epoch": 2, "split": "resumed", "minibatch": 30, "workers": 4}
    lost = {"epoch": 2, "split": "lost", "minibatch": 40, "rank": 3, "host": "n1\x1b", "workers": 3}
    path.write_text("".join(json.dumps(row) + "\n" for row in (resumed, resumed, lost)))
    events = [event.as_text() for event in read_metrics(path).events]
    assert events[1:] == [
        "resumed after epoch 2 and 30 minibatches by 4 worker(s)",
        "worker 3 on n1? was lost after epoch 2 and 40 minibatches; 3 went on",
    ]
