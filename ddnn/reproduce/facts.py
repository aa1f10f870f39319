"""The parts of a report about time and circumstances: where the time went, speed-ups, every run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddnn.reproduce.cells import NONE, Cell, Measure, counted, figure, marked, mean
from ddnn.reproduce.document import Block, Bullets, Grid, Paragraph
from ddnn.reproduce.records import Record, Time
from ddnn.reproduce.speed import SpeedUp


def times(cells: Sequence[Cell]) -> list[Block]:
    """Where the time went, and what was sent; nothing where no run says."""
    rows = []
    crowded: set[tuple[int, int]] = set()
    for cell in cells:
        found = [run.time for run in cell.sound if run.time is not None]
        crowded |= {(cell.workers, time.cores) for time in found if 0 < time.cores < cell.workers}
        sent = [t.bytes_sent / t.averagings for t in found if t.bytes_sent is not None and t.averagings]
        shares = (_share(found, name) for name in ("compute_seconds", "exchange_seconds", "waiting_seconds"))
        rows.append(
            (
                marked(cell.setting),
                str(cell.workers),
                mean([time.averagings for time in found], 0),
                mean([value / 1e6 for value in sent], 3),
                mean([time.seconds for time in found], 1),
                *shares,
            )
        )
    if all(row[4] == NONE for row in rows):
        return []
    header = (
        "setting", "workers", "averagings", "MB sent per worker and averaging", "seconds", "computing (%)",
        "exchange (%)", "waiting (%)",
    )  # fmt: skip
    notes = "Means over the seeds. Seconds are of the training without cross-validation; 1 MB is 10^6 bytes."
    if crowded:
        sharing = ", ".join(f"{workers} workers on {cores}" for workers, cores in sorted(crowded))
        notes += f" Workers shared the machine's cores ({sharing}): these seconds say nothing of a speed-up."
    return [Grid(header, tuple(rows), "lr" + "r" * 6), Paragraph(notes)]


def _share(found: Iterable[Time], name: str) -> str:
    parts = [(getattr(time, name), time.seconds) for time in found if time.seconds > 0]
    return mean([100.0 * part / seconds for part, seconds in parts if part is not None], 1)


def speed_ups(speeds: Sequence[SpeedUp]) -> list[Block]:
    """A row for each setting and kind, a column for each size."""
    if not speeds:
        return []
    sizes = sorted({speed.workers for speed in speeds})
    found = {(s.label, s.kind, s.workers): s.speed_up for s in speeds}
    lines = dict.fromkeys((s.label, s.kind) for s in speeds)
    rows = [
        (label, kind, *(f"{found[label, kind, n]:.2f}" if (label, kind, n) in found else NONE for n in sizes))
        for label, kind in lines
    ]
    header = ("setting", "speed-up", *(counted(n, "worker") for n in sizes))
    notes = (
        "Speed-ups over one worker, of the fastest seed of each. measured: every worker had a core of its own. "
        "predicted: by the scaling model "
        "(docs/scaling.md), from measured times of computing and exchange. paper: the paper's, on GPUs."
    )
    return [Grid(header, tuple(rows), "ll" + "r" * len(sizes)), Paragraph(notes)]


def runs(records: Mapping[str, Record], shown: Sequence[Measure]) -> list[Block]:
    """Where and when, and every run."""
    every = sorted(records.values(), key=lambda record: (record.setting, record.workers, record.seed))
    if not every:
        return [Paragraph("No runs.")]
    dates = sorted({record.date for record in every if record.date})
    facts = (
        f"runs: {len(every)}, of which {sum(record.failed is not None for record in every)} diverged",
        f"machine: {'; '.join(sorted({r.machine for r in every if r.machine})) or 'not known'}",
        f"versions: {'; '.join(sorted({r.version for r in every if r.version})) or 'not known'}",
        f"recorded: {' to '.join(dict.fromkeys((dates[0], dates[-1]))) if dates else 'not known'}",
    )
    rows = [
        (
            record.name,
            str(record.epochs),
            *(figure(measure.of(record)) for measure in shown),
            f"{record.time.seconds:.1f}" if record.time else NONE,
            (record.failed or "")[:200] or NONE,
        )
        for record in every
    ]
    header = ("run (setting-workers-seed)", "epochs", *(measure.title for measure in shown), "seconds", "diverged")
    return [Bullets(facts), Grid(header, tuple(rows), "lr" + "r" * len(shown) + "rl")]
