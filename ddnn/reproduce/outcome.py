"""What `ddnn reproduce` says at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddnn.reproduce.cells import counted
from ddnn.reproduce.jobs import MOST_LINES, Jobs
from ddnn.reproduce.plan import Stale


@dataclass(frozen=True)
class Intent:
    """What a call with --dry-run and without jobs would make.

    Attributes:
        runs: names.
        trained: those of them that have a model, which is only judged.
        stacks: seeds of the stacks of RBMs.
        out, cores: where, and on how many.
    """

    runs: tuple[str, ...]
    trained: tuple[str, ...]
    stacks: tuple[int, ...]
    out: Path
    cores: int

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "runs": list(self.runs),
            "trained": list(self.trained),
            "stacks": list(self.stacks),
            "out": str(self.out),
            "cores": self.cores,
        }

    def as_lines(self) -> list[str]:
        """To read."""
        if not self.runs:
            return ["this call would make no runs"]
        stacks = f" and {counted(len(self.stacks), 'stack')} of RBMs" if self.stacks else ""
        what = f"{counted(len(self.runs), 'run')}{stacks}"
        lines = [f"this call would make {what} in {self.out}, on {counted(self.cores, 'core')}"]
        if self.trained:
            lines.append(f"trained already, to be judged only: {len(self.trained)}")
        return lines + _listed("would be made", self.runs)


@dataclass(frozen=True)
class Reproduction:
    """What there is now, and what is missing.

    Attributes:
        tables: their names.
        records: how many of their runs have one that counts.
        missing: names of runs that have none.
        others: those of the missing that --seeds and --workers leave out.
        stale: runs whose record does not count.
        problems: why runs failed, a sentence each.
        files: that were written.
        summary: of the report, for `--json`.
        jobs: of --slurm, where it had something to do.
        intent: of --dry-run, where there are no jobs.
    """

    tables: tuple[str, ...]
    records: int
    missing: tuple[str, ...]
    others: tuple[str, ...]
    stale: Stale
    problems: tuple[str, ...]
    files: tuple[Path, ...]
    summary: dict[str, object]
    jobs: Jobs | None = None
    intent: Intent | None = None

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "tables": list(self.tables),
            "records": self.records,
            "missing": list(self.missing),
            "not_asked_for": list(self.others),
            "of_another_recipe": list(self.stale.recipe),
            "judged_on_other_tests": list(self.stale.tests),
            "problems": list(self.problems),
            "files": [str(path) for path in self.files],
            **({} if self.jobs is None else {"jobs": self.jobs.as_dict()}),
            **({} if self.intent is None else {"would_make": self.intent.as_dict()}),
            **self.summary,
        }

    def as_text(self) -> str:
        """A few lines."""
        lines = [f"{', '.join(self.tables)}: {self.records} runs there, {len(self.missing)} missing"]
        lines += self.stale.as_lines()
        if self.jobs is not None:
            lines += self.jobs.as_lines()
        elif self.intent is not None:
            lines += self.intent.as_lines()
        else:
            lines += _listed("missing", self.missing)
        if self.others and (self.jobs is not None or self.intent is not None):
            lines.append(f"{len(self.others)} more missing and not asked for (--seeds, --workers)")
        return "\n".join([*lines, *(f"report: {path}" for path in self.files)])


def _listed(what: str, names: Sequence[str]) -> list[str]:
    more = [f"and {len(names) - MOST_LINES} more"] if len(names) > MOST_LINES else []
    return [f"{what}: {name}" for name in names[:MOST_LINES]] + more
