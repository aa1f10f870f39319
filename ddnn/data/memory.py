"""Memory asked for before it is taken, so that a corpus too large is refused with a sentence and not by the kernel."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ddnn.errors import DataError


def available_memory() -> int | None:
    """Bytes that can be had without swapping (Linux's MemAvailable); None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
