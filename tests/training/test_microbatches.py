"""Pipeline schedules, played by a simulator of stages and links, and how minibatches are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.distributed.cost import Layout, Schedule, held_microbatches
from ddnn.training.microbatches import Pass, cut_rows, default_microbatches, pipeline_schedule

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 33)]
KINDS: tuple[Schedule, ...] = ("fill-drain", "1f1b")


def sources(step: Pass, stages: int) -> list[Pass]:
    """What has to be done before: the same microbatch in the stage before, or after, or the own forward pass."""
    m, s, forward = step
    if forward:
        return [Pass(m, s - 1, True)] if s > 0 else []
    return [Pass(m, s, True), *([Pass(m, s + 1, False)] if s < stages - 1 else [])]


def play(schedule: Sequence[Sequence[Pass]], forward: Sequence[int], backward: Sequence[int]) -> tuple[int, list[int]]:
    """Sends do not block and take no time. The time at which the last pass ends, and the most microbatches that each
    stage held; AssertionError if a stage waits for ever."""
    ends: dict[Pass, int] = {}
    clock, at = [0] * len(schedule), [0] * len(schedule)
    held, most = [0] * len(schedule), [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for s, steps in enumerate(schedule):
            while at[s] < len(steps) and all(source in ends for source in sources(steps[at[s]], len(schedule))):
                step = steps[at[s]]
                start = max([clock[s], *(ends[source] for source in sources(step, len(schedule)))])
                clock[s] = ends[step] = start + (forward if step.forward else backward)[s]
                held[s] += 1 if step.forward else -1
                most[s] = max(most[s], held[s])
                at[s] += 1
                progress = True
    assert at == [len(steps) for steps in schedule], "a stage waits for what never comes"
    return max(clock), most


def hangs_with_blocking_sends(schedule: Sequence[Sequence[Pass]]) -> bool:
    """A stage that has made something for its neighbor waits until the neighbor takes it for its next pass."""
    at, sending = [0] * len(schedule), [False] * len(schedule)
    progress = True
    while progress:
        progress = False
        for s, steps in enumerate(schedule):
            if at[s] == len(steps):
                continue
            step = steps[at[s]]
            to = s + 1 if step.forward else s - 1
            if not sending[s]:
                received = [p for p in sources(step, len(schedule)) if p.stage != s]
                progress |= not received  # those of a neighbor come by its send
                sending[s] = not received
            if sending[s]:
                has_receiver = 0 <= to < len(schedule)
                if has_receiver and (sending[to] or at[to] == len(schedule[to])):
                    continue
                if has_receiver and step not in sources(schedule[to][at[to]], len(schedule)):
                    continue
                sending[s], at[s], progress = False, at[s] + 1, True
                if has_receiver:
                    sending[to] = True
    return at != [len(steps) for steps in schedule]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_ends_after_the_time_and_holds_the_microbatches_of_the_formulas(kind: Schedule) -> None:
    for p, m in SIZES:
        schedule = pipeline_schedule(kind, p, m)
        for forward, backward in ((1, 1), (1, 2), (3, 5)):
            seconds, held = play(schedule, [forward] * p, [backward] * p)
            assert seconds == (m + p - 1) * (forward + backward), (p, m)
        assert held == [held_microbatches(kind, s, Layout(1, 1, p, m)) for s in range(p)]
        assert held == [m if kind == "fill-drain" else min(m, p - s) for s in range(p)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_takes_each_microbatch_once_forward_and_then_backward(kind: Schedule) -> None:
    for p, m in SIZES:
        for s, steps in enumerate(pipeline_schedule(kind, p, m)):
            assert sorted(steps) == sorted(Pass(i, s, way) for i in range(m) for way in (True, False))
            for way in (True, False):
                order = [step.microbatch for step in steps if step.forward == way]
                assert order == list(range(m)), "messages of a link come in the order in which they are sent"


@given(
    st.sampled_from(KINDS), st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 32), st.integers(1, 3)
)
@settings(max_examples=300, deadline=None)
def test_unequal_stages_take_at_most_all_stages_and_the_slowest_again(
    kind: Schedule, stages: list[int], microbatches: int, backward: int
) -> None:
    schedule = pipeline_schedule(kind, len(stages), microbatches)
    seconds, _ = play(schedule, stages, [backward * cost for cost in stages])
    assert seconds <= (1 + backward) * (sum(stages) + (microbatches - 1) * max(stages))


def test_1f1b_hangs_where_sends_block() -> None:
    """That is what forbids them: docs of `pipeline_schedule`."""
    for p, m in SIZES:
        assert not hangs_with_blocking_sends(pipeline_schedule("fill-drain", p, m)), (p, m)
        assert hangs_with_blocking_sends(pipeline_schedule("1f1b", p, m)) == (p > 1 and m > 1), (p, m)


@given(st.integers(1, 5000), st.data())
def test_rows_are_cut_into_consecutive_microbatches_of_equal_sizes(rows: int, data: st.DataObject) -> None:
    microbatches = data.draw(st.integers(1, rows))
    cuts = cut_rows(rows, microbatches)
    sizes = [cut.stop - cut.start for cut in cuts]
    assert [row for cut in cuts for row in range(rows)[cut]] == list(range(rows))
    assert len(sizes) == microbatches and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_the_default_number_of_microbatches() -> None:
    assert [default_microbatches(256, p, "cpu") for p in (1, 2, 4)] == [1, 4, 4], "of 64 rows"
    assert [default_microbatches(1024, p, "cpu") for p in (1, 2, 4, 8)] == [1, 8, 16, 16], "at most 4 for each stage"
    assert [default_microbatches(1024, p, "cuda") for p in (2, 4)] == [8, 8], "of 128 rows"
    assert default_microbatches(50, 2, "cpu") == 1
    assert default_microbatches(200, 2, "cpu") == 3
