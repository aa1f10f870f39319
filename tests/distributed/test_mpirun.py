"""mpirun's command and environment, and signals: the first as SIGUSR1 until it is heard; the second as SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from distributed.mpi_worlds import need_mpi

from ddnn.distributed import launcher_file, mpi
from ddnn.distributed.launcher import launch_workers
from ddnn.distributed.launcher_file import LauncherFile
from ddnn.distributed.mpirun import (
    SignalForwarder,
    StderrFilter,
    expected_world_size,
    find_mpirun,
    in_mpi_job,
    mpirun_command,
)
from ddnn.util.errors import UserError

WAIT = "import signal, sys, time\n"
LISTENS_LATE = (
    WAIT + "open(sys.argv[1], 'a').write('begun\\n')\ntime.sleep(0.6)\nheard = []\n"
    "signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
    "until = time.monotonic() + 600\n"
    "while not heard and time.monotonic() < until: time.sleep(0.01)\n"
    "time.sleep(0.3)\n"  # all have heard it before the first of them ends
    "sys.exit(int(sys.argv[2]))\n"
)


def ends(before: float, *numbers: signal.Signals, ready: Callable[[], bool] = lambda: True) -> threading.Thread:
    """Sends this process the signals once it is `ready`, `before` seconds before each."""

    def send() -> None:
        until = time.monotonic() + 600
        while not ready() and time.monotonic() < until:
            time.sleep(0.02)
        for number in numbers:
            time.sleep(before)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@contextmanager
def deaf(*numbers: signal.Signals) -> Iterator[None]:
    """Ignores signals, as nohup and a job script do, for a block."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            assert signal.getsignal(number) is signal.SIG_IGN, "given back"
            signal.signal(number, handler)


def run(code: str, *arguments: object, kill_grace: float = 10, checkpoint_grace: float = 60) -> int:
    with closing(LauncherFile()) as file, SignalForwarder(file, checkpoint_grace, kill_grace) as signals:
        return signals.run([sys.executable, "-c", code, *map(str, arguments)], {**os.environ, **file.environment})


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGINT", 0), ("SIGHUP", 3), ("SIGUSR1", 75)])
def test_the_first_is_forwarded_until_heard_and_the_workers_code_counts(tmp_path: Path, number: str, code: int) -> None:
    thread = ends(0, signal.Signals[number], ready=(tmp_path / "begun").exists)
    assert run(LISTENS_LATE, tmp_path / "begun", code) == code
    thread.join()


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGUSR1"])
def test_the_workers_learn_which_signal_is_forwarded(tmp_path: Path, name: str) -> None:
    """Not from any other file, such as another host has in its place."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom ddnn.distributed.signals import GracefulShutdown\n"
        "with GracefulShutdown(verbose=False) as stop:\n    stop.deferred = True\n    Path(sys.argv[1]).touch()\n"
        "    while stop.signal_name is None: time.sleep(0.01)\n    Path(sys.argv[2]).write_text(stop.signal_name)\n"
    )
    thread = ends(0, signal.Signals[name], ready=(tmp_path / "begun").exists)
    assert run(code, tmp_path / "begun", tmp_path / "told") == 0
    thread.join()
    assert (tmp_path / "told").read_text() == name
    other = tmp_path / "other"
    other.write_text('{"signal": "SIGINT"}\n')
    (tmp_path / "link").symlink_to(other)
    for path in (other, tmp_path / "link", tmp_path / "none"):
        environment = {launcher_file.VARIABLE: f"{path}:ddnn-0123"}
        assert launcher_file.entries(environment) == [] and not launcher_file.append(environment, exit_code=1)
    assert launcher_file.entries({launcher_file.VARIABLE: f"{tmp_path / 'link'}:other"}) == [{"signal": "SIGINT"}]
    assert launcher_file.entries({}) == []


def test_what_the_workers_call_sigusr1_is_the_first_signal() -> None:
    thread = ends(0.5, signal.SIGTERM)
    assert run(WAIT + "signal.signal(signal.SIGUSR1, signal.SIG_DFL); time.sleep(900)") == 143
    thread.join()


def test_the_second_ends() -> None:
    thread = ends(0.3, signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT)
    begun = time.monotonic()
    assert run(WAIT + "time.sleep(900)") == 130
    assert time.monotonic() - begun < 600
    thread.join()


@pytest.mark.parametrize(("numbers", "code"), [(["SIGTERM"], 143), (["SIGTERM", "SIGHUP", "SIGINT"], 130)])
def test_what_does_not_end_is_killed(numbers: list[str], code: int) -> None:
    thread = ends(0.3, *(signal.Signals[number] for number in numbers))
    assert (
        run(
            WAIT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)",
            kill_grace=0.5,
            checkpoint_grace=1.5,
        )
        == code
    )
    thread.join()


RULE = "-" * 74 + "\n"
ABORT = f"{RULE}MPI_ABORT was invoked on rank 0 in communicator MPI COMM 3 DUP FROM 0\n  Errorcode: 2\n\nNOTE: it ends.\n{RULE}"
EXITED = f'{RULE}prterun has exited due to process rank 0 with PID 0 on node vm calling\n"abort".\n{RULE}'
WARNING = f"{RULE}WARNING: no network interface of a fast kind was found\n{RULE}"
"""As Open MPI 5.0.11 writes them."""


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_messages_of_mpirun_are_kept_apart_from_those_of_the_workers(size: int) -> None:
    """However the pipe cuts them; what workers write is shown at once, but for a line that may begin a message."""
    text = f"loading - 5 %{ABORT}{EXITED}\0{WARNING}Traceback\n{RULE}no message\n---\ncut\0 short ---"
    made = StderrFilter()
    shown = [made.pass_on(text[at : at + size].encode()).decode() for at in range(0, len(text), size)]
    assert "".join(shown) == f"loading - 5 %{WARNING}Traceback\n{RULE}no message\n---\ncut short "
    assert made.pass_on(b"") == b"---"
    assert made.own_messages.decode() == ABORT + EXITED
    assert StderrFilter().pass_on(b"a line\nepoch 1 of 3") == b"a line\nepoch 1 of 3"


def test_ignored_ones() -> None:
    """SIGHUP under nohup is not heard; SIGUSR1 is, though a job script ignores it for its children."""
    with deaf(signal.SIGHUP, signal.SIGUSR1):
        thread = ends(0.3, signal.SIGHUP)
        assert run(WAIT + "time.sleep(1)") == 0
        thread.join()
        thread = ends(0.3, signal.SIGUSR1)
        assert run(WAIT + "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); time.sleep(900)") == 75
        thread.join()


def test_real_workers_that_do_not_listen_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun is told before it has started anything: neither it nor the workers die of it, and nothing is lost. But
    Open MPI may hand a signal to a worker whose program has not begun, about once in twenty starts on a busy machine."""
    need_mpi()
    for attempt in range(5):
        begun = tmp_path / f"begun{attempt}"
        thread = ends(0.05, signal.SIGTERM)
        code = launch_workers(2, [sys.executable, "-c", LISTENS_LATE, str(begun), "75"])
        thread.join()
        shown = capfd.readouterr().err
        if code == 75:
            assert begun.read_text() == "begun\n" * 2
            assert "signal" not in shown
            return
        assert code == 128 + signal.SIGTERM and "signal 10 (User defined signal 1)" in shown
    pytest.fail("in each of five starts a worker died of the signal")


def test_command_for_one_machine() -> None:
    command, environment = mpirun_command(4, ["/my python", "-m", "ddnn", "a b"], {"HOME": "/h"}, "/bin x/mpirun")
    assert command == [
        *("/bin x/mpirun", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", "4"),
        *("/my python", "-m", "ddnn", "a b"),
    ]
    assert environment == {
        "HOME": "/h",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_coll": "^han,adapt",
        "OMPI_MCA_async_mpi_finalize": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


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
    assert in_mpi_job(environment) is inside
    assert expected_world_size(environment) == workers


def test_some_nodes_of_an_allocation() -> None:
    command, environment = mpirun_command(4, ["x"], {"SLURM_JOB_NUM_NODES": "3"}, nodes=["n1", "n3"])
    assert command[1:5] == ["--host", "n1:2,n3:2", "--map-by", "ppr:2:node:OVERSUBSCRIBE"]
    assert environment["SLURM_OVERLAP"] == "1", "the step that lost a node still holds its cores"


def test_srun_without_pmix_is_refused() -> None:
    with pytest.raises(UserError, match=r"srun --mpi=pmix"):
        in_mpi_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"})


def test_singletons_are_refused() -> None:
    """A process that is told of four workers but whose MPI finds itself alone, as under another MPI's mpirun."""
    need_mpi()
    code = (
        "import os\nfrom ddnn.util.errors import UserError\nfrom ddnn.distributed.mpi import init_communicator\n"
        "try: init_communicator({**os.environ, 'PMI_RANK': '0', 'PMI_SIZE': '4'})\nexcept UserError as error: print(error)"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=600)
    assert run.stdout.startswith("4 workers were started, but each sees only itself"), run.stderr


def test_home_is_made_up_where_there_is_none() -> None:
    """Open MPI 5 ends with "Unable to get the user home directory" without it."""
    need_mpi()
    told = "import os, sys; sys.exit(0 if os.environ.get('HOME') and os.environ.get('OMPI_COMM_WORLD_RANK') else 3)"
    assert launch_workers(2, [sys.executable, "-c", told], {"PATH": "/usr/bin:/bin"}) == 0


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"pip install 'ddnn\[mpi\]'"):
        find_mpirun({"PATH": str(tmp_path)})
    (tmp_path / "mpirun").write_text("#!/nowhere\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert find_mpirun({}) == str(tmp_path / "mpirun")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="cannot start mpirun"):
        launch_workers(2, ["x"], {})
    assert signal.getsignal(signal.SIGTERM) is before


def test_mpi4py_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(mpi, "set_parent_death_signal", lambda environment: None)
    with pytest.raises(UserError, match=r"mpi4py cannot be used"):
        mpi.init_communicator({"PMIX_RANK": "0"})
