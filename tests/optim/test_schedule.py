"""Schedules against Kaldi's script, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddnn.optim.schedule import Constant, Exponential, MinibatchSizes, Newbob, Passes, Power, Schedule


def figures(loss: float, frame_accuracy: float) -> dict[str, float]:
    return {"loss": loss, "frame_accuracy": frame_accuracy}


def run(schedule: Schedule, losses: list[float], accuracies: list[float] | None = None) -> list[tuple[float, bool]]:
    """Rate and acceptance per epoch; the first figure is the initial network's."""
    accuracies = accuracies or [0.0] * len(losses)
    schedule.initialize(figures(losses[0], accuracies[0]))
    history = []
    for loss, accuracy in zip(losses[1:], accuracies[1:], strict=True):
        assert not schedule.finished
        rate = schedule.learning_rate
        history.append((rate, schedule.step(figures(loss, accuracy))))
    assert schedule.finished
    return history


def test_newbob_halves_after_a_small_gain_and_stops_after_a_smaller_one() -> None:
    losses = [6.0, 2.0, 1.9, 1.895, 1.8, 1.7995]
    assert run(Newbob(initial_lr=0.008), losses) == [
        (0.008, True), (0.008, True), (0.008, True), (0.004, True), (0.002, True),
    ]  # fmt: skip


def test_newbob_rejects_a_worse_epoch_and_judges_the_next_against_the_best() -> None:
    losses = [6.0, 2.0, 2.5, 1.95, 1.95]
    assert run(Newbob(initial_lr=0.008), losses) == [
        (0.008, True),
        (0.008, False),
        (0.004, True),
        (0.002, False),
    ]


def test_newbob_keeps_the_first_epochs() -> None:
    losses = [6.0, 2.0, 2.5, 2.4999, 2.4998]
    assert run(Newbob(initial_lr=0.008, keep_lr_epochs=2), losses) == [
        (0.008, True), (0.008, True), (0.008, True), (0.004, True),
    ]  # fmt: skip


def test_newbob_keeps_the_rate_of_the_first_epochs_whatever_they_gain() -> None:
    losses = [6.0, 5.999, 5.998, 5.0, 4.99, 4.989]
    assert run(Newbob(initial_lr=0.008, keep_lr_epochs=2), losses) == [
        (0.008, True), (0.008, True), (0.008, True), (0.008, True), (0.004, True),
    ]  # fmt: skip


def test_newbob_does_not_end_before_min_epochs() -> None:
    losses = [6.0, 2.0, 1.9999, 1.9999, 1.9999, 1.9999]
    history = run(Newbob(initial_lr=1.0, min_epochs=4), losses)
    # As in train_scheduler.sh, an epoch on which training would have ended leaves the rate as it is.
    assert history == [(1.0, True), (1.0, True), (0.5, True), (0.5, True), (0.5, False)]


def test_newbob_does_what_kaldis_script_does(golden: Path) -> None:
    """Its decisions over 300 random loss curves, recorded from the script itself."""
    for trace in json.loads((golden / "newbob" / "traces.json").read_text()):
        keep, least, most = (trace[name] for name in ("keep_lr_iters", "min_iters", "max_iters"))
        schedule = Newbob(0.008, most, keep_lr_epochs=keep, min_epochs=least)
        history = run(schedule, trace["losses"])  # which ends where the trace does
        assert "".join("+" if accepted else "-" for _, accepted in history) == trace["accepted"], trace
        assert [rate for rate, _ in history] == pytest.approx(trace["rates"], rel=1e-5), trace  # awk has six digits
        assert ("less than end_halving_impr" in schedule.end_reason) == trace["stopped"], trace
        assert trace["final"] == trace["accepted"].rfind("+") + 1


def test_newbob_by_frame_accuracy_takes_a_worsening_for_no_gain() -> None:
    accuracies = [0.5, 0.3, 0.2, 0.1]
    schedule = Newbob(initial_lr=1.0, criterion="frame-accuracy", min_epochs=2)
    assert run(schedule, [1.0] * 4, accuracies) == [(1.0, True), (0.5, True), (0.5, False)]


def test_newbob_by_frame_accuracy_uses_absolute_gains() -> None:
    accuracies = [0.01, 0.50, 0.504, 0.52, 0.5205]
    schedule = Newbob(initial_lr=1.0, criterion="frame-accuracy", start_halving_impr=0.005)
    assert run(schedule, [1.0] * 5, accuracies) == [(1.0, True), (1.0, True), (0.5, True), (0.25, True)]


def test_newbob_ends_at_the_most_epochs() -> None:
    losses = [8.0 / 1.5**k for k in range(21)]
    assert len(run(Newbob(), losses)) == 20


def test_newbob_rejects_a_loss_that_is_not_a_number() -> None:
    schedule = Newbob()
    schedule.initialize(figures(3.0, 0.1))
    assert schedule.step(figures(float("nan"), 0.1)) is False
    assert schedule.step(figures(2.0, 0.1)) is True


def test_exponential_reaches_one_percent_after_15_epochs() -> None:
    rates = [rate for rate, accepted in run(Exponential(0.32, final_lr=0.0032), [3.0] * 16) if accepted]
    assert len(rates) == 15
    assert rates[0] == 0.32
    assert rates[-1] == pytest.approx(0.0032)
    assert rates[7] == pytest.approx((0.32 * 0.0032) ** 0.5)


@pytest.mark.parametrize(("decay_epochs", "exponent"), [(1.0, 1.0), (4.0, 1.0), (0.5, 2.5), (10.0, 0.5)])
def test_power_is_that_of_the_paper(decay_epochs: float, exponent: float) -> None:
    """lr(t) = lr(0) (1 + t/r)^-c, t epochs having passed; every epoch is kept, whatever its loss."""
    history = run(Power(0.02, 6, decay_epochs, exponent), [3.0, 9.0, float("nan"), 2.0, 4.0, 1.0, 8.0])
    expected = [0.02 / np.power(np.float64(1) + np.float64(t) / decay_epochs, exponent) for t in range(6)]
    assert [rate for rate, _ in history] == pytest.approx(expected, rel=1e-14)
    assert all(accepted for _, accepted in history)


def test_power_halves_after_its_first_epochs() -> None:
    assert [rate for rate, _ in run(Power(1.0, 4, 2.0), [1.0] * 5)] == pytest.approx([1.0, 2 / 3, 0.5, 0.4])


def test_constant_keeps_its_rate_and_every_epoch() -> None:
    assert run(Constant(0.05, 3), [3.0, 9.0, 2.0, 5.0]) == [(0.05, True)] * 3


def test_passes_end_early_after_two_that_are_worse() -> None:
    assert run(Passes(1e-5, 4, 0.5), [3.0, 2.0, 2.5, 2.4, 2.6]) == [
        (1e-5, True),
        (5e-6, True),
        (2.5e-6, True),
        (1.25e-6, True),
    ]
    schedule = Passes(1e-5, 9)
    assert run(schedule, [3.0, 2.0, 2.5, 2.6]) == [(1e-5, True)] * 3
    assert (schedule.converged, schedule.may_be_longer) == (True, False)


SCHEDULES = [
    Newbob,
    Exponential,
    Constant,
    lambda: Power(decay_epochs=3.0, exponent=0.7),
    lambda: Passes(halving_factor=0.9),
]


@pytest.mark.parametrize("make", SCHEDULES, ids=["newbob", "exponential", "constant", "power", "passes"])
def test_a_schedule_resumes_where_it_was(make: Callable[[], Schedule]) -> None:
    """A new schedule that takes up the state before every epoch has the rates and decisions of one that runs through."""
    losses = [3.0, 2.0, 1.9, 2.4, 1.7, 1.69, 1.68]
    whole, resumed = make(), make()
    for schedule in (whole, resumed):
        schedule.initialize(figures(losses[0], 0.0))
    for loss in losses[1:]:
        state = resumed.state_dict()
        resumed = make()
        resumed.load_state_dict(state)
        assert (resumed.learning_rate, resumed.step(figures(loss, 0.0))) == (
            whole.learning_rate,
            whole.step(figures(loss, 0.0)),
        )
    assert resumed.state_dict() == whole.state_dict()


def test_a_minibatch_grows_by_the_same_factor_in_multiples_of_eight() -> None:
    sizes = MinibatchSizes(256, 1024, 5)
    assert [sizes.of_epoch(epoch) for epoch in range(1, 8)] == [256, 360, 512, 728, 1024, 1024, 1024]
    assert [MinibatchSizes(100, 101, 4).of_epoch(epoch) for epoch in range(1, 6)] == [100, 101, 101, 101, 101]
    assert [MinibatchSizes(1, 40, 2).of_epoch(epoch) for epoch in (0, 1, 2)] == [1, 1, 40]
    assert [MinibatchSizes(7, 7).of_epoch(epoch) for epoch in (1, 2, 9)] == [7, 7, 7]


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(2, 40))
def test_a_growing_minibatch_never_shrinks_and_ends_where_it_should(start: int, more: int, epochs: int) -> None:
    sizes = MinibatchSizes(start, start + more, epochs)
    found = [sizes.of_epoch(epoch) for epoch in range(1, epochs + 3)]
    assert found[0] == start and set(found[epochs - 1 :]) == {start + more}
    assert found == sorted(found)
    assert all(size % 8 == 0 or size in (start, start + more) for size in found)
