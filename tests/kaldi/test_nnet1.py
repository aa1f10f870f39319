"""nnet1 networks: Kaldi's files written again byte for byte, Kaldi's posteriors from a twin, damaged files refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kaldi_files import nnet1_bytes

from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.nnet1 import (
    MAX_DEPTH,
    Activation,
    AddShift,
    AffineTransform,
    AveragePoolingComponent,
    Component,
    ConvolutionalComponent,
    Copy,
    Dropout,
    LengthNormComponent,
    MaxPoolingComponent,
    ParallelComponent,
    ParametricRelu,
    RbmComponent,
    Rescale,
    Splice,
)
from ddnn.kaldi.nnet1_file import read_nnet1, write_nnet1
from ddnn.util.errors import DataError, UserError

RNG = np.random.default_rng(7)
ALL_COMPONENTS: tuple[Component, ...] = (
    Splice((-1, 0, 3), 2),
    AddShift(RNG.normal(size=6).astype(np.float32), 0.0),
    Rescale(RNG.normal(size=6).astype(np.float32), 0.5),
    RbmComponent("gauss", "bern", *(RNG.normal(size=size).astype(np.float32) for size in ((5, 6), 6, 5))),
    AffineTransform(RNG.normal(size=(4, 5)).astype(np.float32), RNG.normal(size=4).astype(np.float32), 1.0, 0.1, 2.5),
    Activation("relu", 4),
    AffineTransform(RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=3).astype(np.float32)),
    Activation("tanh", 3),
    Activation("sigmoid", 3),
    Activation("softmax", 3),
)
NESTED: tuple[Component, ...] = (
    Copy((11, 0, *range(1, 11), 3), 12),
    ParallelComponent(
        (
            (
                ConvolutionalComponent(
                    12, 2, 1, 4, RNG.normal(size=(5, 6)).astype(np.float32), RNG.normal(size=5).astype(np.float32), 0.5
                ),
                MaxPoolingComponent(15, 2, 1, 5),
                ParametricRelu(*RNG.normal(size=(2, 10)).astype(np.float32), 1.0, 0.25),
            ),
            (ParallelComponent(((Activation("relu", 1),),)),),
        )
    ),
    Dropout(11, 0.25),
    LengthNormComponent(11),
    AveragePoolingComponent(11, 11, 3, 1),
)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


ACTIVATIONS = {"sigmoid": sigmoid, "tanh": np.tanh, "softmax": softmax, "relu": lambda x: np.maximum(x, 0)}


def forward(components: tuple[Component, ...], x: np.ndarray) -> np.ndarray:
    """The float64 twin: one utterance, (frames, input_dim) -> (frames, output_dim)."""
    for component in components:
        if isinstance(component, AffineTransform):
            x = x @ component.weight.T.astype(np.float64) + component.bias
        elif isinstance(component, Activation):
            x = ACTIVATIONS[component.kind](x)
        elif isinstance(component, Splice):
            frames = np.arange(len(x))
            x = np.hstack([x[np.clip(frames + offset, 0, len(x) - 1)] for offset in component.offsets])
        elif isinstance(component, AddShift):
            x = x + component.shift
        elif isinstance(component, Rescale):
            x = x * component.scale
        else:
            x = x @ component.weight.T.astype(np.float64) + component.hidden_bias
            x = sigmoid(x) if component.hidden == "bern" else x
        assert x.shape[1] == component.output_dim
    return x


def read_bytes(data: bytes, path: Path) -> tuple[Component, ...]:
    path.write_bytes(data)
    return read_nnet1(path)


def bytes_of(components: tuple[Component, ...], path: Path, *, binary: bool) -> bytes:
    path.write_bytes(nnet1_bytes(components, binary=binary))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("source", "count"),
    [("golden/nnet1", 11), ("golden/conv", 61), ("an4/kaldi_nnet1", 3), ("fsdd/kaldi_nnet1", 2)],
)
def test_import_then_export_changes_no_byte(
    from_kaldi: Callable[[str], Path], tmp_path: Path, source: str, count: int
) -> None:
    networks = [path for path in sorted(from_kaldi(source).rglob("*")) if path.suffix in (".nnet", ".dbn")]
    assert len(networks) == count
    for path in networks:
        if path.name in ("bare.txt.nnet", "reordered.txt.nnet"):  # written by hand
            continue
        kaldi = path.read_bytes()
        components = read_nnet1(path)
        assert bytes_of(components, tmp_path / "out.nnet", binary=kaldi[:1] == b"\0") == kaldi, path.name


def test_text_and_binary_say_the_same(golden: Path) -> None:
    for name in ("init", "trained_a", "trained_b", "trained_c"):
        binary, text = read_nnet1(golden / "nnet1" / f"{name}.nnet"), read_nnet1(golden / "nnet1" / f"{name}.txt.nnet")
        assert [type(component) for component in binary] == [AffineTransform, Activation] * 3
        for one, other in zip(binary, text, strict=True):
            if isinstance(one, AffineTransform) and isinstance(other, AffineTransform):
                np.testing.assert_allclose(one.weight, other.weight, rtol=1e-6)
                np.testing.assert_allclose(one.bias, other.bias, rtol=1e-6)
                assert one.weight.dtype == one.bias.dtype == other.weight.dtype == other.bias.dtype == np.float32
                assert one.bias_learn_rate_coef == pytest.approx(other.bias_learn_rate_coef)
            else:
                assert one == other
        assert binary[4].bias_learn_rate_coef == pytest.approx(0.1)


@pytest.mark.parametrize("init", ["init.nnet", "init.txt.nnet"])
def test_kaldis_posteriors(golden: Path, init: str) -> None:
    nnet1 = golden / "nnet1"
    transform, network = read_nnet1(nnet1 / "feature_transform.nnet"), read_nnet1(nnet1 / init)
    features = dict(iterate_matrices(nnet1 / "feats.ark"))
    posteriors, activations = (
        dict(iterate_matrices(nnet1 / "init.posterior.txt")),
        dict(iterate_matrices(nnet1 / "init.presoftmax.txt")),
    )
    assert len(features) == 3
    assert features.keys() == posteriors.keys() == activations.keys()
    for utterance, feature in features.items():
        spliced = forward(transform, feature.astype(np.float64))
        np.testing.assert_allclose(forward(network[:-1], spliced), activations[utterance], atol=1e-5, rtol=0)
        np.testing.assert_allclose(forward(network, spliced), posteriors[utterance], atol=1e-6, rtol=0)


def test_an4s_network(kaldi_nnet1: Path) -> None:
    transform = read_nnet1(kaldi_nnet1 / "feature_transform.nnet")
    network = read_nnet1(kaldi_nnet1 / "rbm_ce.nnet")
    assert transform[0] == Splice(tuple(range(-5, 6)), 40)
    dims = [
        (component.input_dim, component.output_dim) for component in network if isinstance(component, AffineTransform)
    ]
    assert dims == [(440, 512), (512, 512), (512, 512), (512, 512), (512, 616)]


@pytest.mark.parametrize("binary", [True, False])
def test_every_component_round_trips(tmp_path: Path, binary: bool) -> None:
    path = tmp_path / "a nèt.nnet"
    data = bytes_of(ALL_COMPONENTS, path, binary=binary)
    again = read_nnet1(path)
    assert [type(component) for component in again] == [type(component) for component in ALL_COMPONENTS]
    for one, other in zip(again, ALL_COMPONENTS, strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(other).items():
            if isinstance(value, np.ndarray | float):
                np.testing.assert_allclose(getattr(one, name), value, rtol=1e-7 if binary else 1e-6)
            else:
                assert getattr(one, name) == value
    assert bytes_of(again, path, binary=binary) == data
    features = RNG.normal(size=(6, 2))
    np.testing.assert_allclose(forward(again, features), forward(ALL_COMPONENTS, features), rtol=1e-4)


def numbers(components: tuple[Component, ...]) -> Iterator[Any]:
    """All numbers of a network, those of nested ones too."""
    for component in components:
        for value in vars(component).values():
            if isinstance(component, ParallelComponent):
                yield from (n for network in value for n in numbers(network))
            elif not isinstance(value, str):
                yield value


@pytest.mark.parametrize("binary", [True, False])
def test_a_network_in_a_network_round_trips(tmp_path: Path, binary: bool) -> None:
    path = tmp_path / "nested.nnet"
    data = bytes_of(NESTED, path, binary=binary)
    again = read_nnet1(path)
    assert list(map(type, again)) == list(map(type, NESTED))
    for one, other in zip(numbers(again), numbers(NESTED), strict=True):
        np.testing.assert_allclose(one, other, rtol=0 if binary else 1e-6)
    assert bytes_of(again, path, binary=binary) == data
    first = again[1].networks[0] if isinstance(again[1], ParallelComponent) else ()
    assert [component.output_dim for component in first] == [15, 10, 10]


def test_optional_tokens_in_any_order_and_none_at_all(golden: Path, tmp_path: Path) -> None:
    tokens, text = golden / "conv/tokens", tmp_path / "again.nnet"
    assert (
        bytes_of(read_nnet1(tokens / "bare.txt.nnet"), text, binary=False)
        == (golden / "conv/conv_max/init.txt.nnet").read_bytes()
    )
    reordered = read_nnet1(tokens / "reordered.txt.nnet")
    assert bytes_of(reordered, text, binary=True) == (tokens / "reordered.nnet").read_bytes()
    first = reordered[0]
    assert isinstance(first, ConvolutionalComponent)
    assert (first.learn_rate_coef, first.bias_learn_rate_coef, first.max_norm) == (0.5, 0.25, 2.5)


def test_copy_counts_from_0_in_memory_and_from_1_in_files(golden: Path) -> None:
    copy = read_nnet1(golden / "conv/copy_cut/init.nnet")[2]
    assert copy == Copy((11, 10, 1, 3, 5, 7, 9, 8, 9, 10, 11, 0, 2, 4, 6, 0), 12)


def test_dropout_of_older_and_newer_kaldis(tmp_path: Path) -> None:
    rates = ("<DropoutRate> 0.3 ", "<DropoutRetention> 0.7 ", "<DropoutRetention> 0.7 <!EndOfComponent> ", "", "\n")
    text = "<Nnet> " + "".join(f"<Dropout> 2 2 {rate}" for rate in rates) + "<dropout> 2 2 </Nnet> "
    found = read_bytes(text.encode(), tmp_path / "dropout.nnet")
    assert [np.float32(c.rate) for c in found if isinstance(c, Dropout)] == [np.float32(0.3)] * 3 + [0.5] * 3
    written = bytes_of(found[1:2], tmp_path / "again.nnet", binary=False)
    assert written == b"<Nnet> \n<Dropout> 2 2 \n<DropoutRate> 0.3 <!EndOfComponent> \n</Nnet> \n"


@pytest.mark.parametrize(("alpha", "beta", "rate"), [(1, 0, 0), (1, 0.1, 0), (0.9, 0, 0), (1, 0, 0.5)])
def test_only_a_plain_relu_is_an_activation(tmp_path: Path, alpha: float, beta: float, rate: float) -> None:
    text = f"<Nnet> <ParametricRelu> 2 2 <BetaLearnRateCoef> {rate} [ 1 {alpha} ]\n [ {beta} 0 ]\n</Nnet> "
    (found,) = read_bytes(text.encode(), tmp_path / "relu.nnet")
    if (alpha, beta, rate) == (1, 0, 0):
        assert found == Activation("relu", 2)
    else:
        assert isinstance(found, ParametricRelu)
        np.testing.assert_array_equal([found.alpha, found.beta], np.array([[1, alpha], [beta, 0]], np.float32))
        assert (found.alpha_learn_rate_coef, found.beta_learn_rate_coef) == (0, rate)


def test_networks_in_networks_have_a_limit(tmp_path: Path) -> None:
    network: tuple[Component, ...] = (Activation("tanh", 2),)
    for _ in range(MAX_DEPTH):
        network = (ParallelComponent((network,)),)
    for binary in (True, False):
        data = bytes_of(network, tmp_path / "deep.nnet", binary=binary)
        assert bytes_of(read_nnet1(tmp_path / "deep.nnet"), tmp_path / "again.nnet", binary=binary) == data
    opened = (
        b"<ParallelComponent> \x04\1\0\0\0\x04\1\0\0\0<NestedNnetCount> \x04\1\0\0\0<NestedNnet> \x04\1\0\0\0<Nnet> "
    )
    with pytest.raises(DataError, match="networks nested at most 8 deep"):
        read_bytes(b"\0B<Nnet> " + opened * 1000, tmp_path / "deep.nnet")
    for _ in range(1000):
        network = (ParallelComponent((network,)),)
    with pytest.raises(DataError, match="networks nested more than 8 deep"):
        write_nnet1(tmp_path / "deeper.nnet", network)
    assert not (tmp_path / "deeper.nnet").exists()


def test_files_of_older_kaldis(tmp_path: Path) -> None:
    text = b"<Nnet>\n<affinetransform> 2 1\n [\n 1\n 2 ]\n [ 3 4 ]\n<sigmoid> 2 2\n</Nnet>\n"
    affine, activation = read_bytes(text, tmp_path / "old.nnet")
    assert isinstance(affine, AffineTransform)
    np.testing.assert_array_equal(affine.weight, [[1], [2]])
    np.testing.assert_array_equal(affine.bias, [3, 4])
    assert (affine.learn_rate_coef, affine.bias_learn_rate_coef, affine.max_norm) == (1, 1, 0)
    assert activation == Activation("sigmoid", 2)
    doubles = b"\0B<Nnet> <Rescale> \x04\1\0\0\0\x04\1\0\0\0DV \x04\1\0\0\0" + np.float64(0.1).tobytes() + b"</Nnet> "
    (rescale,) = read_bytes(doubles, tmp_path / "double.nnet")
    assert isinstance(rescale, Rescale)
    assert (rescale.scale.dtype, rescale.scale[0]) == (np.float32, np.float32(0.1))


def convolution(
    outputs: int, inputs: int, dim: int = 3, step: int = 1, stride: int = 8, columns: int = 27, value: str = "0",
    bias: str = "1 2 3 4 5 6",
) -> str:  # fmt: skip
    sizes = f"<PatchDim> {dim} <PatchStep> {step} <PatchStride> {stride}"
    filters = "\n".join([" ".join([value] * columns)] * 6)
    return f"<Nnet> <ConvolutionalComponent> {outputs} {inputs} {sizes} <Filters> [\n{filters} ]\n<Bias> [ {bias} ]\n</Nnet> "


def pooling(outputs: int, inputs: int, sizes: str) -> str:
    given = " ".join(f"<Pool{name}> {n}" for name, n in zip(("Size", "Step", "Stride"), sizes.split(), strict=True))
    return f"<Nnet> <MaxPoolingComponent> {outputs} {inputs} {given} </Nnet> "


def parallel(outputs: int, inputs: int, *networks: str, count: int | None = None) -> str:
    nested = " ".join(f"<NestedNnet> 1 <Nnet> {network} </Nnet>" for network in networks)
    count = len(networks) if count is None else count
    name = "ParallelComponent"
    return f"<Nnet> <{name}> {outputs} {inputs} <NestedNnetCount> {count} {nested} </{name}> </Nnet> "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<Affine> 1 1 [\n 1 ]\n [ 1 ]\n", "expected <Nnet> at byte 0, found '<Affine>'"),
        ("<AffineTransform> 1 1 [\n 1 ]\n [ 1 ]\n", "expected a component or </Nnet> .* found the end of the file"),
        ("<Nnet> ", "expected a component or </Nnet>"),
        ("<Nnet> </Nnet> ", "no component"),
        ("<Nnet> <Sigmoid> 2 2 ", "expected a component or </Nnet>"),
        ("<Nnet> <Sigmoid> 2 2 </Nnet> <Nnet>", "expected the end of the file behind </Nnet>"),
        (
            "<Nnet> <LstmProjected> 2 2 ",
            "component 1 to be one that is supported .<AffineTransform>, .*'<LstmProjected>'",
        ),
        ("<Nnet> <Sigmoid> 2 3 </Nnet> ", "<Sigmoid> .component 1. of 2 x 3 .output x input. .* found 2 x 2"),
        (
            "<Nnet> <Sigmoid> 2147483647 2147483647 </Nnet> ",
            "component 1 .*: dims 2147483647 x 2147483647, expected 1 to",
        ),
        ("<Nnet> <Sigmoid> 0 0 </Nnet> ", "component 1 .Activation.: dims 0 x 0, expected 1 to 1000000"),
        ("<Nnet> <Sigmoid> 2 2 <Tanh> 3 3 </Nnet> ", "component 1 .Activation. has the output dim 2, .* input dim 3"),
        (
            "<Nnet> <AffineTransform> 2 1 [\n 1 ]\n [ 1 ]\n</Nnet> ",
            "<AffineTransform> .component 1. of 2 x 1 .* found 1 x 1",
        ),
        (
            "<Nnet> <AffineTransform> 1 1 [\n 1 ]\n [ 1 2 ]\n</Nnet> ",
            "<Affine.* .component 1.: bias has the dim 2, expected 1",
        ),
        (
            "<Nnet> <AffineTransform> 1 1 [\n nan ]\n [ 1 ]\n</Nnet> ",
            "component 1 .AffineT.*: weight.0, 0. is nan, expected a",
        ),
        ("<Nnet> <AffineTransform> 1 1 [\n 1 ]\n [ inf ]\n</Nnet> ", "bias.0. is inf, expected a finite value"),
        ("<Nnet> <AffineTransform> 1 1 [\n 1e39 ]\n [ 1 ]\n</Nnet> ", "weight.0, 0. is inf, expected a finite value"),
        ("<Nnet> <AffineTransform> 1 1 [\n 1 ]\n [ 1e309 ]\n</Nnet> ", "bias.0. is inf, expected a finite value"),
        (
            "<Nnet> <AffineTransform> 1 1 <MaxNorm> nan [\n 1 ]\n [ 1 ]\n</Nnet> ",
            "max_norm is nan, expected a finite value",
        ),
        (
            "<Nnet> <AffineTransform> 1 1 <MaxNorm> 1e39 [\n 1 ]\n [ 1 ]\n</Nnet> ",
            "max_norm is inf, expected a finite value",
        ),
        (
            "<Nnet> <Rbm> 1 2 bern bern [\n 1 1 ]\n [ 1 ]\n [ 1 ]\n</Nnet> ",
            "<Rbm> .component 1.: visible_bias has the dim 1, exp",
        ),
        ("<Nnet> <Rbm> 1 2 bern bern [\n 1 1 ]\n [ 1 2 ]\n [ 1 2 ]\n</Nnet> ", "hidden_bias has the dim 2, expected 1"),
        (
            "<Nnet> <ParametricRelu> 2 2 [ 1 1 ]\n [ 0 ]\n</Nnet> ",
            "<ParametricRelu> .component 1.: beta has the dim 1, expected 2",
        ),
        (
            "<Nnet> <AffineTransform> 1 1 <Norm> 1 [\n 1 ]\n [ 1 ]\n</Nnet> ",
            "<LearnRateCoef> or <BiasLearnRateCoef> or",
        ),
        ("<Nnet> <Splice> 4 2 [ -1 0 1 ]\n</Nnet> ", "<Splice> .component 1. of 4 x 2 .* found 6 x 2"),
        (
            "<Nnet> <Splice> 2 2 [ 2147483647 ]\n</Nnet> ",
            "frame offsets 2147483647 to 2147483647, expected within 1000000",
        ),
        ("<Nnet> <ParametricRelu> 1 1 [ 1 ]\n [ nan ]\n</Nnet> ", "beta.0. is nan, expected a finite value"),
        ("<Nnet> <Dropout> 1 1 <DropoutRate> 1 </Nnet> ", "<Dropout> .component 1.: the dropout rate 1, expected at "),
        ("<Nnet> <Dropout> 1 1 <DropoutRetention> 0 </Nnet> ", "the dropout rate 1, expected at least 0"),
        ("<Nnet> <Dropout> 1 1 <Rate> 0 </Nnet> ", "component 2 to be one that is supported .* found '<Rate>'"),
        ("<Nnet> <Copy> 2 3 [ 1 0 ]\n</Nnet> ", "<Copy> .component 1.: column 0 found, expected 1 to 3"),
        ("<Nnet> <Copy> 2 3 [ 4 1 ]\n</Nnet> ", "<Copy> .component 1.: column 4 found, expected 1 to 3"),
        ("<Nnet> <Copy> 2 3 [ 1 ]\n</Nnet> ", "<Copy> .component 1. of 2 x 3 .output x input. .* found 1 x 3"),
        (convolution(36, 70), "<ConvolutionalComponent> .component 1.: PatchStride 8 does not divide the input dim 70"),
        (convolution(36, 72, dim=9), "patches of 9 at steps of 1 do not fit into 8 exactly"),
        (convolution(36, 72, dim=0), "patches of 0 at steps of 1 do not fit into 8 exactly"),
        (convolution(36, 72, step=0), "patches of 3 at steps of 0 do not fit into 8 exactly"),
        (convolution(36, 72, step=2), "patches of 3 at steps of 2 do not fit into 8 exactly"),
        (convolution(36, 72, stride=0), "PatchStride 0 does not divide the input dim 72"),
        (convolution(35, 72), "<ConvolutionalComponent> .component 1. of 35 x 72 .output x input. .* found 36 x 72"),
        (convolution(36, 72, columns=26), "filters have 26 weights each, expected 27 .9 streams of PatchDim 3."),
        (convolution(36, 72, bias="1 2 3 4 5"), "bias has the dim 5, expected 6"),
        (convolution(36, 72, value="nan"), "component 1 .Conv.*: filters.0, 0. is nan, expected a finite value"),
        (convolution(36, 72, bias="1 2 3 4 inf 6"), "component 1 .Conv.*: bias.4. is inf, expected a finite value"),
        (convolution(36, 72).replace("<PatchStep>", "<Step>"), "expected <PatchStep> .* found '<Step>'"),
        (convolution(36, 72).replace("<Filters>", "<Weights>"), "<LearnRateCoef> or .* found '<Weights>'"),
        (
            pooling(18, 36, "2 2 5"),
            "<MaxPoolingComponent> .component 1.: PoolStride 5 does not divide the input dim 36",
        ),
        (pooling(18, 36, "7 2 6"), "pools of 7 at steps of 2 do not fit into 6 exactly"),
        (pooling(18, 36, "3 2 6"), "pools of 3 at steps of 2 do not fit into 6 exactly"),
        (pooling(18, 36, "2 0 6"), "pools of 2 at steps of 0 do not fit"),
        (pooling(12, 36, "2 4 6"), "PoolStep 4 skips patches, expected at most PoolSize 2"),
        (pooling(12, 36, "2 2 6"), "<MaxPoolingComponent> .component 1. of 12 x 36 .output x input. .* found 18 x 36"),
        (parallel(2, 2, "<Sigmoid> 2 3"), "<Sigmoid> .component 1, network 1, component 1. of 2 x 3"),
        (parallel(2, 2, "<Sigmoid> 2 2", count=0), "expected </ParallelComponent> .* found '<NestedNnet>'"),
        (parallel(2, 2, "<Sigmoid> 2 2", count=2), "expected <NestedNnet> .* found '</ParallelComponent>'"),
        (parallel(2, 2, ""), "<ParallelComponent> .component 1.: no nested network, or one without components"),
        (parallel(4, 2, "<Sigmoid> 2 2"), "<ParallelComponent> .component 1. of 4 x 2 .output x input. .* found 2 x 2"),
        (parallel(2, 2, "<Tanh> 2 2", "<Tanh> 2 2"), "<ParallelComponent> .component 1. of 2 x 2 .* found 4 x 4"),
        (
            parallel(3, 2, "<Sigmoid> 2 2 <Tanh> 3 3"),
            "component 1, network 1, component 1 .Activation. has the output dim 2",
        ),
        (parallel(2, 2, "<Tanhh> 2 2"), "component 1, network 1, component 1 to be one that is supported"),
        ("<ParallelComponent> 1 1 <NestedNnetCount> 1 <NestedNnet> 1 " * 1000, "networks nested at most 8 deep"),
        ("<Nnet> <Rbm> 1 1 bern binary [\n 1 ]\n [ 1 ]\n [ 1 ]\n</Nnet> ", "expected bern or gauss .* 'binary'"),
        ("<Nnet> <AddShift> 2 3 [ 1 2 ]\n</Nnet> ", "<AddShift> .component 1. of 2 x 3"),
    ],
)
def test_networks_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_bytes(text.encode(), tmp_path / "a net.nnet")
    assert caught.value.location == str(tmp_path / "a net.nnet")


def test_huge_claims_take_no_memory(tmp_path: Path) -> None:
    dims = b"\x04" + (1_000_000).to_bytes(4, "little") + b"\x04" + (1_000_000).to_bytes(4, "little")
    huge = b"\x04" + (2**31 - 1).to_bytes(4, "little")
    tracemalloc.start()
    try:
        for body in (b"FM " + dims, b"FM " + huge * 2, b"DM " + huge * 2, b"<MaxNorm> \x04\0\0\0\0FM " + dims):
            with pytest.raises(DataError, match="weight of <AffineTransform>"):
                read_bytes(b"\0B<Nnet> <AffineTransform> " + dims + body + bytes(100), tmp_path / "huge.nnet")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("network", [ALL_COMPONENTS, NESTED], ids=["chain", "nested"])
def test_cut_at_every_byte(tmp_path: Path, network: tuple[Component, ...], binary: bool) -> None:
    data = bytes_of(network, tmp_path / "whole.nnet", binary=binary)
    for length in range(len(data)):
        try:
            components = read_bytes(data[:length], tmp_path / "cut.nnet")
        except DataError:
            continue
        assert not binary
        assert data[length:].strip() == b""
        assert bytes_of(components, tmp_path / "again.nnet", binary=False) == data


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("network", [ALL_COMPONENTS, NESTED], ids=["chain", "nested"])
def test_each_byte_changed(tmp_path: Path, network: tuple[Component, ...], binary: bool) -> None:
    data = bytes_of(network, tmp_path / "whole.nnet", binary=binary)
    refused = 0
    for position in range(len(data)):
        change = (0x01, 0x80, 0xFF)[position % 3]
        damaged = data[:position] + bytes([data[position] ^ change]) + data[position + 1 :]
        try:
            components = read_bytes(damaged, tmp_path / "changed.nnet")
        except DataError:
            refused += 1
            continue
        assert len(components) == len(network)
        assert all(np.isfinite(value).all() for value in numbers(components))
    assert refused > 0.4 * len(data)


@given(st.binary(max_size=60), st.sampled_from([b"", b"\0B", b"<Nnet> ", b"\0B<Nnet> <AffineTransform> \x04"]))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes) -> None:
    with pytest.raises(DataError, match="not a Kaldi nnet1 network"):
        read_bytes(head + data, tmp_path_factory.getbasetemp() / "any.nnet")


def test_a_network_that_nnet1_could_not_read_is_not_written(tmp_path: Path) -> None:
    one, two = np.ones((1, 1), np.float32), np.ones(2, np.float32)
    for network, message in (
        ((), "no component"),
        (
            (AffineTransform(one * np.nan, one[0]),),
            "component 1 .AffineTransform.: weight.0, 0. is nan",
        ),
        ((AffineTransform(one, one[0]), Activation("tanh", 2)), "output dim 1, .* input dim 2"),
        ((AffineTransform(one, one[0], max_norm=float("inf")),), "max_norm"),
        ((Activation("tanh", 0),), "dims 0 x 0"),
        ((Splice((), 3),), "dims 0 x 3"),
        (
            (ParallelComponent(((Activation("tanh", 2), AffineTransform(one, one[0])),)),),
            "component 1, network 1, component 1 .Activation. has the output dim 2",
        ),
        (
            (ConvolutionalComponent(2, 1, 1, 2, one * np.inf, one[0]),),
            "component 1 .ConvolutionalComponent.: filters.0, 0. is inf",
        ),
    ):
        with pytest.raises(DataError, match=message):
            write_nnet1(tmp_path / "out.nnet", network)
    assert list(tmp_path.iterdir()) == []
    for component, dims in ((AffineTransform, (one, two)), (ParametricRelu, (two, one[0]))):
        with pytest.raises(ValueError, match=r"has the dim \d, expected"):
            component(*dims)
    with pytest.raises(UserError, match="cannot write"):
        write_nnet1(tmp_path / "no such directory" / "out.nnet", (Activation("tanh", 2),))
