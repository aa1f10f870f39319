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
from twins import FUNCTIONS, random_minibatch

from ddnn.bench.step import Shape, random_setup
from ddnn.data.minibatches import shuffled_minibatches
from ddnn.model import precision as module
from ddnn.model.acoustic import save_model
from ddnn.model.initialise import initialise_randomly
from ddnn.model.loss import cross_entropy_in_place
from ddnn.model.network import (
    Buffers,
    Layer,
    Network,
    Precision,
    backward,
    forward,
    gradient,
    hidden_stack,
    layer_views,
)
from ddnn.model.precision import choose_precision, disagreement, gemm_ratio
from ddnn.model.product import product, widens
from ddnn.optim.sgd import make_optimizer
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Optimizer
from ddnn.train.loop import Setup, train_minibatch

AN4 = hidden_stack(440, 4, 512, 616, "sigmoid")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]


def network(layers: tuple[Layer, ...], seed: int = 1) -> Network:
    made = Network(layers)
    initialise_randomly(made, seed)
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
    made = network(tuple(Layer(a, b, k) for a, b, k in zip(dims[:-1], dims[1:], kinds, strict=True)), seed)
    buffers = Buffers(made, 32, "bf16", compiled=compiled).of(frames)
    labels = random_minibatch(buffers, dims[-1], torch.Generator().manual_seed(seed))
    forward(made, buffers)
    cross_entropy_in_place(buffers, labels)
    backward(made, buffers)
    flat = gradient(made, buffers, torch.full_like(made.parameters, float("nan")))
    assert flat.dtype == torch.float32
    weights, biases = layer_views(made.layers, made.parameters.bfloat16().double())
    weight_gradients, bias_gradients = layer_views(made.layers, flat.double())
    assert torch.equal(buffers.inputs()[0], buffers.x.bfloat16())
    for i, layer in enumerate(made.layers):
        x, y, d = (t.double() for t in (buffers.inputs()[i], buffers.outputs[i], buffers.derivatives[i]))
        exact = FUNCTIONS[layer.activation](x @ weights[i].t() + biases[i])
        sizes = x.abs() @ weights[i].abs().t() + biases[i].abs()
        assert within(y, exact, UNIT * (sizes + exact.abs()))
        assert within(weight_gradients[i], d.t() @ x, UNIT * (d.abs().t() @ x.abs()))
        assert within(bias_gradients[i], d.sum(0), UNIT * d.abs().sum(0))
        if i:
            below, slope = buffers.derivatives[i - 1].double(), SLOPES[kind](x)
            assert within(below, slope * (d @ weights[i]), 2 * UNIT * slope * (d.abs() @ weights[i].abs()))


def within(found: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> bool:
    return bool(((found - exact).abs() <= error + 1e-6).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_are_cast_at_every_forward_pass(compiled: bool) -> None:
    made = network((Layer(4, 3, "softmax"),))
    buffers = Buffers(made, 2, "bf16", compiled=compiled)
    buffers.x.fill_(1.0)
    before = forward(made, buffers).clone()
    made.parameters.mul_(2.0)  # as an averaging or a rejected epoch does, from outside
    assert torch.equal(forward(made, buffers), 2 * before)
    assert made.parameters.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_products_in_bf16_are_summed_in_float32(device: str) -> None:
    ones = torch.ones(600, 3, dtype=torch.bfloat16, device=device)
    out = torch.empty(3, 3, dtype=torch.float32 if widens(torch.device(device)) else torch.bfloat16, device=device)
    product(ones.t(), ones, out=out)
    assert torch.equal(out.float().cpu(), torch.full((3, 3), 600.0)), "bf16 sums end at 256"
    product(ones.t(), ones[:, 0].contiguous(), out=out[0])
    assert out[0].tolist() == [600.0] * 3


def learnable(device: torch.device, precision: Precision, optimizer: str) -> Setup:
    """A training on frames that do tell their label: the largest of the first 5 dims."""
    setup = random_setup(Shape(2, 24, 5, 32), device, frames=1500)
    corpus = setup.train.corpus
    corpus = replace(corpus, labels=corpus.store[:, :5].argmax(dim=1).int())
    recipe = Optimizer(name=optimizer, rank_in=5, rank_out=3)
    made = make_optimizer(recipe, setup.model.network)
    return replace(setup, train=replace(setup.train, corpus=corpus), optimizer=made, precision=precision)


def losses(setup: Setup, minibatches: int = 200, compiled: bool = True) -> torch.Tensor:
    """Losses per frame, averaged over 20 minibatches at a time."""
    buffers = Buffers(setup.model.network, setup.minibatch, setup.precision, compiled=compiled)
    rows = cycle(shuffled_minibatches(setup.train, setup.minibatch, seed=1, epoch=1))
    found = [train_minibatch(setup, buffers, one, 0.02)[0] for one in islice(rows, minibatches)]
    return torch.stack(found).view(-1, 20).mean(dim=1).cpu() / setup.minibatch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_200_minibatches_have_the_same_losses_in_either_precision(compiled: bool, optimizer: str, device: str) -> None:
    plain = losses(learnable(torch.device(device), "float32", optimizer))
    low = losses(learnable(torch.device(device), "bf16", optimizer), compiled=compiled)
    assert plain[-1] < 0.85 * plain[0], "it has to learn, or nothing is compared"
    torch.testing.assert_close(low, plain, rtol=0.01, atol=0.002)
    assert not torch.equal(low, plain), "bf16 was not in bf16"


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_trained_in_bf16_is_saved_in_float32(compiled: bool, tmp_path: Path) -> None:
    setup = learnable(torch.device("cpu"), "bf16", "ng-sgd")
    losses(setup, minibatches=20, compiled=compiled)
    assert setup.model.network.parameters.dtype == setup.optimizer.gradient.dtype == torch.float32
    # Not rounded to bf16 either: an update smaller than 2^-8 of a parameter must not be lost.
    assert not torch.equal(setup.model.network.parameters, setup.model.network.parameters.bfloat16().float())
    save_model(tmp_path / "model.safetensors", setup.model)
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
    monkeypatch.setattr(module, "gemm_ratio", lambda network, minibatch: ratio)
    monkeypatch.setattr(module, "disagreement", lambda network, minibatch: None)
    caplog.set_level(logging.INFO, logger="ddnn")
    assert choose_precision(asked, Network(AN4), 256) == chosen
    assert [record.levelno for record in caplog.records] == [level]
    assert said in caplog.text


def test_float32_asked_for_and_small_networks_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gemm_ratio", lambda network, minibatch: pytest.fail("measured"))
    assert choose_precision("float32", Network(AN4), 256) == "float32"
    assert choose_precision("auto", Network((Layer(4, 3, "softmax"),)), 256) == "float32"


def test_bf16_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "gemm_ratio", lambda network, minibatch: 6.0)
    made = network((Layer(30, 20, "sigmoid"), Layer(20, 10, "softmax")))
    assert disagreement(made, 16) is None

    def wrong(low: Network, buffers: Buffers) -> None:
        backward(low, buffers)
        if buffers.low is not None:
            buffers.derivatives[0].neg_()

    monkeypatch.setattr(module, "backward", wrong)
    assert choose_precision("bf16", made, 16) == "float32"
    assert "bf16 does not do on this device: its gradient is off by" in caplog.text

    def missing(low: Network, buffers: Buffers) -> None:
        if buffers.low is not None:
            raise NotImplementedError('"sigmoid_backward" not implemented for bf16\nand so on')

    monkeypatch.setattr(module, "backward", missing)
    assert choose_precision("bf16", made, 16) == "float32"
    assert "NotImplementedError: " in caplog.text
    assert "and so on" not in caplog.text


class OtherWorkers(Exchange):
    """Worker `rank` of several of which the first has measured a ratio of 6, and all have these complaints."""

    def __init__(self, rank: int, complaints: list[str | None]) -> None:
        super().__init__(rank=rank, size=len(complaints))
        self.complaints = complaints
        self.gathered: list[list[Any]] = [self.complaints, [6.0] + [None] * (self.size - 1)]

    def agree_min(self, value: int) -> int:
        return min(value, *(one is None for one in self.complaints))

    def gather(self, value: Any) -> list[Any]:
        return self.gathered.pop()


def test_the_first_worker_measures_and_all_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "disagreement", lambda network, minibatch: None)
    monkeypatch.setattr(module, "gemm_ratio", lambda network, minibatch: pytest.fail("measured by the second"))
    assert choose_precision("auto", Network(AN4), 256, OtherWorkers(1, [None, None])) == "bf16"
    monkeypatch.setattr(module, "gemm_ratio", lambda network, minibatch: 6.0)
    assert choose_precision("auto", Network(AN4), 256, OtherWorkers(0, [None, None])) == "bf16"
    assert choose_precision("auto", Network(AN4), 256, OtherWorkers(0, [None, "it cannot"])) == "float32"
    assert "bf16 does not do on this device: it cannot. Training in float32" in caplog.text
    caplog.clear()
    assert choose_precision("bf16", Network(AN4), 256, OtherWorkers(1, ["it cannot", None])) == "float32"
    assert all(record.levelno < logging.WARNING for record in caplog.records), "the first worker says it, once"


def test_the_measurement_ends_early_where_bf16_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def seconds(factors: tuple[torch.Tensor, ...]) -> float:
        measured.append(factors[0].dtype)
        return 1e-6 if factors[0].dtype == torch.float32 else 1e-4

    monkeypatch.setattr(module, "_seconds", seconds)
    assert gemm_ratio(Network(AN4), 256) == pytest.approx(0.01)
    assert len(measured) == 4
    monkeypatch.setattr(module, "_seconds", lambda factors: 2.0 if factors[0].dtype == torch.float32 else 0.5)
    assert gemm_ratio(Network(AN4), 256) == 4.0


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported(),
    reason="this processor has bf16 units, and may well be faster with them",
)
def test_auto_takes_float32_on_a_processor_without_bf16_units() -> None:
    assert choose_precision("auto", network(hidden_stack(256, 3, 256, 256, "sigmoid")), 256) == "float32"
