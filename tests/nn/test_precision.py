"""bf16 against float32 and float64, and the choice between them. On processors without bf16 units these are slow."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from twins import FUNCTIONS, batch_of, random_minibatch

from ddnn.bench.step import RandomTask, Shape, random_task
from ddnn.data.batches import ShuffledSampler
from ddnn.distributed.communicator import Communicator
from ddnn.nn import precision as module
from ddnn.nn.acoustic_model import save_model
from ddnn.nn.arithmetic import Precision, make_arithmetic, matmul_out, supports_float32_output
from ddnn.nn.layers import Affine, Layer, mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.precision import bf16_error, choose_arithmetic, gemm_speedup
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.step import EagerStep
from ddnn.util.errors import UserError

CPU = torch.device("cpu")
AN4 = mlp_layers(440, 4, 512, 616, "sigmoid")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]


def network(layers: tuple[Layer, ...], seed: int = 1) -> Network:
    made = Network(layers)
    initialize(made, seed)
    return made


UNIT = 1.1 * 2**-8
"""Rounding to bf16, and a tenth for float32's own."""
SLOPES = {
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: 1 - y * y,
    "relu": lambda y: (y > 0).double(),
    "linear": torch.ones_like,
}


@settings(max_examples=25, deadline=None)
@given(
    dims=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    kind=st.sampled_from(["sigmoid", "tanh", "relu", "linear"]),
    frames=st.integers(1, 30),
    seed=st.integers(0, 1000),
    compiled=st.booleans(),
)
def test_every_product_is_float64s_but_for_rounding(
    dims: list[int], kind: str, frames: int, seed: int, compiled: bool
) -> None:
    """Each layer's output, derivative and gradient in float64 from what it read in bf16, rounded once or twice."""
    kinds = [kind] * (len(dims) - 2) + ["softmax"]
    made = network(tuple(Affine(a, b, k) for a, b, k in zip(dims[:-1], dims[1:], kinds, strict=True)), seed)
    arithmetic = make_arithmetic("bf16", CPU, use_kernels=compiled)
    workspace = Workspace(made, 32, arithmetic).of(frames)
    labels = random_minibatch(workspace, dims[-1], torch.Generator().manual_seed(seed))
    workspace.forward()
    workspace.cross_entropy(labels)
    workspace.backward()
    flat = workspace.gradient(torch.full_like(made.parameters, float("nan")))
    assert flat.dtype == torch.float32
    rounded, gradients = made.split(made.parameters.bfloat16().double()), made.split(flat.double())
    assert torch.equal(workspace.inputs[0], workspace.x.bfloat16())
    for i, layer in enumerate(made.layers):
        assert isinstance(layer, Affine)
        x, y, d = (t.double() for t in (workspace.inputs[i], workspace.activations[i], workspace.grad_outputs[i]))
        weight, bias = rounded[i]["weight"], rounded[i]["bias"]
        exact = FUNCTIONS[layer.activation](x @ weight.t() + bias)
        sizes = x.abs() @ weight.abs().t() + bias.abs()
        assert within(y, exact, UNIT * (sizes + exact.abs()))
        assert within(gradients[i]["weight"], d.t() @ x, UNIT * (d.abs().t() @ x.abs()))
        assert within(gradients[i]["bias"], d.sum(0), UNIT * d.abs().sum(0))
        if i:
            below, slope = workspace.grad_outputs[i - 1].double(), SLOPES[kind](x)
            assert within(below, slope * (d @ weight), 2 * UNIT * slope * (d.abs() @ weight.abs()))


def within(found: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> bool:
    return bool(((found - exact).abs() <= error + 1e-6).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_that_have_changed_are_cast_at_the_next_forward_pass(compiled: bool) -> None:
    made = network((Affine(4, 3, "softmax"),))
    workspace = Workspace(made, 2, make_arithmetic("bf16", CPU, use_kernels=compiled))
    workspace.x.fill_(1.0)
    before = workspace.forward().clone()
    made.load_parameters(2.0 * made.parameters)  # as an averaging or a rejected epoch does, from outside
    assert torch.equal(workspace.forward(), 2 * before)
    assert made.parameters.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_products_in_bf16_are_summed_in_float32(device: str) -> None:
    ones = torch.ones(600, 3, dtype=torch.bfloat16, device=device)
    out = torch.empty(
        3, 3, dtype=torch.float32 if supports_float32_output(torch.device(device)) else torch.bfloat16, device=device
    )
    matmul_out(ones.t(), ones, out=out)
    assert torch.equal(out.float().cpu(), torch.full((3, 3), 600.0)), "bf16 sums end at 256"
    matmul_out(ones.t(), ones[:, 0].contiguous(), out=out[0])
    assert out[0].tolist() == [600.0] * 3


def learnable(device: torch.device, optimizer: str) -> tuple[RandomTask, Sgd]:
    """A training on frames that do tell their label: the largest of the first 5 dims."""
    task = random_task(Shape(2, 24, 5, 32), device, frames=1500)
    dataset = task.train.dataset
    dataset = replace(dataset, labels=dataset.features[:, :5].argmax(dim=1).int())
    options = SgdOptions() if optimizer == "sgd" else NgSgdOptions(rank_in=5, rank_out=3)
    task = replace(task, train=replace(task.train, dataset=dataset))
    return task, make_optimizer(options, task.model.network)


def losses(
    task: RandomTask, optimizer: Sgd, precision: Precision, minibatches: int = 200, compiled: bool = True
) -> torch.Tensor:
    """Losses per frame, averaged over 20 minibatches at a time."""
    arithmetic = make_arithmetic(precision, task.model.network.parameters.device, use_kernels=compiled)
    workspace = Workspace(task.model.network, task.minibatch, arithmetic)
    step = EagerStep(workspace, optimizer)
    rows = cycle(ShuffledSampler(task.train, task.minibatch, seed=1).epoch(1))
    batches = (batch_of(workspace, task.train.dataset, task.model.transform, one) for one in rows)
    found = [step(batch, 0.02)[0] for batch in islice(batches, minibatches)]
    return torch.stack(found).view(-1, 20).mean(dim=1).cpu() / task.minibatch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_200_minibatches_have_the_same_losses_in_either_precision(compiled: bool, optimizer: str, device: str) -> None:
    plain = losses(*learnable(torch.device(device), optimizer), "float32")
    low = losses(*learnable(torch.device(device), optimizer), "bf16", compiled=compiled)
    assert plain[-1] < 0.85 * plain[0], "it has to learn, or nothing is compared"
    torch.testing.assert_close(low, plain, rtol=0.01, atol=0.002)
    assert not torch.equal(low, plain), "bf16 was not in bf16"


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_trained_in_bf16_is_saved_in_float32(compiled: bool, tmp_path: Path) -> None:
    task, optimizer = learnable(CPU, "ng-sgd")
    losses(task, optimizer, "bf16", minibatches=20, compiled=compiled)
    parameters = task.model.network.parameters
    assert parameters.dtype == optimizer.gradient.dtype == torch.float32
    # Not rounded to bf16 either: an update smaller than 2^-8 of a parameter must not be lost.
    assert not torch.equal(parameters, parameters.bfloat16().float())
    save_model(tmp_path / "model.safetensors", task.model)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.float32}  # noqa: SIM118


@pytest.mark.parametrize(
    ("asked", "ratio", "chosen", "said", "level"),
    [
        ("auto", 5.5, "bf16", "bf16 GEMM 5.50 x float32 on this device: bf16", logging.INFO),
        ("auto", 1.1, "float32", "bf16 GEMM 1.10 x float32 on this device: float32", logging.INFO),
        ("auto", 0.11, "float32", "bf16 GEMM 0.11 x float32 on this device: float32", logging.INFO),
        ("bf16", 0.11, "bf16", "precision: float32 would be faster", logging.WARNING),
        ("bf16", 5.5, "bf16", "bf16 GEMM 5.50 x float32 on this device: bf16", logging.INFO),
    ],
)
def test_the_measurement_chooses(
    asked: Any, ratio: float, chosen: str, said: str, level: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "gemm_speedup", lambda network, minibatch: ratio)
    monkeypatch.setattr(module, "bf16_error", lambda network, minibatch: None)
    caplog.set_level(logging.INFO, logger="ddnn")
    assert choose_arithmetic(asked, Network(AN4), 256).precision == chosen
    assert [record.levelno for record in caplog.records] == [level]
    assert said in caplog.text


def test_float32_asked_for_and_small_networks_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gemm_speedup", lambda network, minibatch: pytest.fail("measured"))
    assert choose_arithmetic("float32", Network(AN4), 256).precision == "float32"
    assert choose_arithmetic("auto", Network((Affine(4, 3, "softmax"),)), 256).precision == "float32"


def test_bf16_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "gemm_speedup", lambda network, minibatch_size: 6.0)
    made = network((Affine(30, 20, "sigmoid"), Affine(20, 10, "softmax")))
    assert bf16_error(made, 16) is None

    backward = Workspace.backward

    def wrong(self: Workspace) -> None:
        backward(self)
        if self.arithmetic.precision == "bf16":
            self.grad_outputs[0].neg_()

    monkeypatch.setattr(Workspace, "backward", wrong)
    assert choose_arithmetic("bf16", made, 16).precision == "float32"
    assert "bf16 is numerically unsafe on this device: relative gradient error" in caplog.text

    def missing(self: Workspace) -> None:
        if self.arithmetic.precision == "bf16":
            raise NotImplementedError('"sigmoid_backward" not implemented for bf16\nand so on')

    monkeypatch.setattr(Workspace, "backward", missing)
    assert choose_arithmetic("bf16", made, 16).precision == "float32"
    assert "NotImplementedError: " in caplog.text
    assert "and so on" not in caplog.text


def test_a_training_resumed_in_bf16_is_not_continued_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume promises the same bits."""
    monkeypatch.setattr(module, "gemm_speedup", lambda network, minibatch_size: 6.0)
    made = network((Affine(30, 20, "sigmoid"), Affine(20, 10, "softmax")))
    assert choose_arithmetic("bf16", made, 16, resumed=True).precision == "bf16"
    monkeypatch.setattr(module, "bf16_error", lambda network, minibatch: "it cannot")
    with pytest.raises(UserError, match="the training to resume was in bf16, but bf16 is numerically unsafe"):
        choose_arithmetic("bf16", made, 16, resumed=True)
    assert choose_arithmetic("float32", made, 16, resumed=True).precision == "float32"


class OtherWorkers(Communicator):
    """Worker `rank` of several of which the first has measured a ratio of 6, and all have these complaints."""

    def __init__(self, rank: int, complaints: list[str | None]) -> None:
        super().__init__(rank, len(complaints), "n", {})
        self.complaints = complaints
        self.gathered: list[list[Any]] = [self.complaints, [6.0] + [None] * (self.world_size - 1)]

    def all_reduce_min(self, value: int) -> int:
        return min(value, *(one is None for one in self.complaints))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.gathered.pop()


def test_the_first_worker_measures_and_all_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "bf16_error", lambda network, minibatch: None)
    monkeypatch.setattr(module, "gemm_speedup", lambda network, minibatch: pytest.fail("measured by the second"))
    assert choose_arithmetic("auto", Network(AN4), 256, OtherWorkers(1, [None, None])).precision == "bf16"
    monkeypatch.setattr(module, "gemm_speedup", lambda network, minibatch_size: 6.0)
    assert choose_arithmetic("auto", Network(AN4), 256, OtherWorkers(0, [None, None])).precision == "bf16"
    assert choose_arithmetic("auto", Network(AN4), 256, OtherWorkers(0, [None, "it cannot"])).precision == "float32"
    assert "bf16 is numerically unsafe on this device: it cannot. Training in float32" in caplog.text
    caplog.clear()
    assert choose_arithmetic("bf16", Network(AN4), 256, OtherWorkers(1, ["it cannot", None])).precision == "float32"
    assert all(record.levelno < logging.WARNING for record in caplog.records), "the first worker says it, once"


def test_the_measurement_ends_early_where_bf16_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def seconds(factors: tuple[torch.Tensor, ...]) -> float:
        measured.append(factors[0].dtype)
        return 1e-6 if factors[0].dtype == torch.float32 else 1e-4

    monkeypatch.setattr(module, "_seconds", seconds)
    assert gemm_speedup(Network(AN4), 256) == pytest.approx(0.01)
    assert len(measured) == 4
    monkeypatch.setattr(module, "_seconds", lambda factors: 2.0 if factors[0].dtype == torch.float32 else 0.5)
    assert gemm_speedup(Network(AN4), 256) == 4.0


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported(),
    reason="this processor has bf16 units, and may well be faster with them",
)
def test_auto_takes_float32_on_a_processor_without_bf16_units() -> None:
    assert choose_arithmetic("auto", network(mlp_layers(256, 3, 256, 256, "sigmoid")), 256).precision == "float32"
