"""The command that starts the workers, and where a process finds itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.mpi_worlds import need_mpi

from ddnn.errors import UserError
from ddnn.parallel import connect as connect_module
from ddnn.parallel.launch import (
    SETTINGS,
    announced_workers,
    find_mpirun,
    inside_mpi_job,
    knows_ulfm,
    mpirun_command,
    run_workers,
)


def test_command_for_one_machine() -> None:
    command, environment = mpirun_command(4, ["/my python", "-m", "ddnn", "a b"], {"HOME": "/h"}, "/bin x/mpirun")
    assert command == [
        *("/bin x/mpirun", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", "4"),
        *("/my python", "-m", "ddnn", "a b"),
    ]
    assert environment == {**SETTINGS, "HOME": "/h"}


def test_a_job_that_outlives_its_workers() -> None:
    command, _ = mpirun_command(2, ["x"], {}, fault_tolerant=True)
    assert command[:3] == ["mpirun", "--with-ft", "ulfm"]


@pytest.mark.parametrize(
    ("told", "knows"),
    [
        ("Open MPI: 5.0.11\n  FT MPI support: yes\n", True),
        ("Open MPI: 5.0.11\n  FT MPI support: no\n", False),
        ("Open MPI: 4.1.6\n  FT MPI support: yes\n", False),
        ("Open MPI: main\n", False),
        ("", False),
        (None, False),
    ],
)
def test_whether_this_mpi_knows_ulfm(tmp_path: Path, told: str | None, knows: bool) -> None:
    if told is not None:
        (tmp_path / "ompi_info").write_text(f"#!/bin/sh\necho '{told}'\n")
        (tmp_path / "ompi_info").chmod(0o755)
    assert knows_ulfm(str(tmp_path / "mpirun"), {}) is knows


def test_what_the_user_set_stays() -> None:
    _, environment = mpirun_command(2, ["x"], {"OMPI_MCA_coll": "basic,libnbc"})
    assert environment["OMPI_MCA_coll"] == "basic,libnbc"
    assert environment["OMPI_MCA_async_mpi_finalize"] == "1"


def test_a_slurm_allocation_gets_as_many_on_each_node() -> None:
    command, _ = mpirun_command(6, ["x"], {"SLURM_JOB_NUM_NODES": "3"})
    assert command[1:3] == ["--map-by", "ppr:2:node:OVERSUBSCRIBE"]
    with pytest.raises(UserError, match="multiple of 3"):
        mpirun_command(4, ["x"], {"SLURM_JOB_NUM_NODES": "3"})


@pytest.mark.parametrize(
    ("environment", "inside", "workers"),
    [
        ({}, False, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, True, 4),
        ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "8"}, True, 8),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, True, 3),
        # The batch shell of sbatch: nothing has been started yet.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False, 1),
        # mpirun inside sbatch: its daemons are srun's tasks.
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, True, 4),
        ({"OMPI_COMM_WORLD_SIZE": "?", "PMIX_RANK": "0"}, True, 1),
    ],
)
def test_where_a_process_finds_itself(environment: dict[str, str], inside: bool, workers: int) -> None:
    assert inside_mpi_job(environment) is inside
    assert announced_workers(environment) == workers


def test_srun_without_pmix_is_refused() -> None:
    with pytest.raises(UserError, match=r"srun --mpi=pmix"):
        inside_mpi_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"})


def test_singletons_are_refused() -> None:
    """A process that is told of four workers but whose MPI finds itself alone, as under another MPI's mpirun."""
    need_mpi()
    code = (
        "import os\nfrom ddnn.errors import UserError\nfrom ddnn.parallel.connect import connect\n"
        "try: connect({**os.environ, 'PMI_RANK': '0', 'PMI_SIZE': '4'})\nexcept UserError as error: print(error)"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert run.stdout.startswith("4 workers were started, but each sees only itself"), run.stderr


def test_home_is_made_up_where_there_is_none() -> None:
    """Open MPI 5 ends with "Unable to get the user home directory" without it."""
    need_mpi()
    told = "import os, sys; sys.exit(0 if os.environ.get('HOME') and os.environ.get('OMPI_COMM_WORLD_RANK') else 3)"
    assert run_workers(2, [sys.executable, "-c", told], {"PATH": "/usr/bin:/bin"}) == 0


def test_success_is_the_work_done(capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun said 0 of a training of two nodes that Slurm had ended by SIGTERM."""
    need_mpi()
    assert run_workers(2, ["true"], done=lambda: False) == 137
    assert "the work is not done" in capfd.readouterr().err
    assert run_workers(2, ["true"], done=lambda: True) == 0


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"pip install 'ddnn\[mpi\]'"):
        find_mpirun({"PATH": str(tmp_path)})
    (tmp_path / "mpirun").write_text("#!/nowhere\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert find_mpirun({}) == str(tmp_path / "mpirun")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="cannot start mpirun"):
        run_workers(2, ["x"], {})
    assert signal.getsignal(signal.SIGTERM) is before


def test_mpi4py_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(connect_module, "die_with_launcher", lambda environment: None)
    with pytest.raises(UserError, match=r"mpi4py cannot be used"):
        connect_module.connect({"PMIX_RANK": "0"})
