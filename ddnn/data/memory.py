"""Memory asked for before it is taken, so that a corpus too large is refused with a sentence and not by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from ddnn.errors import DataError

ROOT = Path("/")


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


def require_memory(needed: int, *, what: str, where: str | PathLike[str], workers: int = 1) -> None:
    """Raises DataError where `needed` bytes for `what` are not available to each of so many workers on this machine."""
    available = available_memory()
    if available is None or needed * workers <= available:
        return
    who, other = what, ""
    if workers > 1:
        who, other = f"{workers} workers on this machine with {what} each", ", or spread the workers over more machines"
    raise DataError(
        f"{who} need {workers * needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available",
        where=where,
        mend=f"use fewer utterances or a machine with more memory{other}; in training, data.store: float16 needs half",
    )
