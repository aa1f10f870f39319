"""Worker processes: answers in order, the error of the first task that fails, nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed.mpi_worlds import all_gone

from ddnn.util.errors import DataError, UserError
from ddnn.util.pool import worker_pool


def descriptors() -> int:
    gc.collect()  # what earlier tests have left
    return len(list(Path("/proc/self/fd").iterdir()))


def test_answers_come_in_the_order_of_the_tasks() -> None:
    with worker_pool(2, "", "") as pool:
        tasks = [(time.sleep, 0.3), *((int, str(n)) for n in range(20))]
        assert list(pool.run(tasks)) == [None, *range(20)]
        assert list(pool.run([])) == []
        assert list(pool.run([(int, "7")])) == [7]


def test_the_error_is_that_of_the_first_task_that_fails() -> None:
    """Not of the one that fails first: as if there were one process. What was done before is not lost."""
    tasks = [
        (int, "5"),
        (exec, "import time; time.sleep(0.3); raise OSError('late')"),
        (exec, "raise OSError('early')"),
    ]
    answers = []
    with worker_pool(2, "", "") as pool, pytest.raises(OSError, match="late"):
        for answer in pool.run([*tasks, (int, "6")]):
            answers.append(answer)
    assert answers == [5]


def test_a_killed_process_is_an_error_and_ends_the_others() -> None:
    before = descriptors()
    with (
        pytest.raises(UserError, match="a loading process was ended by signal 9") as caught,
        worker_pool(2, "a loading process", "data.loader_processes: 1") as pool,
    ):
        pids = [child.pid for child in pool.children.values()]
        os.kill(pids[1], signal.SIGKILL)
        list(pool.run([(len, "a")] * 50))
    assert "data.loader_processes: 1" in str(caught.value)
    assert all_gone(pids, 60) and descriptors() == before


def test_no_process_outlives_a_killed_parent() -> None:
    parent = (
        "import time; from ddnn.util.pool import worker_pool\n"
        "with worker_pool(2, 'a process', 'one') as pool:\n"
        "    list(pool.run([(len, 'a')] * 4))\n"
        "    print(*[child.pid for child in pool.children.values()], flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    assert len(pids) == 2 and all_gone(pids, 60)


@pytest.mark.parametrize(
    "error",
    [
        DataError("a", location=Path("b"), hint="c"),
        UserError("a"),
        MemoryError("x"),
        OSError(28, "full"),
        OSError(28, "full", "file"),
    ],
)
def test_errors_travel_whole(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))  # noqa: S301 (made here)
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)
    assert getattr(found, "errno", None) == getattr(error, "errno", None)
