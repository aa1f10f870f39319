"""What the tests would notice: puts the mistakes of mutants.yaml into a copy of the code, one at a time.

    python tests/mutants.py [--only ROW] [--jobs N]

Each mistake is a text of one file that is replaced by another, and names the tests that must fail then. They are run on
the copy as it is first: a test that fails without the mistake proves nothing. The exit code is 1 if a mistake was not noticed,
or if its text is no longer in the file and mutants.yaml has to follow the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = Path(__file__).with_suffix(".yaml")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "shared", "demo", "build", "dist")
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


def failed(mutant: Mutant | None, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests fail on a copy of the code with the mistake, or on a plain one, and what pytest said.

    Raises:
        RuntimeError: pytest could not run them.
    """
    with tempfile.TemporaryDirectory(prefix="ddnn-mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        if (ROOT.parent / "shared").is_dir():  # the reference data that tests look for beside the code
            (tree.parent / "shared").symlink_to(ROOT.parent / "shared")
        if mutant is not None:
            place = tree / mutant.file
            place.write_text(mutant.applied(place.read_text()))
        words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
        variables = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                words,
                cwd=tree,
                env=variables,
                capture_output=True,
                text=True,
                timeout=TIMEOUT if mutant else None,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, f"no end after {TIMEOUT:g} seconds"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.returncode == 1, done.stdout


def verdict(mutant: Mutant) -> tuple[bool, str]:
    """Whether the mistake was noticed; and by which test with what error, or why it is not known."""
    try:
        noticed, said = failed(mutant, mutant.tests)
    except (OSError, RuntimeError, ValueError) as error:
        return False, f"ERROR: {error}"
    if not noticed:
        return False, "SURVIVED"
    named = re.search(r"^FAILED (.*?)( - .*)?$", said, re.MULTILINE)
    errors = re.findall(r"^E +(\S.*)", said, re.MULTILINE)
    return True, f"noticed by {named.group(1) if named else 'a timeout'}: {errors[0][:100] if errors else said[:100]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts mistakes into the code and looks whether the tests notice.")
    parser.add_argument("--only", type=int, action="append", metavar="ROW", help="this row alone; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    given = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if given.only is None or mutant.row in given.only]
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    if not chosen:
        parser.error("mutants.yaml has no such row")
    fails, said = failed(None, tests)
    if fails:
        print(f"{said}\nthese tests fail without any mistake")
        return 1
    tried, noticed = Counter[str](), Counter[str]()
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutant, (found, how) in zip(chosen, pool.map(verdict, chosen), strict=True):
            tried[mutant.area] += 1
            noticed[mutant.area] += found
            print(f"{mutant.row:3} {mutant.mistake}\n    {how}", flush=True)
    print("\n| area | mistakes | noticed |\n|---|---|---|")
    for area in sorted(tried):
        print(f"| {area} | {tried[area]} | {noticed[area]} |")
    print(f"| all | {tried.total()} | {noticed.total()} |")
    return 0 if noticed == tried else 1


if __name__ == "__main__":
    sys.exit(main())
