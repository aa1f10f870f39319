"""A Python for tests that starts in 0.05 s of processor time instead of 2.5, since it has imported torch and ddnn before.

`forked_python()` is the path of a program to start in place of `sys.executable`, as `PYTHON -m ddnn.cli ..`, `PYTHON -c ..`
or `PYTHON script.py`: also by mpirun, and by what it has started itself. A server with everything imported forks a process
for it, which gets its descriptors, arguments, environment, working directory, umask, limits, cores and ignored signals,
runs to the end of an interpreter as any other, and whose exit code or signal becomes its own. Signals are passed on; a
kill -9 of the one ends the other.

Differences: it has another process id than the program, and is a session of its own; its hashes of strings are those of
the server; what was preloaded is not taken apart at its end; sched_yield sleeps; modules of ddnn were imported before a
sitecustomize or the test's variables were there. What Python, torch or the dynamic loader read from the environment as they
start is compared, and where it differs from the server's, as for unknown options, the program becomes a real Python. Tests
of imports, of process ids and groups and of SIGSTOP take `sys.executable`; so do all with DDNN_TEST_REAL_PYTHON=1 in the
environment.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import os
import re
import resource
import runpy
import selectors
import shlex
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).with_name("forked_client.py")
PRELOADED = ("kaldiio", "mpi4py", "rich.progress", "safetensors.torch", "torch", "yaml")
READ_AT_START = re.compile(
    rb"PYTHON(?!PATH$|UNBUFFERED$)|G?OMP_|KMP_|MKL_|OPENBLAS_|ONEDNN_|DNNL_|ATEN_|TORCH_|PYTORCH|CUDA_|LD_(?!LIBRARY_PATH$)|MALLOC_|GLIBC_|LANG|LC_"
)
"""Environment variables that count as Python, torch and the libraries start."""
OF_POOLS = {b"OPENBLAS_NUM_THREADS", b"MKL_NUM_THREADS", b"MALLOC_MMAP_THRESHOLD_", b"MALLOC_TRIM_THRESHOLD_"}
"""Of them those that ddnn/util/pool.py sets: with one thread they change how fast a process is, nothing else."""


@functools.cache
def forked_python() -> str:
    """The path of the program; the server, started at the first call, ends with this process."""
    if not sys.platform.startswith("linux") or "DDNN_TEST_REAL_PYTHON" in os.environ:
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="ddnn-forked-"))
    program = folder / "python"
    words = (sys.executable, "-IS", str(CLIENT), str(folder / "socket"))
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    beside = Path(sys.executable).with_name("mpirun")  # where ddnn looks for it
    if beside.exists():
        (folder / "mpirun").symlink_to(beside)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(100)
        command = [sys.executable, __file__, str(listener.fileno()), str(program)]
        with (folder / "errors").open("w") as errors:
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                pass_fds=[listener.fileno()], start_new_session=True,
                env=os.environ | sleeping_where_others_yield(folder),
            )  # fmt: skip
    atexit.register(server.communicate)
    return str(program)


def sleeping_where_others_yield(folder: Path) -> dict[str, str]:
    """Variables with which a process gives up its core for a while instead of calling sched_yield: workers that wait in MPI
    call it without end, a third of all that the tests of several workers would take. None without a C compiler."""
    compiler, source, library = shutil.which("cc"), folder / "yield.c", folder / "yield.so"
    if compiler is None:
        return {}
    source.write_text("#include <unistd.h>\nint sched_yield(void) { return usleep(20); }\n")
    done = subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], capture_output=True, check=False)
    return {"LD_PRELOAD": str(library)} if done.returncode == 0 else {}


def variables_of(pid: int) -> dict[bytes, bytes]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)  # type: ignore[misc]


def words_of(pid: int) -> list[str]:
    """Arguments of Python that a client was given."""
    return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[4:-1]]


def can_fork_for(pid: int) -> bool:
    def counting(variables: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {name: value for name, value in variables.items() if READ_AT_START.match(name) and name not in OF_POOLS}

    words = words_of(pid)
    known = bool(words) and (words[0] in ("-c", "-m") or not words[0].startswith("-"))
    return known and counting(variables_of(pid)) == counting(dict(os.environb))


@dataclass
class Program:
    """What a forked process is to become: that of the client `pid`, with `descriptors` as its `numbers`."""

    pid: int
    connection: socket.socket
    numbers: Sequence[int]
    descriptors: Sequence[int]

    def become(self, program: str, paths: Sequence[str]) -> list[str]:
        """Takes over all that the client was started with; its arguments of Python."""
        os.setsid()
        os.chdir(f"/proc/{self.pid}/cwd")
        os.environb.clear()
        os.environb.update(variables_of(self.pid))
        os.sched_setaffinity(0, os.sched_getaffinity(self.pid))
        status = dict(re.findall(r"^(\w+):\t(.*)$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE))
        os.umask(int(status["Umask"], 8))
        for number in range(1, 32):
            if int(status["SigIgn"], 16) >> (number - 1) & 1:
                signal.signal(number, signal.SIG_IGN)
        words = words_of(self.pid)
        limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
        for limit in limits:
            resource.setrlimit(limit, resource.prlimit(self.pid, limit))
        self.connection.send(b"f")
        self.connection.close()
        self.take_descriptors()
        sys.executable, sys.orig_argv = program, [program, *words]
        own = os.environ.get("PYTHONPATH", "")
        sys.path[:] = [*(own.split(os.pathsep) if own else ()), *paths]
        tempfile.tempdir = None
        importlib.import_module("numpy").random.seed()
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
        return words

    def take_descriptors(self) -> None:
        """Gives them their numbers, and makes the standard streams anew."""
        above = max([2, *self.numbers]) + 1
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in self.descriptors]
        os.closerange(0, above)
        for descriptor, number in zip(moved, self.numbers, strict=True):
            os.dup2(descriptor, number)
        os.closerange(above, max([above, *moved]) + 1)
        for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
            old, stream = getattr(sys, f"__{name}__"), None
            if number in self.numbers:
                unbuffered = number > 0 and "PYTHONUNBUFFERED" in os.environ
                raw: Any = open(number, mode, 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
                (raw if unbuffered else raw.raw).name = f"<{name}>"
                by_line = name == "stderr" or os.isatty(number)
                stream = io.TextIOWrapper(raw, old.encoding, old.errors, None, by_line, unbuffered)
                stream.mode = mode[0]  # type: ignore[misc]
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def run_python(words: list[str]) -> None:
    """As `python WORDS`, in this process."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [str(Path.cwd())]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).resolve().parent)]
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


class Server:
    """Forks for each client until the standard input, which the tests hold, ends."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.selector = listener, selectors.DefaultSelector()
        self.running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> its id, its client
        for place in (0, listener):
            self.selector.register(place, selectors.EVENT_READ)

    def serve(self) -> Program | None:
        """Returns in each forked process what it is to become, at the end None."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    for pid, _ in self.running.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self.listener:
                    program = self.fork()
                    if program is not None:
                        return program
                elif key.fd in self.running:
                    self.report_end(key.fd)
                elif key.fileobj.fileno() != -1:  # type: ignore[union-attr]  # of a program that has not just ended
                    try:
                        numbers = key.fileobj.recv(100)  # type: ignore[union-attr]
                    except ConnectionResetError:  # killed before it had read that its process was forked
                        numbers = b""
                    for number in numbers or [signal.SIGKILL]:
                        os.kill(key.data, number)
                    if not numbers:
                        self.selector.unregister(key.fileobj)

    def fork(self) -> Program | None:
        client, _ = self.listener.accept()
        numbers, descriptors, _, _ = socket.recv_fds(client, 4096, 253)
        peer, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            can_fork = can_fork_for(peer)
        except OSError:  # the client was killed as soon as it was started
            can_fork = False
        if not can_fork:
            client.close()
        elif pid := os.fork():
            process = os.pidfd_open(pid)
            self.running[process] = pid, client
            self.selector.register(process, selectors.EVENT_READ)
            self.selector.register(client, selectors.EVENT_READ, pid)
        else:
            self.selector.close()
            self.listener.close()
            for process, (_, other) in self.running.items():
                os.close(process)
                other.close()
            return Program(peer, client, [int(number) for number in numbers.split()], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def report_end(self, process: int) -> None:
        pid, client = self.running.pop(process)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):  # a client that was killed
            client.send(code.to_bytes(4, "little", signed=True))
        with suppress(KeyError):
            self.selector.unregister(client)
        self.selector.unregister(process)
        client.close()
        os.close(process)


preloaded: list[str] = []
"""Names of the modules that every forked process begins with."""


def leave_preloaded() -> None:
    """Hides the preloaded modules from the end of the interpreter, which would take them apart, and so copy all their pages."""
    modules = [sys.modules.pop(name, None) for name in {*preloaded} - {"__main__", "builtins", "sys"}]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def preload() -> list[str]:
    """Imports all that programs may need; where they look for modules, without PYTHONPATH and the folder of this file."""
    os.environ.pop("LD_PRELOAD", None)  # has done its work
    own = os.environ.get("PYTHONPATH", "")
    paths = sys.path[1 + len(own.split(os.pathsep) if own else ()) :]
    sys.path[:] = [*(own.split(os.pathsep) if own else ()), *paths]
    for name in PRELOADED:
        importlib.import_module(name)
    package = Path(importlib.import_module("ddnn").__path__[0])
    for file in sorted(package.rglob("*.py")):
        if file.stem not in ("__init__", "__main__", "build_hook"):
            importlib.import_module(".".join(("ddnn", *file.relative_to(package).with_suffix("").parts)))
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()
    preloaded.extend(sys.modules)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # torch's: it takes its operators apart
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # after all that Python does at its end; the destructors of libtorch take 0.3 s
    return paths


if __name__ == "__main__":
    atexit.register(leave_preloaded)  # comes last, since it is the first that is registered
    module_paths = preload()
    forked = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if forked is None:
        shutil.rmtree(Path(sys.argv[2]).parent)
    else:
        run_python(forked.become(sys.argv[2], module_paths))
