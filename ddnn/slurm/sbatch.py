"""Hands a script to sbatch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddnn.errors import UserError

SBATCH_SECONDS = 120.0
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")
_OF_A_RANK = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "SLURMD_")


class SbatchError(UserError):
    """sbatch took no job: another one would rarely fare better."""


def sbatch(options: Sequence[str], script: Path) -> tuple[str, str | None]:
    """Submits a script; the job's number and, in a federation, its cluster.

    Args:
        options: of sbatch, each one word, unquoted; they win over those that stand in the script.

    Raises:
        SbatchError: there is no sbatch, it refused the job, or it has not answered.
    """
    kept = f"the script is {script}"
    try:
        answer = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env=_outside_of_jobs(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SBATCH_SECONDS,
        )
    except FileNotFoundError as error:
        raise SbatchError(
            "sbatch is not found on PATH: is this a login node of a Slurm cluster?",
            mend=f"run it there, or see the script with --dry-run; {kept}",
        ) from error
    except OSError as error:
        raise SbatchError(f"sbatch cannot be started: {error.strerror}", mend=kept) from error
    except subprocess.TimeoutExpired as error:
        raise SbatchError(
            f"sbatch has not answered in {SBATCH_SECONDS:g} s; the job may have been submitted all the same",
            mend="look for it with `squeue --me`, and end it with scancel before you try again",
        ) from error
    said = answer.stdout.strip().splitlines()
    number, _, slurm_cluster = (said[-1] if said else "").partition(";")
    if answer.returncode != 0 or not number.isdigit():
        words = " ".join(answer.stderr.split()) or " ".join(answer.stdout.split()) or "it said nothing"
        raise SbatchError(
            f"sbatch refused the job with {answer.returncode}: {words[:1000]}", where=script.parent, mend=kept
        )
    return number, slurm_cluster or None


def _outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, which hands it on to the job: without what says that this process is itself part of
    a job (an interactive `srun --pty bash`, say), since the training would take itself for that one's rank."""
    return {name: value for name, value in environment.items() if name in _KEPT or not name.startswith(_OF_A_RANK)}
