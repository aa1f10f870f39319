"""Worker processes that are started from scratch, never forked (MPI and CUDA may be in use), get tasks over sockets, and
end with the block that uses them.

`concurrent.futures.ProcessPoolExecutor` does not do: the processes that it spawns import modules from the working
directory, run a user's script again, and outlive a parent that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from ddnn.util.errors import UserError
from ddnn.util.process import WITHOUT_CWD

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc keeps memory that was used: asking the system for it again for each utterance costs more than decompressing
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Of a worker process."""

Task = tuple[Any, ...]  # a function of a module, and its arguments


@contextmanager
def worker_pool(processes: int, name: str, alone: str, descriptor: int | None = None) -> Iterator[WorkerPool]:
    """Processes that end with the block. They inherit the open file `descriptor`. `name`, `alone`: for messages, what a
    process is and what does without them. UserError: they cannot be started."""
    pool = WorkerPool(name, alone)
    try:
        try:
            for _ in range(processes):
                pool.start(() if descriptor is None else (descriptor,))
        except OSError as error:
            raise UserError(f"cannot start {name}: {error.strerror}", hint=f"set {alone}") from error
        yield pool
    finally:
        for child in pool.children.values():
            child.kill()
        for connection, child in pool.children.items():
            child.wait()
            connection.close()


class WorkerPool:
    """Worker processes, each with the connection over which it gets tasks."""

    def __init__(self, name: str, alone: str) -> None:
        self.name, self.alone = name, alone
        self.children: dict[Connection, subprocess.Popen[bytes]] = {}

    def start(self, inherited: tuple[int, ...]) -> None:
        connection, theirs = Pipe()
        with theirs:
            serve = f"from ddnn.util.pool import serve; serve({theirs.fileno()})"
            self.children[connection] = subprocess.Popen(
                [sys.executable, "-c", WITHOUT_CWD + serve],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what is printed goes to standard error
                pass_fds=(theirs.fileno(), *inherited),
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
                env={**os.environ, **ENVIRONMENT},
            )

    def initialize(self, *task: Any) -> None:
        """Has every process do the task. Raises as `run`."""
        for connection in self.children:
            self._send(connection, task)
        for answer in [self._receive(connection) for connection in self.children]:
            if isinstance(answer, Exception):
                raise answer

    def run(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Hands out the tasks, one to each process at a time; yields the answers in the order of the tasks. Exception:
        that of the first task that failed, as if there were one process. UserError: a process died."""
        remaining: Iterator[tuple[int, Task]] = enumerate(tasks)
        busy: dict[Connection, int] = {}
        answers: dict[int, Any] = {}  # that came before those of earlier tasks
        idle, number = list(self.children), 0
        while True:
            for connection, (index, task) in zip(idle, remaining, strict=False):
                busy[connection] = index
                self._send(connection, task)
            if not busy:
                return
            idle = cast(list[Connection], wait(busy))
            for connection in idle:
                answer = answers[busy.pop(connection)] = self._receive(connection)
                if isinstance(answer, Exception):
                    remaining = iter(())  # only earlier tasks are waited for, which may fail too
            while number in answers:
                answer = answers.pop(number)
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                number += 1

    def _send(self, connection: Connection, task: Task) -> None:
        try:
            connection.send(task)
        except ConnectionError as error:
            raise self._death(connection) from error

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._death(connection) from error

    def _death(self, connection: Connection) -> UserError:
        code = self.children[connection].wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        hint = "read the messages before this one, and check whether memory was short; "
        return UserError(f"{self.name} {how}", hint=f"{hint}{self.alone} does without such processes")


def serve(descriptor: int) -> None:
    """A worker process: does one task after another and answers with what it returns or with the error that ended it. It
    ends with the connection, so that it never outlives its parent."""
    with Connection(descriptor) as connection, suppress(EOFError, ConnectionError):
        while True:
            function, *arguments = connection.recv()
            try:
                answer = function(*arguments)
            except (UserError, MemoryError, OSError) as error:  # an OSError of the file that is written
                answer = error
            connection.send(answer)
