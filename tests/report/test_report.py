"""`ddnn report` on run dirs made up: what it counts, shows and draws, and what it refuses."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import PARAMETERS, epoch_row, rows_of, worker_row, write_run

from ddnn.report.runs import read_run, read_runs, summarise, training_seconds
from ddnn.report.table import report
from ddnn.util.errors import DataError, RecipeError, UserError

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
    older = [row for row in rows_of(1) if row["type"] != "worker"]
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
            "optimizer: {name: ng-sgd}\nseed: 7\n",
        ),
    ]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_figures(runs: list[Path]) -> None:
    one, older, two, four = summarise(read_runs(runs))
    assert [s.workers for s in (one, older, two, four)] == [1, 1, 2, 4]
    assert (one.frames_per_second, two.frames_per_second) == (pytest.approx(9500.0), pytest.approx(18050.0))
    assert two.frames_per_second_per_worker == pytest.approx(9025.0)
    assert [s.speed_up for s in (one, older, two, four)] == pytest.approx([1.0, 1.0, 1.9, 3.8])
    assert older.shares == dict.fromkeys(one.shares)
    assert older.consensus_distance is None and one.consensus_distance is None
    spread = four.shares["compute"]
    assert spread is not None
    assert (spread.mean, spread.worst, spread.rank) == (pytest.approx(0.90), pytest.approx(0.87), 3)
    spread = four.shares["wait"]
    assert spread is not None
    assert (spread.mean, spread.worst, spread.rank) == (pytest.approx(0.03), pytest.approx(0.06), 3)
    assert two.bytes_per_averaging == 58_554_848 / 12, "11 averagings and the mean at the end of the epoch"
    assert four.best_loss == pytest.approx(epoch_row(3, "cv")["loss"]), "the last epoch was rejected"
    assert four.epochs == 4


def test_shares_weigh_epochs_by_their_time(tmp_path: Path) -> None:
    rows = [worker_row(1, 0, seconds=1.0, compute_fraction=0.2), worker_row(2, 0, seconds=3.0, compute_fraction=0.6)]
    spread = summarise([read_run(write_run(tmp_path / "run", rows))])[0].shares["compute"]
    assert spread is not None and spread.mean == pytest.approx(0.5)


def test_excluded_models_are_counted_and_the_last_consensus_distance_is_shown(tmp_path: Path) -> None:
    rows = [
        worker_row(1, 0, excluded_averagings=2, consensus_distance=0.5),
        worker_row(2, 0, excluded_averagings=1, consensus_distance=0.25),
    ]
    summary = summarise([read_run(write_run(tmp_path / "run", [*rows, worker_row(2, 1, consensus_distance=0.75)]))])[0]
    assert summary.excluded_averagings == 3
    assert summary.consensus_distance is not None
    assert (summary.consensus_distance.mean, summary.consensus_distance.worst, summary.consensus_distance.rank) == (
        0.5,
        0.75,
        1,
    )


def test_no_speed_up_without_a_run_of_one_worker_or_over_another_network(runs: list[Path], tmp_path: Path) -> None:
    assert [s.speed_up for s in summarise(read_runs(runs[2:]))] == [None, None]
    other = write_run(tmp_path / "other", rows_of(2, num_parameters=PARAMETERS + 1))
    assert summarise(read_runs([runs[0], other]))[1].speed_up is None


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
    assert summarise([read_run(write_run(tmp_path / "run", rows))])[0].frames_per_second == pytest.approx(10_000 / 40)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name / "run", rows_of(1, epochs=1)) for name in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([*paths, paths[0]])] == ["a/run", "b/run", "a/run (2)"]
    assert [run.name for run in read_runs(paths[:1])] == ["run"]


def test_table(runs: list[Path]) -> None:
    text = report(runs, None).as_text()
    rows = {line[:32].strip(): line[32:].split("  ") for line in text.splitlines()}
    assert "\x1b" not in text
    assert "butterfly" in rows["strategy"][-1] and "ng-sgd" in rows["optimizer"][-1]
    assert rows["seed"][-1].strip() == "7", "the recipes differ in it"
    assert rows["speed-up over one worker"][-1].strip() == "3.80"
    assert rows["compute time"][-1].strip() == "90.0 / 87.0 % (3)"
    assert "optimizer.alpha" not in text, "only one of the recipes reads it"


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
    for path in report([many], tmp_path / "out").plots:
        assert max(png_size(path)) <= 2000
    runs = [write_run(tmp_path / f"run {'long ' * 20}{n}", rows_of(2, epochs=1)) for n in range(33)]
    for path in report(runs, tmp_path / "out").plots:
        assert max(png_size(path)) <= 2000


def test_an_unfinished_run_and_one_that_went_wrong(tmp_path: Path) -> None:
    bad = write_run(tmp_path / "bad", [epoch_row(0, "cv", loss=None, frame_accuracy=None), epoch_row(1, "train")])
    begun = write_run(tmp_path / "begun", [])
    found = report([bad, begun], tmp_path / "out")
    assert [s.best_loss for s in found.summaries] == [None, None]
    assert found.summaries[1].frames_per_second is None
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


def test_what_is_no_run_dir(tmp_path: Path, runs: list[Path]) -> None:
    for path in (tmp_path, tmp_path / "gone", runs[0] / "recipe.yaml"):
        with pytest.raises(DataError, match=r"no metrics\.jsonl here"):
            report([path], None)
    (runs[0] / "recipe.yaml").write_text("data: [")
    with pytest.raises(RecipeError):
        report(runs, None)


def test_out_that_cannot_be_written(runs: list[Path]) -> None:
    with pytest.raises(UserError, match="cannot make the directory"):
        report(runs[:1], runs[0] / "recipe.yaml")


def test_on_the_command_line(runs: list[Path], tmp_path: Path, run_cli: RunCli) -> None:
    shown = run_cli("report", *runs, "--out", tmp_path / "out", "--json")
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert [run["workers"] for run in found["runs"]] == [1, 1, 2, 4]
    assert found["runs"][3]["strategy"] == "butterfly"
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
