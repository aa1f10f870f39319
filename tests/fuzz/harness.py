"""Runs a reader on damaged files in a forked child, and holds it to the rules.

Each input must give a result or a `UserError`. A finding is: any other exception, a warning, an error while an object
is destroyed, a crash, more than `SECONDS` of processor time, more memory than the file's size justifies, a file written
outside the scratch folder, a process started, or something unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.child import STATE, Child, Target
from fuzz.mutate import LARGEST

STALLED = 20.0
"""Seconds on the wall after which an input counts as a hang."""
_BROKEN = 97


@dataclass
class Finding:
    """What went wrong, its traceback, and the bytes (before `pack`)."""

    message: str
    trace: str
    data: bytes


@dataclass
class Outcome:
    """What came of fuzzing one target."""

    target: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def fuzz(
    target: Target,
    scratch: Path,
    *,
    seed: int,
    inputs: int,
    seconds: float = 1e9,
    crafted: bool = True,
    thorough: bool = False,
) -> Outcome:
    """Feeds `inputs` inputs to the target, or as many as fit into `seconds`.

    Args:
        scratch: an empty folder; everything the reader writes must be in it.
        crafted: whether the target's crafted inputs come first.
        thorough: measures the memory of each crafted input to the byte, which takes several times as long.
    """
    outcome = Outcome(target.name)
    shared = mmap.mmap(-1, STATE.size + 16 * LARGEST)
    started, attempt = time.monotonic(), 0
    while outcome.inputs < inputs and time.monotonic() - started < seconds and attempt < 20:
        shared[: STATE.size] = STATE.pack(0, 0, 0, 0.0, 0, 0)
        folder = scratch / f"{attempt}"
        folder.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            try:
                left = seconds - (time.monotonic() - started)
                Child(target, folder, shared).run(
                    seed + 1000 * attempt, inputs - outcome.inputs, left, crafted and attempt == 0, thorough
                )
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(_BROKEN)
            os._exit(0)
        ended = _wait(child, shared)
        if ended is not None and ended.endswith(f" {_BROKEN}"):
            raise RuntimeError(f"{target.name}: a seed is refused, or the harness is broken; see above")
        count, accepted, refused, slowest, _, length = STATE.unpack(shared[: STATE.size])
        outcome.inputs, outcome.accepted = outcome.inputs + count, outcome.accepted + accepted
        outcome.refused, outcome.slowest = outcome.refused + refused, max(outcome.slowest, slowest)
        outcome.findings += _read_findings(folder)
        if ended is None:
            break
        outcome.inputs += 1
        outcome.findings.append(Finding(ended, "", bytes(shared[STATE.size : STATE.size + length])))
        attempt += 1
    return outcome


def _wait(child: int, shared: mmap.mmap) -> str | None:
    """How the child died; None where it ended well. One that makes no progress is killed."""
    last, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        index = STATE.unpack(shared[: STATE.size])[4]
        if index != last:
            last, since = index, time.monotonic()
        elif time.monotonic() - since > STALLED:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"hangs: no end after {STALLED:g} s"
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        return f"crashes with {signal.Signals(os.WTERMSIG(status)).name}"
    return None if os.WEXITSTATUS(status) == 0 else f"the process ended with {os.WEXITSTATUS(status)}"


def _read_findings(folder: Path) -> list[Finding]:
    found = []
    for path in sorted((folder / "findings").glob("*.json")):
        said = json.loads(path.read_text())
        found.append(Finding(said["what"], said["trace"], path.with_suffix(".bin").read_bytes()))
    return found
