"""The scaling model: its formulas, its fit, and whether it foretells the paper's speed-ups."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import rows_of, worker_row, write_run

from ddnn.averaging.strategies import STRATEGIES
from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed import cost
from ddnn.distributed.cost import Size
from ddnn.nn.acoustic_model import AcousticModel, save_model
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network
from ddnn.report.measured import network_cost, network_layers, read_measured
from ddnn.report.scale_command import ScaleOptions, Scaling, scale
from ddnn.report.scaling import (
    CommScheme,
    Constants,
    Job,
    Measurement,
    averagings,
    calibrate,
    comm_seconds,
    epoch_seconds,
    expected_max_normal,
    fastest,
    fit_not_negative,
    machine,
    scaled,
)
from ddnn.util.errors import DataError, UserError

RunCli = Callable[..., Any]
K20 = Path("k20-switchboard.yaml")
BUTTERFLY = Path("k20-switchboard-butterfly.yaml")
PAPER = {2: 1.39, 4: 2.65, 8: 4.99, 16: 9.32, 32: 16.70}
PAPER_BUTTERFLY = {2: 1.45, 4: 2.83, 8: 5.44, 16: 10.10, 32: 18.02}
JOB = Job(parameters=40_000_000, operations=240e6, minibatch=1000, averaging_period=10, frames=1e8)
TRUE = Constants(
    job=JOB, minibatch_seconds=0.15, contention_seconds=0.02, serial_seconds=100.0, averaging_seconds=0.1,
    block_std=0.05, latency=1e-3, byte_seconds=1e-9, final_mean=True,
)  # fmt: skip


def foretold(*fit: int, **changes: Any) -> Scaling:
    options = ScaleOptions(workers=tuple(PAPER), fit=fit or None, **changes)
    return scale([K20], options, None)


def speed_ups(found: Scaling, strategy: str) -> dict[int, float]:
    return {p.workers: p.speed_up for p in found.predictions if p.strategy == strategy and not p.overlap}


@pytest.mark.parametrize("fit", [(1, 2, 4), (1, 2, 8), (1, 2, 4, 8, 16, 32)])
def test_the_papers_all_reduce_within_ten_percent(fit: tuple[int, ...]) -> None:
    """The acceptance of the model: fitted to the first sizes, it foretells the others."""
    found = speed_ups(foretold(*fit), "all-reduce")
    assert found == pytest.approx(PAPER, rel=0.10)
    assert found == pytest.approx(PAPER, rel=0.025), "what docs/explanation/scaling-model.md says of it"


def test_the_papers_butterfly_from_its_all_reduce() -> None:
    assert speed_ups(foretold(1, 2, 4), "butterfly") == pytest.approx(PAPER_BUTTERFLY, rel=0.04)


def test_the_papers_every_20_from_its_every_10() -> None:
    """Table of the contrasts: 16 GPUs gain 10.07 at every 20."""
    found = scale([K20], ScaleOptions(workers=(16,), fit=(1, 2, 4), averaging_period=20), None)
    assert speed_ups(found, "all-reduce")[16] == pytest.approx(10.07, rel=0.02)


def test_the_files_hold_the_papers_speed_ups() -> None:
    """The times were copied by hand: their ratios are the speed-ups published beside them."""
    for path, published in ((K20, PAPER), (BUTTERFLY, PAPER_BUTTERFLY)):
        alone, *others = read_measured(path)
        assert {m.workers: alone.seconds / m.seconds for m in others} == pytest.approx(published, rel=0.003)
        assert alone.job.frames / alone.seconds == pytest.approx(6400)


def test_expected_max_normal_normal_variables() -> None:
    assert [expected_max_normal(n) for n in (1, 2, 3)] == pytest.approx(
        [0, 1 / math.sqrt(math.pi), 1.5 / math.sqrt(math.pi)]
    )
    draws = np.random.default_rng(1).standard_normal((4000, 100)).max(axis=1)
    assert expected_max_normal(100) == pytest.approx(draws.mean(), abs=0.03)


def test_an_epoch_by_hand() -> None:
    """Four workers: 2500 averagings of blocks of 10 minibatches; an all-reduce is 4 messages and 1.5 models."""
    x = 4 * 1e-3 + 1.5 * 160e6 * 1e-9
    w = 0.05 * expected_max_normal(4)
    assert averagings(JOB, "all-reduce", 4) == 2500
    assert comm_seconds(TRUE, CommScheme("all-reduce"), 4) == pytest.approx(x)
    assert epoch_seconds(TRUE, CommScheme("all-reduce"), 1) == pytest.approx(100 + 1e5 * 0.15)
    assert epoch_seconds(TRUE, CommScheme("all-reduce"), 4) == pytest.approx(100 + 2500 * (1.7 + w + x + 0.1) + x)
    assert epoch_seconds(TRUE, CommScheme("all-reduce", overlap=True), 4) == pytest.approx(
        100 + 2500 * (1.7 + w + 0.1) + x
    )
    slow = replace(TRUE, byte_seconds=1e-7)
    assert epoch_seconds(slow, CommScheme("ring", overlap=True), 2) == pytest.approx(
        100 + 5000 * (16.001 + 0.1) + 2 * 1e-3 + 16.0
    ), "the exchange takes longer than the block"
    ring = 1e-3 + 160e6 * 1e-9
    assert epoch_seconds(TRUE, CommScheme("ring"), 4) == pytest.approx(100 + 2500 * (1.7 + w + ring + 0.1) + x)
    gradient = 25_000 * (0.17 + w / math.sqrt(10) + x + 0.1)
    assert epoch_seconds(TRUE, CommScheme("gradient-all-reduce"), 4) == pytest.approx(100 + gradient), "no last mean"
    half = 1e-3 + 80e6 * 1e-9
    assert epoch_seconds(TRUE, CommScheme("ring", "bfloat16"), 4) == pytest.approx(
        100 + 2500 * (1.7 + w + half + 0.1) + x
    )


@pytest.mark.parametrize("comm_dtype", ["float32", "bfloat16"])
def test_an_averaging_in_one_bit_by_hand(comm_dtype: str) -> None:
    """Four workers: 3 messages, then 2; as many models as an all-reduce, of one bit for each of 40 million parameters."""
    found = comm_seconds(TRUE, CommScheme("1-bit", comm_dtype), 4)
    assert found == pytest.approx(5 * 1e-3 + 1.5 * 40e6 / 8 * 1e-9)


def test_a_parameter_server_answers_one_worker_after_another() -> None:
    """None waits for a slow one: an exchange is two models and four messages, which limit an interval where many come."""
    exchange = 4e-3 + 320e6 * 1e-9
    for workers, interval in ((2, 1.7 + exchange), (64, 64 * exchange)):
        expected = 100 + 10_000 / workers * (interval + 0.1)
        assert epoch_seconds(TRUE, CommScheme("async"), workers) == pytest.approx(expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(workers=st.integers(1, 2000))
@settings(max_examples=30, deadline=None)
def test_more_workers_never_beat_the_ideal_and_overlap_never_loses(strategy: str, workers: int) -> None:
    scheme = CommScheme(strategy)
    speed_up = epoch_seconds(TRUE, scheme, 1) / epoch_seconds(TRUE, scheme, workers)
    assert 0 < speed_up <= workers * (1 + 1e-9)
    if STRATEGIES[strategy].overlaps:
        assert epoch_seconds(TRUE, replace(scheme, overlap=True), workers) <= epoch_seconds(TRUE, scheme, workers)


def test_another_job() -> None:
    other = replace(JOB, operations=480e6, minibatch=500, averaging_period=40, frames=3e8, parameters=80_000_000)
    found = scaled(TRUE, other)
    assert (found.minibatch_seconds, found.contention_seconds) == pytest.approx((0.15, 0.02))
    assert (found.averaging_seconds, found.serial_seconds, found.block_std) == pytest.approx((0.2, 300.0, 0.1))
    assert scaled(TRUE, JOB) == TRUE


def measurement(
    workers: int, strategy: str = "all-reduce", averaging_period: int = 10, told_apart: bool = True
) -> Measurement:
    """What the model with the constants TRUE (less E and sigma) would have measured."""
    job = replace(JOB, averaging_period=averaging_period)
    constants = replace(TRUE, job=job, block_std=0.0, final_mean=False)
    rounds = averagings(job, strategy, workers) if workers > 1 else 0.0
    comm = rounds * comm_seconds(constants, CommScheme(strategy), workers)
    seconds = epoch_seconds(constants, CommScheme(strategy), workers)
    compute = job.frames / job.minibatch / workers * (0.15 + 0.02 * (workers > 1))
    found = Measurement("made up", workers, CommScheme(strategy), job, seconds, comm, rounds)
    return replace(found, compute=compute, rest=seconds - compute - comm) if told_apart else found


@pytest.mark.parametrize("told_apart", [True, False])
def test_the_fit_finds_the_constants_again(told_apart: bool) -> None:
    measured = [measurement(n, told_apart=told_apart) for n in (1, 2, 4, 8)]
    measured.append(measurement(4, averaging_period=20, told_apart=told_apart))
    found = calibrate(measured).constants
    for name in ("minibatch_seconds", "contention_seconds", "serial_seconds", "averaging_seconds", "latency"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.byte_seconds == pytest.approx(1e-9)


def test_different_strategies_are_fitted_together() -> None:
    found = calibrate([measurement(4), measurement(4, "ring")]).constants
    assert (found.latency, found.byte_seconds) == pytest.approx((1e-3, 1e-9))


def test_the_last_mean_of_an_epoch_is_sent_as_float32() -> None:
    """Four workers, ten averagings in bfloat16: an all-reduce is 4 messages and 1.5 models, a message of a ring one."""
    latency, byte_seconds, size = 1e-3, 1e-9, JOB.parameters
    last = 4 * latency + 1.5 * 4 * size * byte_seconds
    measured = [
        replace(
            measurement(4, strategy),
            scheme=CommScheme(strategy, "bfloat16"),
            averagings=10.0,
            final_mean=True,
            comm=comm + last,
        )
        for strategy, comm in (
            ("all-reduce", 10 * (4 * latency + 1.5 * 2 * size * byte_seconds)),
            ("ring", 10 * (latency + 2 * size * byte_seconds)),
        )
    ]
    found = calibrate(measured).constants
    assert (found.latency, found.byte_seconds) == pytest.approx((latency, byte_seconds), rel=1e-6)


def test_what_is_not_measured_is_said_to_be_assumed() -> None:
    alone = calibrate([measurement(1)], latency=0.0, byte_seconds=1e-9)
    assert all(any(f"({name} = 0)" in note for note in alone.assumed) for name in ("g", "h", "S", "sigma"))
    several = calibrate([measurement(4)])
    assert any("alpha = 0" in note for note in several.assumed)
    assert any("(g = 0)" in note for note in several.assumed)
    assert any("S = 0" in note for note in several.assumed)
    both = calibrate([measurement(1), replace(measurement(2), compute=1.0)])
    assert not any("only runs with one worker" in note for note in both.assumed), "two are no slower, but measured"
    with pytest.raises(UserError, match="no communication was measured"):
        calibrate([measurement(1)])
    with pytest.raises(UserError, match="times with 2, 4 workers found, expected times with 1 and with more"):
        calibrate([measurement(n, told_apart=False) for n in (2, 4)])
    with pytest.raises(UserError, match="differ in network"):
        calibrate([measurement(1), replace(measurement(2), job=replace(JOB, parameters=5))])


def test_given_latency_and_bandwidth_take_the_place_of_the_fitted() -> None:
    measured = [measurement(n) for n in (1, 2, 4)]
    assert calibrate(measured, latency=1e-3).constants.byte_seconds == pytest.approx(1e-9)
    assert calibrate(measured, byte_seconds=1e-9).constants.latency == pytest.approx(1e-3)
    assert calibrate(measured, 7.0, 8.0).constants.latency == 7.0


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_no_coefficient_is_negative(wanted: list[float], seed: int) -> None:
    columns = np.random.default_rng(seed).uniform(0, 1, (3, 6))
    values = np.array(wanted) @ columns
    found = fit_not_negative(dict(zip("abc", columns, strict=True)), values, [1.0] * 6)
    np.testing.assert_allclose(np.array(list(found.values())) @ columns, values, atol=1e-6)
    assert fit_not_negative({"a": [1.0, 2.0, 3.0]}, [-1.0, -2.0, -3.0], [1.0] * 3) == {"a": 0.0}


def test_networks() -> None:
    layers = network_layers("440-6x2048-8806")
    assert [layers[0].input_dim, *(layer.output_dim for layer in layers)] == [440, *[2048] * 6, 8806]
    assert network_cost(network_layers("3-4-5")) == (3 * 4 + 4 + 4 * 5 + 5, 4 * 12 + 6 * 20)
    assert network_cost(network_layers("440-4x512-616"))[1] == pytest.approx(7.5e6, rel=0.02)  # as ddnn bench counts
    for text in ("", "440", "440-", "440-0x5-6", "440-0-6", "440--6", "-1-2", "440-x5-6", "440-1e3-6", "1-101x5-6"):
        with pytest.raises(UserError, match="expected the dims of a network"):
            network_layers(text)


def test_run_dirs(tmp_path: Path) -> None:
    rows = rows_of(
        1, averagings=0, comm_seconds=0.0, compute_fraction=0.90, data_fraction=0.02, interval_seconds_std=None
    )
    one = write_run(tmp_path / "one", rows)
    two = write_run(tmp_path / "two", rows_of(2), "{workers: 2}")
    model = AcousticModel(FeatureConfig(), splice_only(40, 5), Network(mlp_layers(440, 4, 512, 616)))
    save_model(two / "best.safetensors", model)
    found = read_measured(two)[0]
    assert (found.workers, found.scheme, found.averagings) == (2, CommScheme("all-reduce"), 11)
    sizes = tuple(Size(*dims) for dims in pairwise([440, *[512] * 4, 616]))
    assert found.job == Job(*network_cost(network_layers("440-4x512-616")), 256, 10, 2 * 28672, sizes)
    assert found.compute == pytest.approx(3.1 * 0.93)
    assert found.rest == pytest.approx(3.1 * (1 - 0.93 - 0.01) - 0.06)
    assert found.block_std == pytest.approx(math.sqrt(0.01**2 + 0.005**2)), "in time, and between the workers"
    scaling = scale([one, two], ScaleOptions(workers=(1, 2, 4)), None)
    assert scaling.constants.block_std == pytest.approx(found.block_std)
    assert scaling.constants.final_mean
    assert scaling.constants.minibatch_seconds == pytest.approx(3.1 * 0.92 / 112)
    assert scaling.constants.contention_seconds == pytest.approx(3.1 * (0.93 - 0.92) / 112)
    assert [check.workers for check in scaling.checks] == [2]


@pytest.mark.parametrize(
    ("parallel", "averagings", "period"),
    [
        ("averaging_frames: 2560", 11, 10),
        ("averaging_frames: 100", 112, 1),
        ("averaging_frames: 1000000", 0, 112),
        ("averaging_frames: epoch", 0, 112),
    ],
)
def test_an_averaging_period_of_frames_or_an_epoch(tmp_path: Path, parallel: str, averagings: int, period: int) -> None:
    """In minibatches, of which each worker has 112. Without an averaging the times between two are not known."""
    one = write_run(tmp_path / "one", rows_of(1, averagings=0, comm_seconds=0.0))
    two = write_run(tmp_path / "two", rows_of(2, averagings=averagings), f"{{workers: 2, {parallel}}}")
    (found,) = read_measured(two)
    assert (found.job.averaging_period, found.block_std is None) == (period, averagings == 0)
    (alone,) = read_measured(write_run(tmp_path / "alone", rows_of(1), f"{{{parallel}}}"))
    assert alone.job.averaging_period == period
    assert [check.workers for check in scale([one, two], ScaleOptions(workers=(1, 2, 4)), None).checks] == [2]


def test_runs_on_overloaded_cores_are_refused_unless_asked_for(tmp_path: Path, run_cli: RunCli) -> None:
    """The time that they waited for a core would be taken for contention."""
    one = write_run(tmp_path / "one", rows_of(1, averagings=0, comm_seconds=0.0))
    two = write_run(tmp_path / "two", rows_of(2, compute_cpu_seconds=3.1 * 0.92 * 0.21), "{workers: 2}")
    words = ("scale", "--measured", f"{one},{two}", "--workers", "1,2")
    refused = run_cli(*words)
    warning = "two: only 21 % of its compute time was CPU time: the cores were overloaded"
    assert refused.exit_code == 2 and warning in refused.stderr and "--allow-overloaded" in refused.stderr
    assert f"assumption: {warning}; its times count" in run_cli(*words, "--allow-overloaded").stdout


def test_an_overlapped_run_hides_its_exchange(tmp_path: Path) -> None:
    rows = rows_of(2, comm_seconds=1.0, comm_fraction=0.01)
    run = write_run(tmp_path / "run", rows, "{workers: 2, overlap: true}")
    found = read_measured(run)[0]
    assert found.scheme.overlap and found.comm == 1.0
    assert found.rest == pytest.approx(3.1 * 0.06)


def test_an_incomplete_epoch_is_ignored(tmp_path: Path) -> None:
    rows = [*rows_of(2, epochs=2), worker_row(3, 0, seconds=99.0)]
    assert read_measured(write_run(tmp_path / "run", rows))[0].seconds == pytest.approx(3.1)
    for name, only in (("older", rows[:2]), ("begun", [worker_row(1, 0), worker_row(2, 1)])):
        with pytest.raises(DataError, match="no epoch has complete rows of all workers"):
            read_measured(write_run(tmp_path / name, only))


GOOD = "network: 10-20-30\nminibatch_size: 8\naveraging_period: 10\nframes: 1000\nworkers: [1, 2]\n"
GOOD += "total: [9, 5]\ncommunication: [0, 1]"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("frames: 1000", "", "frames: missing"),
        ("frames: 1000", "frames: .inf", "frames"),
        ("frames: 1000", "frames: -1", "frames"),
        ("[9, 5]", "[9]", "differ in length: 2, 1, 2"),
        ("[9, 5]", "[9, 0]", "total.1"),
        ("[9, 5]", "[9, 1]", "2 workers: communication is not below the total"),
        ("[9, 5]", "[9, .nan]", "total.1"),
        ("[1, 2]", "[0, 2]", "workers.0"),
        ("[1, 2]", "[1, 2.5]", "workers.1"),
        ("averaging_period: 10", "averaging_period: 10\nunit: weeks", "unit"),
        ("averaging_period: 10", "averaging_period: 10\nevry: 10", "evry"),
        ("averaging_period: 10", "averaging_period: {a: 1}", "averaging_period"),
        ("10-20-30", "10-20-x", "dims of a network"),
        ("10-20-30", "!!python/object/apply:os.system [ls]", "tags"),
        ("[1, 2]", "*a", "aliases"),
        (GOOD, "[" * 5000, "levels"),
        (GOOD, "", "nothing found"),
    ],
)
def test_damaged_files_of_times(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "times.yaml"
    path.write_text(GOOD)
    assert [m.seconds for m in read_measured(path)] == [9, 5]
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError, match=said):
        read_measured(path)
    with pytest.raises(DataError, match="cannot read the file"):
        read_measured(tmp_path / "gone.yaml")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(GOOD)), st.integers(0, 10), st.binary(max_size=6))
def test_any_bytes_are_predicted_from_or_refused(tmp_path: Path, place: int, length: int, other: bytes) -> None:
    path = tmp_path / "times.yaml"
    text = GOOD.encode()
    path.write_bytes(text[:place] + other + text[place + length :])
    try:
        found = scale([path], ScaleOptions(workers=(1, 1000)), None)
    except UserError:
        return
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": (0,)}, "0 found, expected a number from 1 to 1e"),
        ({"fit": (3,)}, "none of these numbers of workers was measured, only 1, 2, 4, 8, 16, 32"),
        ({"averaging_period": 0}, "0 found, expected a number from 0.001"),
        ({"bandwidth": float("nan")}, "nan found"),
        ({"latency": -1.0}, "-1 found, expected a number from 0"),
        ({"frames": 1.0, "hours": 1.0}, "both given"),
        ({"network": "x"}, "dims of a network"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        scale([K20], replace(ScaleOptions(workers=(2,)), **changes), None)


def test_text_says_what_is_fitted_and_assumed() -> None:
    text = foretold(1, 2, 4, network="440-4x512-616", minibatch_size=256).as_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("k20-switchboard.yaml")]
    assert [row[-1] for row in rows] == ["fit", "fit", "check", "check", "check"]
    assert max(map(len, text.splitlines())) <= 120 and "efficiency: speed-up divided by workers" in text
    sections = [part.splitlines() for part in text.split("\n\n")[-2:]]
    of_16 = [next(line.split()[1] for line in lines if line.split()[0] == "16") for lines in sections]
    assert float(of_16[1]) == pytest.approx(100 * float(of_16[0]) / 16, abs=0.1)
    assert "assumption: a frame takes the same time in a minibatch of another size" in text
    assert "assumption: computing time is proportional to the operations" in text
    assert "1,329,768 parameters, minibatch size 256, averaging period 10" in text
    exact = foretold(1, 2)
    exact = replace(exact, checks=(replace(exact.checks[0], error=-1e-5),))
    assert " +0.0 % " in exact.as_text()
    few = scale([K20], ScaleOptions(workers=(2, 1000), hours=1.0), None).as_text()
    assert "with 1000 or more workers, an epoch has fewer frames than one averaging interval" in few


def test_on_the_command_line(tmp_path: Path, run_cli: RunCli) -> None:
    shown = run_cli("scale", "--measured", f"{K20},{BUTTERFLY}", "--workers", "1,2,1024", "--out", tmp_path, "--json")
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert {p["strategy"] for p in found["predictions"]} == set(STRATEGIES)
    assert len(found["checks"]) == 10
    head = (tmp_path / "scaling.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG") and all(700 <= side <= 1500 for side in struct.unpack(">II", head[16:24]))
    shown = run_cli("scale", "--measured", K20, "--workers", "2,3.5")
    assert (shown.exit_code, "whole numbers" in shown.stderr) == (2, True)


def test_a_growing_minibatch_is_measured_at_its_last_size(tmp_path: Path) -> None:
    rows = rows_of(2, 3)
    for row in rows:
        if row["type"] == "epoch":
            row["minibatch_size"] = 256 if row["epoch"] > 1 else 128
        elif row["type"] == "worker" and row["epoch"] == 1:
            row |= {"minibatches": 224, "seconds": 99.0}
    run = write_run(tmp_path / "run", rows, "{workers: 2}", "minibatch_size: {start: 128, end: 512, epochs: 9}")
    (found,) = read_measured(run)
    assert (found.job.minibatch, found.job.frames, found.seconds) == (256, 57344, pytest.approx(3.1))


NETWORK = "440-6x2048-8806"


def test_workers_that_do_not_share_a_model_are_predicted_as_before() -> None:
    """There is one model: a layout of n x 1 x 1 is n workers."""
    found = foretold(network=NETWORK, layouts="1x1x1,2x1x1,16x1x1")
    plain = {(p.workers, p.strategy): p.speed_up for p in found.predictions if not p.overlap}
    assert found.shared[0].speed_ups == pytest.approx(dict.fromkeys(found.shared[0].speed_ups, 1.0))
    for row, workers in zip(found.shared[1:], (2, 16), strict=True):
        assert row.speed_ups == pytest.approx({name: plain[workers, name] for name in row.speed_ups})


def test_workers_that_share_a_model_by_hand() -> None:
    """c is all of the products; columns send 2 x 6 gathers and exchanges of 2048 columns, and the loss."""
    found = foretold(network=NETWORK, layouts="1x2x1,2x2x1", latency=1e-4, bandwidth=1e9)
    k = found.constants
    rows, widths = 1024, 6 * 2048
    sent = 13e-4 + 1e-9 * (2 * 4 * rows * widths / 2 + 16 * rows)
    minibatch = k.minibatch_seconds / 2 + sent
    assert [row.minibatch_seconds for row in found.shared] == pytest.approx([minibatch] * 2)
    epoch = 97_728_000 / rows
    alone = k.serial_seconds + epoch * k.minibatch_seconds
    one_replica = k.serial_seconds + epoch * (minibatch + k.contention_seconds)
    assert list(found.shared[0].speed_ups.values()) == pytest.approx([alone / one_replica] * 4), "nothing is averaged"
    averaging = 2e-4 + 1e-9 * 4 * math.ceil(k.job.parameters / 2)
    two = k.serial_seconds + epoch / 2 * (minibatch + k.contention_seconds + averaging / 10)
    assert found.shared[1].speed_ups["all-reduce"] == pytest.approx(alone / two)
    assert "tau = 0" in " ".join(found.notes)


def test_a_pipeline_has_its_fastest_number_of_microbatches() -> None:
    found = foretold(network=NETWORK, layouts="1x1x2")
    assert found.shared[0].microbatches == 8
    text = found.as_text()
    assert re.search(r"^1x1x2 +8 +[\d.]+ ms +[\d.]+ GiB +8\.4 MB +1\.\d\d ", text, re.MULTILINE), text
    assert "share a model" not in foretold().as_text()


@pytest.mark.parametrize("layouts", ["2x2", "1x1x8", "1x4096x1", "0x1x1", "1x1x1,", "axbxc"])
def test_layouts_that_cannot_be(run_cli: RunCli, layouts: str) -> None:
    result = run_cli("scale", "--measured", str(K20), "--network", NETWORK, "--layouts", layouts)
    assert result.exit_code == 2 and "columns (at most 2048) x stages (at most 7)" in result.stderr


def test_layouts_need_the_widths_of_the_layers(tmp_path: Path, run_cli: RunCli) -> None:
    """Which a run without a model does not tell."""
    run = write_run(tmp_path / "run", rows_of(2), "{workers: 2}")
    result = run_cli("scale", "--measured", str(run), "--layouts", "1x2x1")
    assert result.exit_code == 2 and "--network" in result.stderr
    assert run_cli("scale", "--measured", str(K20), "--layouts", "1x2x1").exit_code == 0


LAYERS = tuple(Size(*dims) for dims in pairwise([440, *[512] * 4, 616]))
FLOPS, TAU, ALPHA, BETA = 50e9, 20e-6, 30e-6, 1 / 2e9


def on_a_machine(
    minibatch: int,
    workers: int,
    columns: int = 1,
    layers: tuple[Size, ...] = LAYERS,
    activation_bytes: int = 4,
    stages: int = 1,
    microbatches: int = 1,
) -> Measurement:
    """What a machine would have measured that is as the model has it."""
    frames, parameters = 1e6, sum(layer.parameters for layer in layers)
    job = Job(parameters, 7.5e6, minibatch, 10, frames, layers, activation_bytes)
    there = cost.Machine(FLOPS, TAU, math.inf, ALPHA, BETA, activation_bytes)
    count = frames / minibatch * columns * stages / workers
    layout = cost.Layout(1, columns, stages, microbatches)
    both = cost.minibatch_seconds(there, layers, minibatch, layout)
    alone = cost.minibatch_seconds(there._replace(latency=0, byte_seconds=0), layers, minibatch, layout)
    return Measurement(
        "made up", workers, CommScheme("all-reduce"), job, count * both, 0.0, 0.0, count * both, 0.0,
        columns=columns, stages=stages, microbatches=microbatches, shared_comm=count * (both - alone),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [(0, 0), (20, 80)])
@pytest.mark.parametrize("activation_bytes", [4, 2])
def test_two_sizes_of_minibatch_tell_what_a_product_and_a_message_cost(
    ranks: tuple[int, int], activation_bytes: int
) -> None:
    layers = tuple(Size(*layer[:2], *ranks) for layer in LAYERS)
    more = {"layers": layers, "activation_bytes": activation_bytes}
    measured = [on_a_machine(n, workers, workers, **more) for n in (256, 1024) for workers in (1, 2)]
    calibration = calibrate(measured)
    found = machine(calibration.constants)
    assert found[:2] == pytest.approx((FLOPS, TAU)) and found[3:] == pytest.approx((ALPHA, BETA, activation_bytes))
    assert not any("tau" in note or "alpha" in note for note in calibration.assumed)
    assert calibration.constants.latency == pytest.approx(ALPHA), "as no averaging was measured"
    assert any("no averaging was measured" in note for note in calibration.assumed)
    other = scaled(calibration.constants, replace(measured[0].job, minibatch=64))
    expected = cost.minibatch_seconds(found._replace(activation_bytes=4), layers, 64, cost.Layout())
    assert other.minibatch_seconds == pytest.approx(expected)
    deeper = replace(measured[0].job, layers=layers * 2)
    assert scaled(calibration.constants, deeper).fixed_seconds == pytest.approx(
        TAU * sum(2 + 3 - (i == 0) + 4 * (ranks != (0, 0)) for i in range(10))
    )


@pytest.mark.parametrize("stages", [2, 3])
def test_pipelines_tell_what_a_message_costs(stages: int) -> None:
    """By the widths at the boundaries that training has; the narrow layer is at none with two stages, and the layout that is
    predicted is the one that was measured."""
    layers = tuple(Size(*dims) for dims in pairwise([440, 64, 512, 512, 616]))
    pipelines = [
        on_a_machine(n, stages, layers=layers, stages=stages, microbatches=m)
        for n, m in ((256, 2), (256, 4), (1024, 8))
    ]
    measured = [*(on_a_machine(n, 1, layers=layers) for n in (256, 1024)), *pipelines]
    calibration = calibrate(measured)
    assert machine(calibration.constants)[3:5] == pytest.approx((ALPHA, BETA))
    for m in pipelines:
        constants = scaled(calibration.constants, m.job)
        prediction = fastest(constants, m.layout._asdict())
        assert prediction is not None and prediction.minibatch_seconds * m.minibatches == pytest.approx(m.seconds)


def test_one_size_of_minibatch_tells_neither() -> None:
    measured = [on_a_machine(256, 1), on_a_machine(256, 2, 2)]
    calibration = calibrate(measured)
    assert calibration.constants.fixed_seconds == calibration.constants.shared_latency == 0.0
    assert any("one size of minibatch" in note and "(tau = 0)" in note for note in calibration.assumed)
    assert any("messages of only one size within a model" in note for note in calibration.assumed)
    known = calibrate(measured, latency=ALPHA).constants
    assert (known.shared_latency, known.shared_byte_seconds) == pytest.approx((ALPHA, BETA))
    assert calibrate(measured, 7.0, 8.0).constants.shared_latency == 7.0
    with pytest.raises(UserError, match="all runs have workers that share a model"):
        calibrate(measured[1:])
    different = calibrate([on_a_machine(256, 1), replace(on_a_machine(128, 2), comm=1.0)])
    assert different.constants.fixed_seconds == 0.0, "several workers may differ by contention, not by the minibatch"
    assert any("(tau = 0)" in note for note in different.assumed)


def write_shared_run(
    path: Path, minibatches: int, workers: int, columns: int, seconds: float, sent: float, piped: Sequence[float] = ()
) -> Path:
    """A run of workers that share models, one epoch of 57344 frames, and its model. `piped`: seconds in messages to other stages, of
    each stage."""
    shared_by = columns * (len(piped) or 1)
    rows = rows_of(
        workers, 1, minibatches=minibatches, frames=57344 * shared_by // workers, seconds=seconds, columns=columns,
        num_parameters=1_329_768, compute_fraction=0.97, data_fraction=0.01, wait_fraction=0.0, comm_fraction=0.0,
        column_seconds=sent, column_bytes=1000 * minibatches, comm_seconds=0.0, averagings=0,
    )  # fmt: skip
    for row in rows:
        if row["type"] == "worker" and piped:
            stage = row["rank"] // columns % len(piped)
            row |= {"stages": len(piped), "microbatches": 4, "pipe_seconds": piped[stage]}
    run = write_run(
        path, rows, f"{{workers: {workers}, columns: {columns}}}", f"minibatch_size: {57344 // minibatches}"
    )
    save_model(
        run / "final.safetensors",
        AcousticModel(FeatureConfig(), splice_only(40, 5), Network(mlp_layers(440, 4, 512, 616))),
    )
    return run


def test_runs_whose_workers_share_a_model_are_compared_with_the_model(tmp_path: Path) -> None:
    """224 minibatches of 256 frames in 4 s; and in 2.5 s, 0.6 of them in messages."""
    one = write_run(
        tmp_path / "one", rows_of(1, 1, averagings=0, comm_seconds=0.0, minibatches=224, frames=57344, seconds=4.0)
    )
    two = write_shared_run(tmp_path / "two", 224, 2, 2, 2.5, 0.6)
    (found,) = read_measured(two)
    assert (found.workers, str(found.layout), found.job.frames, found.minibatches) == (2, "1x2x1", 57344, 224)
    assert (found.job.minibatch, found.shared_comm) == (256, pytest.approx(0.6))
    scaling = scale([one, two], ScaleOptions(workers=(1, 2), layouts="1x2x1"), None)
    (check,) = scaling.checks
    assert (check.layout, check.workers, check.measured) == ("1x2x1", 2, pytest.approx(4.0 / 2.5))
    constants = scaling.constants
    seconds = 224 * (constants.minibatch_seconds / 2 + constants.contention_seconds) + 0.6 + constants.serial_seconds
    assert check.predicted == pytest.approx(epoch_seconds(constants, CommScheme("all-reduce"), 1) / seconds)
    assert scaling.shared[0].speed_ups["all-reduce"] == pytest.approx(check.predicted)
    text = scaling.as_text()
    assert re.search(r"two +all-reduce +2 +1x2x1 +1\.60 ", text), text
    assert "its messages are as fast as those within a model" in text


def test_what_stages_wait_for_each_other_is_told_from_their_messages(tmp_path: Path) -> None:
    """Of 2.5 s are 2.45 computing and data, of which one stage waits 0.6 s, the other 0.8: 1.85 and 1.65 s in 4 microbatches
    take (1.85 + 1.65 + 3 * 1.85) / 4 s one after the other."""
    one = write_shared_run(tmp_path / "one", 224, 1, 1, 4.0, 0.0)
    two = write_shared_run(tmp_path / "two", 224, 2, 1, 2.5, 0.0, (0.6, 0.8))
    (found,) = read_measured(two)
    assert found.layout == cost.Layout(1, 1, 2, 4) and found.minibatches == 224
    assert found.shared_comm == pytest.approx(2.45 - 9.05 / 4)
    eight = write_shared_run(tmp_path / "eight", 112, 8, 2, 2.5, 0.2, (0.4, 0.6))
    (hybrid,) = read_measured(eight)
    assert hybrid.layout == cost.Layout(2, 2, 2, 4) and hybrid.shared_comm == found.shared_comm
    scaling = scale([one, two], ScaleOptions(workers=(1, 2), layouts="1x1x1,1x2x1,2x2x1,1x1x2"), None)
    (check,) = scaling.checks
    assert (check.layout, check.measured) == ("1x1x2", pytest.approx(4.0 / 2.5))
    alike = next(p for p in scaling.shared if p.layout == "1x1x2" and p.microbatches == 4)
    assert check.predicted == pytest.approx(alike.speed_ups["all-reduce"])
    assert [p.layout for p in scaling.shared] == ["1x1x1", "1x2x1", "2x2x1", "1x1x2"]
    assert [p["layout"] for p in scaling.as_dict()["shared"]] == [p.layout for p in scaling.shared]
    assert re.search(r"two +all-reduce +2 +1x1x2 +1\.60 ", scaling.as_text())


def test_a_shared_model_whose_layers_are_not_known(tmp_path: Path) -> None:
    run = write_shared_run(tmp_path / "run", 224, 2, 2, 2.5, 0.6)
    (run / "final.safetensors").unlink()
    with pytest.raises(DataError, match="its workers share a model that is not written yet"):
        read_measured(run)


def test_runs_of_two_sizes_of_minibatch_and_layouts(tmp_path: Path) -> None:
    runs = [
        write_shared_run(tmp_path / f"{n} {workers}", n, workers, columns, seconds, 0.1 * (columns > 1))
        for n, workers, columns, seconds in ((224, 1, 1, 4.0), (448, 1, 1, 4.4), (224, 2, 2, 2.5), (112, 4, 2, 1.3))
    ]
    found = scale(runs, ScaleOptions(workers=(1, 2)), None)
    assert found.constants.fixed_seconds * 224 == pytest.approx(0.4 * 0.98, rel=0.02)
    assert [check.layout for check in found.checks] == ["1x2x1", "2x2x1"]
    assert "not in proportion to the frames" in found.as_text()
