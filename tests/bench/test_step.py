"""The benchmark measures the trainer's own step; no time is asserted."""

from __future__ import annotations

import json

import pytest
import torch

from ddnn.bench import step
from ddnn.model.network import Network, hidden_stack


def test_three_products_a_layer_but_two_for_the_first() -> None:
    """8.0 MFLOP a frame for 440-4x512-616; nobody needs the derivative of the input, which leaves 7.5."""
    network = Network(hidden_stack(440, 4, 512, 616, "sigmoid"))
    first = 2 * 440 * 512
    assert step.matrix_flop(network) + first == pytest.approx(8.0e6, rel=0.01)


def test_a_bench_runs_the_trainer_and_says_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "NETWORKS", {"tiny": step.Shape(1, 8, 5, 16)})
    steps = 0
    real = step.train_minibatch

    def counted(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal steps
        steps += 1
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "train_minibatch", counted)
    report = step.run_bench(("tiny",), "cpu", seconds=0.05)
    assert steps > 9
    found = json.loads(json.dumps(report.as_dict()))
    assert {"date", "cpu", "torch"} <= set(found["machine"])
    result = found["results"][0]
    assert result["spread"][0] <= result["frames_per_second"] <= result["spread"][1]
    assert all(result[name] > 0.0 for name in ("gflops", "gemm_gflops", "share_of_limit", "time_over_sgd"))
    assert "tiny" in report.as_text()
