"""`ddnn status --follow`: the status again and again, until the training ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from ddnn.info.status import Status, read_status
from ddnn.slurm.job import Job, slurm_state

SECONDS = 5.0
"""Between two looks at the files."""
SLURM_SECONDS = 30.0
"""Between two questions to Slurm, which one daemon answers for a whole cluster."""
_CHANGES_BY_ITSELF = ("age", "estimated_end")


def follow_status(
    run_dir: Path,
    show: Callable[[str], None],
    *,
    terminal: bool,
    as_json: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> Status:
    """Shows the status every few seconds until it is finished or stopped; returns the last one.

    On a terminal each takes the place of the one before. Elsewhere, and as JSON (an object a line), one is shown only
    when something in it has changed other than the time.
    """
    ask = _asked_seldom()
    before, lines = None, 0
    while True:
        status = read_status(run_dir, ask)
        found = {name: value for name, value in status.as_dict().items() if name not in _CHANGES_BY_ITSELF}
        if as_json or not terminal:
            if found != before:
                show(json.dumps(status.as_dict(), ensure_ascii=False) if as_json else status.as_text())
        else:
            text = status.as_text()
            show((f"\x1b[{lines}F\x1b[J" if lines else "") + text)
            lines = text.count("\n") + 1
        if status.state in ("finished", "stopped"):
            return status
        before = found
        pause(SECONDS)


def _asked_seldom() -> Callable[[Job], str | None]:
    """`slurm_state`, answered from memory for half a minute."""
    answers: dict[str, tuple[float, str | None]] = {}

    def ask(job: Job) -> str | None:
        if job.number not in answers or time.monotonic() - answers[job.number][0] > SLURM_SECONDS:
            answers[job.number] = (time.monotonic(), slurm_state(job))
        return answers[job.number][1]

    return ask
