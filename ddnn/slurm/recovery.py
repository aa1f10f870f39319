"""Nodes of a Slurm allocation that fail while a job of several workers runs: the launcher asks which, and goes on
without them where it can. Slurm itself notices a failed node only after minutes (SlurmdTimeout)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress

from ddnn.distributed.launcher import NodeRecovery, print_status
from ddnn.distributed.mpirun import count_of
from ddnn.util.process import run
from ddnn.util.system import slurm_job_id


class SlurmNodes(NodeRecovery):
    """The nodes of the allocation that this process runs in; none outside Slurm."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.environment = environment
        self.times_requeued = count_of(environment, "SLURM_RESTART_COUNT")

    def lost(self) -> list[str]:
        nodes = self._nodes()
        answering = nodes if len(nodes) < 2 else answering_nodes(nodes, self.environment)
        return [node for node in nodes if node not in answering]

    def leave_lost(self, workers: int) -> bool:
        lost = self.lost()
        if not lost:
            return True
        names, remaining = ", ".join(lost), [node for node in self._nodes() if node not in lost]
        gpus = any(self.environment.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS"))
        if gpus or workers % len(remaining):
            print_status(f"{names} no longer answers, and the other nodes cannot run {workers} workers")
            return False
        print_status(f"{names} no longer answers: {workers} workers on {', '.join(remaining)}")
        if not release_other_nodes(remaining, self.environment):
            print_status("they cannot be given back to Slurm, which may end and requeue the job when it notices")
        self.remaining = remaining
        return True

    def _nodes(self) -> Sequence[str]:
        return self.remaining or allocated_nodes(self.environment)


def allocated_nodes(environment: Mapping[str, str]) -> list[str]:
    """Names of the nodes of the Slurm allocation; empty outside Slurm, and where it cannot be asked."""
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    return (_scontrol(["show", "hostnames", nodes], environment) or "").split() if nodes else []


def release_other_nodes(nodes: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Gives all other nodes of the allocation back: Slurm ends a job when it notices the failure of a node that it
    still has. (`sbatch --no-kill` does not serve: where the node of the job's script is lost, the job holds the others
    until its time limit, seen with Slurm 22.05.)"""
    words = ["update", f"JobId={slurm_job_id(environment)}", f"NodeList={','.join(nodes)}"]
    return _scontrol(words, environment) is not None


def _scontrol(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """What it prints; None where there is none, it fails, or it does not answer. An update leaves a script where it
    runs."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = run(["env", f"--chdir={folder}", "scontrol", *words], timeout=30, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def answering_nodes(nodes: Sequence[str], environment: Mapping[str, str], timeout: float = 30.0) -> list[str]:
    """Those of the nodes on which a process starts within `timeout` seconds. All where it starts on none: then srun does
    not work here, since this process runs on one."""

    def answers(node: str) -> bool:
        command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", f"--nodelist={node}", "true"]
        try:
            return run(command, env=environment, timeout=timeout).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    with ThreadPoolExecutor(len(nodes)) as threads:
        answered = list(threads.map(answers, nodes))
    return list(compress(nodes, answered)) or list(nodes)
