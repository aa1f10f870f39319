"""The text of an sbatch script, a pure function of a JobScript."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ddnn.distributed.mpirun import IGNORING_SIGUSR1, MPI_SETTINGS, SAFE_PATH
from ddnn.slurm.cluster import ClusterConfig, Placement
from ddnn.training.run_status import CHECKPOINTS, JOB_OUTPUT
from ddnn.util.errors import UserError
from ddnn.util.text import environment


@dataclass(frozen=True)
class JobScript:
    """A training as a job: everything that its script says."""

    run_dir: Path  # absolute; the job's output goes into it
    training: tuple[str, ...]  # the command that trains, word by word, with absolute paths only
    name: str  # the job's name, one word
    placement: Placement  # workers over nodes
    threads: int  # CPU threads of each worker
    # settings of the cluster; of its numbers of nodes, workers and GPUs `placement` is the last word
    cluster: ClusterConfig
    pretraining: bool = False  # whether it is one

    @property
    def cpus_per_worker(self) -> int:
        return max(self.threads, self.cluster.cpus_per_worker)


def sbatch_options(job: JobScript) -> list[str]:
    """Options of sbatch, each one word, unquoted: for its command line, where they win over SBATCH_* variables.
    UserError: the run dir's name holds what Slurm cannot write to."""
    cluster, placement = job.cluster, job.placement
    gpus = placement.gpus_per_node
    chosen = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "time": cluster.time,
        "nodes": placement.nodes,
        "ntasks-per-node": placement.workers_per_node,
        "cpus-per-task": job.cpus_per_worker,
        "gres": ":".join(filter(None, ("gpu", cluster.gpu_type, str(gpus)))) if gpus else None,
        "mem": cluster.mem,
    }
    unfit = next((c for c in str(job.run_dir) if c == "\\" or not c.isprintable()), None)
    if unfit is not None:
        message = f"the name of the run dir holds {unfit!r}, which Slurm cannot have in the name of an output file"
        raise UserError(message, location=repr(str(job.run_dir)), hint="name another --run-dir")
    return [
        f"--job-name={job.name}",
        # Slurm replaces what follows %; two of them are one.
        f"--output={job.run_dir}".replace("%", "%%") + f"/{JOB_OUTPUT}",
        "--open-mode=append",  # a job that was requeued continues the same file
        "--requeue" if cluster.requeue else "--no-requeue",
        *([f"--signal=B:USR1@{cluster.signal_seconds}"] if cluster.signal_seconds else []),
        *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
        *cluster.options,
    ]


def script_text(job: JobScript) -> str:
    """The whole script. UserError: a name holds what neither Slurm nor one line of shell can."""
    by_srun, placement = job.cluster.launcher == "srun" and job.placement.workers > 1, job.placement
    srun = [
        *("srun", "--mpi=pmix", "--kill-on-bad-exit=1", f"--nodes={placement.nodes}", f"--ntasks={placement.workers}"),
        f"--ntasks-per-node={placement.workers_per_node}",
        f"--cpus-per-task={job.cpus_per_worker}",  # since 22.05 srun does not take it from the job
        *IGNORING_SIGUSR1,
    ]
    # Values are written as they are, but for the quotes: a path may hold any byte.
    templates = environment().overlay(finalize=None)
    templates.filters = {**templates.filters, "sbatch_quote": _sbatch_quote}
    return templates.get_template("job.sh.j2").render(
        job=job,
        note="A pretraining: submitted again, it resumes with the RBM that it had reached."
        if job.pretraining
        else f"`ddnn status {shlex.quote(str(job.run_dir))}` follows it.",
        sbatch_options=sbatch_options(job),
        by_srun=by_srun,
        mpi_settings={name: value for name, value in MPI_SETTINGS.items() if by_srun and "MCA" in name},
        environment={
            "SLURM_EXPORT_ENV": "ALL",
            "OMP_NUM_THREADS": str(job.threads),
            **SAFE_PATH,
            **job.cluster.environment,
        },
        # mpirun is started by ddnn itself, on the nodes of the allocation.
        command=[*(srun if by_srun else ()), *map(_one_line, job.training)],
        saved=f"{job.run_dir}/{'rbm1.safetensors' if job.pretraining else CHECKPOINTS}",
    )


def _sbatch_quote(option: str) -> str:
    """An option for an #SBATCH line. sbatch reads double quotes and backslashes in them as a shell would, no $."""
    if not re.search(r"[\s\"'#]", option):
        return option
    name, _, value = option.partition("=")
    escaped = value.replace('"', '\\"')
    return f'{name}="{escaped}"'


def _one_line(text: str) -> str:
    unfit = next((c for c in text if c in "\n\r\0"), None)
    if unfit is not None:
        raise UserError(
            f"{unfit!r} found, which cannot be in a job script", location=repr(text), hint="rename the file"
        )
    return text
