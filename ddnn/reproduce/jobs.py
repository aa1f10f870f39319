"""What `ddnn reproduce --slurm` says of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_LINES = 20


@dataclass(frozen=True)
class Ended:
    """A job that ended without a result: of which run (or stack), its number, the last it said, where to look."""

    name: str
    job: str
    said: str | None
    where: Path

    def __str__(self) -> str:
        said = (self.said or "nothing was said: cancelled, or its time was over").strip().splitlines()[0]
        return f"{self.name}, job {self.job}: {said[:300]}; see {self.where}"


@dataclass(frozen=True)
class Jobs:
    """What became of runs that had no record.

    Attributes:
        dry_run: whether `submitted` only would be.
        submitted: run, or "stack-SEED" of RBMs -> number of the job that it got in this call.
        waiting, running: the same of jobs of earlier calls.
        finished: runs whose model is there, to be judged in this call.
        diverged: run -> the error.
        ended: jobs that ended without a result; their runs are among the submitted, but for those of which what came
            does not count, since they lost workers.
    """

    dry_run: bool
    submitted: Mapping[str, str]
    waiting: Mapping[str, str]
    running: Mapping[str, str]
    finished: tuple[str, ...]
    diverged: Mapping[str, str]
    ended: tuple[Ended, ...]

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "submitted": {} if self.dry_run else dict(self.submitted),
            "to_submit": list(self.submitted) if self.dry_run else [],
            "waiting": dict(self.waiting),
            "running": dict(self.running),
            "finished": list(self.finished),
            "diverged": dict(self.diverged),
            "ended": [{"run": e.name, "job": e.job, "said": e.said, "output": str(e.where)} for e in self.ended],
        }

    def as_lines(self) -> list[str]:
        """To read: counts, jobs by name, and what to do next."""
        counts = {
            "would be submitted" if self.dry_run else "submitted": len(self.submitted),
            "waiting": len(self.waiting),
            "running": len(self.running),
            "finished": len(self.finished),
            "diverged": len(self.diverged),
            "ended without a result": len(self.ended),
        }
        lines = [f"jobs: {', '.join(f'{count} {what}' for what, count in counts.items())}"]
        lines += _some("would be submitted" if self.dry_run else "submitted", list(map(_named, self.submitted.items())))
        lines += _some("waiting", list(map(_named, self.waiting.items())))
        lines += _some("running", list(map(_named, self.running.items())))
        lines += _some("diverged", [f"{name}: {said}" for name, said in self.diverged.items()])
        lines += _some("ended without a result", list(map(str, self.ended)))
        if not self.dry_run and (self.submitted or self.waiting or self.running):
            lines.append("give the same command again when jobs have ended: it records them and goes on with the rest")
        return lines


def _named(job: tuple[str, str]) -> str:
    name, number = job
    return f"{name}: job {number}" if number else name


def _some(what: str, lines: list[str]) -> list[str]:
    more = [f"{what}: and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [f"{what}: {line}" for line in lines[:MOST_LINES]] + more
