"""Trainings as Slurm jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line says about the job: `settings` by the keys of ClusterConfig, over which they win."""

    cluster: str | None
    job_name: str | None
    settings: dict[str, Any]
