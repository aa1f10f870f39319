"""The job of a run dir: job.json, its submission by sbatch, what squeue says of it, and why it ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from ddnn.recipe.section import Count
from ddnn.runs.run_status import JOB_RECORD
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited, write_text
from ddnn.util.process import run
from ddnn.util.text import printable

MAX_BYTES = 10_000
_TAIL_BYTES = 1 << 16
_MAX_REASON = 2000
SBATCH_SECONDS = 120.0
FORWARDED_ENV = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")
RANK_ENV_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "SLURMD_")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Job:
    """A submitted job: Slurm's `number`, of a task of an array ARRAY_TASK; in a federation its `slurm_cluster`; when, in
    seconds since 1970; the `options` of ddnn that submit it again. Checked: it is safe to hand on to squeue."""

    number: Annotated[str, Field(pattern=r"^[0-9]+(_[0-9]+)?$")]
    slurm_cluster: Name | None
    submitted: Annotated[float, Field(ge=0, lt=1e11)]
    workers: Count
    nodes: Count
    launcher: Name
    options: tuple[str, ...] = ()


class SlurmState(NamedTuple):
    """What squeue says of a job. `name`: PENDING, RUNNING, ..., or GONE if Slurm does not know the job any more. `reason`:
    why it is pending."""

    name: str
    reason: str | None = None


_JOB = TypeAdapter(Job)


def write_job(run_dir: Path, job: Job) -> None:
    write_text(run_dir / JOB_RECORD, _JOB.dump_json(job, indent=2).decode() + "\n")


def read_job(run_dir: Path) -> Job | None:
    """The job of a run dir; None where it was not submitted to Slurm. DataError: job.json is damaged."""
    path = run_dir / JOB_RECORD
    if not path.is_file():
        return None
    try:
        return _JOB.validate_json(read_bytes_limited(path, MAX_BYTES))
    except (OSError, ValueError) as error:
        raise DataError("damaged: expected what `ddnn train --slurm` writes", location=path) from error


def last_output(path: Path) -> str | None:
    """The likeliest reason for the end of a job in what it printed: the first message of ddnn, of the script or of
    Slurm, else the last line with a letter in it; None if there is none. For jobs whose status.json does not say
    why."""
    if not path.is_file():
        return None
    with path.open("rb") as handle:
        handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL_BYTES))
        text = handle.read(_TAIL_BYTES).decode("utf-8", "replace").replace("\r", "\n")
    for pattern in (r"^ddnn: .+(?:\n  \w+: .+)*", r"^job\.sh: .+", r"^(?:slurmstepd|srun)\S* error: .+"):
        if match := re.search(pattern, text, re.MULTILINE):
            return printable(match[0].strip())[:_MAX_REASON]
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    return printable(lines[-1].strip())[:_MAX_REASON] if lines else None


def slurm_state(job: Job, seconds: float = 10.0) -> SlurmState | None:
    """None if there is no squeue, or it does not answer in time."""
    return slurm_states([job], seconds)[job]


def slurm_states(jobs: Sequence[Job], seconds: float = 30.0) -> dict[Job, SlurmState | None]:
    """The states of many jobs, with one call of squeue for each cluster of a federation, each within so many
    seconds."""
    states_by_job: dict[Job, SlurmState | None] = {}
    for cluster in {job.slurm_cluster for job in jobs}:
        here = [job for job in jobs if job.slurm_cluster == cluster]
        command = [
            "squeue",
            "--noheader",
            "--array",
            f"--jobs={','.join(job.number for job in here)}",
            "--format=%i|%T|%r",
        ]
        try:
            answer = run([*command, *([] if cluster is None else [f"--clusters={cluster}"])], timeout=seconds)
        except (OSError, subprocess.TimeoutExpired):
            states_by_job |= dict.fromkeys(here)
            continue
        rows = re.findall(r"^(\d+(?:_\d+)?)\|([A-Z_]+)(?:\|(.*))?$", answer.stdout, re.MULTILINE)
        states = {
            number: SlurmState(
                name, reason.strip() if name == "PENDING" and reason.strip() not in ("", "None") else None
            )
            for number, name, reason in rows
        }
        # A number that is unknown, or known but done.
        is_certain = answer.returncode == 0 or (len(here) == 1 and "Invalid job id" in answer.stderr)
        states_by_job |= {job: states.get(job.number, SlurmState("GONE") if is_certain else None) for job in here}
    return states_by_job


_DRY_RUN = "--dry-run shows the script and the options of sbatch"
_ACCOUNTS = "`sacctmgr show associations user=$USER` lists the accounts and QOS that you may use"
REFUSALS = {
    "job array": (
        "--seeds",
        "seeds must be below Slurm's MaxArraySize, which `scontrol show config` shows: often 1001",
    ),
    "fatal:": ("--slurm", "is this a login node of a Slurm cluster? `sinfo` shows whether Slurm answers here"),
    "account": ("--account", _ACCOUNTS),
    "qos": ("--qos", _ACCOUNTS),
    "memory specification": (
        "--mem",
        "`sinfo -o '%N %m'` shows the memory of the nodes in MB; where it is 1, Slurm does not know it: omit mem",
    ),
    "partition": ("--partition", "`sinfo` lists the partitions; the cluster's settings may name one too"),
}
"""By what an error of sbatch says: the option that causes it, and a hint."""


class SbatchError(UserError):
    """sbatch did not accept the job; another one would rarely succeed."""


class NoAnswerError(SbatchError):
    """sbatch has not answered: the job may have been submitted."""


def sbatch(options: Sequence[str], script: Path | str) -> tuple[str, str | None]:
    """Submits a script, a file or its text; the job's number and, in a federation, its cluster. `options`: of sbatch,
    each one word, unquoted; they override those in the script. SbatchError: sbatch cannot be started, it refused the
    job, or (NoAnswerError) it has not answered."""
    as_text, file = (script, None) if isinstance(script, str) else (None, script)
    command = ["sbatch", "--parsable", *options, *([] if file is None else [str(file)])]
    try:
        answer = run(command, timeout=SBATCH_SECONDS, env=submission_environment(os.environ), text=as_text)
    except OSError as error:
        raise SbatchError(f"sbatch cannot be started: {error.strerror}", hint=_DRY_RUN) from error
    except subprocess.TimeoutExpired as error:
        message = f"sbatch has not answered in {SBATCH_SECONDS:g} s; the job may have been submitted all the same"
        hint = "look for it with `squeue --me`, and end it with scancel before you try again"
        raise NoAnswerError(message, hint=hint) from error
    lines = answer.stdout.strip().splitlines()
    number, _, slurm_cluster = (lines[-1] if lines else "").partition(";")
    if answer.returncode != 0 or not number.isdigit():
        output = answer.stderr.strip() or answer.stdout.strip() or "it printed nothing"
        # The last of several errors where sbatch finds no cluster.
        words = " ".join(next((line for line in output.splitlines() if " fatal: " in line), output).split())
        cause = next((cause for cause in REFUSALS if cause in words.lower()), "")
        location, hint = REFUSALS.get(cause, ("--slurm", _DRY_RUN))
        raise SbatchError(
            f"sbatch refused the job with {answer.returncode}: {words[:1000]}", location=location, hint=hint
        )
    return number, slurm_cluster or None


def submission_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, which hands it on to the job: without what says that this process is itself part of
    a job (an interactive `srun --pty bash`, say), since the training would take itself for that one's rank."""
    hidden = {name for name in environment if name.startswith(RANK_ENV_PREFIXES)} - set(FORWARDED_ENV)
    return {name: value for name, value in environment.items() if name not in hidden}
