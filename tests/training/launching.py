"""Scripts of this folder, run by mpirun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from forked_python import forked_python

from ddnn.distributed.mpirun import find_mpirun, mpirun_command

HERE = Path(__file__).parent


def mpi_script(name: str, workers: int, *arguments: object, timeout: float = 600, code: int = 0) -> str:
    """Runs a script beside this file as so many workers; what it said. Fails where it ends with another code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMIX_"))}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1]))),
    }
    words = [forked_python(), str(HERE / name), *map(str, arguments)]
    command, variables = mpirun_command(workers, words, environment, find_mpirun(environment))
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
