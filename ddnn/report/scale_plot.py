"""The plot of `ddnn scale`: speed-up against workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddnn.report.figures import COLOURS, MARKERS, legend_below, new_figure, save, tidy
from ddnn.report.scaling import SAME_COST

if TYPE_CHECKING:
    from ddnn.report.scale_command import Scaling


def draw_scaling(found: Scaling, path: Path) -> Path:
    """Speed-up against workers, both logarithmic: the ideal, a curve for each cost, what was measured.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(9, 7)
    axes = figure.subplots()
    given = {p.workers for p in found.predictions} | {1, *(check.workers for check in found.checks)}
    powers = [2**q for q in range(max(given).bit_length())]
    sizes = sorted({*given, *powers})
    axes.plot(sizes, sizes, color="0.6", linewidth=1.2, label="ideal: as many times as workers")
    for name, way in SAME_COST:
        number = {"all-reduce": 0, "butterfly": 1, "gradient": 2}[way.strategy]
        line = "--" if way.overlap else "-"
        speed_ups = [found.speed_up(way, n) for n in sizes]
        axes.plot(sizes, speed_ups, line, color=COLOURS[number], linewidth=1.8, label=f"model: {name}")
    checks = found.checks if found.as_measured else ()
    for number, strategy in enumerate(dict.fromkeys(check.strategy for check in checks)):
        points = [(check.workers, check.measured) for check in checks if check.strategy == strategy]
        axes.plot(
            *([x for x, _ in points], [y for _, y in points]),
            linestyle="none",
            marker=MARKERS[number],
            markersize=8,
            markerfacecolor="none",
            markeredgecolor="black",
            markeredgewidth=1.4,
            label=f"measured: {strategy}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(powers[:: 1 + len(powers) // 12])
        axis.set_major_formatter("{x:g}")
        axis.set_tick_params(which="minor", length=0)
    job = found.job
    title = f"Speed-up: {job.parameters:,} parameters, minibatch {job.minibatch}, every {job.every}, {found.wire}"
    tidy(axes, title, "workers", "speed-up over one worker (frames per second)")
    legend_below(figure, axes)
    return save(figure, path)
