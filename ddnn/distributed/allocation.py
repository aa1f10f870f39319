"""The nodes of the Slurm allocation that this process runs in, and which of them still answer."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from ddnn.util.process import run


def allocated_nodes(environment: Mapping[str, str]) -> list[str]:
    """Names of the allocation's nodes; empty outside Slurm, and where it cannot be asked."""
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return []
    try:
        expanded = run(["scontrol", "show", "hostnames", nodes], timeout=30, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return expanded.stdout.split() if expanded.returncode == 0 else []


def release_other_nodes(nodes: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Gives all other nodes of the allocation back. When Slurm notices the failure of a node that a job still has, it
    ends the job.

    `sbatch --no-kill` does not serve instead: where the node is lost on which the job's script runs, such a job holds
    the others until its time limit (seen with Slurm 22.05).
    """
    command = ["scontrol", "update", f"JobId={environment.get('SLURM_JOB_ID', '')}", f"NodeList={','.join(nodes)}"]
    try:
        with tempfile.TemporaryDirectory() as folder:  # scontrol leaves a script there
            return run(["env", f"--chdir={folder}", *command], timeout=30, env=environment).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def answering_nodes(nodes: Sequence[str], environment: Mapping[str, str], timeout: float = 30.0) -> list[str]:
    """Those of the nodes on which a process starts within `timeout` seconds.

    Slurm itself notices a failed node only after minutes (SlurmdTimeout). All nodes where the process starts on none:
    then srun does not work here, since this process runs on one of them.
    """
    command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none"]
    probes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node in nodes:
            probes[node] = subprocess.Popen(
                [*command, f"--nodelist={node}", "true"],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    except OSError:
        return list(nodes)
    until, answering = time.monotonic() + timeout, []
    for node, probe in probes.items():
        try:
            if probe.wait(max(until - time.monotonic(), 0.1)) == 0:
                answering.append(node)
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.wait()
    return answering or list(nodes)
