"""metrics.jsonl: read as it was written, of a run in progress, of another version, damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import epoch_row, rows_of, worker_row

from ddnn.runs import metrics as module
from ddnn.runs.metrics import MetricsWriter, read_metrics
from ddnn.runs.rows import EpochRow, EventRow, MetricsRow, PretrainRow, WarmupRow, WorkerRow, throughput
from ddnn.util.errors import DataError


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_rows_are_told_apart_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*reversed(rows_of(workers=3, epochs=2))))
    found = read_metrics(path)
    assert [row.epoch for row in found.train] == [1, 2]
    assert [row.epoch for row in found.cv] == [0, 1, 2]
    assert [(row.epoch, row.rank) for row in found.workers] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert found.workers[1].compute_fraction == 0.91


def test_what_is_not_finite_is_null_and_later_versions_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = epoch_row(1, "cv", loss=None, frame_accuracy=None, new_in_a_later_version=[1])
    path.write_text(
        lines(row, worker_row(1, 0, consensus_distance=None, interval_seconds=None), {"type": "of a later version"})
    )
    found = read_metrics(path)
    assert (found.cv[0].loss, found.workers[0].consensus_distance) == (None, None)
    for written in ("NaN", "-Infinity", "1e999"):  # by another program
        path.write_text(json.dumps(epoch_row(1, "cv", loss=0.125)).replace("0.125", written) + "\n")
        assert read_metrics(path).cv[0].loss is None


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_that_is_being_written_is_passed_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(epoch_row(0, "cv")) + json.dumps(epoch_row(1, "train"))[:cut])
    assert [row.epoch for row in read_metrics(path).cv] == [0]
    path.write_text(lines(json.dumps(epoch_row(1, "train"))[:cut], epoch_row(1, "cv")))
    with pytest.raises(DataError, match="line 1 is not a metrics row"):
        read_metrics(path)


def without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in keys}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("", "Invalid JSON"),
        ("[1]", "[1] found, Input should be an object"),
        ("[" * 100_000, "Invalid JSON"),
        ('{"type": "epoch", "split": "cv", "epoch": 1' + "0" * 5000 + "}", "Invalid JSON"),
        (without(epoch_row(1, "cv"), "type"), "it has no `type` (run dirs of ddnn 0.1 are not read)"),
        (without(epoch_row(1, "cv"), "split"), "split: missing"),
        (epoch_row(1, ["cv"]), "split: ['cv'] found"),  # type: ignore[arg-type]
        (without(epoch_row(1, "cv"), "loss", "frame_accuracy"), "figures: "),
        (epoch_row(1, "cv", figures={"speed": 1.0}), "there is no figure speed"),
        (epoch_row(1, "cv", epoch=-1), "epoch: -1 found"),
        (epoch_row(1, "cv", epoch=1.0), "epoch: 1.0 found"),
        (epoch_row(1, "cv", epoch=True), "epoch: True found"),
        (epoch_row(1, "cv", accepted="yes"), "accepted: 'yes' found"),
        (worker_row(1, 0, compute_fraction=57.0), "compute_fraction: 57.0 found"),
        (worker_row(1, 0, rank="0"), "rank: '0' found"),
        (worker_row(1, 0, seconds=-3.0), "seconds: -3.0 found"),
        (worker_row(1, 0, host="x" * 5000), "host: 'xxx"),
        (without(worker_row(1, 0), "frames"), "frames: missing"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, row: object, said: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(epoch_row(0, "cv"), row))
    with pytest.raises(DataError, match="line 2 is not a metrics row") as caught:
        read_metrics(path)
    assert said in str(caught.value)
    assert caught.value.location == str(path)
    assert len(str(caught.value)) < 1000


def test_two_rows_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(worker_row(1, 0), worker_row(1, 1), worker_row(1, 0)))
    with pytest.raises(DataError, match="line 3: a second worker row for epoch 1, rank 0"):
        read_metrics(path)
    path.write_text(lines(epoch_row(2, "train"), epoch_row(2, "cv"), epoch_row(2, "train")))
    with pytest.raises(DataError, match="line 3: a second epoch row for split train, epoch 2"):
        read_metrics(path)


def test_what_is_no_file_and_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("gone", "pipe", "loop", "."):
        with pytest.raises(DataError, match="the file does not exist"):
            read_metrics(tmp_path / name)
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
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
        assert error.location == str(path)
    else:
        assert len(found.train) + len(found.cv) + len(found.workers) <= len(rows)


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumed = EventRow(event="resumed", epoch=2, minibatch=30, world_size=4)
    restarted = EventRow(event="restarted", epoch=2, minibatch=40, world_size=4, number=1, reason="worker 3 died\x1b")
    further = restarted.model_copy(update={"number": 2, "died_epoch": 3, "died_minibatch": 55})
    path.write_text(lines(*(row.model_dump() for row in (resumed, resumed, restarted, further))))
    assert [event.as_text() for event in read_metrics(path).events[1:]] == [
        "resumed after epoch 2 and 30 minibatches with 4 workers",
        "restart 1 after epoch 2 and 40 minibatches: worker 3 died\\x1b",
        "restart 2 after epoch 2 and 40 minibatches: worker 3 died\\x1b; the job had been after epoch 3 and 55 minibatches",
    ]


# --- what is written is what is read

ROWS: list[MetricsRow] = [
    WarmupRow(epoch=0, loss=4.5, frame_accuracy=0.1, learning_rate=0.008, **throughput(640, 0.5)),
    EpochRow(epoch=1, split="cv", loss=2.0, frame_accuracy=0.5, learning_rate=0.008, **throughput(6000, 3.0)),
    WorkerRow(epoch=1, rank=2, host="n1", frames=9, minibatches=3, seconds=1.5, consensus_distance=0.0123456789),
    EventRow(event="resumed", epoch=1, world_size=3),
    PretrainRow(rbm=1, epoch=2, reconstruction_error=2.5, mean_reconstruction_error=2.25, **throughput(10, 0.3)),
]


def test_the_first_figure_is_the_loss_in_whatever_order_a_file_has_them() -> None:
    row = EpochRow.model_validate({"split": "cv", "epoch": 1, "frame_accuracy": 0.5, "loss": 2.0})
    assert row.loss == 2.0
    assert EpochRow(split="cv", epoch=1, figures={"frame_accuracy": 0.5, "loss": 2.0}).loss == 2.0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.type)
def test_a_row_is_read_as_it_was_written(tmp_path: Path, row: MetricsRow) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(row)
    found = read_metrics(path)
    assert [row] == [
        *found.train,
        *found.cv,
        *found.workers,
        *found.events,
        *found.pretraining,
        *filter(None, [found.warmup]),
    ]
    figures = {"loss", "frame_accuracy"} if row.FIGURES else set()
    fields = type(row).model_fields.keys() - row.FIGURES.keys() | figures
    assert set(json.loads(path.read_text())) == fields, "every field, each figure by its name, and nothing else"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(EpochRow(epoch=1, split="train", loss=value, frame_accuracy=0.1, seconds=value))
    row = read_metrics(path).train[0]
    assert (row.loss, row.seconds, row.figures["frame_accuracy"]) == (None, None, 0.1)
    assert "nan" in row.as_text()


def test_the_warm_up_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(ROWS[0])
    assert read_metrics(path).warmup == ROWS[0]
    assert ROWS[0].as_text().startswith("epoch  0 warmup loss 4.5000  frame accuracy 10.00 %  learning rate 0.008")


def test_the_model_is_that_of_the_last_accepted_epoch_not_of_the_lowest_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [(0, 5.5, True), (1, 2.5, True), (2, 2.25, True), (3, 2.0, False), (4, None, True), (5, 2.75, True)]
    path.write_text(lines(*(epoch_row(epoch, "cv", loss=loss, accepted=accepted) for epoch, loss, accepted in rows)))
    found = read_metrics(path)
    assert found.last_accepted is not None and found.last_accepted.epoch == 5
    assert found.lowest_loss is not None and found.lowest_loss.epoch == 2
    path.write_text(lines(epoch_row(0, "cv", loss=2.0), epoch_row(1, "cv", loss=2.0, accepted=False)))
    found = read_metrics(path)
    assert found.last_accepted is not None and (found.last_accepted.epoch, found.lowest_loss) == (0, None)
    path.write_text(lines(epoch_row(1, "cv", accepted=False)))
    assert (read_metrics(path).last_accepted, read_metrics(path).lowest_loss) == (None, None)


def test_workers_are_counted_over_all_epochs(tmp_path: Path) -> None:
    """The last one may not be complete yet."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*(worker_row(1, rank) for rank in range(4)), *(worker_row(2, rank) for rank in range(3))))
    found = read_metrics(path)
    assert (found.num_workers, [row.rank for row in found.last_worker_rows]) == (4, [0, 1, 2])
