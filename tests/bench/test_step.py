"""The benchmark measures the trainer's own step; no time is asserted."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from ddnn.bench import step
from ddnn.bench.task import Shape, random_task
from ddnn.data.batches import Batch
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.layers import check_layers, mlp_layers, training_flop_per_frame
from ddnn.nn.network import Network, Workspace
from ddnn.nn.products import matmul_out
from ddnn.optim.natural_gradient import NaturalGradient
from ddnn.report import figures
from ddnn.training.step import EagerStep, Sums
from ddnn.util.errors import UserError


def test_three_products_a_layer_but_two_for_the_first() -> None:
    """8.0 MFLOP a frame for 440-4x512-616; nobody needs the derivative of the input, which leaves 7.5."""
    first = 2 * 440 * 512
    assert training_flop_per_frame(mlp_layers(440, 4, 512, 616)) + first == pytest.approx(8.0e6, rel=0.01)


def test_the_networks_to_measure_fit_together() -> None:
    for shape in step.NETWORKS.values():
        check_layers(shape.layers())
        assert shape.layers()[0].input_dim == 11 * shape.dim and shape.layers()[-1].output_dim == shape.pdfs
    gemms = [layer.gemm for layer in step.NETWORKS["cnn"].layers()]
    assert [gemm for gemm in gemms if gemm and gemm.rows > 1] == [(33, 264, 128), (8, 512, 256)]


def test_a_bench_runs_the_trainer_and_says_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "NETWORKS", {"tiny": Shape(1, 8, 5, 16)})
    dtypes = set()
    steps = 0
    real = EagerStep.__call__

    def counted(self: EagerStep, batch: Batch, lr: float) -> Sums:
        nonlocal steps
        steps += 1
        dtypes.add(self.workspace.activations[0].dtype)
        return real(self, batch, lr)

    monkeypatch.setattr(EagerStep, "__call__", counted)
    report = step.run_bench(("tiny",), "cpu", seconds=0.1, precisions=("float32", "bf16"))
    assert steps > 9
    assert dtypes == {torch.float32, torch.bfloat16}
    found = json.loads(json.dumps(report.as_dict()))
    assert {"date", "cpu", "torch"} <= set(found["machine"])
    rows = [(result["optimizer"], result["precision"]) for result in found["results"]]
    assert rows == [("sgd", "float32"), ("ng-sgd", "float32"), ("sgd", "bf16"), ("ng-sgd", "bf16")]
    for result in found["results"]:
        assert result["spread"][0] <= result["frames_per_second"] <= result["spread"][1]
        figures = ("gflops", "gemm_gflops", "gemm_efficiency", "time_ratio_to_sgd", "speedup_over_float32")
        assert all(result[name] > 0.0 for name in figures)
        assert set(result["shares"]) == set(step.PARTS)
        assert result["shares"]["gemm"] == pytest.approx(result["gemm_efficiency"])
    assert found["results"][0]["shares"]["ng"] == 0.0
    assert found["results"][0]["speedup_over_float32"] == 1.0
    text = report.as_text()
    assert all(part.replace("_", "-") in text for part in step.PARTS)
    assert text.count("tiny") == 8


def test_rounds_have_an_update_of_a_settled_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NG-SGD in bf16 as many steps as there are from one update to the next, or it is a matter of chance."""
    monkeypatch.setattr(step, "NETWORKS", {"tiny": Shape(1, 8, 5, 16)})
    begun, updated, rounds = set[int](), set[int](), list[tuple[int, int]]()
    begin, timed = NaturalGradient.begin_minibatch, step.seconds_per_call

    def begins(self: NaturalGradient, *of: Any) -> bool:
        updates = begin(self, *of)
        begun.add(self.t)
        updated.update([self.t] * updates)
        return updates

    def counted(function: Callable[[], object], calls: int, device: torch.device) -> float:
        begun.clear(), updated.clear()
        took = timed(function, calls, device)
        rounds.append((len(begun), len(updated)))
        return took

    monkeypatch.setattr(NaturalGradient, "begin_minibatch", begins)
    monkeypatch.setattr(step, "seconds_per_call", counted)
    step.run_bench(("tiny",), "cpu", seconds=0.01, precisions=("bf16",))
    of_ng_sgd = [(steps, updates) for steps, updates in rounds[-6 * step.MIN_ROUNDS :] if updates]
    assert len(of_ng_sgd) == step.MIN_ROUNDS
    assert all(steps == 16 * updates for steps, updates in of_ng_sgd)


def test_bf16_is_measured_on_request_or_where_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "NETWORKS", {"tiny": Shape(1, 8, 5, 16)})
    monkeypatch.setattr(step, "WARM_UP", 1)
    chosen = Float32()
    monkeypatch.setattr(step, "choose_arithmetic", lambda asked, network, minibatch: chosen)
    found = step.run_bench(("tiny",), "cpu", seconds=0.01)
    assert [result.precision for result in found.results] == ["float32"] * 2
    chosen = make_arithmetic("bf16", torch.device("cpu"))
    found = step.run_bench(("tiny",), "cpu", seconds=0.01)
    assert [result.precision for result in found.results] == ["float32"] * 2 + ["bf16"] * 2
    found = step.run_bench(("tiny",), "cpu", seconds=0.01, precisions=("bf16",))
    assert [(result.precision, result.speedup_over_float32) for result in found.results] == [("bf16", None)] * 2


def test_sizes_of_minibatches_in_one_table_and_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_cli: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddnn")
    monkeypatch.setattr(step, "NETWORKS", {"an4": Shape(1, 8, 5, 16)})
    words = ("bench", "--minibatch-size", "4,8", "--seconds", "0.1", "--precision", "float32")
    shown = run_cli(*words, "--out", tmp_path)
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split()[:4] for line in shown.stdout.splitlines() if line.startswith("an4")]
    assert rows == 2 * [["an4", of, "float32", size] for size in ("4", "8") for of in ("sgd", "ng-sgd")]
    assert (tmp_path / "minibatch-size.png").read_bytes().startswith(b"\x89PNG")
    for size in (4, 8):
        assert re.search(rf"an4, minibatch size {size}: \d+ rounds, about ", caplog.text)
    for wrong in ("0", "60000"):
        refused = run_cli("bench", "--minibatch-size", wrong)
        assert refused.exit_code == 2 and "location: --minibatch-size" in refused.stderr
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
    figures.draw_speeds([("b", 16, 2.0), ("a", 8, 3.0), ("b", 4, 1.0)], tmp_path / "x.png")
    curves = [(line.get_label(), list(line.get_xdata())) for line in drawn[0].axes[0].lines if len(line.get_xdata())]
    assert curves == [("b", [4.0, 16.0]), ("a", [8.0])]


@pytest.mark.parametrize(("took", "seconds", "lowest", "highest"), [(0.001, 10.0, 8.0, 10.5), (1.5, 20.0, 20.0, 31.0)])
def test_the_time_asked_for_is_kept_or_the_log_says_how_long_it_takes(
    took: float,
    seconds: float,
    lowest: float,
    highest: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a clock that only the calls move: two functions, one of which makes four steps."""
    now = 0.0

    def call(steps: int = 1) -> None:
        nonlocal now
        now += steps * took

    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: now))
    caplog.set_level(logging.INFO, "ddnn")
    names: list[step.Name] = [("float32", "sgd"), ("float32", "ng-sgd")]
    times = step.interleave({names[0]: call, names[1]: lambda: call(4)}, torch.device("cpu"), seconds, "swbd")
    number = len(times[names[0]])
    assert times[names[0]] == pytest.approx([took] * number) and times[names[1]] == pytest.approx([4 * took] * number)
    assert lowest <= now <= highest
    (said,) = caplog.messages
    if took == 0.001:
        assert said == "swbd: 25 rounds, about 9 s" and number == 25
    else:
        assert said == "swbd: 3 rounds, about 22 s, more than --seconds: 3 rounds are needed" and number == 3


def test_the_products_are_those_of_the_layers() -> None:
    network = Network(mlp_layers(12, 2, 8, 5))
    workspace = Workspace(network, 7)
    products = step.matrix_products(workspace)
    for factors in products:
        matmul_out(*factors)
    flop = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right, _ in products)
    assert flop == 7 * training_flop_per_frame(network.layers)
    assert products[1][0] is products[0][2], "a layer reads what the one below gives"


def test_shares_of_a_step_by_hand() -> None:
    """Medians of three rounds, in the last of which the machine had other work."""
    rounds = {"gemm": [6, 6, 60], "passes": [7, 7, 70], "update": [0.5, 0.5, 9], "data": [0.5, 1.5, 1], "sgd": [10] * 3}
    found = step._shares(**{part: np.array(seconds) for part, seconds in rounds.items()}, step=np.array([20.0] * 3))
    expected = {"gemm": 0.3, "element_wise": 0.05, "update": 0.025, "ng": 0.5, "data": 0.05, "other": 0.05}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_loop_in_plain_pytorch_trains_the_same_network(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many products in each step, in the precision asked for, and it learns that all frames have one label."""
    monkeypatch.setattr(step, "LR", 1.0)
    task = random_task(Shape(2, 8, 5, 16), torch.device("cpu"), frames=100)
    task.train.dataset.labels.fill_(3)
    loop, dtypes = step.plain_step(task, precision), set[torch.dtype]()
    hook = register_module_forward_hook(lambda module, given, made: dtypes.add(made.dtype))
    with FlopCounterMode(display=False) as counter:
        losses = [float(loop()) for _ in range(20)]
    hook.remove()
    assert counter.get_total_flops() == 20 * 16 * training_flop_per_frame(task.model.network.layers)
    assert dtypes == {make_arithmetic(precision, torch.device("cpu")).dtype}
    assert losses[-1] < 0.1 < 1.0 < losses[0]


def test_a_bench_beside_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "NETWORKS", {**step.NETWORKS, "tiny": Shape(1, 8, 5, 16)})
    monkeypatch.setattr(step, "WARM_UP", 1)
    report = step.run_bench(("tiny",), "cpu", seconds=0.01, precisions=("float32", "bf16"), plain=True)
    rows = [(result.optimizer, result.precision, bool(result.shares)) for result in report.results]
    assert rows[2::3] == [("plain", "float32", False), ("plain", "bf16", False)] and all(row[2] for row in rows[:2])
    assert report.results[2].speedup_over_float32 == 1.0
    text = report.as_text()
    assert text.count("tiny") == 6 + 4 and "plain: SGD" in text
    with pytest.raises(UserError, match="affine layers only") as caught:
        step.run_bench(("tiny", "cnn"), "cpu", seconds=0.01, plain=True)
    assert caught.value.location == "--plain"
