"""The options of `ddnn train`, `pretrain` and `reproduce` for Slurm. Imports nothing heavy: every command loads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ddnn.errors import UserError


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line says of the job: `settings` by the keys of the cluster's settings, which they win over."""

    cluster: str | None
    job_name: str | None
    settings: dict[str, Any]


def slurm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command gets them as `slurm`: a SlurmOptions, or None without --slurm.

    Raises (when the command runs):
        UserError: one of the others is given without --slurm.
    """

    @functools.wraps(command)
    def gathered(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in ("cluster", "job_name", *_SETTINGS)}
        given = {name: value for name, value in given.items() if value is not None}
        if not arguments["slurm"]:
            if given:
                options = ", ".join("--" + name.replace("_", "-") for name in given)
                raise UserError(f"{options} without --slurm", where="the command line", mend="add --slurm, or drop it")
            command(**{**arguments, "slurm": None})
            return
        settings = {name: value for name, value in given.items() if name in _SETTINGS}
        command(**{**arguments, "slurm": SlurmOptions(given.get("cluster"), given.get("job_name"), settings)})

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


_SETTINGS = ("nodes", "gpus_per_node", "workers_per_node", "time", "partition", "account", "launcher")
_OPTIONS = (
    click.option("--slurm", is_flag=True, help="Submit it to Slurm; with --dry-run only say what would be."),
    click.option("--cluster", metavar="NAME|FILE", help="Slurm: settings of the cluster, see docs/slurm.md."),
    click.option("--nodes", type=int, help="Slurm: number of nodes of a job."),
    click.option("--gpus-per-node", type=int, help="Slurm: GPUs on each node, a worker on each; 0: CPU."),
    click.option("--workers-per-node", type=int, help="Slurm: workers on each node.  [default: one for each GPU]"),
    click.option("--time", help="Slurm: time limit, as HOURS:MM:SS or DAYS-HOURS."),
    click.option("--partition", help="Slurm: partition."),
    click.option("--account", help="Slurm: account to charge."),
    click.option("--launcher", type=click.Choice(["mpirun", "srun"]), help="Slurm: who starts the workers."),
    click.option("--job-name", help="Slurm: name of the job.  [default: that of the run dir]"),
)
