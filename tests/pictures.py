"""`make docs`: docs/images/*.svg. Texts, colors and sizes are here; what the averaging strategies do is applied, not described: each is
called with unit vectors, which gives its mixing matrix. Learning rates, minibatch sizes, averaging steps and windows are ddnn's, too.

Colors are legible on white and on dark pages; the background is transparent.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import get_args
from xml.sax.saxutils import escape

import torch
from distributed.threads import run_workers

from ddnn.averaging.strategies import STRATEGIES
from ddnn.averaging.strategy import AveragingOptions, Interval
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.signals import EXIT_DIVERGED, EXIT_KILLED, EXIT_RESUMABLE
from ddnn.nn.convolution import Axis, Convolution
from ddnn.optim.schedule import Constant, Exponential, MinibatchSizes, Newbob, Power, Schedule
from ddnn.recipe.schema import WorkersConfig
from ddnn.runs.run_status import State
from ddnn.util.errors import UserError, exit_code

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
BLUE, ORANGE, GREEN, GRAY, TEXT = "#0072B2", "#D55E00", "#009E73", "#888888", "#7a7a7a"
SMALL, LEFT, RIGHT = 'text-anchor="middle" font-size="11"', 'font-size="11"', 'text-anchor="end" font-size="11"'
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


def rectangle(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {more}/>'


def line(points: Sequence[tuple[float, float]], more: str) -> str:
    return f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" fill="none" {more}/>'


def learning_rates(schedule: Schedule, figures: Sequence[dict[str, float]]) -> list[float]:
    """Those of its epochs; `figures`: of cross-validation, of the initial network and after each epoch."""
    schedule.initialize(figures[0])
    rates = []
    while not schedule.finished:
        rates.append(schedule.learning_rate)
        schedule.step(figures[min(len(rates), len(figures) - 1)])
    return rates


def schedules() -> str:
    """Learning rates and the sizes of a growing minibatch by epoch. Newbob's are those of a recorded run on AN4."""
    epochs, record = 15, json.loads((ROOT / "docs/results/an4/records/newbob-1-2.json").read_text())
    figures = [record["baseline"], *record["cv_by_epoch"]]
    curves = {
        "newbob": (learning_rates(Newbob(start_halving_impr=0.03, max_epochs=16), figures), BLUE),
        "exponential": (learning_rates(Exponential(max_epochs=epochs, final_lr=0.0008), figures), ORANGE),
        "power": (learning_rates(Power(max_epochs=epochs), figures), GREEN),
        "constant": (learning_rates(Constant(max_epochs=epochs), figures), GRAY),
    }
    sizes = MinibatchSizes(256, 1024, 5)
    left, top, wide, high = 62, 34, 300, 190

    def across(epoch: float) -> float:
        return wide * (epoch - 0.5) / epochs

    def axes(x: float, title: str, ticks: dict[str, float]) -> list[str]:
        parts = [text(x, top - 18, title, 'font-weight="bold"'), text(x + wide / 2, top + high + 34, "epoch", SMALL)]
        parts.append(line([(x, top), (x, top + high), (x + wide, top + high)], f'stroke="{GRAY}"'))
        parts += [text(x - 6, y + 4, label, RIGHT) for label, y in ticks.items()]
        parts += [line([(x - 3, y), (x, y)], f'stroke="{GRAY}"') for y in ticks.values()]
        return parts + [text(x + across(n), top + high + 16, str(n), SMALL) for n in range(1, epochs + 1, 2)]

    def height_of_rate(rate: float) -> float:
        return top + high * math.log(0.009 / rate) / math.log(0.009 / 0.0002)

    rates = (0.008, 0.004, 0.002, 0.001, 0.0005, 0.00025)
    parts = axes(left, "learning rate", {f"{rate:g}": height_of_rate(rate) for rate in rates})
    for name, (values, color) in curves.items():
        points = [
            (left + across(n + half), height_of_rate(rate)) for n, rate in enumerate(values, 1) for half in (-0.5, 0.5)
        ]
        x, y = points[-1]
        parts.append(line(points, f'stroke="{color}" stroke-width="2"'))
        place = (x, y + 16, "end") if name == "newbob" else (x + 6, y + 4, "start")
        parts.append(text(*place[:2], name, f'text-anchor="{place[2]}" font-size="12" fill="{color}"'))

    def height_of_size(frames: float) -> float:
        return top + high * (1 - frames / 1100)

    right = left + wide + 140
    ticks = {str(frames): height_of_size(frames) for frames in (0, 256, 512, 768, 1024)}
    parts += axes(right, "frames in a minibatch that grows", ticks)
    for n in range(1, epochs + 1):
        x, y = right + across(n) - 7, height_of_size(sizes.of_epoch(n))
        parts.append(rectangle(x, y, 14, top + high - y, f'fill="{BLUE}" fill-opacity="0.6"'))
        if n <= sizes.epochs:
            parts.append(text(x + 7, y - 4, str(sizes.of_epoch(n)), 'text-anchor="middle" font-size="9"'))
    return document(right + wide + 20, top + high + 44, parts)


MINIBATCHES, SECONDS = (34, 33, 35, 33), (1.0, 1.06, 0.96, 1.02)
"""Of each of four workers: the minibatches of its shard, and the time of one."""
PERIOD, AVERAGING = 10, 1.6


def epoch(overlap: bool) -> tuple[list[list[tuple[float, int]]], list[float], float]:
    """For each worker the start and the minibatches of each of its intervals; when each averaging step begins, which is when
    the last worker calls it; and when the mean at the end of the epoch begins."""
    steps = min(Interval(PERIOD).completed(minibatches, 0) for minibatches in MINIBATCHES)
    intervals: list[list[tuple[float, int]]] = [[] for _ in MINIBATCHES]
    clocks, begins = [0.0] * len(MINIBATCHES), list[float]()
    for _ in range(steps):
        for worker, seconds in enumerate(SECONDS):
            intervals[worker].append((clocks[worker], PERIOD))
            clocks[worker] += PERIOD * seconds
        before = begins[-1] + AVERAGING if begins else 0.0  # the end of the averaging step that ran meanwhile
        begins.append(max(clocks))
        clocks = [max(clock, before) if overlap else begins[-1] + AVERAGING for clock in clocks]
    for worker, seconds in enumerate(SECONDS):
        rest = MINIBATCHES[worker] - steps * PERIOD
        intervals[worker].append((clocks[worker], rest))
        clocks[worker] += rest * seconds
    return intervals, begins, max(*clocks, begins[-1] + AVERAGING)


def timeline() -> str:
    """An epoch of four workers that average every ten minibatches, without and with overlap."""
    unit, left, row, panel, parts = 14, 166, 34, 190, list[str]()
    waiting = f'fill="none" stroke="{GRAY}" stroke-dasharray="2 2"'
    for index, overlap in enumerate((False, True)):
        top = panel * index + 34
        intervals, begins, end = epoch(overlap)
        title = f"parallel.overlap: {str(overlap).lower()}"
        parts.append(text(10, top - 14, title, 'font-weight="bold" font-size="14"'))
        for worker, (seconds, minibatches) in enumerate(zip(SECONDS, MINIBATCHES, strict=True)):
            y = top + row * worker
            parts.append(text(10, y + 13, f"worker {worker}: {minibatches} minibatches", LEFT))
            step_y, step_height = (y + 20, 6) if overlap else (y, 18)
            for step, (start, number) in enumerate(intervals[worker]):
                x, stop = left + unit * start, start + number * seconds
                parts.append(rectangle(x, y, unit * number * seconds, 18, f'fill="{BLUE}" fill-opacity="0.55"'))
                ticks = "".join(f"M{x + unit * seconds * n:.1f} {y}v18" for n in range(number + 1))
                parts.append(f'<path d="{ticks}" stroke="{GRAY}" stroke-width="0.7"/>')
                if step < len(begins):
                    begin = left + unit * begins[step]
                    parts.append(
                        rectangle(left + unit * stop, step_y, begin - left - unit * stop, step_height, waiting)
                    )
                    parts.append(rectangle(begin, step_y, unit * AVERAGING, step_height, f'fill="{ORANGE}"'))
            parts.append(rectangle(left + unit * stop, y, unit * (end - stop), 18, waiting))
            parts.append(rectangle(left + unit * end, y, unit * AVERAGING, 18, f'fill="{GREEN}"'))
    x, y = 10.0, 2 * panel + 14
    legend = [("minibatches", f'fill="{BLUE}" fill-opacity="0.55"'), ("averaging step", f'fill="{ORANGE}"')]
    legend += [("exact mean, end of epoch", f'fill="{GREEN}"'), ("waiting for the slowest worker", waiting)]
    for label, style in legend:
        parts += [rectangle(x, y - 10, 12, 12, style), text(x + 18, y, label, LEFT)]
        x += 46 + 6.2 * len(label)
    return document(800, 2 * panel + 26, parts)


def convolution() -> str:
    """What filters over 40 bands read of a spliced frame, where their outputs are, and what pooling takes of these."""
    frames, streams, band = 11, 3, Axis(40, 8, 1)
    pool = Axis(band.windows, 3, 3)
    left, top, wide, high, parts = 84, 44, 7, 5, list[str]()
    colors = {0: BLUE, 1: ORANGE, band.windows - 1: GREEN}

    def row_at(frame: int, stream: int = 0) -> int:
        return top + frame * (streams * high + 3) + stream * high

    bottom = row_at(frames) - 3
    title = f"input: {frames} frames x {streams} streams x {band.length} bands"
    parts.append(text(left, 16, title, 'font-weight="bold" font-size="12"'))
    parts += [text(left + wide * (n + 0.5), top - 6, str(n), SMALL) for n in (0, 8, 16, 24, 32, 39)]
    for frame in range(frames):
        for stream in range(streams):
            y, opacity = row_at(frame, stream), 0.36 - 0.1 * stream
            parts.append(rectangle(left, y, wide * band.length, high, f'fill="{GRAY}" fill-opacity="{opacity:g}"'))
            parts.append(rectangle(left, y, wide * band.size, high, f'fill="{BLUE}" fill-opacity="0.6"'))
        if frame % 5 == 0:
            label = f"frame {frame - frames // 2:+d}".replace("+0", "0")
            parts.append(text(left - 8, row_at(frame) + 12, label, RIGHT))
    for patch, color in colors.items():
        x, width = left + wide * patch * band.step, wide * band.size
        parts.append(
            text((left, left + 58, x)[min(patch, 2)] + 28, bottom + 18, f"patch {patch}", f'{SMALL} fill="{color}"')
        )
        if patch:
            frame_of_patch = f'fill="none" stroke="{color}" stroke-width="2"'
            parts.append(rectangle(x, top - 2, width, bottom - top + 4, frame_of_patch))
    pieces = frames * streams
    notes = (
        "streams of each frame: static, delta, delta-delta",
        f"a filter reads {band.size} bands of all {pieces} pieces",
    )
    parts += [text(left, bottom + 38 + 15 * i, note, LEFT) for i, note in enumerate(notes)]
    right, tall = left + wide * band.length + 120, 14
    parts.append(arrow(left + wide * band.length + 14, 88, right - 56, 88))
    filters = ("filter a", "filter b", "filter c", "...")
    rows = (("outputs", band.windows, 5, 60, colors), ("after max pooling", pool.windows, 5 * pool.step, 178, {}))
    for name, columns, width, y, colored in rows:
        parts.append(text(right, y - 8, f"{name}: {columns} positions", 'font-weight="bold" font-size="12"'))
        for f, label in enumerate(filters):
            parts.append(text(right - 6, y + tall * f + 11, label, RIGHT))
            for n in range(columns):
                fill = f'fill="{colored.get(n, GRAY)}" fill-opacity="{0.7 if n in colored else 0.3}"'
                parts.append(rectangle(right + width * n, y + tall * f, width - 0.6, tall - 1, fill))
    x, y, end = right + 5 * pool.size / 2, 60 + len(filters) * tall, right + 5 * pool.size
    parts.append(line([(right, y + 2), (right, y + 6), (end, y + 6), (end, y + 2)], f'stroke="{TEXT}"'))
    parts += [arrow(x, y + 8, x, 156), text(x + 10, y + 30, f"the largest of {pool.size}", LEFT)]
    return document(right + 5 * band.windows + 70, bottom + 64, parts)


def second_convolution() -> str:
    """Which pooled outputs of three filters the patches of the next convolution read, in either layout."""
    pools, filters, wide, high, left = 6, "abc", 24, 18, 120
    columns, parts = pools * len(filters), list[str]()
    parts.append(text(left - 10, 47, "a row of its input", RIGHT))
    for column in range(columns):
        x = left + wide * column
        parts.append(rectangle(x, 34, wide - 2, high, f'fill="{GRAY}" fill-opacity="{0.2 + 0.2 * (column // 3 % 2)}"'))
        parts.append(text(x + wide / 2 - 1, 47, filters[column % len(filters)], SMALL))
    for pool in range(pools):
        parts.append(text(left + wide * len(filters) * (pool + 0.5), 26, f"pool {pool}", SMALL))
    for y, channels_last, title in ((84, True, "along frequency"), (154, False, "layout: kaldi")):
        layer = Convolution(1, len(filters), pools, 1, 2, 1, channels_last=channels_last)
        row = torch.arange(columns)[None]
        windows = layer._windows(row, channels_last=layer.grid.channels_last)[0, 0]
        parts.append(text(left, y - 6, f"conv {{patch: 2}}, {title}", 'font-weight="bold" font-size="12"'))
        for patch, color in enumerate((BLUE, ORANGE)):
            parts.append(text(left - 10, y + 13 + high * patch, f"patch {patch}", f'{RIGHT} fill="{color}"'))
            for column in windows[patch].flatten().tolist():
                parts.append(
                    rectangle(
                        left + wide * column, y + high * patch, wide - 2, high - 2, f'fill="{color}" fill-opacity="0.7"'
                    )
                )
    return document(left + wide * columns + 10, 200, parts)


def life_cycle() -> str:
    """The states of a run, and the exit codes with which it leaves one for another."""
    places = {
        "new": (10, 150, 110, ("no run dir yet",), GRAY),
        "running": (265, 150, 170, ("epoch after epoch",), BLUE),
        "restarted": (265, 20, 170, ("by the launcher",), GRAY),
        "interrupted": (265, 290, 170, ("has a checkpoint",), ORANGE),
        "finished": (610, 40, 160, ("final.safetensors",), BLUE),
        "diverged": (610, 150, 160, ("or learned nothing",), ORANGE),
        "failed": (610, 260, 160, ("status.json: why",), ORANGE),
    }
    assert set(places) == {*get_args(State), "new", "restarted"}
    failed = f"{exit_code(RuntimeError())} (a bug), {UserError.exit_code}, {EXIT_KILLED}"
    restarts = WorkersConfig.model_fields["max_restarts"].default
    parts = [
        part for name, (x, y, width, lines, color) in places.items() for part in box(x, y, width, (name, *lines), color)
    ]
    small = 'text-anchor="middle" font-size="12"'
    parts += [
        *(arrow(122, 175, 261, 175), text(192, 168, "ddnn train", small)),
        *(arrow(437, 160, 606, 70), text(560, 84, "0", small)),
        *(arrow(437, 175, 606, 175), text(520, 168, str(EXIT_DIVERGED), small)),
        *(arrow(437, 190, 606, 285), text(490, 282, failed, small)),
        *(arrow(310, 148, 310, 74), text(218, 105, "a worker is killed", small), text(218, 120, "or hangs", small)),
        *(
            arrow(390, 74, 390, 146),
            text(460, 92, f"up to {restarts} times without", small),
            text(460, 107, "a newer checkpoint", small),
        ),
        *(arrow(310, 202, 310, 286), text(240, 240, "a signal:", small), text(240, 255, str(EXIT_RESUMABLE), small)),
        *(arrow(390, 286, 390, 206), text(430, 255, "--resume", small)),
    ]
    return document(780, 352, parts)


PICTURES = {
    "pipeline.svg": pipeline,
    "life-cycle.svg": life_cycle,
    "strategies.svg": strategies,
    "fsdd.svg": fsdd,
    "schedules.svg": schedules,
    "timeline.svg": timeline,
    "convolution.svg": convolution,
    "second-convolution.svg": second_convolution,
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (IMAGES / file).write_text(draw())
