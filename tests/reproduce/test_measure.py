"""Speed-ups from records, and whose utterances those of a test set are."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import epoch_row, rows_of, write_run
from reproduce.synthetic import by_name, collapsed, diverged, epoch, plan, record

from ddnn.decoding.word_errors import speaker_numbers
from ddnn.report.scaling import CommScheme, Job, Measurement
from ddnn.reproduce.entries import overloaded_runs, speed_ups
from ddnn.reproduce.measure import evaluate_run, with_other_wers
from ddnn.reproduce.runs import FrameMetrics, MeasuredEpoch, RunRecord
from ddnn.reproduce.tables import Condition, Table, TestSet
from ddnn.util.errors import DataError


def run(workers: int, seed: int, seconds: float, machine: str) -> RunRecord:
    return record("base", workers, seed, 0.6, measured=epoch(workers, seconds), machine=machine)


def measured(*runs: RunRecord) -> dict[int, float]:
    table = Table(name="toy", title="", workers=("all",), conditions=(Condition(name="base", label="all-reduce"),))
    found = speed_ups(plan(workers=(1, 2, 16)), table, by_name(runs))
    return {one["workers"]: one["speed_up"] for one in found if one["kind"] == "measured"}


def test_only_runs_of_one_kind_of_machine_are_held_against_each_other() -> None:
    slow_alone, fast_two = run(1, 1, 30.0, "slow, 2 cores"), run(2, 2, 5.0, "fast, 4 cores")
    assert measured(slow_alone, fast_two) == {1: 1.0}
    assert measured(slow_alone, fast_two, run(2, 1, 16.0, "slow, 2 cores"))[2] == pytest.approx(30 / 16)
    fast_alone = run(1, 2, 9.0, "fast, 2 cores")
    assert measured(slow_alone, fast_two, fast_alone)[2] == pytest.approx(9 / 5)


def test_medians_over_the_seeds_are_compared() -> None:
    runs = [run(1, 1, 10.0, "a"), run(1, 2, 8.0, "a"), run(1, 3, 8.5, "a"), run(2, 1, 6.0, "a"), run(2, 2, 5.0, "a")]
    assert measured(*runs)[2] == pytest.approx(8.5 / 5.5)


def test_runs_on_overloaded_cores_are_in_no_speed_up() -> None:
    """Those that computed far longer than like runs, or of which little was CPU time though each worker had a core."""

    def with_cpu_time(record: RunRecord, fraction: float, **changes: int) -> RunRecord:
        assert record.time is not None
        return record.model_copy(
            update={"time": record.time.model_copy(update={"compute_cpu_fraction": fraction, **changes})}
        )

    alone, quiet, loaded = run(1, 1, 10.0, "a"), run(2, 1, 5.0, "a"), run(2, 2, 8.0, "a")
    assert overloaded_runs(by_name([alone, quiet, loaded])) == {"base-2-2"}
    assert measured(alone, quiet, loaded)[2] == pytest.approx(10 / 5)
    assert measured(alone, with_cpu_time(loaded, 0.7)) == {1: 1.0}
    assert measured(alone, with_cpu_time(loaded, 0.9))[2] == pytest.approx(10 / 8)
    shared = with_cpu_time(loaded, 0.5, cores=1)
    assert overloaded_runs(by_name([alone, shared])) == set(), "each of two workers on one core has half of it"
    sgd = loaded.model_copy(update={"optimizer": "another"})
    assert overloaded_runs(by_name([quiet, sgd])) == set()


def test_runs_whose_workers_shared_cores_are_no_measured_speed_up() -> None:
    alone, shared, own = run(1, 1, 10.0, "a"), run(2, 1, 4.0, "a"), run(2, 2, 5.0, "a")
    assert shared.time is not None
    shared = shared.model_copy(update={"time": shared.time.model_copy(update={"cores": 1})})
    assert measured(alone, shared) == {1: 1.0}
    assert measured(alone, shared, own)[2] == pytest.approx(10 / 5)


def test_the_cv_figure_of_a_record_is_that_of_the_last_accepted_epoch(tmp_path: Path) -> None:
    rows = rows_of(1, epochs=3, compute_cpu_seconds=3.1 * 0.93 * 0.5)
    rows[-1] |= {"accepted": False, "loss": 3.0, "frame_accuracy": 0.1}
    found = evaluate_run(record("base", 1, 1, 0.6), write_run(tmp_path / "run", rows), {}, "cpu")
    expected = epoch_row(2, "cv")
    assert found.cv is not None and found.epochs == 3
    assert found.time is not None and found.time.compute_cpu_fraction == pytest.approx(0.5)
    assert (found.cv.loss, found.cv.frame_accuracy) == (expected["loss"], expected["frame_accuracy"])


def test_a_record_says_what_the_metrics_say_of_the_training(tmp_path: Path) -> None:
    """Baseline, initial figures, precision and machine; a training without an accepted epoch has its initial network."""
    start = {
        "type": "start", "epoch": 0, "date": "2026-01-01", "command": "c", "version": "v", "host": "h",
        "machine": "a CPU", "precision": "float32", "world_size": 1, "learning_rate_scale": 1.0,
        "train_frames": 9, "cv_frames": 9, "train_digest": "aa", "cv_digest": "bb",
        "baseline_loss": 1.5, "baseline_frame_accuracy": 0.25,
    }  # fmt: skip
    resumed = {**start, "epoch": 1, "machine": "another"}
    initial = epoch_row(0, "cv") | {"loss": 2.5, "frame_accuracy": 0.125}
    rows = [r for r in rows_of(1, epochs=2) if r["type"] != "start" and (r["epoch"], r.get("split")) != (0, "cv")]
    made = {}
    for name, accepted in (("trained", True), ("rejected", False)):
        own = [r | {"accepted": accepted} if r["type"] == "epoch" else r for r in rows]
        run_dir = write_run(tmp_path / name, [start, initial, *own, resumed])
        made[name] = evaluate_run(record("base", 1, 1, 0.6), run_dir, {}, "cpu")
    found = made["trained"]
    assert found.baseline == FrameMetrics(loss=1.5, frame_accuracy=0.25)
    assert found.initial_cv == FrameMetrics(loss=2.5, frame_accuracy=0.125) == made["rejected"].cv
    assert (found.machine, found.kind_of_machine) == ("a CPU; another", "a CPU; another")
    assert (found.precision, found.train_digest) == ("float32", "aa")
    assert made["rejected"].failure == "CV loss 2.5, 2.5 before training"


def test_the_cores_of_a_record_are_those_that_the_start_found(tmp_path: Path) -> None:
    """Also where another machine evaluates it: 4 workers with a quarter of a core each."""
    start = {
        "type": "start", "epoch": 0, "date": "2026-01-01", "command": "c", "version": "v", "host": "h",
        "machine": "a CPU", "precision": "float32", "world_size": 4, "cores_per_worker": 0.25,
        "learning_rate_scale": 1.0, "train_frames": 9, "cv_frames": 9, "train_digest": "aa", "cv_digest": "bb",
    }  # fmt: skip
    rows = [start, *(row for row in rows_of(4, epochs=2) if row["type"] != "start")]
    found = evaluate_run(record("base", 4, 1, 0.6), write_run(tmp_path / "run", rows), {}, "cpu")
    assert found.time is not None and found.time.cores == 1


@pytest.mark.parametrize(("age", "dbn"), [(-60, "parameters x"), (60, "known before")])
def test_rbms_that_were_trained_since_are_not_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int, dbn: str
) -> None:
    monkeypatch.setattr("ddnn.reproduce.measure.dbn_parameters", lambda path: "parameters x")
    pretrain = f"init: rbm\npretrain: {{dbn: {tmp_path}/dbn, epochs: null}}\n"
    run_dir = write_run(tmp_path / "run", rows_of(1, epochs=2), more=pretrain)
    monkeypatch.setattr(
        "ddnn.reproduce.measure.read_measured",
        lambda path: [Measurement("", 1, CommScheme("ring"), Job(1, 2.0, 3, 4, 5.0), 1.0, 0.0, 0.0)],
    )
    (run_dir / "final.safetensors").touch()
    (tmp_path / "dbn").mkdir()
    (tmp_path / "dbn" / "dbn.safetensors").touch()
    when = (run_dir / "final.safetensors").stat().st_mtime + age
    os.utime(tmp_path / "dbn" / "dbn.safetensors", (when, when))
    before = record("base", 1, 1, 0.6, dbn="known before")
    assert evaluate_run(before, run_dir, {}, "cpu").dbn == dbn


def test_rates_of_another_scorer_are_read_where_there_is_no_graph(tmp_path: Path) -> None:
    for name in ("decode-eval2000/SWB", "decode-eval2000/eval2000 x", "decode-other/SWB", "decode-test/a", "SWB"):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"wer": 14.6}')
    (tmp_path / "decode-eval2000" / "frames.json").write_text('{"loss": 1.0, "frame_accuracy": 0.5}')
    tests = {**plan().tests, "eval2000": TestSet(data=tmp_path)}
    before = record("base", 1, 1, 0.6)
    found = with_other_wers(before, tmp_path, tests)
    assert found.wers.keys() - before.wers.keys() == {"SWB", "eval2000 x"}
    assert found.percentages["SWB WER"] == 14.6 and found.wers.keys() >= before.wers.keys()
    assert with_other_wers(before, tmp_path / "nowhere", tests) == before
    failed = diverged("base", 1, 1)
    assert with_other_wers(failed, tmp_path, tests) == failed
    with pytest.raises(DataError, match=r"two test sets have a SWB\.json"):
        with_other_wers(before, tmp_path, {**tests, "other": TestSet(data=tmp_path)})


@pytest.mark.parametrize(
    ("loss", "accuracy", "initial", "why"),
    [
        (5.1, 0.083, None, "CV frame accuracy 8.3 %, 11.0 % by always choosing the most frequent pdf"),
        (5.1, 0.11, None, "CV frame accuracy 11.0 %, 11.0 % by always choosing the most frequent pdf"),
        (5.1, 0.12, None, None),
        (5.474, 0.12, None, "CV loss 5.474, 5.474 by the frequencies of the pdfs alone"),
        (2e31, 0.12, None, "CV loss 2e+31, 5.474 by the frequencies of the pdfs alone"),
        (5.1, 0.12, 5.1, "CV loss 5.1, 5.1 before training"),
        (5.1, 0.12, 5.2, None),
    ],
)
def test_when_a_run_did_not_train(loss: float, accuracy: float, initial: float | None, why: str | None) -> None:
    before = None if initial is None else FrameMetrics(loss=initial, frame_accuracy=0.5)
    run = collapsed("sgd", 16, 1, loss, accuracy).model_copy(update={"initial_cv": before})
    assert run.failure == why
    assert run.model_copy(update={"baseline": None, "initial_cv": None}).failure is None, "unknown is not failed"


def test_a_run_that_ended_without_a_model_failed_for_its_reason() -> None:
    assert diverged("sgd", 16, 1, "it learned nothing").failure == "it learned nothing"
    nothing = record("sgd", 16, 1, 0.5, cv=None)
    assert nothing.failure == "no epoch was accepted"


@pytest.mark.parametrize(
    "other", [{"precision": "bf16"}, {"optimizer": "sgd"}, {"train_digest": "another"}, {"machine": "b, 2 cores"}]
)
def test_a_speed_up_is_between_runs_that_share_all_but_the_workers(other: dict[str, str]) -> None:
    alike = {"precision": "float32", "optimizer": "ng-sgd", "train_digest": "aa", "machine": "a, 2 cores"}
    one, two = (run(n, 1, 10.0 / n, "").model_copy(update=alike) for n in (1, 2))
    assert measured(one, two) == {1: 1.0, 2: pytest.approx(2.0)}
    assert measured(one, two.model_copy(update=other)) == {1: 1.0}


@pytest.mark.parametrize("field", ["num_parameters", "minibatch_size", "flop_per_frame"])
def test_a_speed_up_is_between_runs_of_one_network_and_minibatch(field: str) -> None:
    one, two = run(1, 1, 10.0, "a"), run(2, 1, 5.0, "a")
    changed = epoch(2, 5.0).model_copy(update={field: 2 * getattr(epoch(2, 5.0), field)})
    assert measured(one, two.model_copy(update={"measured": changed})) == {1: 1.0}


def test_a_run_that_did_not_train_has_no_speed_up() -> None:
    failed = collapsed("base", 2, 1).model_copy(update={"measured": epoch(2, 1.0), "machine": "a"})
    assert measured(run(1, 1, 10.0, "a"), failed) == {1: 1.0}


def test_speakers_are_numbered_in_the_order_of_the_utterances(tmp_path: Path) -> None:
    assert speaker_numbers(tmp_path / "utt2spk", ["u1", "u2"]) == (), "without utt2spk they are unknown"
    (tmp_path / "utt2spk").write_text("u1 b\nu2 a\nu3 b\n")
    assert speaker_numbers(tmp_path / "utt2spk", ["u3", "u2", "u1"]) == (0, 1, 0)
    with pytest.raises(DataError, match="utterance u4 has no speaker"):
        speaker_numbers(tmp_path / "utt2spk", ["u1", "u4"])


def test_an_epoch_is_recorded_under_the_names_of_records() -> None:
    """The fields are taken in their order: none may change its place."""
    way, job = CommScheme("bmuf", "bfloat16", True), Job(1, 2.0, 3, 4, 5.0)
    epoch = Measurement("exp/run", 8, way, job, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, True)
    record = MeasuredEpoch.of(epoch)
    assert record.model_dump() == {
        "strategy": way.strategy,
        "comm_dtype": way.comm_dtype,
        "overlap": way.overlap,
        "num_parameters": job.parameters,
        "flop_per_frame": job.operations,
        "minibatch_size": job.minibatch,
        "averaging_period": job.averaging_period,
        "frames": job.frames,
        "seconds": epoch.seconds,
        "comm_seconds": epoch.comm,
        "averagings": epoch.averagings,
        "compute_seconds": epoch.compute,
        "other_seconds": epoch.rest,
        "interval_seconds_std": epoch.block_std,
        "final_mean": epoch.final_mean,
        "columns": 1,
    }
    shared = replace(epoch, columns=2, source="record")
    assert MeasuredEpoch.of(shared).to_measurement(8) == shared
    assert record.to_measurement(8) == replace(epoch, source="record")
