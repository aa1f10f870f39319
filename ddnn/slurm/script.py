"""The text of an sbatch script: a pure function of what it is made from."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ddnn.errors import UserError
from ddnn.parallel.launch import IGNORING_SIGUSR1, SAFE_PATH, SETTINGS
from ddnn.slurm.cluster import Cluster
from ddnn.slurm.plan import Placement
from ddnn.train.run_dir_files import JOB_OUTPUT

RESTARTED = """\
[ -z "$SLURM_RESTART_COUNT" ] || echo "job.sh: restart $SLURM_RESTART_COUNT of job $SLURM_JOB_ID, $(date)"
"""

ASKING = """\
# Slurm's SIGUSR1 before the time limit asks the training for a checkpoint and its end. It is handed on every second,
# since the training does not listen from the beginning. SIGTERM, which ends a job, Slurm sends to all its processes:
# handed on too soon it would be a second signal, which ends the training at once.
asked='' heard='' training=''
ask_training() { [ "$asked" = USR1 ] || sleep 1; while kill -USR1 "$training" 2>/dev/null; do sleep 1; done; }
ask() { before=$asked asked=$1 heard=1; if [ -z "$before" ] && [ -n "$training" ]; then ask_training & fi; }
trap 'ask USR1' USR1
trap 'ask TERM' TERM
"""

WAITING = """\
training=$!
if [ -n "$asked" ]; then ask_training & fi
while heard='' code=0; wait "$training" || code=$?; [ -n "$heard" ]; do :; done  # a signal ends wait, too
"""

REQUEUEING = """\
# 75: it can go on. Over 128: it was killed before the checkpoint that it was asked for, or by a preemption of which
# only its workers were told; it goes on from an older one, or begins anew, three times at most.
job=''
if [ "$code" = 75 ] || [ "$code" -gt 128 ]; then job=$(scontrol --oneliner show job "$SLURM_JOB_ID") || job=unknown; fi
case $job in *' PreemptTime='[0-9]*) asked=preempted ;; esac
if [ "$code" = 75 ] || { [ "$code" -gt 128 ] && [ -n "$asked" ] &&
    { [ SAVED ] || [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; }; }; then
    # Slurm still counts it as running: a job that is cancelled does not queue again.
    case $job in
    *' JobState=RUNNING '* | *' JobState=SIGNALING '*) scontrol requeue "$SLURM_JOB_ID" || job=unknown ;;
    esac
    [ "$job" != unknown ] || echo "job.sh: the job cannot be requeued: submit it again, with --resume" >&2
fi
"""


@dataclass(frozen=True)
class JobScript:
    """A training as a job: everything that its script says.

    Attributes:
        run_dir: absolute; the job's output goes into it.
        training: the command that trains, word by word, as it stands in the job: absolute paths only.
        name: the job's name, one word.
        placement: workers over nodes.
        threads: CPU threads of each worker.
        cluster: settings of the cluster; of its numbers of nodes, workers and GPUs `placement` is the last word.
        pretraining: whether it is one.
    """

    run_dir: Path
    training: tuple[str, ...]
    name: str
    placement: Placement
    threads: int
    cluster: Cluster
    pretraining: bool = False

    @property
    def cpus_per_worker(self) -> int:
        """Cores to ask for."""
        return max(self.threads, self.cluster.cpus_per_worker)


def sbatch_options(job: JobScript) -> list[str]:
    """Options of sbatch, each one word, unquoted: for its command line, where they win over SBATCH_* variables.

    Raises:
        UserError: the run dir's name holds what Slurm cannot write to.
    """
    cluster, placement = job.cluster, job.placement
    chosen = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "time": cluster.time,
        "nodes": placement.nodes,
        "ntasks-per-node": placement.workers_per_node,
        "cpus-per-task": job.cpus_per_worker,
        "gres": ":".join(filter(None, ("gpu", cluster.gpu_type, str(placement.gpus_per_node)))),
        "mem": cluster.mem,
    }
    if not placement.gpus_per_node:
        del chosen["gres"]
    return [
        f"--job-name={job.name}",
        # What stands behind % is Slurm's to fill in; two of them are one.
        f"--output={_slurm_path(job.run_dir)}".replace("%", "%%") + f"/{JOB_OUTPUT}",
        "--open-mode=append",  # a job that was requeued goes on with the same file
        "--requeue" if cluster.requeue else "--no-requeue",
        *([f"--signal=B:USR1@{cluster.signal_seconds}"] if cluster.signal_seconds else []),
        *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
        *cluster.options,
    ]


def script_text(job: JobScript) -> str:
    """The whole script.

    Raises:
        UserError: a name holds what neither Slurm nor one line of shell can.
    """
    cluster = job.cluster
    lines = [
        "#!/bin/bash",
        f"# Written by ddnn: {job.placement}. {_followed(job)}",
        *(f"#SBATCH {_quoted(option)}" for option in sbatch_options(job)),
        "",
        "# A line that fails ends the job, with its exit code. No -u: module and conda read variables that nobody set.",
        "set -eo pipefail",
        """trap 'echo "job.sh: exit code $? from: $BASH_COMMAND" >&2' ERR""",
        RESTARTED,
        ASKING,
        *_exports({k: v for k, v in SETTINGS.items() if "MCA" in k} if _by_srun(job) else {}),
        *(["# setup of the cluster's settings, as it stands there", *cluster.setup, ""] if cluster.setup else []),
        *_exports({"SLURM_EXPORT_ENV": "ALL", "OMP_NUM_THREADS": str(job.threads), **SAFE_PATH, **cluster.environment}),
        "",
        "# Deaf to SIGUSR1 until it listens: it would die of it as it starts.",
        f"(trap '' USR1; exec {shlex.join([*_launcher(job), *map(_one_line, job.training)])}) &",
        WAITING,
        *([_requeueing(job)] if cluster.requeue else []),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _followed(job: JobScript) -> str:
    if job.pretraining:
        return "A pretraining: submitted again, it goes on with the RBM that it was at."
    return f"`ddnn status {shlex.quote(str(job.run_dir))}` follows it."


def _requeueing(job: JobScript) -> str:
    """With what is there once there is something to go on from."""
    name, kind = ("rbm1.safetensors", "-f") if job.pretraining else ("checkpoints", "-d")
    text = REQUEUEING.replace("SAVED", f"{kind} {shlex.quote(f'{job.run_dir}/{name}')}")
    return text.replace(", with --resume", "") if job.pretraining else text


def _by_srun(job: JobScript) -> bool:
    return job.cluster.launcher == "srun" and job.placement.workers > 1


def _launcher(job: JobScript) -> list[str]:
    """What stands before the training. Nothing for mpirun: ddnn starts it itself, over the nodes of the allocation."""
    if not _by_srun(job):
        return []
    placement = job.placement
    return [
        *("srun", "--mpi=pmix", "--kill-on-bad-exit=1", f"--nodes={placement.nodes}", f"--ntasks={placement.workers}"),
        f"--ntasks-per-node={placement.workers_per_node}",
        f"--cpus-per-task={job.cpus_per_worker}",  # since 22.05 srun does not take it from the job
        *IGNORING_SIGUSR1,
    ]


def _exports(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _quoted(option: str) -> str:
    """An option for an #SBATCH line. sbatch reads double quotes and backslashes in them as a shell would, no $."""
    if not re.search(r"[\s\"'#]", option):
        return option
    name, _, value = option.partition("=")
    escaped = value.replace('"', '\\"')
    return f'{name}="{escaped}"'


def _slurm_path(path: Path) -> str:
    text = str(path)
    unfit = next((c for c in text if c == "\\" or not c.isprintable()), None)
    if unfit is not None:
        raise UserError(
            f"the name of the run dir holds {unfit!r}, which Slurm cannot have in the name of an output file",
            where=repr(text),
            mend="name another --run-dir",
        )
    return text


def _one_line(text: str) -> str:
    unfit = next((c for c in text if c in "\n\r\0"), None)
    if unfit is not None:
        raise UserError(
            f"{unfit!r} found, which cannot stand in a job script", where=repr(text), mend="rename the file"
        )
    return text
