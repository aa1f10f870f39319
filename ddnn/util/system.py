"""Facts about this machine: cores, processor, and memory, also under the limits of control groups."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model name, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def device_name(device: str) -> str:
    """The GPU's name if `device` (cpu, cuda, auto) uses one, else the processor's with its number of cores."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return f"{cpu_name()}, {usable_cores()} cores"


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that this process can have without swapping: what the machine has left, or what its control group allows
    (a container's, a Slurm job's) if that is less. None where the system does not say.

    Args:
        root: where proc and sys are mounted.
    """
    found = [limit for limit in (_of_machine(root), *_of_control_groups(root)) if limit is not None]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> int | None:
    """Linux's MemAvailable: free, or in use as cache."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_control_groups(root: Path) -> Iterator[int | None]:
    """What is left in the control groups of this process and all above them, of version 1 and 2."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            for group in _upwards(mounted, path):
                limits = [_number(group / name) for name in ("memory.max", "memory.high")]
                yield _left(group, min((x for x in limits if x is not None), default=None), "memory.current", "")
        elif "memory" in controllers.split(","):
            for group in _upwards(mounted / "memory", path):
                yield _left(group, _number(group / "memory.limit_in_bytes"), "memory.usage_in_bytes", "total_")


def _upwards(mounted: Path, path: str) -> Iterator[Path]:
    """The folder of a control group and those above it, up to where they are mounted: in a container often all that
    can be seen."""
    parts = [part for part in path.strip().split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mounted.joinpath(*parts[:length])


def _left(group: Path, limit: int | None, usage: str, prefix: str) -> int | None:
    """The limit less what is in use. Files in the cache count as used, but give way."""
    used = _number(group / usage)
    if limit is None or used is None:
        return None
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in _lines(group / "memory.stat"))
    return limit - used + sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isascii() and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
