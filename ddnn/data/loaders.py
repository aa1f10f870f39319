"""Loading processes as their parent sees them: started afresh (never forked: MPI and CUDA may be up), given tasks over
pipes, ended with the block that uses them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Any

from ddnn.data.fill import Preparation
from ddnn.data.loader_process import error_of_answer, setup_line
from ddnn.errors import UserError

BYTES_FOR_A_PROCESS = 512 << 20
"""Of float32 features: what pays for a process, which takes a third of a second to start."""

MOST_PROCESSES = 8
"""Unless the recipe says another number."""


def usable_processes(workers_on_host: int = 1) -> int:
    """Default of `data.loaders`: the cores that this process may use, up to 8, shared with the other workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_PROCESSES) // workers_on_host)


def worthwhile_processes(wanted: int, float32_bytes: int) -> int:
    """How many of the wanted processes the amount of features pays for; 1: none but this one."""
    return max(1, min(wanted, float32_bytes // BYTES_FOR_A_PROCESS))


SETTINGS = {
    "PYTHONSAFEPATH": "1",  # what lies in the working directory is no module of ours
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc keeps memory that was used: to take it from the system anew for each utterance costs more than decompressing
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Environment of a loading process."""


class Loaders:
    """Loading processes; a context manager that leaves none behind, whatever ends its block.

    Args:
        count: how many.
        descriptor: the open file that they write into; None where they only read.
        start: byte of the file where the store begins.
    """

    def __init__(self, count: int, preparation: Preparation, descriptor: int | None = None, start: int = 0) -> None:
        self._count, self._descriptor = count, descriptor
        self._setup = setup_line(descriptor, start, preparation)
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Loaders:
        environment = {**os.environ, **SETTINGS}
        try:
            for _ in range(self._count):
                child = subprocess.Popen(
                    [sys.executable, "-m", "ddnn.data.loader_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=() if self._descriptor is None else (self._descriptor,),
                    start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
                    env=environment,
                )
                self._children.append(child)
                self._send(child, self._setup)
        except OSError as error:
            self._end()
            raise UserError(f"cannot start a loading process: {error.strerror}", mend="set data.loaders: 1") from error
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, tasks: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Hands the tasks out in order, one to each process at a time; gives (index of the task, answer) as they come.

        Raises:
            DataError, UserError, MemoryError, OSError: what the first task that failed met, as if there were but one
                process.
            UserError: a process died.
        """
        waiting = iter(enumerate(tasks))
        failed: dict[int, Exception] = {}
        with selectors.DefaultSelector() as answering:
            for child in self._children:
                self._hand_out(child, waiting, answering)
            while answering.get_map():
                for key, _ in answering.select():
                    child, index = key.data
                    answering.unregister(key.fileobj)
                    answer = self._answer(child)
                    error = error_of_answer(answer)
                    if error is not None:
                        failed[index] = error
                    else:
                        yield index, answer
                    if not failed:  # else only those before the failed one are waited for: they might fail, too
                        self._hand_out(child, waiting, answering)
        if failed:
            raise failed[min(failed)]

    def _hand_out(
        self, child: subprocess.Popen[bytes], waiting: Iterator[tuple[int, bytes]], answering: selectors.BaseSelector
    ) -> None:
        index, task = next(waiting, (-1, b""))
        if index >= 0:
            answering.register(_pipe(child.stdout), selectors.EVENT_READ, (child, index))
            self._send(child, task)

    def _send(self, child: subprocess.Popen[bytes], line: bytes) -> None:
        stdin = _pipe(child.stdin)
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            raise _died(child) from None

    def _answer(self, child: subprocess.Popen[bytes]) -> dict[str, Any]:
        line = _pipe(child.stdout).readline()
        if not line.endswith(b"\n"):
            raise _died(child)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
            _pipe(child.stdout).close()
            try:
                _pipe(child.stdin).close()
            except BrokenPipeError:  # what it was not told any more
                continue
        self._children.clear()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _died(child: subprocess.Popen[bytes]) -> UserError:
    code = child.wait()
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return UserError(
        f"a loading process {how}",
        mend="look at the messages before this one, and whether memory was short; data.loaders: 1 loads without them",
    )
