"""`ddnn status` on run dirs in every state, whole and damaged."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import make_job

from ddnn.errors import UserError
from ddnn.info.checkpoints import newest_checkpoint
from ddnn.info.follow import follow_status
from ddnn.info.status import Status, read_status
from ddnn.info.status_text import duration
from ddnn.slurm.job import Job, write_job
from ddnn.train.checkpoint_manifest import Manifest, manifest_bytes
from ddnn.train.run_dir import RunDir

RunCli = Callable[..., Any]
RECIPE = """\
data: {train: /gone/train, alignments: /gone/ali}
schedule: {name: exponential, epochs: 10}
parallel: {workers: 2}
"""
JOB = Job("4711", None, time.time() - 100, 2, 1, "mpirun")


def cv(epoch: int, loss: float | None, accepted: bool = True) -> dict[str, Any]:
    return {"epoch": epoch, "split": "cv", "loss": loss, "frame_accuracy": 0.5, "seconds": 1.0, "accepted": accepted}


def trained(epoch: int, seconds: float = 9.0) -> dict[str, Any]:
    return {
        **cv(epoch, 1.0), "split": "train", "seconds": seconds, "learning_rate": 0.01, "frames_per_second": 3000.0,
    }  # fmt: skip


def worker(epoch: int, rank: int, waiting: float) -> dict[str, Any]:
    shares = {"compute_share": 0.5, "data_share": 0.1, "communication_share": 0.2, "waiting_share": waiting}
    return {
        "epoch": epoch, "split": "worker", "rank": rank, "frames": 9, "minibatches": 3, "seconds": 9.0, **shares,
    }  # fmt: skip


ROWS = [
    *(cv(0, 5.0), trained(1), worker(1, 0, 0.9), cv(1, 3.0), trained(2), worker(2, 0, 0.1), worker(2, 1, 0.3)),
    cv(2, 4.0, accepted=False),
]


def write_rows(run: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run dir of a training that has stopped after two epochs."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "train.log").write_text("2026-11-21 20:40:01,123 INFO ddnn 0.1.0\n")
    write_rows(path, ROWS)
    return path


def asked(answer: str | None) -> Callable[[Job], str | None]:
    return lambda job: answer


def test_figures(run: Path) -> None:
    status = read_status(run)
    assert (status.state, status.workers, status.epochs_done, status.epochs_most) == ("stopped", 2, 2, 10)
    assert status.last == {"epoch": 2, "loss": 4.0, "frame_accuracy": 0.5, "accepted": False}
    assert status.best is not None and status.best["epoch"] == 1
    assert (status.frames_per_second, status.frames_per_second_per_worker) == (3000.0, 1500.0)
    assert status.shares == pytest.approx({"compute": 0.5, "communication": 0.2, "waiting": 0.2, "data": 0.1})
    assert status.age is not None and status.age < 60 and status.estimated_end is None
    assert status.problems == ()
    for said in ("stopped", "2 of at most 10", "rejected", "3000 frames/s, 1500 for each of 2", "waiting 20.0 %"):
        assert said in status.as_text()


def test_states_without_slurm(run: Path) -> None:
    lock = RunDir(run, resume=True).open_log()
    running = read_status(run)
    lock.close()
    assert (running.state, running.phase) == ("running", "training")
    assert running.estimated_end is not None and 75 < running.estimated_end - time.time() <= 80, "8 epochs of 10 s"
    assert read_status(run).state == "stopped"
    (run / "final.safetensors").write_bytes(b"")
    finished = read_status(run, pytest.fail)  # nobody asks Slurm of what has finished
    assert (finished.state, finished.error) == ("finished", None)


@pytest.mark.parametrize(
    ("slurm", "begun", "state"),
    [
        ("PENDING", False, "submitted"),
        ("CONFIGURING", True, "submitted"),
        ("RUNNING", False, "running"),
        ("RUNNING", True, "running"),
        ("COMPLETING", True, "stopped"),
        ("GONE", False, "stopped"),
        ("GONE", True, "stopped"),
        (None, False, "submitted"),
        (None, True, "stopped"),
    ],
)
def test_states_with_slurm(run: Path, slurm: str | None, begun: bool, state: str) -> None:
    write_job(run, JOB)
    if not begun:
        (run / "train.log").unlink()
        (run / "metrics.jsonl").unlink()
    status = read_status(run, asked(slurm))
    assert (status.state, status.job) == (state, "4711")
    assert (slurm is None) == any("Slurm could not be asked" in problem for problem in status.problems)
    assert (" submitted " in status.as_text()) == (state == "submitted")


def test_the_last_error_of_the_log(run: Path) -> None:
    (run / "job.out").write_text("slurmstepd: error: *** JOB 4711 CANCELLED ***\n")
    log = run / "train.log"
    log.write_text(
        log.read_text() + "2026-11-21 20:41:01,1 ERROR stopped: first\n"
        "2026-11-21 20:41:02,1 ERROR stopped: the training loss is nan\n  where: x\x1b[2J\n"
        "2026-11-21 20:41:03,1 INFO bye\n"
    )
    status = read_status(run)
    assert status.error == "stopped: the training loss is nan\n  where: x?[2J"
    assert "the training loss is nan\n" in status.as_text() and "\x1b" not in status.as_text()


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("ddnn 0.1\nddnn: worker 2 on n1: error: a\n  mend:  b\nddnn: worker 1: error: c\n",
         "ddnn: worker 2 on n1: error: a\n  mend:  b"),
        ("epoch 1\nslurmstepd-n1: error: *** JOB 5 ***\nsrun: error: x\n", "slurmstepd-n1: error: *** JOB 5 ***"),
        ("bash: x: command not found\njob.sh: exit code 127 from: x\n", "job.sh: exit code 127 from: x"),
        ("epoch 1\nlast words\n\0\n---\n", "last words"),
        ("", None),
    ],
)  # fmt: skip
def test_the_likeliest_reason_in_the_jobs_output(run: Path, output: str, error: str | None) -> None:
    (run / "job.out").write_text(output)
    assert read_status(run).error == error


def test_a_line_that_is_being_written(run: Path) -> None:
    write_rows(run, ROWS, '{"epoch": 3, "split": "tr')
    status = read_status(run)
    assert (status.epochs_done, status.problems) == (2, ())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b'{"epoch": 1}\n{}\n', "metrics.jsonl"),
        ("recipe.yaml", b"minibtach: 1\n", "did you mean minibatch"),
        ("recipe.yaml", b"\0" * 200_000, "recipe.yaml"),
        ("job.json", b"{}", "job.json"),
    ],
)
def test_damage_is_named_and_the_rest_told(run: Path, name: str, content: bytes, said: str) -> None:
    (run / name).write_bytes(content)
    status = read_status(run)
    assert any(said in problem for problem in status.problems)
    assert status.state == "stopped"
    assert (status.epochs_done == 2) == (name != "metrics.jsonl")
    assert "problem: " in status.as_text()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    st.sampled_from(["metrics.jsonl", "recipe.yaml", "job.json", "train.log", "job.out"]),
    st.binary(max_size=60) | st.just(b"[" * 50_000),
)
def test_no_bytes_make_it_fail(run: Path, name: str, content: bytes) -> None:
    before = (run / name).read_bytes() if (run / name).exists() else None
    (run / name).write_bytes(content)
    status = read_status(run, asked(None))
    json.dumps(status.as_dict(), allow_nan=False)
    assert status.as_text().replace("\n", "").isprintable()
    (run / name).unlink() if before is None else (run / name).write_bytes(before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "job.json", "recipe.yaml"])
def test_what_is_no_file(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    assert read_status(run, asked(None)).state == "stopped"


def test_pipes_do_not_hang_it(run: Path) -> None:
    for name in ("train.log", "job.out", "job.json", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert read_status(run, asked(None)).problems


def test_pretraining(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    write_job(run, JOB)
    assert read_status(run, asked("RUNNING")).phase == "starting"
    (run / "pretrain").mkdir()
    row = {"layer": 2, "pass": 3, "reconstruction_error_all_passes": 0.5}
    (run / "pretrain" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_status(run, asked("RUNNING")).phase == "pretraining, RBM 2, 3 passes done"


@pytest.fixture
def stack(tmp_path: Path, run_cli: RunCli) -> Path:
    """The dir of a finished pretraining of two RBMs, by `ddnn pretrain`."""
    make_job(tmp_path / "job")
    shape = ("init=rbm", "model.hidden_layers=2", "pretrain.passes=[2, 1]")
    made = run_cli(
        "pretrain", tmp_path / "job" / "recipe.yaml", "--run-dir", tmp_path / "my stack", "--device", "cpu",
        *(word for setting in shape for word in ("--set", setting)),
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    return tmp_path / "my stack"


def test_how_far_a_pretraining_is(stack: Path, run_cli: RunCli) -> None:
    finished = read_status(stack, pytest.fail)
    assert (finished.state, finished.resume, finished.problems) == ("finished", None, ())
    (stack / "stack.safetensors").unlink()
    (stack / "rbm2.safetensors").unlink()
    broken_off = read_status(stack)
    assert broken_off.state == "unfinished" and broken_off.rbms is not None
    assert [broken_off.rbms[key] for key in ("done", "most", "layer", "passes")] == [1, 2, 2, 1]
    text = broken_off.as_text()
    assert (
        "1 of 2 finished" in text
        and "RBM 2, pass 1: reconstruction error" in text
        and "a pretraining has no lock" in text
    )
    assert "epochs" not in text and "checkpoint" not in text
    json.dumps(broken_off.as_dict(), allow_nan=False)
    assert broken_off.resume is not None
    again = run_cli(*shlex.split(broken_off.resume)[1:], "--device", "cpu")
    assert again.exit_code == 0, again.stderr
    assert read_status(stack).state == "finished" and "2 of 2 finished" in read_status(stack).as_text()


def test_a_pretraining_in_its_first_passes_and_as_a_job(stack: Path) -> None:
    for name in ("stack", "rbm1", "rbm2"):
        (stack / f"{name}.safetensors").unlink()
    first = (stack / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (stack / "metrics.jsonl").write_text(first)
    begun = read_status(stack)
    assert begun.state == "unfinished" and begun.rbms is not None and len(begun.problems) == 1
    assert [begun.rbms[key] for key in ("done", "layer", "passes")] == [0, 1, 1]
    (stack / "metrics.jsonl").unlink()
    assert read_status(stack).rbms == {"done": 0, "most": 2, "layer": None, "passes": None, "error": None}
    (stack / "recipe.yaml").rename(stack / "job.yaml")  # before its job begins
    write_job(stack, JOB)
    (stack / "job.out").write_text("slurmstepd: error: *** JOB 4711 CANCELLED DUE TO TIME LIMIT ***\n")
    found = {slurm: read_status(stack, asked(slurm)) for slurm in ("PENDING", "RUNNING", "GONE", None)}
    assert [status.state for status in found.values()] == ["submitted", "running", "stopped", "unfinished"]
    assert "TIME LIMIT" in (found["GONE"].error or "") and found["RUNNING"].problems == ()
    assert "Slurm could not be asked" in found[None].problems[0]


def test_nothing_there(tmp_path: Path, run_cli: RunCli) -> None:
    with pytest.raises(UserError, match="no run dir"):
        read_status(tmp_path)
    assert run_cli("status", tmp_path / "nope").exit_code == 2


def follow(run: Path, steps: list[Callable[[], object]], terminal: bool) -> tuple[Status, list[str]]:
    shown: list[str] = []
    return follow_status(run, shown.append, terminal=terminal, pause=lambda seconds: steps.pop(0)()), shown


@pytest.mark.parametrize("terminal", [False, True])
def test_follows_to_the_end(run: Path, terminal: bool) -> None:
    owner = RunDir(run, resume=True)
    lock = owner.open_log()
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: write_rows(run, [*ROWS, trained(3), cv(3, 2.0)]),
        lambda: (run / "final.safetensors").write_bytes(b""),
        lambda: lock.close(),
    ]
    status, shown = follow(run, steps, terminal)
    assert (status.state, status.epochs_done) == ("finished", 3)
    if terminal:
        assert len(shown) == 5 and all(text.startswith("\x1b[") for text in shown[1:])
    else:
        assert ["running" in text for text in shown] == [True, True, False], "only what changes"


def test_command_line(run: Path, run_cli: RunCli) -> None:
    assert json.loads(run_cli("status", run, "--json").stdout)["epochs_done"] == 2
    stopped = run_cli("status", run, "--follow")
    assert (stopped.exit_code, stopped.stdout.count("stopped")) == (1, 1)
    (run / "final.safetensors").write_bytes(b"")
    assert run_cli("status", run, "--follow", "--json").exit_code == 0
    assert run_cli("status", run).stdout.startswith(f"{run}: finished\n")


def test_it_needs_no_torch(run: Path) -> None:
    code = "import sys; from ddnn.cli import cli; cli(['status', sys.argv[1]], standalone_mode=False); " \
        "sys.exit('torch' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code, run], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (7300, "2 h 1 min"), (90_000, "1 d 1 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- going on with it


HEADER = {"epoch": 3, "minibatch": 120, "recipe": "x"}


def write_checkpoint(run: Path, number: int, header: dict[str, Any], workers: int = 1) -> Path:
    """As ddnn.train.checkpoint does, with files of a few bytes."""
    folder = run / "checkpoints" / f"{number:08d}"
    folder.mkdir(parents=True)
    files = {}
    for name in ("shared.safetensors", *(f"worker{rank:04d}.safetensors" for rank in range(workers))):
        (folder / name).write_bytes(b"12345")
        files[name] = (5, hashlib.sha256(b"12345").hexdigest())
    (folder / "checkpoint.json").write_bytes(manifest_bytes(Manifest(number, workers, files, header)))
    return folder


def test_where_a_stopped_training_goes_on(run: Path, run_cli: RunCli) -> None:
    write_checkpoint(run, 41, {"epoch": 3, "minibatch": 0})
    write_checkpoint(run, 42, HEADER, workers=2)
    status = read_status(run)
    assert status.checkpoint is not None and status.problems == ()
    assert [status.checkpoint[key] for key in ("number", "workers", "epoch", "minibatch")] == [42, 2, 3, 120]
    assert status.resume == f"ddnn train {run} --resume"
    text = status.as_text()
    assert (
        "number 42: after epoch 3, 120 minibatches into the next, 0 s ago" in text and f"train {run} --resume" in text
    )
    told = run_cli("info", run).stdout
    assert "number 42: after epoch 3" in told and f"train {run} --resume" in told
    (run / "final.safetensors").write_bytes(b"")
    assert (read_status(run).checkpoint, read_status(run).resume) == (None, None)


def test_going_on_without_a_checkpoint(run: Path) -> None:
    assert "none: going on begins anew" in read_status(run).as_text()
    lock = RunDir(run, resume=True).open_log()
    running = read_status(run)
    lock.close()
    assert running.resume is None and "going on" not in running.as_text()


@pytest.mark.parametrize(
    ("header", "text"),
    [({}, "number 42"), ({"epoch": 3}, "number 42: after epoch 3"), ({"epoch": True}, "number 42"),
     ({"epoch": -1, "minibatch": "x"}, "number 42"), ({"epoch": 3, "minibatch": 2**80}, "number 42: after epoch 3")],
)  # fmt: skip
def test_headers_of_any_kind(run: Path, header: dict[str, Any], text: str) -> None:
    write_checkpoint(run, 42, header)
    found = newest_checkpoint(run, pytest.fail)
    assert found is not None and found.as_text() == text


def no_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def huge_manifest(folder: Path) -> None:
    with (folder / "checkpoint.json").open("r+b") as handle:
        handle.truncate(2**33)


def deep_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("[" * 100_000)


def pipe_for_a_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()
    os.mkfifo(folder / "checkpoint.json")


def linked_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").rename(folder.parent / "elsewhere.json")
    (folder / "checkpoint.json").symlink_to(folder.parent / "elsewhere.json")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def cut_part(folder: Path) -> None:
    (folder / "worker0000.safetensors").write_bytes(b"1")


def missing_part(folder: Path) -> None:
    (folder / "shared.safetensors").unlink()


def another_number(folder: Path) -> None:
    (folder / "checkpoint.json").write_bytes((folder.parent / "00000041/checkpoint.json").read_bytes())


def one_byte(folder: Path) -> None:
    text = (folder / "checkpoint.json").read_text()
    (folder / "checkpoint.json").write_text(text.replace('"epoch": 3', '"epoch": 4'))


def names_outside(folder: Path) -> None:
    value = Manifest(42, 1, {"../../recipe.yaml": (5, ""), "shared.safetensors": (5, "")}, {})
    (folder / "checkpoint.json").write_bytes(manifest_bytes(value))


@pytest.mark.parametrize(
    "damage",
    [no_manifest, huge_manifest, deep_manifest, pipe_for_a_manifest, linked_manifest, linked_folder, cut_part,
     missing_part, another_number, one_byte, names_outside],
)  # fmt: skip
def test_behind_a_damaged_checkpoint_is_another(run: Path, damage: Callable[[Path], None]) -> None:
    write_checkpoint(run, 41, HEADER)
    damage(write_checkpoint(run, 42, HEADER))
    status = read_status(run)
    assert status.checkpoint is not None and status.checkpoint["number"] == 41
    assert len(status.problems) == 1 and "checkpoint 42" in status.problems[0]


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_what_is_no_folder_of_checkpoints(run: Path, kind: str) -> None:
    (run / "elsewhere").mkdir()
    path = run / "checkpoints"
    {"file": path.touch, "link": lambda: path.symlink_to("elsewhere"), "fifo": lambda: os.mkfifo(path)}[kind]()
    status = read_status(run)
    assert status.checkpoint is None and status.problems[0].startswith("checkpoints: ")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["sha256", "files", "header", "number", "x"]), inner, max_size=5),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_manifest(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoints/00000042"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_bytes(content)
    said: list[str] = []
    assert newest_checkpoint(folder.parents[1], said.append) is None and len(said) == 1


def test_stopped_on_a_signal(run: Path) -> None:
    log = run / "train.log"
    log.write_text(
        "2026-11-21 20:40:01,123 INFO ddnn 0.1.0, torch 2.13.0, cpu, python 3.11\n"
        "2026-11-21 20:41:01,1 ERROR stopped: on SIGTERM; go on with --resume\n"
    )
    status = read_status(run)
    assert (status.state, status.error) == ("stopped", "stopped: on SIGTERM; go on with --resume")
    with log.open("a") as handle:  # gone on with, and then killed: what ended it before is not what ended it now
        handle.write("2026-11-21 20:50:01,123 INFO ddnn 0.1.0, torch 2.13.0, cpu, python 3.11\n")
    assert read_status(run).error is None


def test_status_needs_no_torch(run: Path) -> None:
    write_checkpoint(run, 42, HEADER)
    code = (
        "import sys; from pathlib import Path; from ddnn.info.status import read_status; "
        "assert read_status(Path(sys.argv[1])).checkpoint; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, run], check=True)


@pytest.mark.parametrize(
    "name",
    ["recipe.yaml", "train.log", "metrics.jsonl", "final.safetensors", "best.safetensors", "job.json", "job.out",
     "checkpoints", "pretrain"],
)  # fmt: skip
def test_pipes_in_place_of_files_are_not_waited_for(run: Path, name: str, run_cli: RunCli) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command in ("status", "info"):
        assert "Traceback" not in run_cli(command, run).stderr
