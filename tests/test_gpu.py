"""`make gpu`: its parts, rehearsed on a CPU in this process, and the program that tries them one after another."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu
import gpu_parts
import pytest
from gpu import attempt, missing, page, table, try_all
from gpu_parts import PARTS, SIZES, Found, NotHere

from ddnn.util.text import TERMINAL_LEVEL

ROOT = Path(__file__).parents[1]
RunCli = Callable[..., Any]


class Done:
    """A process that has ended."""

    returncode = 0

    def wait(self) -> int:
        return 0


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_cli: RunCli) -> Callable[[str], Found]:
    """Runs a part as on a CPU, all of it in this process: a new one takes seconds to begin."""

    def ddnn(*arguments: object, allowed: Sequence[int] = (0,)) -> str:
        done = run_cli(*arguments)
        assert done.exit_code in allowed, done.stderr
        return str(done.stdout)

    def start(*arguments: object) -> Done:
        ddnn(*arguments, allowed=(0, gpu_parts.LEARNED_NOTHING))
        return Done()

    monkeypatch.setenv(TERMINAL_LEVEL, "INFO")  # --quiet, which the trainings have, ends with this test
    for handler in logging.getLogger().handlers:
        monkeypatch.setattr(handler, "level", handler.level)
    monkeypatch.setattr(gpu_parts, "ddnn", ddnn)
    monkeypatch.setattr(gpu_parts, "start", start)

    def run(name: str) -> Found:
        found = Found(tmp_path / "result.json")
        folder = tmp_path / name
        folder.mkdir()
        PARTS[name](found, "cpu", SIZES["tiny"], folder)
        assert json.loads(found.path.read_text())["rows"] == found.rows, "kept from the first row on"
        return found

    return run


def test_the_machine_and_its_products(rehearse: Callable[[str], Found]) -> None:
    found = rehearse("machine")
    assert [row["precision"] for row in found.rows] == ["float32", "bf16"]
    assert all(row["gflops"] > 0 for row in found.rows)
    assert "torch: " in found.notes[0] and "mpirun: " in found.notes[0]


def test_a_bench_in_each_precision(rehearse: Callable[[str], Found]) -> None:
    found = rehearse("bench-an4")
    rows = [(row["optimizer"], row["precision"]) for row in found.rows]
    assert rows == [("sgd", "float32"), ("ng-sgd", "float32"), ("sgd", "bf16"), ("ng-sgd", "bf16")]
    assert "tf32: not on a CPU" in found.notes and all(row["frames/s"] > 0 for row in found.rows)


def test_a_profile_invents_nothing_that_only_a_gpu_shows(rehearse: Callable[[str], Found]) -> None:
    found = rehearse("profile")
    assert len(found.rows) == 4 and found.wrong == []
    assert all(row["host waits"] == "not on a CPU" and row["kernels"] > 10 for row in found.rows)


def test_memory_over_minibatches(rehearse: Callable[[str], Found], monkeypatch: pytest.MonkeyPatch) -> None:
    found = rehearse("memory")
    assert [row["minibatches"] for row in found.rows] == [30, 30]
    assert found.rows[0]["reserved, MiB"] == "not on a CPU" and found.rows[0]["host, MiB"] > 10


def test_memory_that_grows_is_a_failure(rehearse: Callable[[str], Found], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(0, 100 << 30, 10 << 20))
    monkeypatch.setattr(gpu_parts, "resident_bytes", lambda: next(sizes))
    found = rehearse("memory")
    assert found.wrong == [f"{name}: host memory grew by 80.0 MiB" for name in ("sgd", "ng-sgd")]


def test_trainings_are_compared_with_those_of_the_cpu(
    rehearse: Callable[[str], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [("sgd", {}, 2e-3), ("ng-sgd", {"precision": "bf16"}, 1e-2), ("sgd", {"seed": 2}, 1e-9)]
    monkeypatch.setattr(gpu_parts, "TRAININGS", [*kinds, ("sgd", {"allow_tf32": "true"}, 0.0)])
    found = rehearse("train")
    keys = [(row["optimizer"], row["keys"]) for row in found.rows]
    assert keys == [("sgd", ""), ("ng-sgd", "precision=bf16"), ("sgd", "seed=2"), ("sgd", ""), ("ng-sgd", "")]
    assert found.rows[0]["difference"] == 0.0 < found.rows[1]["difference"] < 1e-2 and "difference" not in found.rows[3]
    assert len(found.wrong) == 1 and re.match(r"sgd seed=2: CV losses .* from those of the CPU", found.wrong[0])
    assert all(0 <= row["waiting for data"] <= 1 for row in found.rows)
    assert "tf32: not on a CPU" in found.notes


def test_images_by_one_worker_where_there_is_no_mpi(
    rehearse: Callable[[str], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "why_no_mpi", lambda: "no mpirun")
    found = rehearse("images")
    assert [(row["workers"], row["where"]) for row in found.rows] == [(1, "cpu")] * 2
    assert all(0 < row["test accuracy"] <= 1 for row in found.rows)
    assert "two workers: no mpirun" in found.notes
    with pytest.raises(NotHere):
        PARTS["workers"](found, "cpu", SIZES["tiny"], found.path.parent)


FOUND = '{"rows": [{"a": 1, "b": 2.5}], "wrong": [], "notes": ["n"], "skipped": ""}'
WRITES = f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({FOUND!r}); "
PROGRAMS = {
    "machine": WRITES,
    "tests": WRITES + "sys.exit('a | first\\nthe last line')",
    "bench-an4": WRITES + "import time; time.sleep(600)",
    "train": WRITES.replace('"wrong": []', '"wrong": ["a loss"]'),
    "profile": WRITES.replace('"skipped": ""', '"skipped": "no such thing"'),
    "memory": "import os; os.abort()",
    "images": WRITES,
}


def test_each_part_is_tried_whatever_happens_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {name: part._replace(seconds=3.0 if name == "bench-an4" else 60.0) for name, part in gpu.PARTS.items()}
    monkeypatch.setattr(gpu, "PARTS", limits)
    monkeypatch.setattr(gpu, "LEAST", 1.0)
    monkeypatch.setattr(
        gpu, "command_of", lambda name, device, size, result: [sys.executable, "-c", PROGRAMS[name], str(result)]
    )
    assert not try_all(tuple(PROGRAMS), "cpu", "tiny", tmp_path, 120.0)
    report = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {part["name"]: part["status"] for part in report["parts"]}
    assert statuses == {
        **dict.fromkeys(("machine", "images"), "ok"),
        **{"tests": "failed", "bench-an4": "out of time", "train": "failed", "profile": "not here", "memory": "failed"},
    }
    errors = {part["name"]: part["error"] for part in report["parts"] if part["error"]}
    assert errors["tests"] == "exit code 1: the last line" and errors["train"] == "a loss"
    assert errors["bench-an4"] == "out of time: ended after 3 s"
    assert errors["memory"] == "exit code -6: no message"
    assert report["parts"][2]["rows"] == [{"a": 1, "b": 2.5}], "what was found before the time was over"
    text = (tmp_path / "gpu.md").read_text()
    assert "a rehearsal on a CPU" in text and "**out of time: ended after 3 s**" in text and "| 1 | 2.5 |" in text
    assert "tests: failed" in capsys.readouterr().out

    monkeypatch.setattr(gpu, "LEAST", 1000.0)
    assert not try_all(["machine"], "cpu", "tiny", tmp_path, 120.0)
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["error"] == "not begun: no time was left"


def test_what_a_part_leaves_behind_is_ended(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    row = attempt("machine", [sys.executable, "-c", child], tmp_path / "result.json", 60.0)
    assert row["status"] == "ok"
    pid, until = int((tmp_path / "result.log").read_text()), time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until


def test_the_command_from_begin_to_end(tmp_path: Path) -> None:
    """As `make gpu` calls it, without an installed ddnn on its path but for what it adds itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / "tests/gpu.py", "--device", "cpu", "--size", "tiny", "--only", "machine"]
    command += ["--out", tmp_path / "out"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.md"]
    assert "machine: ok" in done.stdout and "everything is as it should be" in done.stdout
    (part,) = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    assert part["rows"]


def test_a_machine_that_lacks_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "missing", lambda packages: ["torch"])
    with pytest.raises(SystemExit) as ended:
        gpu.complete_python(tmp_path / "python", [])
    assert ended.value.code == 2 and "has no torch" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "missing", lambda packages: ["no-such-package"])
    flags = ["--no-index", "--find-links", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        gpu.complete_python(tmp_path / "python", flags)
    assert (
        ended.value.code == 2
        and "no-such-package cannot be installed: docs/development/gpu.md" in capsys.readouterr().err
    )
    # What this Python has, the new one has too.
    done = subprocess.run([tmp_path / "python/bin/python", "-c", "import numpy, pytest"], check=False)
    assert done.returncode == 0


def test_what_is_needed_is_what_the_project_says() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    needs = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert needs is not None
    assert set(re.findall(r'"([a-z0-9]+)', needs[1])) - {"torch", "mpi4py"} <= set(gpu.NEEDED)
    assert missing({**gpu.NEEDED, "nothing": "no_such_module"}) == ["nothing"]


def test_a_page_escapes_what_would_break_its_tables() -> None:
    assert table([{"a": "x|y\nz"}, {"b": 1234.5}]) == ["| a | b |", "| --- | --- |", "| x\\|y z |  |", "|  | 1,234 |"]
    part = {
        "name": "n",
        "title": "T",
        "status": "ok",
        "seconds": 1.0,
        "error": "",
        "skipped": "",
        "notes": [],
        "rows": [],
    }
    assert "on a GPU" in page(
        {"date": "d", "commit": "", "seconds": 1.0, "device": "cuda", "parts": [{**part, "wrong": []}]}
    )


def test_every_part_has_a_name_and_a_size() -> None:
    assert tuple(PARTS) == tuple(gpu.PARTS) and tuple(SIZES) == gpu.SIZES
    assert set(gpu.NOT_IN_REHEARSAL) < set(PARTS)
