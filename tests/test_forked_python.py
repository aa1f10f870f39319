"""What forked_python.py starts ends, says and is told the same as a real Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from distributed.mpi_worlds import all_gone
from forked_python import forked_python

BOTH = ("forked", "real")
SURROUNDINGS = """
import os, resource, signal, sys
print(sys.argv, __name__, os.getcwd(), os.environ["A"], os.environ.get("HOME"), "torch" in sys.modules or "no torch yet")
print(sys.stdin.read(), os.read(int(sys.argv[1]), 10), os.umask(0), resource.getrlimit(resource.RLIMIT_CORE))
print(os.sched_getaffinity(0), signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM), sys.path[0])
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stderr.errors, sys.stdin.encoding)
"""


@pytest.fixture(autouse=True)
def forked() -> None:
    if forked_python() == sys.executable:
        pytest.skip("nothing is forked: not on Linux, or DDNN_TEST_REAL_PYTHON is set")


def program(kind: str) -> str:
    return forked_python() if kind == "forked" else sys.executable


def run(kind: str, code: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(kind), "-c", code, *words], capture_output=True, text=True, timeout=600, **options)


def test_it_is_started_with_the_same(tmp_path: Path) -> None:
    said = {}
    for kind in BOTH:
        read, write = os.pipe()
        os.write(write, b"handed on")
        os.close(write)
        script = 'umask 027; ulimit -c 0; trap "" USR1; exec "$@"'
        command = ["/bin/sh", "-c", script, "sh", program(kind), "-c", f"import sys\n{SURROUNDINGS}", str(read), "é"]
        environment = {**os.environ, "A": "b=c", "HOME": "/nowhere"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input="input", capture_output=True, text=True, pass_fds=[read],
            check=True,
        )  # fmt: skip
        os.close(read)
        said[kind] = done.stdout.replace("no torch yet", "True").replace(f"'{read}'", "'N'")
    assert said["forked"] == said["real"]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os.abort()",
        "import atexit; atexit.register(print, 'at the end'); print('first')",
        "import threading, time; threading.Timer(0.1, print, ['of a thread']).start()",
        "import sys; print('lost'); sys.stdout.close()",
        "import os; print('kept back'); os.close(1)",
        "import sys; sys.stderr.write('é\\udc80')",
    ],
)
def test_it_ends_the_same(code: str) -> None:
    ends = [run(kind, code) for kind in BOTH]
    assert len({(done.returncode, done.stdout, done.stderr) for done in ends}) == 1, ends


def test_an_exception_has_its_traceback() -> None:
    forked, real = (run(kind, "def broken(): 1 / 0\nbroken()") for kind in BOTH)
    assert forked.returncode == real.returncode == 1
    assert forked.stderr.endswith(real.stderr.partition("\n")[2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_it_and_it_is_gone(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([forked_python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(600) == -number
    assert pid != process.pid and all_gone([pid], 60)


def test_a_sitecustomize_and_other_settings_of_python_count(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('customized', sys.orig_argv[1:])")
    for kind in BOTH:
        done = run(kind, "pass", "x", env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert done.stdout == "customized ['-c', 'pass', 'x']\n"
    for name, value, code, expected in (
        (
            "PYTHONHASHSEED",
            "0",
            "print(hash('a'))",
            run("real", "print(hash('a'))", env={"PYTHONHASHSEED": "0"}).stdout,
        ),
        ("OMP_NUM_THREADS", "2", "import torch; print(torch.get_num_threads())", "2\n"),
    ):
        assert run("forked", code, env={**os.environ, name: value}).stdout == expected


def test_programs_that_are_killed_as_they_start_leave_others_alone() -> None:
    for attempt in range(30):
        process = subprocess.Popen([program("forked"), "-c", "pass"])
        time.sleep(0.02 + 0.002 * attempt)
        process.kill()
        process.wait()
    assert run("forked", "import sys; print('torch' in sys.modules)").stdout == "True\n"


def test_it_starts_at_once() -> None:
    run("forked", "pass")
    before, code = time.process_time(), "import time, torch, ddnn.training.job; print(time.process_time())"
    assert float(run("forked", code).stdout) < 0.5 and time.process_time() - before < 0.5
