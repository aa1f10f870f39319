"""`ddnn report` on run dirs made up: what it counts, shows and draws, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import PARAMETERS, epoch_row, rows_of, start_row, worker_row, write_run
from rich.cells import cell_len

from ddnn.report import figures
from ddnn.report.runs import incomparable, read_run, read_runs, summarize, training_seconds
from ddnn.report.scale_command import ScaleOptions, scale
from ddnn.report.table import report
from ddnn.runs.run_status import FINAL, model_digest
from ddnn.util.errors import DataError, RecipeError, UserError
from ddnn.util.text import printable

RunCli = Callable[..., Any]
ALONE = {
    "averagings": 0,
    "consensus_distance": None,
    "bytes_sent": 0,
    "interval_seconds": None,
    "interval_seconds_std": None,
}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """One worker, one worker of an older version, two workers, four by another strategy; hostile names."""
    older = [row for row in rows_of(1) if row["type"] not in ("worker", "start")]
    four = rows_of(4)
    four[-1] |= {"accepted": False, "loss": 3.0}
    return [
        write_run(tmp_path / "one", rows_of(1, **ALONE)),
        write_run(tmp_path / "older version", older),
        write_run(tmp_path / "_two $\\frac{$", rows_of(2), "{workers: 2}"),
        write_run(
            tmp_path / "vier \x1b[31m 四",
            four,
            "{workers: 4, strategy: butterfly, averaging_period: 20}",
            "seed: 7\n",
        ),
    ]


def spread(summary: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Of a value that each worker has: the mean over the workers, the worst, its rank."""
    return tuple(summary[f"{name}_{part}"] for part in ("mean", "worst", "rank"))


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_figures(runs: list[Path]) -> None:
    one, older, two, four = summarize(read_runs(runs))
    assert [s["workers"] for s in (one, older, two, four)] == [1, 1, 2, 4]
    assert (one["frames_per_second"], two["frames_per_second"]) == (pytest.approx(9500.0), pytest.approx(18050.0))
    assert two["frames_per_second_per_worker"] == pytest.approx(9025.0)
    assert [s["speed_up"] for s in (one, older)] == [None, None], "one worker has none"
    assert [s["speed_up"] for s in (two, four)] == pytest.approx([1.9, 3.8])
    assert (two["speed_up_over"], two["no_speed_up"]) == ("one", None)
    assert [value for name, value in older.items() if name.endswith(("_mean", "_worst", "_rank"))] == [None] * 21
    assert spread(one, "consensus_distance") == (None, None, None)
    assert spread(four, "compute_fraction") == (pytest.approx(0.90), pytest.approx(0.87), 3)
    assert spread(four, "wait_fraction") == (pytest.approx(0.03), pytest.approx(0.06), 3)
    assert two["bytes_per_averaging"] == 58_554_848 / 12, "11 averagings and the mean at the end of the epoch"
    assert four["model_cv_loss"] == pytest.approx(epoch_row(3, "cv")["loss"]), "the last epoch was rejected"
    assert (four["model_epoch"], four["finished"], four["lowest_cv_loss"]) == (3, False, None)
    assert four["epochs"] == 4


def test_shares_weigh_epochs_by_their_time(tmp_path: Path) -> None:
    rows = [worker_row(1, 0, seconds=1.0, compute_fraction=0.2), worker_row(2, 0, seconds=3.0, compute_fraction=0.6)]
    (summary,) = summarize([read_run(write_run(tmp_path / "run", rows))])
    assert spread(summary, "compute_fraction") == (pytest.approx(0.5), pytest.approx(0.5), 0)


def test_excluded_models_are_counted_and_the_last_consensus_distance_is_shown(tmp_path: Path) -> None:
    rows = [
        worker_row(1, 0, excluded_averagings=2, consensus_distance=0.5),
        worker_row(2, 0, excluded_averagings=1, consensus_distance=0.25),
    ]
    summary = summarize([read_run(write_run(tmp_path / "run", [*rows, worker_row(2, 1, consensus_distance=0.75)]))])[0]
    assert summary["excluded_averagings"] == 3
    assert spread(summary, "consensus_distance") == (0.5, 0.75, 1)


def test_no_speed_up_without_a_run_of_one_worker_or_over_another_network(runs: list[Path], tmp_path: Path) -> None:
    assert [s["speed_up"] for s in summarize(read_runs(runs[2:]))] == [None, None]
    other = write_run(tmp_path / "other", rows_of(2, num_parameters=PARAMETERS + 1))
    assert summarize(read_runs([runs[0], other]))[1]["speed_up"] is None


DIFFERENT = {
    "optimizer.name": ({}, "optimizer: {name: ng-sgd, momentum: 0.0}"),
    "optimizer.momentum": ({}, "optimizer: {momentum: 0.9}"),
    "minibatch_size": ({}, "minibatch_size: 512"),
    "training data": ({"train_digest": "bbbb2222"}, ""),
    "precision": ({"precision": "bf16"}, ""),
    "machine": ({"machine": "AMD EPYC"}, ""),
    "cpu_threads": ({"cpu_threads": 2, "cores_per_worker": 2.0}, ""),
    "precision, machine": ({"precision": "bf16", "machine": "AMD EPYC"}, ""),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_speed_up_only_over_a_run_that_differs_in_nothing_but_the_workers(tmp_path: Path, what: str) -> None:
    start, recipe = DIFFERENT[what]
    one = write_run(tmp_path / "one", rows_of(1, **ALONE))
    two = write_run(tmp_path / "two", rows_of(2, start=start), "{workers: 2}", recipe)
    found = report([one, two], None)
    assert found.summaries[1]["speed_up"] is None
    assert f"two: no speed-up: it does not compare with one: {what}\n" in f"{found.as_text()}\n"
    if what == "minibatch_size":
        assert scale([one, two], ScaleOptions(workers=(2,)), None).checks, "two sizes tell what a product costs"
        return
    with pytest.raises(UserError, match=f"two: it does not compare with one: {what}"):
        scale([one, two], ScaleOptions(workers=(2,)), None)


def test_workers_that_share_a_model(tmp_path: Path) -> None:
    """A speed-up as of any two workers, and what their messages took."""
    one = write_run(tmp_path / "one", rows_of(1, **ALONE))
    shares = {"columns": 2, "column_seconds": 0.62, "column_bytes": 112_000, "averagings": 0, "bytes_sent": 0}
    two = write_run(tmp_path / "two", rows_of(2, **shares), "{workers: 2, columns: 2}")
    four = write_run(tmp_path / "four", rows_of(4, **shares), "{workers: 4, columns: 2}")
    found = report([one, two, four], None)
    assert [summary["layout"] for summary in found.summaries] == ["1x1x1", "1x2x1", "2x2x1"]
    assert found.summaries[1]["speed_up"] == pytest.approx(1.9)
    assert spread(found.summaries[1], "column_fraction") == (pytest.approx(0.2), pytest.approx(0.2), 0)
    lines = [line.split() for line in found.as_text().splitlines()]
    assert [*["replicas", "x", "columns", "x", "stages"], "-", "1x2x1", "2x2x1"] in lines
    assert [*["messages", "between", "columns"], "-", "20.0", "%", "20.0", "%"] in lines
    assert [*["bytes", "sent", "per", "minibatch", "within", "a", "model"], "-", "1,000", "1,000"] in lines
    alone = report([one], None).as_text()
    assert "within a model" not in alone and "between" not in alone


def test_workers_that_are_stages(tmp_path: Path) -> None:
    """Their share of time in messages, with waiting, and the bytes between columns and between stages."""
    bubbles = {"stages": 2, "microbatches": 4, "pipe_bytes": 224_000, "averagings": 0, "bytes_sent": 0}
    rows = rows_of(4, columns=2, column_seconds=0.31, column_bytes=112_000, **bubbles)
    for row in rows:
        if row["type"] == "worker":
            row["bubble_share"] = 0.125 if row["rank"] < 2 else 0.375
    hybrid = write_run(tmp_path / "hybrid", rows, "{workers: 4, columns: 2, stages: 2}")
    piped = write_run(tmp_path / "piped", rows_of(2, bubble_share=0.25, **bubbles), "{workers: 2, stages: 2}")
    found = report([hybrid, piped], None)
    assert [summary["layout"] for summary in found.summaries] == ["1x2x2", "1x1x2"]
    assert spread(found.summaries[0], "bubble_share") == (0.25, 0.375, 2)
    lines = [line.split() for line in found.as_text().splitlines()]
    assert [*["replicas", "x", "columns", "x", "stages"], "1x2x2", "1x1x2"] in lines
    assert [*["messages", "between", "columns"], "10.0", "%", "-"] in lines
    assert [*["messages", "between", "stages"], "25.0", "%", "25.0", "%"] in lines
    assert [*["bytes", "sent", "per", "minibatch", "within", "a", "model"], "3,000", "2,000"] in lines


def test_speeds_with_shared_and_growing_minibatches(tmp_path: Path) -> None:
    """One worker's minibatch is that of all workers; one that grows is compared over as many epochs."""
    total, growing = "minibatch_scope: total", "minibatch_size: {start: 128, end: 256}"
    one = write_run(tmp_path / "one", rows_of(1, **ALONE))
    shared = write_run(tmp_path / "shared", rows_of(2), "{workers: 2}", total)
    each = write_run(tmp_path / "each", rows_of(2), "{workers: 2}")
    alone, two, longer = (
        write_run(tmp_path / name, rows_of(workers, epochs, **(ALONE if workers == 1 else {})), f"{{workers: {workers}}}", growing)
        for name, workers, epochs in (("alone", 1, 4), ("two", 2, 4), ("longer", 2, 5))
    )  # fmt: skip
    runs = read_runs([one, shared, each, alone, two, longer])
    assert incomparable(runs[1], runs[0]) is None and incomparable(runs[0], runs[1]) is None
    assert incomparable(runs[1], runs[2]) == "it does not compare with each: minibatch_scope"
    assert incomparable(runs[4], runs[3]) is None
    assert incomparable(runs[5], runs[3]) == "it does not compare with alone: minibatch_size"


def test_runs_whose_speed_compares_with_no_other(tmp_path: Path) -> None:
    resumed, shared = rows_of(2), {"cores_per_worker": 0.5}
    resumed.append(start_row(2, epoch=4, machine="AMD EPYC"))
    older = [row for row in rows_of(2) if row["type"] != "start"]
    runs = [
        write_run(tmp_path / "one", rows_of(1, **ALONE)),
        write_run(tmp_path / "shared", rows_of(2, start=shared), "{workers: 2}"),
        write_run(tmp_path / "gpu", rows_of(2, start=shared, device="cuda:0"), "{workers: 2}"),
        write_run(tmp_path / "threads", rows_of(2, start={"cpu_threads": 2}), "{workers: 2, cpu_threads: 2}"),
        write_run(tmp_path / "resumed", resumed, "{workers: 2}"),
        write_run(tmp_path / "older", older, "{workers: 2}"),
    ]
    found = report(runs, None)
    assert [s["speed_up"] for s in found.summaries] == [None] * 6
    reasons = [s["no_speed_up"] for s in found.summaries]
    assert reasons[0] is None and all("it does not compare with one: " in reason for reason in reasons[1:])
    assert [reason.rpartition(": ")[2] for reason in reasons[1:]] == [
        "workers that shared cores or GPUs",
        "workers that shared cores or GPUs",
        "cpu_threads, workers that shared cores or GPUs",
        "machine, a resume with another machine, precision or number of workers",
        "metrics.jsonl of an older version, or no recipe.yaml",
    ]
    for run in read_runs(runs[1:]):
        assert incomparable(run, run) is not None, "ddnn scale is not fitted to it, even alone"
    assert "CV set not recorded (older version): CV losses of older may not compare" in found.as_text()
    alone = summarize(read_runs([write_run(tmp_path / "two", rows_of(2), "{workers: 2}")]))
    assert alone[0]["no_speed_up"] == "there is no run with one worker"
    both = summarize(
        read_runs([*runs[5:], write_run(tmp_path / "1 of old", [r for r in rows_of(1) if r["type"] != "start"])])
    )
    assert both[0]["speed_up"] is None


def test_the_fastest_of_several_runs_with_one_worker_is_compared_with(tmp_path: Path) -> None:
    slow, fast, other = rows_of(1, **ALONE), rows_of(1, **ALONE), rows_of(1, start={"precision": "bf16"}, **ALONE)
    for rows, speed in ((slow, 9000.0), (fast, 10000.0), (other, 90000.0)):
        for row in rows:
            row |= {"frames_per_second": speed} if row["type"] == "epoch" and row["split"] == "train" else {}
    runs = [write_run(tmp_path / name, rows) for name, rows in (("slow", slow), ("fast", fast), ("other", other))]
    found = report([*runs, write_run(tmp_path / "two", rows_of(2), "{workers: 2}")], None)
    assert [s["speed_up"] for s in found.summaries[:3]] == [None] * 3
    assert found.summaries[3]["speed_up"] == pytest.approx(1.805)
    assert "two: its speed-up is relative to fast, the fastest comparable run with one worker" in found.as_text()
    measured = scale([*runs[:2], tmp_path / "two"], ScaleOptions(workers=(2,)), None).checks
    assert [check.measured for check in measured] == pytest.approx([2.0]), "of equal seconds and half the frames each"


def test_runs_with_other_cv_sets_are_named(tmp_path: Path) -> None:
    starts = {"a": {}, "b": {"cv_digest": "dddd4444"}, "c": {}, "d": {"cv_digest": "eeee5555"}}
    runs = [write_run(tmp_path / name, rows_of(1, start=start)) for name, start in starts.items()]
    assert "CV sets differ: CV losses compare only within a | b" in report(runs[:2], None).as_text()
    assert "CV sets differ: CV losses compare only within a, c | b | d" in report(runs, None).as_text()
    assert "CV set" not in report([runs[0], runs[2]], None).as_text()


def test_the_model_shown_is_the_one_that_was_trained(tmp_path: Path) -> None:
    """With the exponential schedule the last epoch's, though an earlier one had a lower loss."""
    rows = [epoch_row(n, "cv", loss=loss, frame_accuracy=0.4 + n / 100) for n, loss in enumerate((5.0, 1.8, 1.9))]
    runs = [write_run(tmp_path / name, rows) for name in ("done", "going on")]
    (runs[0] / "final.safetensors").touch()
    found = report(runs, None)
    shown = {line[0]: line[1:] for line in (re.split(r"\s{2,}", text) for text in found.as_text().splitlines())}
    assert shown["final model: epoch"] == ["2", "2 (so far)"]
    assert shown["CV loss"] == ["1.9000"] * 2 and shown["CV frame accuracy"] == ["42.00 %"] * 2
    assert shown["lower CV loss, not kept"] == ["1.8000 (epoch 1)"] * 2
    run = found.as_dict()["runs"][0]
    assert (run["finished"], run["model_epoch"], run["model_cv_loss"]) == (True, 2, 1.9)
    assert run["model_cv_frame_accuracy"] == pytest.approx(0.42)
    assert (run["lowest_cv_loss"], run["lowest_cv_loss_epoch"]) == (1.8, 1)


def test_keys_that_one_run_sets_and_keys_beyond_the_table_are_named(tmp_path: Path) -> None:
    held_out = "seed: 1\n"
    one = write_run(tmp_path / "one", rows_of(1), more=held_out)
    two = write_run(tmp_path / "two", rows_of(1), more=held_out)
    text = (one / "recipe.yaml").read_text()
    (one / "recipe.yaml").write_text(text.replace("/gone, al", "/a/x/train, cv: {speakers: /b/cv.txt}, al", 1))
    (two / "recipe.yaml").write_text(text.replace("/gone, al", "/a/y/train, cv: {fraction: 0.2}, al", 1))
    shown = report([one, two], None).as_text()
    rows = {line.split("  ")[0]: line.split()[1:] for line in shown.splitlines()}
    assert rows["data.cv.speakers"] == ["cv.txt", "not", "set"] and rows["data.train"] == ["x/train", "y/train"]
    assert "/b" not in shown and "more keys differ" not in shown
    many = "optimizer: {name: ng-sgd, alpha: 2, rank_in: 3, rank_out: 4, momentum: 0.5, l2: 0.1, update_period: 9}\n"
    many += "schedule: {name: exponential, epochs: 3}\nminibatch_size: 2\ninit: rbm\npretrain: {minibatch_size: 9}\n"
    other = write_run(tmp_path / "three", rows_of(1), more=many)
    found = report([one, other], None)
    given, differing = (run["settings"] for run in found.as_dict()["runs"])
    assert {"optimizer.alpha", "schedule.epochs", "minibatch_size", "pretrain.minibatch_size"} <= differing.keys()
    assert (given["optimizer.alpha"], differing["optimizer.alpha"]) == (None, "2.0")
    assert "optimizer.max_change_scope" not in differing
    rest = list(differing)[6 + 12 :]
    assert rest and f"{len(rest)} more keys differ: {', '.join(rest)}" in found.as_text()


@pytest.mark.parametrize(("frames", "shown"), [("2500", "2500 frames"), ("epoch", "one epoch"), ("null", "10")])
def test_how_often_parameters_were_averaged_is_shown(tmp_path: Path, frames: str, shown: str) -> None:
    run = write_run(tmp_path / "run", rows_of(2), f"{{workers: 2, averaging_frames: {frames}}}")
    rows = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in report([run], None).as_text().splitlines()}
    assert rows["averaging_period"] == shown


def test_overloaded_cores_are_warned_of(tmp_path: Path) -> None:
    """Wall-clock time of compute that is no CPU time was spent waiting for a core. A GPU's host need not compute."""
    runs = [
        write_run(tmp_path / name, rows_of(1, compute_cpu_seconds=3.1 * 0.93 * used, device=device))
        for name, used, device in (("busy", 0.5, "cpu"), ("idle", 0.97, "cpu"), ("gpu", 0.5, "cuda:0"))
    ]
    text = report(runs, None).as_text()
    assert "busy: warning: only 50 % of its compute time was CPU time: the cores were overloaded" in text
    assert "idle: warning" not in text and "gpu: warning" not in text


def test_the_learning_rate_is_the_applied_one_and_the_machine_is_shown(tmp_path: Path) -> None:
    rows = [start_row(2), epoch_row(1, "train", learning_rate=0.016, schedule_learning_rate=0.008)]
    shown = report([write_run(tmp_path / "run", rows, "{workers: 2}")], None).as_text()
    rows_shown = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in shown.splitlines()}
    assert rows_shown["last learning rate, applied"] == "0.016"
    facts = [rows_shown[key] for key in ("activation", "schedule", "seed", "precision", "date")]
    assert facts == ["sigmoid", "newbob", "1", "float32", "2026-11-22 18:32"]
    assert rows_shown["machine"] == "Intel(R) Xeon(R) 8481C"


def test_time_is_what_the_clock_on_the_wall_shows(tmp_path: Path) -> None:
    rows = [epoch_row(1, "train", frames=1000, frames_per_second=500.0, seconds=99.0)]
    rows += [epoch_row(2, "train", frames_per_second=None, seconds=4.0)]
    assert training_seconds(read_run(write_run(tmp_path / "run", rows))) == [2.0, 6.0]


def test_speed_is_all_frames_over_all_seconds(tmp_path: Path) -> None:
    """Not the mean of the epochs' speeds: one epoch is shorter and slower."""
    rows = [
        epoch_row(1, "train", frames=1000, frames_per_second=100.0),
        epoch_row(2, "train", frames=9000, frames_per_second=300.0),
    ]
    assert summarize([read_run(write_run(tmp_path / "run", rows))])[0]["frames_per_second"] == pytest.approx(
        10_000 / 40
    )


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name / "run", rows_of(1, epochs=1)) for name in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([*paths, paths[0]])] == ["a/run", "b/run", "a/run (2)"]
    assert [run.name for run in read_runs(paths[:1])] == ["run"]


def test_table(runs: list[Path]) -> None:
    text = report([runs[0], *runs[2:]], None).as_text()
    rows = {line.split("  ")[0]: re.split(r"\s{2,}", line)[1:] for line in text.splitlines()}
    assert "\x1b" not in text
    assert "butterfly" in rows["strategy"][-1]
    assert rows["seed"][-1] == "7", "the recipes differ in it"
    assert rows["speed-up over one worker"][-1] == "3.80" and rows["efficiency: speed-up/workers"][-1] == "95.0 %"
    assert (rows["compute time"][-1], rows["compute time, least"][-1]) == ("90.0 %", "87.0 % (rank 3)")
    assert (rows["waiting time"][-1], rows["waiting time, most"][-1]) == ("3.0 %", "6.0 % (rank 3)")
    assert rows["training loss"][-1] == f"{epoch_row(3, 'train')['loss']:.4f}"


def test_the_table_of_one_worker_has_no_rows_of_zeros(tmp_path: Path) -> None:
    zeros = {"comm_fraction": 0.0, "wait_fraction": 0.0, "consensus_distance": 0.0, "bytes_sent": 0, "averagings": 0}
    text = report([write_run(tmp_path / "one", rows_of(1, **zeros))], None).as_text()
    assert not re.search("communication|waiting|consensus|averag|speed-up|rank|per worker", text), text
    assert "compute time" in text


def test_a_table_is_as_wide_as_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names and values of runs side by side go over several lines, broken between words, and none is cut off."""
    long = "a-name-that-is-longer-than-the-cells"
    machine = {"machine": "a processor whose description is much longer than a column of the table may be"}
    runs = [
        write_run(tmp_path / name, rows_of(n, 2, start=machine), f"{{workers: {n}}}")
        for n, name in enumerate((long, *"bc"), 1)
    ]
    monkeypatch.delenv("COLUMNS", raising=False)
    for columns in (100, 80, 120):
        text = report(runs, None).as_text().partition("\nb: ")[0]
        lines = text.splitlines()
        assert columns - 10 < max(map(len, lines)) <= columns
        assert ["workers", "1", "2", "3"] in [line.split() for line in lines]
        header = " ".join(lines[: next(n for n, line in enumerate(lines) if line.startswith("workers"))])
        assert "".join(word for word in header.split() if word not in "bc") == long
        for word in ("processor", "description", "column"):
            assert text.split().count(word) == 3, word
        monkeypatch.setenv("COLUMNS", str({100: 80, 80: 120}.get(columns)))


def test_from_four_runs_on_each_has_a_row(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What all have in common is above; as many columns side by side as fit, with labels and values in whole words."""
    found = report([*runs, runs[0]], None)
    words = {word for label, cell in chain(*map(dict.items, found.columns)) for word in (*label.split(), *cell.split())}
    for columns in (80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = found.as_text()[: found.as_text().index(": its speed-up is")].rpartition("\n")[0]
        assert max(map(cell_len, text.splitlines())) <= columns
        common, *tables = text.split("\n\n")
        assert common.splitlines()[0] == "all runs"
        shared = dict(re.split(r"\s{2,}", line) for line in common.splitlines()[1:])
        assert shared["optimizer"] == "sgd" and "workers" not in shared and "strategy" not in shared
        names = [run.name for run in found.runs]
        assert len(tables) > 1
        for table in tables:
            lines = [line.replace("四", "四~") for line in table.splitlines()]  # it takes two columns
            assert [line[:18].rstrip() for line in lines[-5:]] == [name.replace("四", "四~") for name in names]
            assert {word for line in lines for word in line[18:].split()} <= words
        figures = " ".join(tables[0].split())
        assert "older version 1 - - 1" in figures and "4 butterfly 20 7" in figures
        shown = " ".join(" ".join(table.split()) for table in tables)
        assert all(word in shown for word in ("95.0 %", "87.0 % (rank 3)", "speed-up/workers", "communication"))


def test_runs_that_differ_in_nothing_are_named(runs: list[Path]) -> None:
    lines = report(runs[:1] * 4, None).as_text().splitlines()
    assert lines[-4:] == ["one", "one (2)", "one (3)", "one (4)"] and "CV loss" in "".join(lines)


def test_what_the_log_does_is_no_difference(tmp_path: Path) -> None:
    more = ("log: {tensorboard: true, interval_minutes: 1}\nminibatch_size: 512", "")
    found = report(
        [write_run(tmp_path / name, rows_of(1), "{}", text) for name, text in zip("ab", more, strict=True)], None
    )
    assert "minibatch_size" in found.settings and not any(key.startswith("log.") for key in found.settings)


@pytest.mark.parametrize(("reason", "shown"), [("epochs-exhausted", "reached max_epochs"), ("converged", "converged")])
def test_why_a_training_ended(tmp_path: Path, reason: str, shown: str) -> None:
    """In words; files and scripts have the reason as metrics.jsonl has it."""
    end = {"type": "end", "reason": reason, "detail": "4 epochs done", "loss": 1.0, "epoch": 4, "kept_epoch": 4}
    found = report([write_run(tmp_path / "run", [*rows_of(1), end])], None)
    assert found.columns[0]["ended"] == shown and found.as_dict()["runs"][0]["ended"] == reason


def test_plots(runs: list[Path], tmp_path: Path) -> None:
    found = report(runs, tmp_path / "new folder" / "out")
    assert [path.name for path in found.plots] == ["learning.png", "time.png", "consensus-distance.png"]
    for path in found.plots:
        width, height = png_size(path)
        assert 800 <= width <= 2000 and 300 <= height <= 2000
    assert sorted(path.name for path in (tmp_path / "new folder" / "out").iterdir()) == sorted(
        path.name for path in found.plots
    )
    older = report(runs[1:2], tmp_path / "older")
    assert [path.name for path in older.plots] == ["learning.png"], "it has no rows of workers"


def test_plots_of_very_many_runs_and_workers(tmp_path: Path) -> None:
    many = write_run(
        tmp_path / "many", [worker_row(1, rank, compute_fraction=0.5, wait_fraction=0.3) for rank in range(300)]
    )
    plots = report([many], tmp_path / "out").plots
    assert [path.name for path in plots] == ["learning.png", "time.png", "consensus-distance.png"]
    assert max(max(png_size(path)) for path in plots) <= 2000
    runs = [write_run(tmp_path / f"run {'long ' * 20}{n}", rows_of(2, epochs=1)) for n in range(33)]
    plots = report(runs, tmp_path / "out").plots
    assert len(plots) == 3 and max(max(png_size(path)) for path in plots) <= 2000


def test_an_unfinished_run_and_one_that_went_wrong(tmp_path: Path) -> None:
    bad = write_run(tmp_path / "bad", [epoch_row(0, "cv", loss=None, frame_accuracy=None), epoch_row(1, "train")])
    begun = write_run(tmp_path / "begun", [])
    found = report([bad, begun], tmp_path / "out")
    assert [s["model_cv_loss"] for s in found.summaries] == [None, None]
    assert found.summaries[1]["frames_per_second"] is None
    json.dumps(found.as_dict(), allow_nan=False)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_metrics_that_can_be_read_can_be_shown(tmp_path: Path, data: st.DataObject) -> None:
    share = st.none() | st.floats(0.0, 1.1)
    number = st.none() | st.floats(0.0, 1e18)
    rows: list[dict[str, Any]] = []
    for epoch in range(data.draw(st.integers(0, 2))):
        loss = data.draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
        rows.append(epoch_row(epoch, "cv", loss=loss, accepted=data.draw(st.booleans())))
        rows.append(epoch_row(epoch, "train", frames_per_second=data.draw(number), seconds=data.draw(number)))
        for rank in range(data.draw(st.integers(0, 2))):
            more = {
                "compute_fraction": data.draw(share),
                "seconds": data.draw(number),
                "consensus_distance": data.draw(number),
            }
            rows.append(worker_row(epoch, rank, **more))
    path = tmp_path / "run"
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report([path], None)
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.as_text()


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e18])
def test_extreme_figures_are_drawn(tmp_path: Path, value: float) -> None:
    rows = [epoch_row(1, "train", frames_per_second=value), epoch_row(1, "cv", loss=-value, frame_accuracy=value)]
    path = write_run(tmp_path / "run", [*rows, worker_row(1, 0, consensus_distance=value, seconds=value)])
    assert len(report([path], tmp_path / "out").plots) == 3


def test_what_is_no_run_dir(tmp_path: Path, runs: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    others = [tmp_path, tmp_path / "gone", runs[0] / "recipe.yaml"]
    for paths in (others, *([path] for path in others)):
        with pytest.raises(DataError, match=r"no metrics\.jsonl here"):
            report(paths, None)
    with pytest.raises(DataError) as caught:
        report([tmp_path], None)
    inside = ", ".join(map(str, sorted(runs)[:3]))
    assert caught.value.hint == f"name a run dir in it, such as {inside}"
    caplog.clear()
    assert [run.path for run in report([others[0], runs[0], *others[1:]], None).runs] == [runs[0]]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: there is no metrics.jsonl here: not shown" for path in others
    ]
    (runs[0] / "recipe.yaml").write_text("data: [")
    with pytest.raises(RecipeError):
        report(runs, None)


def test_pretrainings_are_shown_only_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training that pretrains has rows of RBMs, too, before its own begin."""
    rbm = {"type": "pretrain", "rbm": 1, "epoch": 1, "reconstruction_error": 2.0, "mean_reconstruction_error": 2.5}
    dnn, both = write_run(tmp_path / "dnn", rows_of(1)), write_run(tmp_path / "both", [rbm, *rows_of(1)])
    dbn = write_run(tmp_path / "dbn", [rbm])
    found = report([dnn, dbn, both], None)
    assert [run.path for run in found.runs] == [dnn, both] and "older version" not in found.as_text()
    (record,) = caplog.records
    assert record.getMessage() == f"{dbn}: metrics of RBMs alone: not shown; see ddnn info"
    caplog.clear()
    assert [run.path for run in report([dbn], None).runs] == [dbn] and not caplog.records


def test_results_on_test_sets_are_those_whose_json_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = [write_run(tmp_path / name, rows_of(1)) for name in ("one", "two")]
    evaluated = {"loss": 1.23456, "frame_accuracy": 0.61234, "frames": 10, "utterances": {"used": 1}}
    (runs[0] / "evaluate_test.json").write_text(json.dumps(evaluated))
    (runs[1] / "decode_test").mkdir()
    (runs[1] / "decode_test" / "score.json").write_text(json.dumps({"scales": [], "best": 0.1, "wer": 3.5}))
    for name, other in (
        ("status", "{}"),
        ("list", "[1]"),
        ("nan", '{"wer": NaN}'),
        ("deep", "[" * 9999),
        ("text", "x"),
    ):
        (runs[1] / f"{name}.json").write_text(other)
    (runs[1] / "folder.json").mkdir()
    found = report(runs, None)
    expected = {"evaluate_test: loss per frame": 1.23456, "evaluate_test: frame accuracy (%)": pytest.approx(61.234)}
    assert [run.results[0] for run in found.runs] == [expected, {"decode_test/score: WER (%)": 3.5}]
    rows = {line.split("  ")[0]: re.split(r"\s{2,}", line)[1:] for line in found.as_text().splitlines()}
    assert rows["evaluate_test: loss per frame"] == ["1.2346", "-"]
    assert rows["decode_test/score: WER (%)"] == ["-", "3.50"]
    assert found.as_dict()["runs"][1]["results"] == {"decode_test/score: WER (%)": 3.5}
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [str(runs[1] / "folder.json")]


def test_results_of_another_model_are_left_out_and_named(tmp_path: Path) -> None:
    """Without a digest (an older version), or without a final model, they are taken as they are."""
    path = write_run(tmp_path / "run", rows_of(1))
    (path / "decode_test").mkdir()
    figures = {"evaluate": {"loss": 1.0, "frame_accuracy": 0.5}, "decode_test/score": {"wer": 3.5}, "old": {"wer": 4.0}}
    (path / FINAL).write_bytes(b"two epochs")
    for name, values in figures.items():
        model = {} if name == "old" else {"model": model_digest(path)}
        (path / f"{name}.json").write_text(json.dumps(values | model))
    found = report([path], None)
    assert len(found.runs[0].results[0]) == 4 and "another model" not in found.as_text()
    (path / FINAL).write_bytes(b"four epochs")
    found = report([path], None)
    assert found.runs[0].results[0] == {"old: WER (%)": 4.0}
    said = f"run: evaluate, decode_test/score: of another model than {FINAL} is now"
    assert said in found.as_text() and any(said in line for line in found.as_dict()["remarks"])
    assert "3.5" not in found.runs_csv()
    (path / FINAL).unlink()
    assert len(report([path], None).runs[0].results[0]) == 4


def test_csv(tmp_path: Path, run_cli: RunCli) -> None:
    """A spreadsheet takes numbers as numbers, in full, and nothing that a name says for a formula."""
    evil = ["=1+1", "+x", "-x", "@x", " =x", "\uff1dx", 'a"b,c\nd']
    runs = [write_run(tmp_path / name, rows_of(2, epochs=2), "{workers: 2}") for name in evil]
    one = write_run(tmp_path / "one", rows_of(1, **ALONE), more="schedule: {name: exponential}\n")
    (one / "evaluate.json").write_text('{"loss": -0.1, "frame_accuracy": 0.1}')
    files = [tmp_path / "new" / "runs.csv", tmp_path / "epochs.csv"]
    result = run_cli("report", *runs, one, "--no-plots", "--csv", files[0], "--csv-epochs", files[1])
    assert result.exit_code == 0 and f"table: {files[0]}" in result.stdout, result.stderr
    table, epochs = (list(csv.DictReader(io.StringIO(path.read_text(), newline=""))) for path in files)
    assert [row["run"] for row in table] == [*(f"'{name}" for name in evil[:-1]), 'a"b,c\\nd', "one"]
    assert all(row["path"] == printable(str(path), "") for row, path in zip(table, [*runs, one], strict=True))
    summaries = summarize(read_runs([*runs, one]))
    for row, summary in zip(table, summaries, strict=True):
        assert float(row["model_cv_loss"]) == summary["model_cv_loss"] and row["finished"] == "false"
        assert row["efficiency"] == ("" if summary["efficiency"] is None else str(summary["efficiency"]))
        assert float(row["compute_fraction_mean"]) == summary["compute_fraction_mean"]
    assert [row["parallel.strategy"] for row in table] == ["all-reduce"] * 7 + [""]
    assert (table[-1]["schedule.name"], table[-1]["evaluate: loss per frame"]) == ("exponential", "-0.1")
    assert len(epochs) == 7 * (3 + 2 + 4) + 5 + 4 + 4 and epochs[-1]["run"] == "one"
    cv, worker = [row for row in epochs if row["split"] == "cv"], epochs[-1]
    values = {key: float(cv[-1][key]) for key in ("epoch", "loss", "learning_rate")}
    assert values == {"epoch": 4, "loss": epoch_row(4, "cv")["loss"], "learning_rate": 0.008}
    assert (worker["type"], worker["rank"], worker["data_fraction"]) == ("worker", "0", "0.01")
    assert (cv[0]["accepted"], worker["consensus_distance"]) == ("true", "")
    assert run_cli("report", *runs, one, "--csv", "-").stdout == files[0].read_text()
    assert run_cli("report", *runs, one, "--csv-epochs", "-").stdout == files[1].read_text()
    for words in (("--csv", "-", "--csv-epochs", "-"), ("--csv", "-", "--json"), ("--csv", "x", "--csv-epochs", "x")):
        refused = run_cli("report", one, *words)
        assert refused.exit_code == 2 and "--csv" in refused.stderr
    assert run_cli("report", one, "--no-plots", "--csv", tmp_path).exit_code == 2


def test_a_run_that_diverged_does_not_flatten_the_others(tmp_path: Path) -> None:
    diverged = rows_of(2, start={"machine": "x"})
    for row in diverged:
        if row["type"] == "epoch" and row["epoch"] > 0:
            row |= {"loss": 1e30 if row["epoch"] < 3 else None, "learning_rate": 1e30}
    bad = write_run(tmp_path / "bad", diverged)
    runs = read_runs([write_run(tmp_path / "good", rows_of(1, epochs=2)), bad])
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
        figures.draw_learning(runs, tmp_path / "x.png")
    panels = drawn[0].axes
    losses, rates = (panels[n].get_ylim()[1] for n in (0, 4))
    assert 4.0 < losses < 8.0 and rates < 200.0 and panels[0].get_xlim()[1] > 4.0


def test_the_network_before_training_is_drawn_and_flattens_nothing(tmp_path: Path) -> None:
    """The line from a random one comes from outside the axes; one that is fine-tuned is inside."""
    drawn: list[Any] = []
    for name, losses in (("random", (6.0, 2.0, 1.5, 1.25)), ("fine-tuned", (1.125, 2.0, 1.5, 1.25))):
        rows = [epoch_row(epoch, split, loss=loss) for epoch, loss in enumerate(losses) for split in ("train", "cv")]
        run = read_runs([write_run(tmp_path / name, [row for row in rows if row["epoch"] or row["split"] == "cv"])])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
            figures.draw_learning(run, tmp_path / "x.png")
    for figure, first in zip(drawn, (6.0, 1.125), strict=True):
        for panel in figure.axes[:2]:
            assert any(line.get_xdata()[0] == 0.0 and line.get_ydata()[0] == first for line in panel.lines)
            assert panel.get_xlim()[0] < 0.0
    (low, high), (low_tuned, _) = (figure.axes[0].get_ylim() for figure in drawn)
    assert high < 4.0 and low < 1.25 and low_tuned < 1.125
    *_, legend = drawn[0].axes
    names = [text.get_text() for text in legend.get_legend().get_texts()]
    assert "epoch 0: before training" in names[0] and "rejected" in names[1] and "training," in names[2]


def test_the_learning_rate_is_drawn_once_in_steps(tmp_path: Path) -> None:
    """That of an epoch, from the end of the one before; its change is upright."""
    rows = rows_of(1, epochs=3)
    for row in rows:
        if row["type"] == "epoch" and row["epoch"] == 3:
            row["learning_rate"] = 0.004
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
        figures.draw_learning(read_runs([write_run(tmp_path / "run", rows)]), tmp_path / "x.png")
    *_, rates, unused = drawn[0].axes
    (line,) = rates.lines
    assert line.get_drawstyle() == "steps-pre" and not unused.axison
    assert line.get_xdata().tolist() == [0, 1, 2, 3] and line.get_ydata().tolist() == [0.008, 0.008, 0.008, 0.004]


def test_markers_outside_the_axes_are_not_drawn_in_part(tmp_path: Path) -> None:
    rows = rows_of(2)
    for row in rows:
        if row["type"] == "worker":
            row["consensus_distance"] = 0.105 if row["epoch"] == 1 else 0.01
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
        figures.draw_consensus_distance(read_runs([write_run(tmp_path / "run", rows)]), tmp_path / "x.png")
    (axes,) = drawn[0].axes
    assert axes.get_ylim()[1] < 10.6 and axes.lines[0].get_markevery() == [False, True, True, True]


def test_time_names_only_what_occurs(tmp_path: Path) -> None:
    drawn: list[Any] = []
    alone = rows_of(1, comm_fraction=0.0, wait_fraction=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
        figures.draw_time(read_runs([write_run(tmp_path / "run", alone)]), tmp_path / "x.png")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["compute", "data", "other"]


def test_out_that_cannot_be_written(runs: list[Path]) -> None:
    with pytest.raises(UserError, match="cannot make the directory"):
        report(runs[:1], runs[0] / "recipe.yaml")


def test_on_the_command_line(runs: list[Path], tmp_path: Path, run_cli: RunCli) -> None:
    shown = run_cli("report", *runs, "--out", tmp_path / "out", "--json")
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert [run["workers"] for run in found["runs"]] == [1, 1, 2, 4]
    assert found["runs"][3]["settings"]["parallel.strategy"] == "butterfly"
    assert [Path(path).name for path in found["plots"]] == ["learning.png", "time.png", "consensus-distance.png"]
    assert run_cli("report", runs[0], "--no-plots").exit_code == 0
    assert run_cli("report").exit_code == 2


def test_without_matplotlib(runs: list[Path], tmp_path: Path) -> None:
    """The table does without it, plots say what to install; neither loads torch."""
    code = (
        "import sys; from pathlib import Path; sys.modules['matplotlib.figure'] = None\n"
        "from ddnn.util.errors import UserError; from ddnn.report.table import report\n"
        "print(report([Path(sys.argv[1])], None).as_text())\n"
        "try: report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "except UserError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(runs[0]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "frames/s" in done.stdout
    assert "pip install 'ddnn[report]'" in done.stdout
    assert done.stdout.endswith("False\n")
