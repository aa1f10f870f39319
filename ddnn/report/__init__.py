"""What trainings came to, side by side, and what more workers would bring: `ddnn report` and `ddnn scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_run_page(run_dir: Path) -> None:
    """Writes the page of one training into its run dir. Imports what it needs only now: a training that begins does not."""
    from ddnn.report.page import write_page
    from ddnn.report.table import report
    from ddnn.runs.run_status import PAGE

    write_page(report([run_dir], None), run_dir / PAGE)
