"""`make fuzz`: every reader for long, on all cores, and a table of what came of it.

Targets are fuzzed in rounds, each with another seed, until the seconds are over or the inputs are enough. Findings are
kept as files: FOLDER/TARGET/HASH.bin is what was damaged, HASH.txt says what went wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from fuzz.harness import Outcome, fuzz
from fuzz.targets import all_targets


def _scratch() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _round(index: int, seed: int, seconds: float, crafted: bool) -> Outcome:
    """One target for so many seconds; in a process of the pool, which forks the one that reads."""
    with tempfile.TemporaryDirectory(prefix="ddnn-fuzz-", dir=_scratch()) as folder:
        target = all_targets()[index]
        return fuzz(target, Path(folder), seed=seed, inputs=10**9, seconds=seconds, crafted=crafted, thorough=True)


def _add(total: Outcome, more: Outcome) -> None:
    total.inputs, total.accepted = total.inputs + more.inputs, total.accepted + more.accepted
    total.refused, total.slowest = total.refused + more.refused, max(total.slowest, more.slowest)
    total.findings += more.findings


def _keep(outcome: Outcome, folder: Path) -> None:
    for finding in outcome.findings:
        path = (
            folder / outcome.target.replace(" ", "-").replace(",", "") / hashlib.sha256(finding.data).hexdigest()[:16]
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".bin").write_bytes(finding.data)
        path.with_suffix(".txt").write_text(f"{finding.message}\n\n{finding.trace}")


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a line for each target, and their sum."""
    lines = ["| Target | Inputs | Accepted | Refused | Findings | Slowest (s) |", "|---|---:|---:|---:|---:|---:|"]
    total = Outcome("**all**")
    for outcome in outcomes:
        _add(total, outcome)
    for o in (*outcomes, total):
        lines.append(
            f"| {o.target} | {o.inputs:,} | {o.accepted:,} | {o.refused:,} | {len(o.findings)} | {o.slowest:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Prints the table; 1 where there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--inputs", type=int, default=0, help="end once there are so many in all; 0: by time alone")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round; printed")
    parser.add_argument("--target", default="", help="only targets whose names hold this")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    chosen = [n for n, target in enumerate(all_targets()) if options.target in target.name]
    totals = {n: Outcome(all_targets()[n].name) for n in chosen}
    print(f"{len(chosen)} targets, seed {options.seed}, {options.processes} processes", flush=True)
    started, turn = time.monotonic(), 0
    share = max(1.0, min(15.0, options.seconds * options.processes / max(1, len(chosen)) / 2))
    with ProcessPoolExecutor(options.processes) as pool:
        running: dict[Future[Outcome], int] = {}
        while True:
            left = options.seconds - (time.monotonic() - started)
            enough = options.inputs and sum(o.inputs for o in totals.values()) >= options.inputs
            while len(running) < options.processes and left > 0.5 and not enough and chosen:
                index = chosen[turn % len(chosen)]
                turn += 1
                mine = share if all_targets()[index].inputs > 60 else share / 3  # slow ones, of which few come anyway
                job = pool.submit(_round, index, options.seed + 7919 * turn, min(mine, left), turn <= len(chosen))
                running[job] = index
            if not running:
                break
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                outcome = job.result()
                _add(totals[running.pop(job)], outcome)
                _keep(outcome, options.findings)
                for finding in outcome.findings:
                    print(f"{outcome.target}: {finding.message}", flush=True)
    print(table(list(totals.values())))
    print(f"{time.monotonic() - started:.0f} s; findings are kept in {options.findings}")
    return 1 if any(o.findings for o in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
