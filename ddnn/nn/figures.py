"""The figures that say how good a model is: means per frame that an objective (`ddnn.nn.objective`) names. Whoever shows
figures, in a log, a table or a plot, reads here how. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Value = TypeVar("Value", float, float | None)


@dataclass(frozen=True)
class Figure:
    """A mean over frames."""

    name: str  # its key in metrics.jsonl and in what `--json` prints
    label: str  # in texts
    better: Literal["lower", "higher"]
    percent: bool = False  # from 0 to 1, shown in percent
    unit: str = ""

    @property
    def axis(self) -> str:
        """What an axis shows: "loss per frame (nats)", "frame accuracy"."""
        unit = f" ({self.unit})" if self.unit else ""
        return self.label if self.percent else f"{self.label} per frame{unit}"

    def is_no_better(self, value: float, reached: float) -> bool:
        """Whether the value is equal or worse; false where one of the two is NaN."""
        return value >= reached if self.better == "lower" else value <= reached

    def format(self, value: float) -> str:
        """ "1.2345", "57.08 %"."""
        if self.percent:
            return f"{100 * value:.2f} %"
        return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"

    def text(self, value: float) -> str:
        """ "loss 1.2345", "frame accuracy 57.08 %"."""
        return f"{self.label} {self.format(value)}"


LOSS = Figure("loss", "loss", "lower", unit="nats")
FRAME_ACCURACY = Figure("frame_accuracy", "frame accuracy", "higher", percent=True)
EXPECTED_ERROR = Figure("expected_error", "expected error", "lower", percent=True)
"""What sMBR and MPFE minimize: 1 less the next."""
RIGHT_FRAMES = Figure("expected_accuracy", "expected accuracy", "higher", percent=True)
"""The expected share of frames that a lattice's paths have right; of MMI the mean posterior of the reference."""
RECONSTRUCTION_ERROR = Figure("reconstruction_error", "reconstruction error", "lower")  # of an RBM, in rows of its own

FIGURES = {figure.name: figure for figure in (LOSS, FRAME_ACCURACY, EXPECTED_ERROR, RIGHT_FRAMES)}
"""All figures of all objectives, by name, in the order in which they are shown."""


def check_known(figures: dict[str, Value]) -> dict[str, Value]:
    """The same in the order of `FIGURES`, which a file may have lost; ValueError where there is no figure of a name."""
    if unknown := figures.keys() - FIGURES.keys():
        raise ValueError(f"there is no figure {min(unknown)}")
    return {name: figures[name] for name in FIGURES if name in figures}


def texts(figures: Mapping[str, float | None]) -> list[str]:
    """["loss 1.2345", "frame accuracy 57.08 %"]; None is not finite."""
    return [FIGURES[name].text(math.nan if value is None else value) for name, value in figures.items()]


def describe(figures: Mapping[str, float | None], separator: str = ", ") -> str:
    """ "loss 1.2345, frame accuracy 57.08 %"."""
    return separator.join(texts(figures))
