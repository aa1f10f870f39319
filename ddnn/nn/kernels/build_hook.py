"""Compiles `kernels.c` where pip installs ddnn, if there is a C compiler; without one ddnn runs all the same. Called by
hatchling (see pyproject.toml), for wheels and editable installs. Of ddnn nothing may be imported here."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")
SECONDS = 120


class CompileKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Makes `kernels.so`: for an editable install beside its source, for a wheel in the wheel alone."""

    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        here = Path(self.root) / "ddnn" / "nn" / "kernels"
        if version != "editable":
            self._folder = tempfile.mkdtemp()
        library = Path(self._folder or here) / "kernels.so"
        failure = compile_library(here / "kernels.c", library)
        if failure is not None:
            print(f"ddnn: its kernels are not compiled, bf16 on a CPU will be slower: {failure}", file=sys.stderr)
            return
        if self._folder is not None:
            build_data["force_include"][str(library)] = "ddnn/nn/kernels/kernels.so"
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"  # it knows nothing of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def compile_library(source: Path, library: Path) -> str | None:
    """Compiles with $CC, cc, gcc or clang, whichever is there; returns why not, or None. Where it fails an older library
    stays: it knows which source it was made from, and is used with no other."""
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        return f"CC is {os.environ['CC']!r}: {error}"
    compilers = [asked] if asked else [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not compilers:
        return "there is no C compiler"
    made = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        command = [*compilers[0], *FLAGS, f'-DDDNN_SOURCE="{digest}"', "-o", str(made), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
        if done.returncode != 0:
            return f"{compilers[0][0]}: {done.stderr.strip()[-500:] or done.returncode}"
        made.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compilers[0][0]}: {error}"
    finally:
        with suppress(OSError):  # also that of a tree that cannot be written
            made.unlink()
    return None
