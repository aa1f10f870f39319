"""What all plots share: matplotlib without a display, colors, names as labels, files written atomically."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddnn.util.errors import UserError
from ddnn.util.files import atomic_write, ensure_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, which colour-blind readers tell apart; yellow, which is faint on white, gives way to brown."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
DPI = 120
LONGEST_LABEL = 40


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches, of no window and no global state.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"plots need the package matplotlib, which cannot be imported: {error}",
            hint="pip install 'ddnn[report]', or --no-plots",
        ) from error
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(number: int) -> tuple[str, str, str]:
    """Colour, marker and line of the curve with this number: they repeat only after 32."""
    return COLOURS[number % 8], MARKERS[number % 8], LINES[number // 8 % 4]


def label(name: str) -> str:
    """A name that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    short = name if len(name) <= LONGEST_LABEL else f"...{name[3 - LONGEST_LABEL :]}"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels of the axes with their units, a faint grid behind the curves."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_height(names: Sequence[str], width: float) -> float:
    """Inches that the legend of these curves takes under a figure of `width` inches."""
    return 0.22 * math.ceil(len(names) / _columns(list(map(label, names)), width))


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend under all panels, of the curves in `axes`."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = _columns(labels, figure.get_figwidth())
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _columns(labels: Sequence[str], width: float) -> int:
    return max(1, min(len(labels), int(12 * width / (max(map(len, labels), default=0) + 6))))


def save(figure: Figure, path: Path) -> Path:
    """Writes a PNG, whole or not at all; makes its folder.

    Raises:
        UserError: it cannot be written.
    """
    ensure_directory(path.parent)
    with atomic_write(path) as handle, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a run's name in a script that the font lacks: boxes will do
        figure.savefig(handle, format="png")
    return path
