"""How a pipeline works through a minibatch: how its rows are cut into microbatches, and in which order each stage takes them.
Pure functions; the gradient of a minibatch is the sum over its microbatches whatever they return. After GPipe (Huang et al.
2019) and, for `1f1b`, PipeDream-Flush (Narayanan et al. 2021)."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from ddnn.distributed.cost import MIN_ROWS, Schedule


class Pass(NamedTuple):
    """A microbatch goes through a stage, forward or backward. Both are counted from 0."""

    microbatch: int
    stage: int
    forward: bool


def pipeline_schedule(kind: Schedule, stages: int, microbatches: int) -> list[list[Pass]]:
    """The passes of each stage in their order. Both kinds take (m + p - 1) (t_F + t_B) with equal stages.

    fill-drain: all forward passes, then all backward passes. 1f1b: stage s begins with p - 1 - s forward passes, then takes
    one forward and one backward pass in turn, then the remaining backward passes. Its messages cross each other: a stage
    sends forward while the next one sends backward, so that sends must not block. `held_microbatches` of
    `ddnn.distributed.cost` is what a stage has to keep meanwhile."""
    return [_passes(kind, stage, stages, microbatches) for stage in range(stages)]


def _passes(kind: Schedule, stage: int, stages: int, microbatches: int) -> list[Pass]:
    ahead = microbatches if kind == "fill-drain" else min(microbatches, stages - 1 - stage)
    forward, backward = ([Pass(i, stage, direction) for i in range(microbatches)] for direction in (True, False))
    in_turn = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *in_turn, *backward[microbatches - ahead :]]


def cut_rows(rows: int, microbatches: int) -> list[slice]:
    """The rows of each microbatch: consecutive, of equal numbers, the first ones a row more."""
    size, larger = divmod(rows, microbatches)
    ends = accumulate((size + (i < larger) for i in range(microbatches)), initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]


def default_microbatches(rows: int, stages: int, device_type: str) -> int:
    """The number for a minibatch of `rows`: more make the stages wait less, but matrix products of few rows are slow. At
    most 4 for each stage, and 1 without a pipeline. `device_type`: a key of `MIN_ROWS`."""
    return max(1, min(4 * stages, rows // MIN_ROWS[device_type])) if stages > 1 else 1
