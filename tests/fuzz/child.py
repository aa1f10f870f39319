"""The process that runs a reader on one input after another, and watches what it does."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import mmap
import os
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutate import LARGEST, mutate

from ddnn.util.errors import UserError

SECONDS = 0.5
"""Processor time for an input of at most `LARGEST` bytes."""
FREE_BYTES = 24 << 20
"""Memory that any input may take; beyond it, `Target.per_byte` for each byte of the file."""
ADDRESS_SPACE = 1 << 30
"""What a child may map beyond what it begins with."""
STATE = struct.Struct("<qqqdqq")
"""Shared with the parent: inputs, accepted, refused, slowest, index of the input, its length; then its bytes."""
_MEASURED_EVERY = 40


def _nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True)
class Target:
    """A reader and what to feed it.

    Attributes:
        file: the file to damage, relative to the scratch folder.
        read: reads the folder; whatever it returns or yields is thrown away.
        seeds: valid files, which `read` must accept.
        crafted: what an adversary would write; to be accepted or refused.
        beside: lays down what else the reader needs.
        pack: makes the file of a (damaged) input: compressed, or with a checksum put right.
        tokens: words of the format.
        per_byte: bytes of memory that a byte of the file justifies.
        inputs: how many of them are tried in the test suite.
    """

    name: str
    file: str
    read: Callable[[Path], object]
    seeds: tuple[bytes, ...]
    crafted: tuple[bytes, ...] = ()
    beside: Callable[[Path], None] = _nothing
    pack: Callable[[bytes], bytes] = bytes
    tokens: tuple[bytes, ...] = ()
    per_byte: int = 64
    inputs: int = 200


class Forbidden(BaseException):
    """The reader did what no reader may."""


class TooSlow(BaseException):
    """The reader took too much processor time."""


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NEVER = {
    *("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "pty.spawn"),
    *("pickle.find_class", "socket.connect", "socket.bind", "ctypes.dlopen", "os.kill", "os.putenv"),
}
_CHANGES = {
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "os.chown"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "os.utime"),
}


class _Guard:
    """Watches what the interpreter does while it is armed. It cannot be removed: only for forked children."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = Path(os.path.realpath(scratch))
        self.armed = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int):
                self._inside(event, path)
        elif event in _NEVER:
            self.armed = False
            raise Forbidden(f"{event}{arguments!r}"[:300])
        elif event in _CHANGES:
            both = event in ("os.rename", "os.link", "shutil.move")
            for path in arguments[1:2] if event == "os.symlink" else arguments[: 1 + both]:
                if not isinstance(path, int):  # a descriptor: opening it was looked at
                    self._inside(event, path)

    def _inside(self, event: str, path: Any) -> None:
        folder, name = os.path.split(os.fsdecode(path))
        real = Path(os.path.realpath(path)) if event == "open" else Path(os.path.realpath(folder), name)
        if not real.is_relative_to(self.scratch):
            self.armed = False
            raise Forbidden(f"{event} outside the scratch folder: {path!r}"[:300])


class Child:
    """The forked process: runs inputs until it has enough, or dies of one."""

    def __init__(self, target: Target, folder: Path, shared: mmap.mmap) -> None:
        self.target, self.shared = target, shared
        self.work, self.findings = folder / "work", folder / "findings"
        for made in (self.work, self.findings, folder / "tmp"):
            made.mkdir()
        target.beside(self.work)
        self.file = self.work / target.file
        self.file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(folder / "tmp")
        os.chdir(self.work)
        self.count = self.accepted = self.refused = self.index = 0
        self.slowest = 0.0
        self.known: set[str] = set()
        self.unraised: list[str] = []
        self.guard = _Guard(folder)

    def run(self, seed: int, inputs: int, seconds: float, crafted: bool, thorough: bool) -> None:
        faulthandler.disable()  # a crash is told of by the parent
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        for data in self.target.seeds:  # also imports what is imported late, before the limits
            self.file.write_bytes(self.target.pack(data))
            self.target.read(self.work)
        self._limit()
        rng, started = Random(seed), time.monotonic()
        corpus = list(self.target.seeds)
        signatures: set[str] = set()
        queue = [*self.target.seeds, *(self.target.crafted if crafted else ())]
        while self.count < inputs and time.monotonic() - started < seconds:
            exact = self.count < len(self.target.seeds) or (thorough and bool(queue))
            data = queue.pop(0) if queue else mutate(rng, corpus, self.target.tokens)
            signature = self._try(data, measured=exact or self.count % _MEASURED_EVERY == 0)
            # What fails, or succeeds, in a new place is worth damaging further.
            if signature not in signatures and len(data) <= LARGEST:
                signatures.add(signature)
                corpus.append(data)

    def _limit(self) -> None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20,) * 2)
        warnings.simplefilter("error")
        signal.signal(signal.SIGPROF, self._too_slow)
        sys.unraisablehook = lambda unraised: self.unraised.append(f"{unraised.exc_value!r} in {unraised.object!r}")
        # A report of one warning is not repeated: each must count each time.
        gc.collect()

    def _too_slow(self, number: int, frame: object) -> None:
        raise TooSlow("takes too much processor time")

    def _try(self, data: bytes, measured: bool) -> str:
        """Runs one input; its signature: where and how it was refused."""
        packed = self.target.pack(data)
        self.file.write_bytes(packed)
        self._tell(data)
        allowed = FREE_BYTES + self.target.per_byte * len(packed)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if measured:
            tracemalloc.start()
        message, trace, signature, error = "", "", "accepted", None
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, (6 if measured else 2) * SECONDS)
        self.guard.armed = True
        try:
            self.target.read(self.work)
            self.accepted += 1
        except UserError as refusal:
            self.refused += 1
            error, signature = refusal, _place(refusal)
        except (Exception, Forbidden, TooSlow) as finding:  # noqa: BLE001
            error, message = finding, f"{type(finding).__name__}: {finding}"[:300]
            trace, signature = traceback.format_exc()[-4000:], _place(finding)
        finally:
            self.guard.armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - started
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > allowed and not message:
                message = f"takes {peak >> 20} MiB for {len(packed)} bytes"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if grown > allowed and not message and not measured:
            message = f"grows by {grown >> 20} MiB for {len(packed)} bytes"
        if seconds > (SECONDS if len(data) <= LARGEST else 4 * SECONDS) * (3 if measured else 1) and not message:
            message = f"takes {seconds:.2f} s for {len(packed)} bytes"
        if self.unraised and not message:
            message = f"unraisable: {self.unraised[0]}"
        self.unraised.clear()
        del error
        self.count, self.slowest = self.count + 1, max(self.slowest, 0.0 if measured else seconds)
        if message:
            self._keep(message, trace, signature, data)
        self._tell(b"")
        return signature

    def _tell(self, data: bytes) -> None:
        self.index += 1
        kept = data[: 16 * LARGEST]
        state = (self.count, self.accepted, self.refused, self.slowest, self.index, len(kept))
        self.shared[: STATE.size + len(kept)] = STATE.pack(*state) + kept

    def _keep(self, message: str, trace: str, signature: str, data: bytes) -> None:
        sort = f"{re.sub('[0-9.]+', '#', message)[:40]} {signature}"
        if sort in self.known:
            return
        self.known.add(sort)
        path = self.findings / hashlib.sha256(data).hexdigest()[:16]
        path.with_suffix(".bin").write_bytes(data)
        path.with_suffix(".json").write_text(json.dumps({"what": message, "trace": trace}))


def _place(error: BaseException) -> str:
    """Kind of an error and the lines of ddnn that it came through: errors of one place are of one sort."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "ddnn" in code.co_filename:
            lines.append(f"{code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    cause = error.__cause__
    return f"{type(error).__name__} {' '.join(lines[-5:])} {type(cause).__name__ if cause else ''}"
