"""A status as text, and the last words of logs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16
MOST_CHARACTERS = 2000
_ENTRY = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ "
ERROR_ENTRY = re.compile(_ENTRY + r"(?:ERROR|CRITICAL) ", re.MULTILINE)
_BEGUN_ENTRY = re.compile(_ENTRY + r"INFO ddnn \S+, torch ", re.MULTILINE)
"""What a training says first, each time that it goes on too."""

_REASONS = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (r"^ddnn: .+(?:\n  \w+: .+)*", r"^job\.sh: .+", r"^(?:slurmstepd|srun)\S* error: .+")
]


def last_entry(log: Path, kind: re.Pattern[str]) -> str | None:
    """The last entry of train.log whose beginning matches, without its time and level, lines and all; of what was said
    before the training was last begun or gone on with, none."""
    text = _tail(log)
    begun = list(_BEGUN_ENTRY.finditer(text))
    if begun:
        text = text[begun[-1].start() :]
    found = list(kind.finditer(text))
    if not found:
        return None
    after = re.compile(_ENTRY, re.MULTILINE).search(text, found[-1].end())
    return text[found[-1].end() : after.start() if after else None].strip()[:MOST_CHARACTERS] or None


def why_it_ended(output: Path) -> str | None:
    """Of what a job printed, the likeliest reason for its end: the first message of ddnn, of its script, of Slurm; else
    the last line that says anything."""
    text = _tail(output)
    for reason in _REASONS:
        found = reason.search(text)
        if found:
            return found[0].strip()[:MOST_CHARACTERS]
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    return lines[-1].strip()[:MOST_CHARACTERS] if lines else None


def _tail(path: Path) -> str:
    """The end of a text file; nothing of one that is missing or no regular file. Control characters become ?."""
    if not path.is_file():
        return ""
    with path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        handle.seek(max(0, size - TAIL_BYTES))
        text = handle.read(TAIL_BYTES).decode("utf-8", "replace").replace("\r", "\n")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def render(status: dict[str, Any], now: float) -> str:
    """A status, as `Status.as_dict` gives it, in lines."""
    job = f", Slurm job {status['job']}" if status["job"] else ""
    slurm = f" ({status['slurm']})" if status["slurm"] and status["state"] != "submitted" else ""
    phase = f", {status['phase']}" if status["phase"] else ""
    facts: dict[str, str | None] = {
        "error": (status["error"] or "none was written: ended from outside, or the machine went down")
        if status["state"] == "stopped"
        else None,
        "submitted": f"{duration(max(0.0, now - status['submitted']))} ago" if status["state"] == "submitted" else None,
        "RBMs": _rbms(status["rbms"]),
        "last pass": _last_pass(status["rbms"]),
        "epochs": None if status["rbms"] else _epochs(status),
        "last": _figures(status["last"]),
        "best": _figures(status["best"]),
        "learning rate": None if status["learning_rate"] is None else f"{status['learning_rate']:.6g}",
        "speed": _speed(status),
        "time of workers": _shares(status["shares"]),
        "ends": _end(status, now),
        "checkpoint": _checkpoint(status, now),
        "go on by": status["resume"],
        "last line": None if status["age"] is None else f"{duration(status['age'])} ago",
    }
    shown = {name: text for name, text in facts.items() if text is not None}
    lines = [f"{status['run_dir']}: {status['state']}{phase}{job}{slurm}"]
    for name, text in shown.items():
        first, *more = text.splitlines()
        lines += [f"  {name:<15}  {first}", *(f"  {'':<15}  {line}" for line in more)]
    return "\n".join([*lines, *(f"  problem: {problem}" for problem in status["problems"])])


def duration(seconds: float) -> str:
    """In the two largest units: "3 h 20 min"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _rbms(found: dict[str, Any] | None) -> str | None:
    if found is None:
        return None
    return f"{found['done']}" + (f" of {found['most']}" if found["most"] is not None else "") + " finished"


def _last_pass(found: dict[str, Any] | None) -> str | None:
    if found is None or found["layer"] is None:
        return None
    error = "not finite" if found["error"] is None else f"{found['error']:.4f}"
    return f"RBM {found['layer']}, pass {found['passes']}: reconstruction error {error} over its passes"


def _epochs(status: dict[str, Any]) -> str:
    most = status["epochs_most"]
    return f"{status['epochs_done']}" + (f" of at most {most}" if most is not None else "")


def _figures(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    accuracy = "" if row["frame_accuracy"] is None else f", frame accuracy {100 * row['frame_accuracy']:.2f} %"
    return f"epoch {row['epoch']}: cross-validation loss {loss}{accuracy}{'' if row['accepted'] else ', rejected'}"


def _speed(status: dict[str, Any]) -> str | None:
    if status["frames_per_second"] is None:
        return None
    text = f"{status['frames_per_second']:.0f} frames/s"
    if (status["workers"] or 1) > 1:
        text += f", {status['frames_per_second_per_worker']:.0f} for each of {status['workers']} workers"
    return text


def _shares(shares: dict[str, float] | None) -> str | None:
    return None if not shares else ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())


def _checkpoint(status: dict[str, Any], now: float) -> str | None:
    found = status["checkpoint"]
    if status["rbms"]:
        return None  # it goes on with the RBM that it was at
    if found is None:
        damaged = any(problem.startswith("checkpoint") for problem in status["problems"])
        told = "none that is whole" if damaged else "none: going on begins anew"
        return told if status["state"] == "stopped" else None
    return f"{found['where']}, {duration(max(0.0, now - found['written']))} ago"


def _end(status: dict[str, Any], now: float) -> str | None:
    end = status["estimated_end"]
    if end is None:
        return None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(end, 4e9)))
    return f"{when} at the latest, in {duration(max(0.0, end - now))}, if epochs take as long as the last"
