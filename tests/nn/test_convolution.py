"""Convolution and pooling against loops in float64, written from Kaldi's definition, one number at a time."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.nn import convolution
from ddnn.nn.acoustic_model import AcousticModel, to_nnet1
from ddnn.nn.arithmetic import Float32, make_arithmetic
from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling, Pooling
from ddnn.nn.elementwise import Activation
from ddnn.nn.layer import Gemm, Layer, LayerCall, Params
from ddnn.nn.layers import Affine, layer_from_config
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.util.errors import UserError

Array = NDArray[np.float64]


class Float64(Float32):
    dtype = x_dtype = gradient_dtype = torch.float64
    casts = True


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Patches = list[list[int]]  # of each patch the columns that it reads, in the order of a filter's elements


def pieces_read(in_features: int, dim: int, step: int, stride: int) -> Patches:
    """As nnet1 defines them."""
    pieces = range(0, in_features, stride)
    return [[s + first + i for s in pieces for i in range(dim)] for first in range(0, stride - dim + 1, step)]


def grid_read(
    times: int, channels: int, bands: int, time_size: int, band_size: int, filters: int,
    time_step: int = 1, band_step: int = 1, dilation: int = 1, channels_last: bool = False,
) -> Patches:  # fmt: skip
    """By the fields of a convolution over time and bands."""
    found = []
    for t in range(0, times - (time_size - 1) * dilation, time_step):
        for b in range(0, bands - band_size + 1, band_step):
            rows, columns = [t + i * dilation for i in range(time_size)], range(b, b + band_size)
            if channels_last:
                found.append([(m * bands + n) * channels + c for m in rows for n in columns for c in range(channels)])
            else:
                found.append([(m * channels + c) * bands + n for m in rows for c in range(channels) for n in columns])
    return found


def reads(layer: Convolution) -> Patches:
    return grid_read(*list(asdict(layer).values())[:10])


def twin_convolution(patches: Patches, w: Array, b: Array, x: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """y, dx, dW, db, for inputs x and derivatives d of the output."""
    y = np.zeros((len(x), len(patches) * len(w)))
    dx, dw, db = np.zeros_like(x), np.zeros_like(w), np.zeros_like(b)
    for n in range(len(x)):
        for p, columns in enumerate(patches):
            for f in range(len(w)):
                out = p * len(w) + f
                y[n, out] += b[f]
                db[f] += d[n, out]
                for k, c in enumerate(columns):
                    y[n, out] += w[f, k] * x[n, c]
                    dx[n, c] += w[f, k] * d[n, out]
                    dw[f, k] += d[n, out] * x[n, c]
    return y, dx, dw, db


def members(layer: Pooling) -> list[list[int]]:
    """Of each output column the columns of its pool."""
    found = []
    for t in range(0, layer.times - layer.time_size + 1, layer.time_step):
        for b in range(0, layer.bands - layer.band_size + 1, layer.band_step):
            cells = [(t + i) * layer.bands + b + j for i in range(layer.time_size) for j in range(layer.band_size)]
            found += [[cell * layer.channels + c for cell in cells] for c in range(layer.channels)]
    return found


def twin_pooling(layer: Pooling, x: Array, d: Array) -> tuple[Array, Array]:
    """y and dx, for inputs x and derivatives d of the output."""
    pools = members(layer)
    y, dx, times_read = np.zeros((len(x), len(pools))), np.zeros_like(x), np.zeros(x.shape[1])
    for out, columns in enumerate(pools):
        times_read[columns] += 1
        for n in range(len(x)):
            values = [x[n, c] for c in columns]
            largest = layer.kind.startswith("max")
            y[n, out] = max(-1e20, *values) if largest else sum(values) / len(values)
            for c in columns:
                dx[n, c] += d[n, out] * (x[n, c] == y[n, out] if largest else 1 / len(values))
    return y, dx / times_read


def run(layer: Layer, x: Tensor, d: Tensor, parameters: Tensor, a: Float32 | None = None) -> tuple[Tensor, ...]:
    """y, dx and the flat gradient of one layer, in float64 or another arithmetic."""
    a = a or Float64()
    flat = parameters.to(a.dtype)
    p = Params(layer.views(flat), layer.views(parameters))
    saved = {name: torch.full((len(x), *shape), math.nan, dtype=a.dtype) for name, shape in layer.saved.items()}
    x, grad = x.to(a.dtype), d.to(a.dtype).clone()
    y, grad_x = torch.full((len(x), layer.output_dim), math.nan, dtype=a.dtype), torch.full_like(x, math.nan)
    call = LayerCall(layer, a, p, x, y, grad, grad_x, saved)
    layer.forward(call)
    layer.backward(call)
    gradient = torch.full((layer.num_parameters,), math.nan, dtype=a.gradient_dtype)
    if layer.num_parameters:
        layer.gradient(call, layer.views(gradient))
    layer.backward(call._replace(grad_x=None))  # the first layer's
    return y, grad_x, gradient


def convolutions() -> st.SearchStrategy[tuple[Convolution, Patches]]:
    """Pieces, patches, values of a patch and its step, filters: overlapping, side by side and with gaps between."""

    def make(n: tuple[int, ...]) -> tuple[Convolution, Patches]:
        stride = n[2] + (n[1] - 1) * n[3]
        sizes = (n[0] * stride, n[2], n[3], stride)
        return Convolution.of_pieces(*sizes, n[4]), pieces_read(*sizes)

    return st.tuples(*(st.integers(1, 4) for _ in range(5))).map(make)


@st.composite
def convolutions2d(draw: st.DrawFn) -> tuple[Convolution, Patches]:
    count, size = st.integers(1, 3), st.integers(1, 3)
    (times, time_size, time_step, dilation), (bands, band_size, band_step) = (
        [draw(count), *(draw(size) for _ in range(n))] for n in (3, 2)
    )
    length = (time_size - 1) * dilation + 1 + (times - 1) * time_step, band_size + (bands - 1) * band_step
    sizes = (length[0], draw(size), length[1], time_size, band_size, draw(size))
    fields = (*sizes, time_step, band_step, dilation, draw(st.booleans()))
    return Convolution(*fields), grid_read(*fields)


@given(st.one_of(convolutions(), convolutions2d()), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_a_convolution_is_its_definition(case: tuple[Convolution, Patches], frames: int, seed: int) -> None:
    layer, patches = case
    x, d = noise(frames, layer.input_dim, seed=seed).double(), noise(frames, layer.output_dim, seed=seed + 1).double()
    parameters = noise(layer.num_parameters, seed=seed + 2).double()
    w, b = layer.views(parameters).values()
    expected = twin_convolution(patches, *(t.numpy() for t in (w, b, x, d)))
    y, grad_x, gradient = run(layer, x, d, parameters)
    for found, twin in zip((y, grad_x, *layer.views(gradient).values()), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), twin, rtol=1e-12, atol=1e-12)


@st.composite
def pooling_layers(draw: st.DrawFn, dims: int) -> tuple[int, ...]:
    """Fields of a pooling layer over one axis or two, whose steps are at most the sizes."""
    sizes = [draw(st.integers(1, 5 if dims == 1 else 3)) for _ in range(dims)]
    steps = [draw(st.integers(1, size)) for size in sizes]
    lengths = [n + (draw(st.integers(1, 4)) - 1) * step for n, step in zip(sizes, steps, strict=True)]
    channels = draw(st.integers(1, 3))
    return (lengths[0] * channels, *sizes, *steps, channels) if dims == 1 else (*lengths, channels, *sizes, *steps)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("kind", [MaxPooling, AveragePooling])
@given(data=st.data(), frames=st.integers(1, 3), seed=st.integers(0, 2**31), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_pooling_is_its_definition(
    kind: Any, dims: int, data: st.DataObject, frames: int, seed: int, ties: bool
) -> None:
    fields = data.draw(pooling_layers(dims))
    layer: Pooling = kind(*fields) if dims == 2 else kind.of_patches(*fields)
    x, d = noise(frames, layer.input_dim, seed=seed).double(), noise(frames, layer.output_dim, seed=seed + 1).double()
    x = x.round() if ties else x
    y, grad_x, _ = run(layer, x, d, torch.empty(0))
    for found, twin in zip((y, grad_x), twin_pooling(layer, x.numpy(), d.numpy()), strict=True):
        np.testing.assert_allclose(found.numpy(), twin, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layer", [Convolution.of_pieces(40, 3, 1, 10, 4), Convolution(7, 3, 6, 3, 3, 4, channels_last=True)]
)
def test_blocks_of_frames_make_no_difference(layer: Convolution, monkeypatch: pytest.MonkeyPatch) -> None:
    x, d, parameters = noise(9, layer.input_dim), noise(9, layer.output_dim), noise(layer.num_parameters)
    expected = run(layer, x, d, parameters)[1]
    for frames in (4, 0):
        monkeypatch.setattr(convolution, "BLOCK", frames * layer.patches * layer.fan_in)
        torch.testing.assert_close(run(layer, x, d, parameters)[1], expected, rtol=1e-12, atol=1e-12)


def test_all_of_the_time_is_a_convolution_along_frequency() -> None:
    """Bit for bit: streams and frame offsets are alike for it, and so are the bands and filters below."""
    assert Convolution.of_pieces(60, 3, 1, 10, 4) == Convolution(2, 3, 10, 2, 3, 4)
    assert Convolution.of_pieces(60, 9, 3, 30, 4) == Convolution(2, 3, 10, 2, 3, 4, channels_last=True)


def test_a_tdnn_splices_within_the_network() -> None:
    """The frames t-1 to t+1 of the features, then of the layer below t-3, t and t+3."""
    below, above = (
        Convolution(11, 1, 5, 3, 5, 4),
        Convolution(9, 4, 1, 3, 1, 6, time_dilation=3, channels_last=True),
    )
    network = Network((below, Activation(below.output_dim, "tanh"), above))
    network.load_parameters(noise(network.num_parameters))
    workspace = Workspace(network, 1)
    workspace.x.copy_(noise(1, 55))
    found = workspace.forward().view(3, 6)
    (w, b), _, (w2, b2) = (tuple(views.values()) for views in network.views)
    features = workspace.x.view(11, 5)
    hidden = [torch.tanh(w @ features[t - 1 : t + 2].flatten() + b) for t in range(1, 10)]
    for i, t in enumerate((3, 4, 5)):
        spliced = torch.cat([hidden[t - 3], hidden[t], hidden[t + 3]])
        torch.testing.assert_close(found[i], w2 @ spliced + b2, rtol=1e-5, atol=1e-5)


def test_a_maximum_is_never_below_a_bound() -> None:
    y, grad_x, _ = run(
        MaxPooling.of_patches(2, 2, 2, 1),
        torch.tensor([[-1e30, -2e20], [-3.0, -2e20]]),
        torch.ones(2, 1),
        torch.empty(0),
    )
    assert y.tolist() == [[-1e20], [-3.0]] and grad_x.tolist() == [[0.0, 0.0], [1.0, 0.0]]


LAYERS = (
    Convolution.of_pieces(30, 3, 1, 10, 4),
    Convolution.of_pieces(30, 5, 5, 30, 3),
    Convolution.of_pieces(12, 4, 2, 12, 3),
    Convolution.of_pieces(6, 6, 1, 6, 5),
    MaxPooling.of_patches(24, 3, 3, 4),
    MaxPooling.of_patches(28, 4, 3, 4),
    AveragePooling.of_patches(24, 2, 2, 4),
    Convolution(7, 2, 6, 3, 3, 4, 2, 1),
    Convolution(7, 2, 6, 3, 3, 4, 1, 3, 2, True),
    MaxPooling(4, 6, 3, 2, 3, 2, 3),
    AveragePooling(5, 6, 3, 3, 2, 1, 2),
)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_they_compute_in_float32_and_bf16(layer: Layer, precision: Any) -> None:
    """From the same rounded numbers, within a few roundings."""
    x, d = (noise(9, dim, seed=dim).bfloat16().float() for dim in (layer.input_dim, layer.output_dim))
    parameters = noise(layer.num_parameters).bfloat16().float()
    bound = 2e-5 if precision == "float32" else 0.04
    for kernels in (False, True):
        found = run(layer, x, d, parameters, make_arithmetic(precision, torch.device("cpu"), use_kernels=kernels))
        for one, expected in zip(found, run(layer, x, d, parameters), strict=True):
            scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
            torch.testing.assert_close(one.double(), expected, rtol=bound, atol=bound * scale)


def step_once(layer: Convolution, options: SgdOptions, steps: int = 3) -> list[Tensor]:
    """The parameters before and after each of some steps of SGD at 0.01, from random inputs and derivatives."""
    network = Network((layer,))
    initialize(network, 1)
    optimizer, workspace = Sgd(network, options), Workspace(network, 7)
    found = [network.parameters.clone()]
    for t in range(steps):
        workspace.x.copy_(noise(7, layer.input_dim, seed=t))
        workspace.forward()
        workspace.grad_outputs[-1].copy_(noise(7, layer.output_dim, seed=t + 9))
        workspace.backward()
        optimizer.step(workspace, 0.01)
        found.append(network.parameters.clone())
    return found


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_step_has_rates_and_a_largest_norm_but_neither_momentum_nor_decay(max_norm: float) -> None:
    layer = Convolution.of_pieces(30, 3, 1, 10, 6, 0.7, 0.3, max_norm, weight_stddev=0.2)
    before, *after = step_once(layer, SgdOptions(momentum=0.9, l2=0.1))
    w, b = (part.double().numpy() for part in layer.views(before).values())
    limited = 0
    for t, found in enumerate(after):
        x, d = (noise(7, dim, seed=s).double().numpy() for dim, s in ((30, t), (48, t + 9)))
        _, _, dw, db = twin_convolution(reads(layer), w, b, x, d)
        w, b = w - 0.01 * 0.7 * dw, b - 0.01 * 0.3 * db
        for row in w:
            if max_norm and (norm := np.sqrt((row**2).sum())) > max_norm:
                row *= max_norm / norm
                limited += 1
        for part, twin in zip(layer.views(found).values(), (w, b), strict=True):
            np.testing.assert_allclose(part.numpy(), twin, atol=2e-6)
    assert 0 < limited < 18 if max_norm else limited == 0


def test_one_patch_is_an_affine_layer() -> None:
    """Bit for bit in plain SGD."""
    made = [Network((layer,)) for layer in (Convolution.of_pieces(12, 4, 1, 4, 5), Affine(12, 5, "linear"))]
    initialize(made[0], 3)
    made[1].load_parameters(made[0].parameters)
    for network in made:
        optimizer, workspace = Sgd(network), Workspace(network, 8)
        for t in range(5):
            workspace.x.copy_(noise(8, 12, seed=t))
            workspace.forward()
            workspace.grad_outputs[-1].copy_(workspace.activations[-1])
            workspace.backward()
            optimizer.step(workspace, 0.02)
    assert torch.equal(made[0].parameters, made[1].parameters)


def natural_steps(network: Network, options: NgSgdOptions, x: Tensor, d: Tensor, precision: Any, lr: float) -> NgSgd:
    """NG-SGD on the minibatches x, with the output derivatives d, both (minibatches, rows, columns)."""
    optimizer = NgSgd(network, options)
    workspace = Workspace(network, x.shape[1], make_arithmetic(precision, torch.device("cpu"), use_kernels=False))
    for inputs, derivatives in zip(x, d, strict=True):
        workspace.x.copy_(inputs)
        workspace.forward()
        workspace.grad_outputs[-1].copy_(derivatives)
        workspace.backward()
        optimizer.step(workspace, lr)
    return optimizer


def twin_layers(layer: Convolution) -> tuple[Network, Network]:
    """The convolution, and an affine layer of the same parameters for its rows."""
    made = Network((layer,)), Network((Affine(layer.fan_in, layer.filters, "linear"),))
    initialize(made[0], 3)
    made[1].load_parameters(made[0].parameters)
    return made


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("max_change", [0.0, 1e-3])
@pytest.mark.parametrize(
    "layer",
    [
        Convolution.of_pieces(12, 4, 1, 4, 9),
        Convolution.of_pieces(30, 3, 1, 10, 9),
        Convolution.of_pieces(24, 6, 6, 24, 9),
    ],
)
def test_natural_gradient_is_that_of_an_affine_layer_on_all_rows(
    layer: Convolution, max_change: float, precision: Any
) -> None:
    """Bit for bit in inputs, gammas, kappa and state, with P times the history and a P-th of the largest change; also
    without momentum and weight decay. One patch is an affine layer as it is."""
    patches, (made, other) = layer.patches, twin_layers(layer)
    x, d = noise(13, 11, layer.input_dim), noise(13, 11, layer.output_dim, seed=2)
    rows = x[..., [c for columns in reads(layer) for c in columns]].view(13, 11 * patches, layer.fan_in)
    options = {"rank_in": 4, "rank_out": 2}
    found = natural_steps(
        made, NgSgdOptions(0.5, 0.1, max_change_per_sample=max_change, **options), x, d, precision, 0.1
    )  # type: ignore[arg-type]
    options |= {"num_samples_history": patches * 2000.0, "max_change_per_sample": max_change / patches}
    twin = natural_steps(other, NgSgdOptions(**options), rows, d.view(13, -1, layer.filters), precision, 0.1)  # type: ignore[arg-type]
    assert torch.equal(made.parameters, other.parameters)
    for name, state in twin.state_dict().items():
        assert torch.equal(found.state_dict()[name], state), name


def test_natural_gradient_does_not_depend_on_how_often_rows_are_there() -> None:
    """As the history is in frames: P patches that read and want the same are one patch of P times the derivative."""
    layer, x, d = Convolution.of_pieces(24, 6, 6, 24, 9), noise(40, 17, 6), noise(40, 17, 9, seed=2)
    x, d = x * torch.arange(1.0, 7.0), d * torch.arange(1.0, 10.0)
    made, other = twin_layers(layer)
    options = NgSgdOptions(rank_in=3, rank_out=2, max_change_per_sample=0.0)
    start = made.parameters.clone()
    natural_steps(made, options, x.repeat(1, 1, 4), d.repeat(1, 1, 4), "float32", 1e-3 / 4)
    natural_steps(other, options, x, d, "float32", 1e-3)
    moved = (other.parameters - start).norm()
    assert moved > 0.1 and (made.parameters - other.parameters).norm() < 1e-3 * moved


def test_few_filters_have_a_low_rank() -> None:
    ranks = [
        NgSgdOptions().sides(Gemm(rows, 9, fan_out))[1][1] for rows, fan_out in ((8, 32), (8, 33), (1, 32), (8, 2))
    ]
    assert ranks == [8, 80, 80, 1]
    assert NgSgdOptions(rank_out=3).sides(Gemm(8, 9, 32))[1] == (32, 3)


def test_a_long_history_of_many_patches() -> None:
    NgSgd(Network((Convolution.of_pieces(24, 6, 6, 24, 9),)), NgSgdOptions(num_samples_history=1e6))


def test_parameters_begin_as_asked() -> None:
    network = Network((Convolution.of_pieces(400, 5, 1, 10, 500, weight_stddev=0.02, bias_mean=-1.0, bias_range=4.0),))
    initialize(network, 1)
    weight, bias = network.views[0].values()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02) and abs(float(weight.mean())) < 2e-4
    assert -3.0 <= float(bias.min()) < -2.9 and 0.9 < float(bias.max()) <= 1.0
    assert abs(float(bias.mean()) + 1.0) < 0.15


def test_gaps_are_not_read() -> None:
    """Their derivative is 0."""
    layer = Convolution.of_pieces(12, 2, 5, 12, 3)
    _, grad_x, _ = run(layer, noise(4, 12), noise(4, 9), noise(layer.num_parameters))
    assert ((grad_x == 0).all(0)).tolist() == [False, False, True, True, True] * 2 + [False, False]


PIECES, PATCHES, AVERAGES = Convolution.of_pieces, MaxPooling.of_patches, AveragePooling.of_patches
SIZES: list[tuple[Any, tuple[Any, ...], str]] = [
    (PIECES, (30, 3, 1, 8, 4), "patch_stride 8 does not divide 30 inputs; 6 and 10 do"),
    (PIECES, (30, 3, 1, 31, 4), "patch_stride 31 does not divide 30 inputs; 30 do"),
    (PIECES, (30, 11, 1, 10, 4), "patch 11 does not fit into 10 bands; 1 to 10 do"),
    (PIECES, (1, 2, 1, 1, 4), "patch 2 does not fit into 1 band; 1 does"),
    (
        PIECES,
        (40, 9, 2, 40, 4),
        "patch 9 with step 2 leaves 1 of 40 bands over; patch 8 and 10, or step 1 and 31 fit",
    ),
    (PIECES, (40, 1, 2, 40, 4), "leaves 1 of 40 bands over; patch 2, or step 1 and 3 fit"),
    (PIECES, (0, 3, 1, 10, 4), "in_features 0, expected 1 to 1000000"),
    (PIECES, (30, 3.0, 1, 10, 4), "patch_dim 3.0"),
    (PIECES, (30, True, 1, 10, 4), "patch_dim True"),
    (PIECES, (30, 3, -1, 10, 4), "patch_step -1"),
    (PIECES, (30, 3, 1, 10, "4"), "filters '4'"),
    (PIECES, (10_000, 1, 1, 10_000, 1000), "outputs 10000000"),
    (PIECES, (30, 3, 1, 10, 4, math.nan), "expected finite"),
    (PIECES, (30, 3, 1, 10, 4, 1.0, 1.0, 0.0, 0.1, math.inf), "expected finite"),
    (PATCHES, (33 * 4, 4, 4, 4), "pool 4 does not divide 33 patches; 3 and 11 do"),
    (
        PATCHES,
        (33 * 4, 4, 2, 4),
        "pool 4 with pool_step 2 leaves 1 of 33 patches over; pool 3 and 5, or pool_step 1 and",
    ),
    (PATCHES, (33 * 4, 34, 4, 4), "pool 34 does not fit into 33 patches; 1 to 33 do"),
    (AVERAGES, (33, 3, 3, 4), "pool_stride 4 does not divide 33 inputs; 3 and 11 do"),
    (AVERAGES, (40, 3, 4, 4), "pool_step 4 would skip patches between pools of 3; 1 to 3 do not"),
    (AVERAGES, (40, 3, None, 4), "band_step None"),
    (Convolution, (7, 2, 6, 8, 3, 4), "patch.time 8 does not fit into 7 frames; 1 to 7 do"),
    (Convolution, (7, 2, 6, 3, 3, 4, 1, 1, 4), "patch.time 3 with dilation 4 spans 9 of 7 frames"),
    (
        Convolution,
        (7, 2, 6, 3, 3, 4, 3),
        "patch.time 3 with step.time 3 leaves 1 of 7 frames over; patch.time 1 and 4, or",
    ),
    (Convolution, (7, 2, 6, 3, 3, 4, 1, 2), "patch.bands 3 with step.bands 2 leaves 1 of 6 bands over"),
    (Convolution, (7, 2, 6, 3, 3, 4, 1, 1, 1, 1), "channels_last 1, expected true or false"),
    (Convolution, (7, 2, 6, 3, 3, 4, 1, 1, 1, True, math.nan), "expected finite"),
    (Convolution, (1000, 1000, 1000, 1, 1, 1), "inputs 1000000000, expected 1 to 1000000"),
    (MaxPooling, (5, 6, 3, 2, 3, 2, 3), "pool.time 2 does not divide 5 patches; 1 and 5 do"),
    (MaxPooling, (4, 6, 3, 2, 3, 2, 4), "pool_step.bands 4 would skip patches between pools of 3; 1 to 3 do not"),
    (AveragePooling, (4, 6, 0, 2, 3, 2, 3), "channels 0"),
]


@pytest.mark.parametrize(("kind", "fields", "said"), SIZES)
def test_sizes_that_do_not_fit_are_refused(kind: Any, fields: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        kind(*fields)


@pytest.mark.parametrize(
    "layer", [Convolution(7, 2, 6, 3, 3, 4), MaxPooling(4, 6, 3, 2, 3, 2, 3)], ids=lambda layer: layer.kind
)
def test_nnet1_has_nothing_over_time(layer: Layer) -> None:
    model = AcousticModel(FeatureConfig(), splice_only(layer.input_dim, 0), Network((layer,)))
    with pytest.raises(UserError, match=r"cannot be a Kaldi nnet1 network: nnet1 has no component for .* over time"):
        to_nnet1(model)


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (
            {
                "kind": "conv",
                "in_features": 30,
                "patch_dim": 3,
                "patch_step": 1,
                "patch_stride": 10,
                "filters": 4,
                "max_norm": 2.0,
            },
            Convolution.of_pieces(30, 3, 1, 10, 4, max_norm=2.0),
        ),
        (
            {"kind": "conv2d", "times": 7, "channels": 2, "bands": 6, "time_size": 3, "band_size": 3, "filters": 4},
            Convolution(7, 2, 6, 3, 3, 4),
        ),
        (
            {"kind": "max-pool", "in_features": 24, "pool_size": 3, "pool_step": 3, "pool_stride": 4},
            MaxPooling.of_patches(24, 3, 3, 4),
        ),
        (
            {"kind": "average-pool2d"} | asdict(AveragePooling(4, 6, 3, 2, 3, 2, 3)),
            AveragePooling(4, 6, 3, 2, 3, 2, 3),
        ),
    ],
)
def test_layers_of_earlier_model_files_are_read(config: dict[str, Any], layer: Layer) -> None:
    assert layer_from_config(config) == layer == layer_from_config(layer.config())
