"""What every layer promises, for ddnn's and for layers that only these tests have: nothing else knows what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_layers import TOYS, Filters, Gain, Pool
from twins import random_minibatch

from ddnn.bench.step import matrix_products
from ddnn.data.batches import Batch
from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.nn.acoustic_model import AcousticModel, load_model, model_config, model_from_config, save_model, to_nnet1
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling
from ddnn.nn.elementwise import Activation
from ddnn.nn.layer import Layer
from ddnn.nn.layers import (
    LAYERS,
    Affine,
    activation_floats,
    check_layers,
    layer_from_config,
    mlp_layers,
    num_parameters,
    training_flop_per_frame,
)
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.precision import bf16_error
from ddnn.nn.products import matmul_out
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.step import EagerStep
from ddnn.util.errors import DataError, UserError

CPU = torch.device("cpu")
TOY = (Filters(15, 5, 2, 4), Pool(6, 4), Gain(12, largest=1.2), Affine(12, 8, "sigmoid"), Affine(8, 5, "softmax"))
"""15 -> 6 patches of 4 filters -> 3 of 4 -> the same -> 8 -> 5 pdfs."""
NETWORKS: dict[str, tuple[Layer, ...]] = {
    "toy": TOY,
    "toy above": (Affine(15, 12, "tanh"), Filters(12, 4, 4, 3, "sigmoid"), Affine(9, 5, "softmax")),
    "affine": mlp_layers(15, 2, 9, 5),
    "conv": (
        *(
            Convolution.of_pieces(15, 2, 1, 5, 4),
            MaxPooling.of_patches(16, 2, 2, 4),
            Convolution.of_pieces(8, 4, 2, 8, 3),
            AveragePooling.of_patches(9, 3, 3, 3),
        ),
        *(Affine(3, 8, "tanh"), Affine(8, 5, "softmax")),
    ),
    "conv wide": (
        *(
            Convolution.of_pieces(15, 2, 1, 15, 8),
            MaxPooling.of_patches(112, 2, 2, 8),
            Activation(56, "tanh"),
            Affine(56, 5, "softmax"),
        ),
    ),
    "conv2d": (
        *(Convolution(5, 1, 3, 2, 2, 3), MaxPooling(4, 2, 3, 2, 2, 2, 2), Activation(6, "tanh")),
        *(Convolution(2, 3, 1, 2, 1, 4, channels_last=True), Affine(4, 5, "softmax")),
    ),
}
OPTIMIZERS = {
    "sgd": SgdOptions(),
    "momentum": SgdOptions(momentum=0.5, l2=1e-3),
    "ng-sgd": NgSgdOptions(rank_in=3, rank_out=2),
    "ng-sgd momentum": NgSgdOptions(rank_in=3, rank_out=2, momentum=0.5, l2=1e-3),
}


@pytest.fixture(autouse=True)
def with_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, layer in TOYS.items():
        monkeypatch.setitem(LAYERS, kind, layer)


class Float64(Float32):
    """The plain twin of the arithmetics: what layers compute in it is held against autograd."""

    dtype = x_dtype = gradient_dtype = torch.float64
    casts = True


def network_of(name: str, seed: int = 1) -> Network:
    made = Network(NETWORKS[name])
    initialize(made, seed)
    return made


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_the_derivative_of_the_loss(name: str) -> None:
    """By differences of the loss in float64, parameter by parameter, and of the input by the layer below."""
    made = network_of(name)
    made.load_parameters(made.parameters + 0.3 * noise(made.num_parameters))
    double = Network(made.layers, made.parameters.double())
    workspace = Workspace(double, 9, Float64()).of(7)
    labels = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(1))
    x = noise(7, 15).double()

    def loss() -> float:
        workspace.x.copy_(x)
        logits = workspace.forward()
        return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))

    loss()
    workspace.grad_outputs[-1].copy_(
        torch.softmax(workspace.activations[-1], 1) - torch.nn.functional.one_hot(labels, 5)
    )
    workspace.backward()
    found = torch.empty(made.num_parameters)
    workspace.gradient(found)
    for i in range(made.num_parameters):
        sides = []
        for change in (1e-5, -2e-5, 1e-5):
            double.parameters[i] += change
            double.parameters_changed()
            sides.append(loss())
        assert found[i] == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-5, abs=1e-6), i


def task() -> tuple[Tensor, Tensor]:
    """Rows whose label is the largest of five sums of three neighbors."""
    x = noise(640, 15)
    return x, x.view(-1, 5, 3).sum(2).argmax(1)


def batches(x: Tensor, labels: Tensor, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    for t in range(count):
        rows = torch.randint(0, len(x), (29 if t % 5 == 4 else 32,), generator=generator)
        yield Batch(x[rows], labels[rows])


def train(
    made: Network, optimizer: Sgd, precision: Precision, steps: int = 200, use_kernels: bool = True, skip: int = 0
) -> Tensor:
    """Losses per frame of the minibatches after the first `skip`."""
    step = EagerStep(Workspace(made, 32, make_arithmetic(precision, CPU, use_kernels=use_kernels)), optimizer)
    found = [step(batch, 0.02)[0] / len(batch.labels) for batch in list(batches(*task(), steps))[skip:]]
    return torch.stack(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["toy", "toy above", "conv wide"])
def test_it_trains_in_float32_and_in_bf16(name: str, optimizer: str) -> None:
    losses = {}
    for precision, kernels in (("float32", False), ("bf16", False), ("bf16", True)):
        made = network_of(name)
        options = OPTIMIZERS[optimizer]
        found = train(made, make_optimizer(options, made), precision, use_kernels=kernels)  # type: ignore[arg-type]
        losses[precision, kernels] = found.view(-1, 20).mean(1)
    plain = losses["float32", False]
    assert plain[-1] < 0.6 * plain[0], "it has to learn, or nothing is compared"
    for found in losses.values():
        torch.testing.assert_close(found, plain, rtol=0.05, atol=0.02)
    assert not torch.equal(plain, losses["bf16", False])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_a_state_to_the_same_bits(optimizer: str) -> None:
    made, options = network_of("toy"), OPTIMIZERS[optimizer]
    first = make_optimizer(options, made)
    train(made, first, "float32", 20)
    parameters = made.parameters.clone()
    state = {name: value.clone() for name, value in first.state_dict().items()}
    expected = train(made, first, "float32", 40, skip=20)
    again = network_of("toy", seed=2)
    second = make_optimizer(options, again)
    train(again, second, "float32", 5)
    again.load_parameters(parameters)
    second.load_state_dict(state)
    assert torch.equal(train(again, second, "float32", 40, skip=20), expected)
    assert torch.equal(again.parameters, made.parameters)


def test_a_state_that_does_not_fit_is_refused() -> None:
    made = network_of("toy")
    momentum, natural = (make_optimizer(OPTIMIZERS[name], made) for name in ("momentum", "ng-sgd"))
    for optimizer, state in (
        (momentum, {}),
        (momentum, {"momentum_buffer": torch.zeros(3)}),
        (momentum, {**momentum.state_dict(), "more": torch.zeros(3)}),
        (momentum, natural.state_dict()),
        (natural, {}),
        (natural, {name: value for name, value in natural.state_dict().items() if name != "preconditioner.0.w"}),
    ):
        with pytest.raises(DataError):
            optimizer.load_state_dict(state)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    made = network_of("toy")
    model = AcousticModel(FeatureConfig(), splice_only(3, 2), made)
    save_model(tmp_path / "final.safetensors", model)
    found = load_model(tmp_path / "final.safetensors").network
    assert found.layers == made.layers and torch.equal(found.parameters, made.parameters)
    again = model_from_config(model_config(model), {"parameters": made.parameters}, Path("checkpoint"))
    assert again.network.layers == made.layers
    config = {**model_config(model), "layers": [layer.config() for layer in (*made.layers[:2], *made.layers[3:-1])]}
    with pytest.raises(DataError, match="parameters is"):
        model_from_config(config, {"parameters": made.parameters}, Path("checkpoint"))
    with pytest.raises(UserError, match="nnet1 has no component for a filters layer"):
        to_nnet1(model)


def test_every_layer_comes_back_from_its_config() -> None:
    for layer in {layer for layers in NETWORKS.values() for layer in layers}:
        assert layer_from_config(layer.config()) == layer


@pytest.mark.parametrize("name", NETWORKS)
def test_memory_and_operations_are_counted(name: str) -> None:
    layers = NETWORKS[name]
    made, frames = Network(layers), 11
    workspace = Workspace(made, frames)
    held = [workspace.x, *(memory for call in workspace.calls for memory in (call.y, call.grad, *call.saved.values()))]
    assert activation_floats(layers) * frames == sum(tensor.numel() for tensor in held)
    assert (
        num_parameters(layers)
        == made.parameters.numel()
        == sum(part.numel() for views in made.views for part in views.values())
    )
    flop = [2 * layer.gemm.rows * layer.gemm.fan_in * layer.gemm.fan_out if layer.gemm else 0 for layer in layers]
    assert training_flop_per_frame(layers) == 3 * sum(flop) - flop[0] > 0
    products = matrix_products(workspace)
    for factors in products:
        matmul_out(*factors)
    shapes = [(left.shape[0], left.shape[1], right.shape[1]) for left, right, _ in products]
    assert sum(2 * a * b * c for a, b, c in shapes) == frames * training_flop_per_frame(layers)


def test_what_natural_gradient_takes_is_counted() -> None:
    options = NgSgdOptions(rank_in=3, rank_out=2)
    made = network_of("toy")
    optimizer = NgSgd(made, options)
    train(made, optimizer, "float32", 1)
    sides = optimizer._memory.sides.values()
    states = sum(one.w.nbytes + one.j.nbytes for one in optimizer.preconditioners)
    states += sum(side.rows.h.nbytes for pair in sides for side in pair)
    rows = sum(inputs.rows.scratch[:, :-1].numel() * 4 for inputs, _ in sides)
    assert states + rows <= options.num_bytes(made.layers, 32) <= 4 * (states + rows)
    assert SgdOptions().num_bytes(made.layers, 32) == 0


def test_bf16_is_checked_on_its_layers() -> None:
    assert bf16_error(network_of("toy"), 32) is None


def test_what_is_no_network_is_refused() -> None:
    for layers, said in (
        ((), "no layers"),
        ((Affine(3, 4, "softmax"), Affine(4, 2)), "layer 0: softmax, which only the last layer can be"),
        ((Filters(15, 5, 2, 4), Affine(23, 2)), "layer 1 reads 23 dims, the one before gives 24"),
    ):
        with pytest.raises(ValueError, match=said):
            check_layers(layers)
    with pytest.raises(ValueError, match="kind of layer 'lstm' found, expected one of affine, conv, "):
        layer_from_config({"kind": "lstm"})


def one_step(made: Network, options: NgSgdOptions, x: Tensor, grad: Tensor, precision: Precision = "float32") -> NgSgd:
    """NG-SGD steps of a network of one layer, from these inputs and output derivatives."""
    optimizer = NgSgd(made, options)
    workspace = Workspace(made, len(x), make_arithmetic(precision, CPU, use_kernels=False))
    for t in range(12):
        workspace.x.copy_(x.roll(t, 0))
        workspace.forward()
        workspace.grad_outputs[-1].copy_(grad.roll(2 * t, 0))
        workspace.backward()
        optimizer.step(workspace, 0.1)
    return optimizer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("patches", "max_change"), [(1, 0.0), (1, 1e-3), (4, 0.0), (4, 1e-3)])
def test_natural_gradient_of_filters_is_that_of_an_affine_layer_on_all_their_rows(
    patches: int, max_change: float, precision: Precision
) -> None:
    """With `patches` times the history and that part of the maximum change, bit for bit."""
    frames, size, filters = 30, 6, 8  # of 8 the rank is 2
    one, other = (
        Network((Filters(patches * size, size, size, filters, "linear"),)),
        Network((Affine(size, filters, "linear"),)),
    )
    initialize(one, 1)
    other.load_parameters(one.parameters)
    options = {"rank_in": 3, "rank_out": 2}
    x, grad = noise(frames, patches * size), noise(frames, patches * filters, seed=2)
    found = one_step(one, NgSgdOptions(**options, max_change_per_sample=max_change), x, grad, precision)
    rows = NgSgdOptions(**options, num_samples_history=patches * 2000.0, max_change_per_sample=max_change / patches)
    optimizer = NgSgd(other, rows)
    workspace = Workspace(other, frames * patches, make_arithmetic(precision, CPU, use_kernels=False))
    for t in range(12):
        workspace.x.copy_(x.roll(t, 0).view(-1, size))
        workspace.forward()
        workspace.grad_outputs[-1].copy_(grad.roll(2 * t, 0).view(-1, filters))
        workspace.backward()
        optimizer.step(workspace, 0.1)
    assert torch.equal(one.parameters, other.parameters)
    for mine, twin in zip(found.preconditioners, optimizer.preconditioners, strict=True):
        assert torch.equal(mine.w, twin.w) and mine.rho == twin.rho and mine.t == twin.t


def test_a_layer_without_a_product_is_limited_too() -> None:
    """Its step changes no more than max_change per frame, times its learning rate coefficient."""
    made = network_of("toy")
    optimizer = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, max_change_per_sample=0.001))
    before = made.views[2]["gain"].clone()
    x, labels = task()
    EagerStep(Workspace(made, 32), optimizer)(Batch(x[:32], labels[:32]), 1e6)
    moved = torch.linalg.vector_norm(made.views[2]["gain"] - before)
    assert 0.0 < moved <= 0.5 * 0.001 * 32 * 1.001


def test_momentum_and_bounds_are_the_layers_own() -> None:
    """The filters have no momentum, the gains stay within their bound, also in the copy in bf16."""
    for precision in ("float32", "bf16"):
        made = network_of("toy")
        optimizer = Sgd(made, SgdOptions(momentum=0.9))
        workspace = Workspace(made, 32, make_arithmetic(precision, CPU))  # type: ignore[arg-type]
        step = EagerStep(workspace, optimizer)
        for batch in batches(*task(), 60):
            step(batch, 0.02)
            buffer, gradient = made.split(optimizer.momentum_buffer), made.split(optimizer.gradient)
            assert torch.equal(buffer[0]["weight"], gradient[0]["weight"])
        assert not torch.equal(buffer[3]["weight"], gradient[3]["weight"])
        largest = made.views[2]["gain"].max()
        assert largest == pytest.approx(1.2)
        labels = random_minibatch(workspace, 5, torch.Generator().manual_seed(1))
        fresh = Workspace(made, 32, workspace.arithmetic)
        fresh.x.copy_(workspace.x)
        assert len(labels) and torch.equal(workspace.forward(), fresh.forward())
