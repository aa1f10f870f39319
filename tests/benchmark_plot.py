"""`make docs`: docs/results/benchmarks.svg and others, the bars of the JSON files of those names. By hand rather than matplotlib: the same
text from the same figures everywhere, 4 kB, and a diff shows what changed.

The figures are those of programs that took turns: `rows` has for each the frames/s of every round, and whose it is.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent.parent / "docs" / "results"
FIGURES = RESULTS / "benchmarks.json"
DRAWN = [FIGURES, *sorted(RESULTS.glob("compare*.json"))]
COLORS = {"limit": "#bbbbbb", "ddnn": "#0072B2", "others": "#E69F00"}  # as in ddnn.report.figures
LABELS, BARS, ROW, TOP = 250, 380, 24, 46
"""In pixels: the widths of both columns, the first at least, the heights of a row and the title."""


def svg(figures: dict[str, Any]) -> str:
    """A bar for each row, its median beside it, with a line from the smallest to the largest round."""
    rows = figures["rows"]
    labels = max(LABELS, 7 * max(len(row["name"]) for row in rows))
    width, height = labels + BARS + 80, TOP + ROW * len(rows) + 10
    scale = BARS / max(max(row["frames_per_second"]) for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="13" fill="#808080">',
        f'<text x="10" y="20" font-size="15">{escape(figures["title"])}</text>',
        f'<text x="10" y="37" font-size="12">{escape(figures["machine"])}</text>',
    ]
    for i, row in enumerate(rows):
        y, rounds = TOP + ROW * i, row["frames_per_second"]
        low, median, high = (f(rounds) * scale for f in (min, statistics.median, max))
        lines += [
            f'<text x="{labels - 8}" y="{y + 16}" text-anchor="end">{escape(row["name"])}</text>',
            f'<rect x="{labels}" y="{y + 3}" width="{median:.1f}" height="{ROW - 6}" fill="{COLORS[row["of"]]}"/>',
            f'<path d="M{labels + low:.1f} {y + 12}H{labels + high:.1f}" stroke="#808080"/>',
            f'<text x="{labels + high + 6:.1f}" y="{y + 16}">{statistics.median(rounds):,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    for file in DRAWN:
        file.with_suffix(".svg").write_text(svg(json.loads(file.read_text())))
