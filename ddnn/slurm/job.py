"""The job of a run dir: job.json, what Slurm says of it, and whether a training holds the run dir."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddnn.errors import DataError
from ddnn.files import read_regular, write_json
from ddnn.train.run_dir_files import JOB_RECORD

MOST_BYTES = 10_000


@dataclass(frozen=True)
class Job:
    """A submitted job: Slurm's `number`, in a federation its `slurm_cluster`; when, in seconds since 1970."""

    number: str
    slurm_cluster: str | None
    submitted: float
    workers: int
    nodes: int
    launcher: str


def write_job(run_dir: Path, job: Job) -> None:
    """Leaves job.json in the run dir."""
    write_json(run_dir / JOB_RECORD, asdict(job))


def read_job(run_dir: Path) -> Job | None:
    """The job of a run dir; None where it was not submitted to Slurm.

    Raises:
        DataError: job.json is damaged.
    """
    path = run_dir / JOB_RECORD
    if not path.is_file():
        return None
    try:
        found = json.loads(read_regular(path, MOST_BYTES))
        job = Job(**found) if isinstance(found, dict) else None
    except (OSError, ValueError, TypeError, RecursionError):
        job = None
    if job is None or not _sound(job):
        raise DataError("damaged: expected what `ddnn train --slurm` writes", where=path)
    return job


def _sound(job: Job) -> bool:
    """Whether it is safe to hand on to squeue, and to show."""
    words = [job.number, job.launcher, *([] if job.slurm_cluster is None else [job.slurm_cluster])]
    return (
        all(isinstance(word, str) and re.fullmatch(r"\w[\w.-]*", word, re.ASCII) for word in words)
        and job.number.isdigit()
        and isinstance(job.submitted, (int, float))
        and 0 <= job.submitted < 1e11
        and all(type(count) is int and count > 0 for count in (job.workers, job.nodes))
    )


def slurm_state(job: Job, seconds: float = 10.0) -> str | None:
    """What squeue says: PENDING, RUNNING, ..., or GONE where Slurm knows the job no longer; None where there is no
    squeue, or it does not answer within so many seconds."""
    command = ["squeue", "--noheader", f"--jobs={job.number}", "--format=|%T"]
    if job.slurm_cluster is not None:
        command.append(f"--clusters={job.slurm_cluster}")
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    states = re.findall(r"^\|([A-Z_]+)", asked.stdout, re.MULTILINE)
    if states:
        return str(states[0])
    # An unknown number, or one that is known but done.
    return "GONE" if asked.returncode == 0 or "Invalid job id" in asked.stderr else None


def slurm_states(jobs: Sequence[Job], seconds: float = 30.0) -> dict[Job, str | None]:
    """The same of many jobs, with one call of squeue for each cluster of a federation, and so many seconds for it."""
    found: dict[Job, str | None] = {}
    for cluster in {job.slurm_cluster for job in jobs}:
        here = [job for job in jobs if job.slurm_cluster == cluster]
        command = ["squeue", "--noheader", f"--jobs={','.join(job.number for job in here)}", "--format=%A|%T"]
        try:
            asked = subprocess.run(
                [*command, *([] if cluster is None else [f"--clusters={cluster}"])],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            found |= dict.fromkeys(here)
            continue
        said = dict(re.findall(r"^(\d+)\|([A-Z_]+)", asked.stdout, re.MULTILINE))
        known = asked.returncode == 0 or (len(here) == 1 and "Invalid job id" in asked.stderr)
        found |= {job: said.get(job.number, "GONE" if known else None) for job in here}
    return found
