"""job.json, squeue's answers, the lock."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddnn.slurm.job import Job, read_job, slurm_state, slurm_states, write_job
from ddnn.util.errors import DataError
from ddnn.util.system import slurm_job_id

JOB = Job("7", None, 1.5e9, 4, 2, "mpirun")


def test_round_trip(tmp_path: Path) -> None:
    assert read_job(tmp_path) is None
    write_job(tmp_path, JOB)
    assert read_job(tmp_path) == JOB


@given(st.binary(max_size=40) | st.sampled_from([b'{"number": "--help"}', b"[" * 9000, b" " * 20_000]))
def test_damage_is_named(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "job.json").write_bytes(content)
    with pytest.raises(DataError, match=r"job\.json"):
        read_job(folder)


@pytest.mark.parametrize(
    "change", ['"7"->7', '"7"->"--help"', '"7"->"7;x"', "null->\"-x\"", "4->0", "4->true", "1500000000.0->1e300"]
)  # fmt: skip
def test_what_would_be_handed_to_squeue_is_checked(tmp_path: Path, change: str) -> None:
    write_job(tmp_path, JOB)
    path = tmp_path / "job.json"
    before, _, after = change.partition("->")
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(DataError):
        read_job(tmp_path)


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("print('7|RUNNING')", "RUNNING"),
        ("print('CLUSTER: x'); print('7|PENDING')", "PENDING"),
        ("print('7|RUNNING|None')", "RUNNING"),
        ("print('7|PENDING|ReqNodeNotAvail, n|1')", ("PENDING", "ReqNodeNotAvail, n|1")),
        ("print('7|PENDING|None')", "PENDING"),
        ("pass", "GONE"),
        ("sys.exit('slurm_load_jobs error: Invalid job id specified')", "GONE"),
        ("sys.exit('slurm_load_jobs error: Unable to contact slurm controller')", None),
        ("time.sleep(900)", None),
    ],
)
def test_squeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str | tuple[str, str] | None
) -> None:
    (tmp_path / "squeue").write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    began = time.monotonic()
    found = slurm_state(JOB, seconds=1.0 if "sleep" in script else 10.0)
    assert found == (state if state is None or isinstance(state, tuple) else (state, None))
    assert time.monotonic() - began < 600


MANY = [JOB, Job("8", None, 1.5e9, 1, 1, "srun"), Job("7", "far", 1.5e9, 1, 1, "srun")]


@pytest.mark.parametrize(
    ("script", "states"),
    [
        ("print('8|RUNNING') if '--jobs=7,8' in sys.argv else print('CLUSTER: far', '7|PENDING', sep='\\n')",
         ["GONE", "RUNNING", "PENDING"]),
        ("sys.exit('slurm_load_jobs error: Invalid job id specified' if '--jobs=7' in sys.argv else 'no')",
         [None, None, "GONE"]),
        ("time.sleep(900)", [None, None, None]),
    ],
)  # fmt: skip
def test_squeue_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, states: list[str | None]) -> None:
    (tmp_path / "squeue").write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = slurm_states(MANY, seconds=1.0 if "sleep" in script else 10.0)
    assert [state and state.name for state in map(found.get, MANY)] == states
    assert slurm_states([]) == {}


def test_no_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_state(JOB) is None


def test_a_task_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ARRAY_TASK in job.json, in squeue and in a job's environment: the number of the array may mean all tasks."""
    tasks = [replace(JOB, number=f"7_{task}") for task in (1, 2)]
    write_job(tmp_path, tasks[0])
    assert read_job(tmp_path) == tasks[0]
    said = "print('7_1|RUNNING\\n7_12|PENDING') if {'--array', '--format=%i|%T|%r', '--jobs=7_1,7_2'} <= {*sys.argv} else 0"
    (tmp_path / "squeue").write_text(f"#!{sys.executable}\nimport sys\n{said}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [state and state.name for state in slurm_states(tasks).values()] == ["RUNNING", "GONE"]
    environment = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert [slurm_job_id(e) for e in (environment, {"SLURM_JOB_ID": "9"}, {})] == ["7_2", "9", ""]
