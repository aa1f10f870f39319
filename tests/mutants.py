"""What the tests would notice: puts the mistakes of mutants.yaml into a copy of the code, one at a time.

    python tests/mutants.py [--only ROW] [--jobs N]

Each mistake is a text of one file that is replaced by another, and names the tests that must fail then. They are run on
the copy as it is first: a test that fails without the mistake proves nothing. A mistake that no test notices on this machine
is undecided where it skips some of them. The exit code is 1 if a mistake was not noticed, or if its text is no longer in the file and
mutants.yaml has to follow the code.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = Path(__file__).with_suffix(".yaml")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "shared", "corpus", "demo", "build", "dist")
PROCESSES = multiprocessing.get_context("forkserver")
"""Forks of one process that has imported what takes seconds, but no module of ddnn."""
PRELOADED = ["numpy", "pytest", "torch"]
TIMEOUT = 600.0
"""Seconds for the tests of one mistake: some make a loop endless. All tests without a mistake have as long as they take."""


@dataclass(frozen=True)
class Mutant:
    """A mistake of one place: `old`, which `file` has exactly once, becomes `new`. `tests` are arguments of pytest."""

    row: int
    mistake: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        """The folder of the package that it is in: ddnn/AREA/..."""
        return Path(self.file).parts[1]

    def applied(self, text: str) -> str:
        """The text of the file with the mistake; ValueError where the old text is not there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"the old text is {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """All mistakes, in the order of the file."""
    return [Mutant(**{**one, "tests": tuple(one["tests"])}) for one in yaml.safe_load(path.read_text())]


def run_pytest(tree: Path, words: Sequence[str], output: Path) -> None:
    """Ends this process, which has imported no module of ddnn, as `pytest WORDS` in the folder `tree`."""
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(Path(__file__).parent))]
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    import pytest

    code = int(pytest.main(["-p", "no:cacheprovider", *words]))
    sys.stdout.flush()
    os._exit(code)


def kill_those_of(tree: Path) -> None:
    """Kills all processes that tests in `tree` have left, by their environment: jobs are sessions of their own."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"PYTHONPATH={tree}".encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


def run_tests(mutant: Mutant | None, words: Sequence[str], seconds: float | None = TIMEOUT) -> tuple[bool, str]:
    """Whether tests fail on a copy of the code with the mistake, or on a plain one, and what pytest said.

    Raises:
        RuntimeError: pytest could not run them.
    """
    with tempfile.TemporaryDirectory(prefix="ddnn-mutant-", ignore_cleanup_errors=True) as folder:
        tree, output = Path(folder) / "tree", Path(folder) / "output"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        if (ROOT.parent / "shared").is_dir():  # the reference data that tests look for beside the code
            (tree.parent / "shared").symlink_to(ROOT.parent / "shared")
        for corpus in ROOT.glob("recipes/*/corpus"):  # not copied: 40 MB
            (tree / corpus.relative_to(ROOT)).symlink_to(corpus)
        if mutant is not None:
            place = tree / mutant.file
            place.write_text(mutant.applied(place.read_text()))
        process = PROCESSES.Process(target=run_pytest, args=(tree, words, output))
        process.start()
        process.join(seconds)
        ended = process.exitcode is not None
        process.kill()
        kill_those_of(tree)
        process.join()
        if not ended:
            return True, f"no end after {seconds:g} seconds"
        said = output.read_text(errors="replace") if output.exists() else ""
    if process.exitcode not in (0, 1):
        raise RuntimeError(f"pytest ended with {process.exitcode}: {said[-4000:]}")
    return process.exitcode == 1, said


def verdict(mutant: Mutant) -> tuple[str, str]:
    """Whether the mistake was "noticed", "survived", or is "undecided"; and by which test with what error, or why."""
    try:
        fails, said = run_tests(mutant, ["-x", *mutant.tests])
    except (OSError, RuntimeError, ValueError) as error:
        return "survived", f"ERROR: {error}"
    if not fails:
        skipped = re.search(r"\d+ skipped: .*", said)
        return ("undecided", f"undecided: {skipped[0]}") if skipped else ("survived", "SURVIVED")
    named = re.search(r"^FAILED (.*?)( - .*)?$", said, re.MULTILINE)
    errors = re.findall(r"^E +(\S.*)", said, re.MULTILINE)
    return (
        "noticed",
        f"noticed by {named.group(1) if named else 'a timeout'}: {errors[0][:100] if errors else said[:100]}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts mistakes into the code and looks whether the tests notice.")
    parser.add_argument("--only", type=int, action="append", metavar="ROW", help="this row alone; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    given = parser.parse_args()
    PROCESSES.set_forkserver_preload(PRELOADED)
    chosen = [mutant for mutant in read_mutants() if given.only is None or mutant.row in given.only]
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    if not chosen:
        parser.error("mutants.yaml has no such row")
    fails, said = run_tests(None, ["-n", str(given.jobs), *tests], seconds=None)
    if fails:
        print(f"{said}\nthese tests fail without any mistake")
        return 1
    found = Counter[tuple[str, str]]()
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutant, (outcome, how) in zip(chosen, pool.map(verdict, chosen), strict=True):
            found[mutant.area, outcome] += 1
            found["all", outcome] += 1
            print(f"{mutant.row:3} {mutant.mistake}\n    {how}", flush=True)
    print("\n| area | mistakes | noticed | undecided |\n|---|---|---|---|")
    for area in sorted({area for area, _ in found}, key=lambda area: (area == "all", area)):
        noticed, survived, undecided = (found[area, outcome] for outcome in ("noticed", "survived", "undecided"))
        print(f"| {area} | {noticed + survived + undecided} | {noticed} | {undecided} |")
    return 1 if found["all", "survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
