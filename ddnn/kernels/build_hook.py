"""Compiles `kernels.c` where pip installs ddnn, if there is a C compiler; without one ddnn runs all the same.

Called by hatchling (see pyproject.toml), for wheels and editable installs. Of ddnn nothing may be imported here.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")
SECONDS = 120


class CompileKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Makes `ddnn/kernels/kernels.so` beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are gathered."""
        folder = Path(self.root) / "ddnn" / "kernels"
        failure = compile_library(folder / "kernels.c", folder / "kernels.so")
        if failure is not None:
            print(f"ddnn: its kernels are not compiled, bf16 on a CPU will be slower: {failure}", file=sys.stderr)
            return
        build_data["artifacts"].append("ddnn/kernels/kernels.so")
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compile_library(source: Path, library: Path) -> str | None:
    """Compiles with $CC, cc, gcc or clang, whichever is there; returns why not, or None."""
    library.unlink(missing_ok=True)  # a stale one is worse than none
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        return f"CC is {os.environ['CC']!r}: {error}"
    compilers = [asked] if asked else [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not compilers:
        return "there is no C compiler"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    made = library.with_suffix(f".{os.getpid()}.tmp")
    command = [*compilers[0], *FLAGS, f'-DDDNN_SOURCE="{digest}"', "-o", str(made), str(source), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
        if done.returncode != 0:
            return f"{command[0]}: {done.stderr.strip()[-500:] or done.returncode}"
        made.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    finally:
        made.unlink(missing_ok=True)
    return None
