"""`make docs`: docs/images/*.svg. Texts, colors and sizes are here; what the averaging strategies do is applied, not described: each is
called with unit vectors, which gives its mixing matrix.

Colors are legible on white and on dark pages; the background is transparent.
"""

from __future__ import annotations

import csv
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from distributed.threads import run_workers

from ddnn.averaging.strategies import STRATEGIES, AveragingOptions
from ddnn.distributed.communicator import Communicator

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
BLUE, ORANGE, GRAY, TEXT = "#0072B2", "#D55E00", "#888888", "#7a7a7a"
COLORS = {"SGD": BLUE, "SGD, 9 epochs or more": "#56B4E9", "NG-SGD": ORANGE, "Kaldi, SGD, one run": GRAY}
WORKERS = 4
CELL = 26


def document(width: int, height: int, parts: list[str]) -> str:
    """An SVG of so many pixels."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    head += f'font-family="sans-serif" font-size="13" fill="{TEXT}">'
    arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    arrow += f'<path d="M0 0L8 4L0 8z" fill="{GRAY}"/></marker>'
    return "\n".join([head, f"<defs>{arrow}</defs>", *parts, "</svg>\n"])


def text(x: float, y: float, content: str, more: str = 'text-anchor="middle"') -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(content)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{GRAY}" stroke-width="1.5" marker-end="url(#arrow)"/>'


def box(x: float, y: float, width: float, lines: tuple[str, ...], color: str) -> list[str]:
    """A box with a title and lines below it."""
    height = 18 * len(lines) + 14
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6" fill="none" stroke="{color}" stroke-width="2"/>'
    ]
    for i, line in enumerate(lines):
        weight = (
            f'text-anchor="middle" font-weight="bold" fill="{color}"'
            if i == 0
            else 'text-anchor="middle" font-size="12"'
        )
        parts.append(text(x + width / 2, y + 22 + 18 * i, line, weight))
    return parts


def pipeline() -> str:
    """What goes into ddnn and what comes out."""
    inputs = (("features", "data-fmllr/train"), ("alignment", "exp/tri4_ali"), ("recipe", "my.yaml"))
    outputs = (
        ("log-likelihoods", "for Kaldi's decoders"),
        ("final.nnet", "for nnet-forward"),
        ("word error rate", "ddnn score, without Kaldi"),
    )
    parts = box(250, 62, 220, ("ddnn train", "RBMs, SGD or NG-SGD, sMBR", "1 to N workers, averaged by MPI"), BLUE)
    for i, (title, path) in enumerate(inputs):
        y = 6 + 66 * i
        parts += [*box(10, y, 170, (title, path), ORANGE if i < 2 else BLUE), arrow(182, y + 25, 246, 96)]
    for i, (title, path) in enumerate(outputs):
        y = 6 + 66 * i
        parts += [*box(540, y, 190, (title, path), ORANGE if i < 2 else BLUE), arrow(472, 96, 536, y + 25)]
    parts.append(text(370, 205, "orange: Kaldi's files; blue: ddnn's", 'text-anchor="middle" font-size="11"'))
    return document(740, 214, parts)


def mixing_matrix(name: str, index: int, workers: int = WORKERS) -> list[list[float]]:
    """M of theta_r <- sum_s M[r, s] theta_s at averaging `index`: row r is what worker r has where worker s had the s-th
    unit vector."""

    def work(comm: Communicator) -> list[float]:
        strategy = STRATEGIES[name](AveragingOptions(strategy=name), comm)
        vector = torch.zeros(workers)
        strategy.start(vector)
        vector[comm.rank] = 1.0
        strategy.average(vector, index, 1.0)
        return vector.tolist()

    return run_workers(workers, work)


def matrix(x: float, y: float, rows: list[list[float]]) -> list[str]:
    """A heat map with the values in it."""
    parts = []
    for r, row in enumerate(rows):
        for s, value in enumerate(row):
            place = f'x="{x + CELL * s:g}" y="{y + CELL * r:g}"'
            parts.append(
                f'<rect {place} width="{CELL}" height="{CELL}" fill="{BLUE}" fill-opacity="{value:.3g}" stroke="{GRAY}" stroke-width="0.5"/>'
            )
            if value:
                parts.append(
                    text(
                        x + CELL * (s + 0.5),
                        y + CELL * (r + 0.5) + 4,
                        f"{value:.2g}".lstrip("0"),
                        'text-anchor="middle" font-size="10"',
                    )
                )
    return parts


def strategies() -> str:
    """The mixing matrices of successive averagings of four workers, and of their product."""
    shown = {"all-reduce": 1, "butterfly": 2, "ring": 3, "hopping-ring": 3}
    width, height, parts = 780, 158, []
    for row, (name, averagings) in enumerate(shown.items()):
        y = row * height + 34
        parts.append(text(10, y - 14, name, 'font-weight="bold" font-size="14"'))
        product = torch.eye(WORKERS)
        for index in range(averagings):
            rows = mixing_matrix(name, index)
            x = 22 + 160 * index
            parts += [
                *matrix(x, y, rows),
                text(x + 2 * CELL, y + 4 * CELL + 15, f"averaging {index + 1}", 'text-anchor="middle" font-size="11"'),
            ]
            product = torch.tensor(rows) @ product
        x = 30 + 150 * 3 + 60
        label = "after all of them" if averagings > 1 else "after one"
        parts += [
            *matrix(x, y, product.tolist()),
            text(x + 2 * CELL, y + 4 * CELL + 15, label, 'text-anchor="middle" font-size="11"'),
        ]
    return document(width - 80, height * len(shown), parts)


def dots(x: float, y: float, results: list[dict[str, str]], figure: str, low: float, high: float) -> list[str]:
    """A column of dots with their standard deviations, a line for each result; from `low` to `high` in 220 pixels."""

    def place(value: float) -> float:
        return x + 220 * (value - low) / (high - low)

    parts = []
    for row, result in enumerate(results):
        color, line = COLORS[result["by"]], y + 9 * row + 12 * (row // len(COLORS))
        mean, deviation = float(result[figure]), float(result[figure + "_sd"] or 0)
        ends = f"M{place(mean - deviation):.1f} {line}H{place(mean + deviation):.1f}"
        parts.append(f'<path d="{ends}" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<circle cx="{place(mean):.1f}" cy="{line}" r="4" fill="{color}"/>')
    bottom = y + 9 * len(results) + 12 * (len(results) // len(COLORS)) - 8
    parts.append(f'<path d="M{x} {bottom}h220" stroke="{GRAY}"/>')
    for tick in (low, (low + high) / 2, high):
        parts.append(text(place(tick), bottom + 16, f"{tick:g}", 'text-anchor="middle" font-size="11"'))
    return parts


def fsdd() -> str:
    """Means and standard deviations over seeds, of recipes/fsdd/results.csv."""
    with (ROOT / "recipes/fsdd/results.csv").open() as file:
        results = list(csv.DictReader(file))
    parts, networks = [], list(dict.fromkeys(result["network"] for result in results))
    for i, (name, color) in enumerate(COLORS.items()):
        parts.append(f'<circle cx="{12 + 160 * i}" cy="14" r="4" fill="{color}"/>')
        parts.append(text(22 + 160 * i, 18, name, 'font-size="12"'))
    parts += [text(220, 46, "cross-validation loss"), text(490, 46, "test frame accuracy (%)")]
    parts += [text(10, 78 + 48 * i, name, "") for i, name in enumerate(networks)]
    parts += dots(110, 62, results, "cv_loss", 1.2, 1.8)
    parts += dots(380, 62, results, "test_frame_accuracy", 70, 82)
    return document(640, 316, parts)


PICTURES = {"pipeline.svg": pipeline, "strategies.svg": strategies, "fsdd.svg": fsdd}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (IMAGES / file).write_text(draw())
