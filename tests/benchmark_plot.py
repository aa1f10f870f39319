"""`make docs`: docs/results/benchmarks.svg, the bars of docs/results/benchmarks.json. By hand rather than matplotlib: the same
text from the same figures everywhere, 4 kB, and a diff shows what changed.

The figures are those of programs that took turns on one core: `rows` has for each the frames/s of every round, and whose it is.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FIGURES = Path(__file__).parent.parent / "docs" / "results" / "benchmarks.json"
COLORS = {"limit": "#999999", "ddnn": "#0072B2", "others": "#E69F00"}  # as in ddnn.report.figures
LABELS, BARS, ROW, TOP = 250, 380, 24, 46  # in pixels; the widths of both columns, the heights of a row and the title


def svg(figures: dict[str, Any]) -> str:
    """A bar for each row, its median beside it, with a line from the smallest to the largest round."""
    rows = figures["rows"]
    width, height = LABELS + BARS + 80, TOP + ROW * len(rows) + 10
    scale = BARS / max(max(row["frames_per_second"]) for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(figures["title"])}</text>',
        f'<text x="10" y="37" fill="#555555" font-size="12">{escape(figures["machine"])}</text>',
    ]
    for i, row in enumerate(rows):
        y, rounds = TOP + ROW * i, row["frames_per_second"]
        low, median, high = (f(rounds) * scale for f in (min, statistics.median, max))
        lines += [
            f'<text x="{LABELS - 8}" y="{y + 16}" text-anchor="end">{escape(row["name"])}</text>',
            f'<rect x="{LABELS}" y="{y + 3}" width="{median:.1f}" height="{ROW - 6}" fill="{COLORS[row["of"]]}"/>',
            f'<path d="M{LABELS + low:.1f} {y + 12}H{LABELS + high:.1f}" stroke="black"/>',
            f'<text x="{LABELS + high + 6:.1f}" y="{y + 16}">{statistics.median(rounds):,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    FIGURES.with_suffix(".svg").write_text(svg(json.loads(FIGURES.read_text())))
