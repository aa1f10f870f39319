"""From `model.layers` to the layers of the network: sizes, initial values, frozen layers, and what is said where they do
not fit the features."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Job, RunCli, assert_refused, files_in, make_job

from ddnn.nn.acoustic_model import load_model
from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling, nearest_divisors
from ddnn.nn.elementwise import Activation, Dropout, LengthNorm, ParametricRelu, Scale, Shift
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine, num_parameters
from ddnn.nn.network import Network, initialize
from ddnn.recipe.load import load_recipe
from ddnn.training.network_layers import frozen_layers, network_layers
from ddnn.training.options import estimate_memory
from ddnn.util.errors import RecipeError

FSDD = "[{conv: {filters: 32, patch: 8, pool: 3}}, {conv: {filters: 64, patch: 4%s}}, {affine: 256, repeat: 3}]"


def build(tmp_path: Path, layers: str, dim: int, pdfs: int = 7, *settings: str) -> tuple[Layer, ...]:
    """Of features of so many dims a frame, by default without context."""
    path = tmp_path / "r.yaml"
    path.write_text(f"data: {{train: ., alignments: ., splice: 0}}\nmodel: {{layers: {layers}}}\n")
    recipe = load_recipe(path, settings)
    return network_layers(recipe, dim * (2 * recipe.data.splice + 1), pdfs)


@pytest.mark.parametrize(("name", "layout"), [("cnn_true", ""), ("cnn", ", layout: kaldi")])
def test_a_cnn_is_that_of_kaldi_s_prototypes(tmp_path: Path, shared: Path, name: str, layout: str) -> None:
    """make_cnn_proto.py for 40 bands with deltas, splice +-5: kinds, sizes, initial values, MaxNorm, 312,216 parameters."""
    layers = build(tmp_path, FSDD % layout, 120, 120, "data.deltas=2", "data.splice=5")
    assert num_parameters(layers) == 312_216
    components: list[tuple[str, dict[str, float]]] = []
    for line in (shared / "fsdd" / "kaldi_nnet1" / f"{name}.proto").read_text().splitlines():
        kind, *rest = re.findall(r"<(\w+)>\s*([-\d.e]*)", line) or [("NnetProto", "")]
        if kind[0] not in ("NnetProto", "Softmax"):
            components.append((kind[0], {key: float(value) for key, value in rest}))
    network, found = Network(layers), list[tuple[str, dict[str, float]]]()
    initialize(network, 1)
    for layer, views in zip(layers, network.views, strict=True):
        whole = {"InputDim": layer.input_dim, "OutputDim": layer.output_dim}
        if isinstance(layer, Convolution):
            size = {"PatchDim": layer.band_size, "PatchStep": layer.band_step, "PatchStride": layer.bands}
            start = {"BiasMean": layer.bias_mean, "BiasRange": layer.bias_range, "ParamStddev": layer.weight_stddev}
            found.append(("ConvolutionalComponent", {**whole, **size, **start, "MaxNorm": layer.max_norm}))
        elif isinstance(layer, MaxPooling):
            pool = {"PoolSize": layer.band_size, "PoolStep": layer.band_step, "PoolStride": layer.channels}
            found.append(("MaxPoolingComponent", {**whole, **pool}))
        elif isinstance(layer, Affine):
            last = layer is layers[-1]
            begin = {"BiasMean": 0.0 if last else -2.0, "BiasRange": 0.0 if last else 4.0}
            assert views["bias"].min() >= begin["BiasMean"] - begin["BiasRange"] / 2
            assert views["bias"].max() <= begin["BiasMean"] + begin["BiasRange"] / 2
            deviation = 3.5 * math.sqrt(2.0 / (layer.input_dim + layer.output_dim))  # no smaller input weights
            assert views["weight"].std().item() == pytest.approx(deviation, rel=0.02)
            more = {"LearnRateCoef": 1.0, "BiasLearnRateCoef": layer.bias_learn_rate_coef} if last else {"MaxNorm": 0.0}
            found.append(("AffineTransform", {**whole, **begin, "ParamStddev": round(deviation, 6), **more}))
            found += [] if last else [("Sigmoid", {k: layer.output_dim for k in whole})]
        else:
            start = {"Rescale": {"InitParam": 1.0}, "AddShift": {"InitParam": 0.0}, "Sigmoid": {}}
            kaldi = {"scale": "Rescale", "shift": "AddShift", "activation": "Sigmoid"}[layer.kind]
            found.append((kaldi, {**whole, **start[kaldi]}))
    assert found == components


def test_every_key_reaches_its_layer(tmp_path: Path) -> None:
    conv = (
        "conv: {filters: 6, patch: 4, step: 2, pool: 3, pool_step: 1, pool_kind: average, scale_and_shift: false, "
        "max_norm: 2, weight_stddev: 0.3, bias_mean: 0.5, bias_range: 0.25, activation: tanh, dropout: 0.25, "
        "learn_rate_coef: 0.5}"
    )
    found = build(tmp_path, f"[{{{conv}}}, {{affine: 5, max_norm: 3, learn_rate_coef: 2, activation: linear}}]", 20)
    assert found == (
        Convolution.of_pieces(20, 4, 2, 20, 6, 0.5, 0.5, 2, 0.3, 0.5, 0.25),
        AveragePooling.of_patches(54, 3, 1, 6),
        Activation(42, "tanh"),
        Dropout(42, 0.25),
        Affine(42, 5, "linear", 2, 2, 3),
        Affine(5, 7, "softmax", bias_learn_rate_coef=0.1),
    )


def test_layers_on_their_own(tmp_path: Path) -> None:
    text = "[{conv: {filters: 2, patch: 3}}, {pool: {size: 2, kind: average}}, {affine: 4, activation: prelu}, scale-and-shift, "
    text += "{dropout: 0.5}, {activation: relu}, {stored: {kind: length-norm, width: 4}}]"
    found = build(tmp_path, text, 6)
    assert found[1:4] == (Scale(8), Shift(8), Activation(8, "sigmoid"))
    assert found[4:] == (
        AveragePooling.of_patches(8, 2, 2, 2),
        Affine(4, 4, "linear"),
        ParametricRelu(4, beta_learn_rate_coef=1.0, beta=0.25),
        *(Scale(4), Shift(4), Dropout(4, 0.5), Activation(4, "relu"), LengthNorm(4)),
        Affine(4, 7, "softmax", bias_learn_rate_coef=0.1),
    )


def test_no_layers_leave_the_output_layer(tmp_path: Path) -> None:
    assert build(tmp_path, "[]", 9) == (Affine(9, 7, "softmax", bias_learn_rate_coef=0.1),)


def test_equal_layers_are_those_of_the_short_form(tmp_path: Path) -> None:
    found = build(tmp_path, "[{affine: 8, repeat: 3, activation: relu}]", 5)
    short = tmp_path / "short.yaml"
    short.write_text("data: {train: ., alignments: ., splice: 0}\n")
    settings = ["model.hidden_layers=3", "model.hidden_units=8", "model.activation=relu"]
    assert found == network_layers(load_recipe(short, settings), 5, 7)


def test_convolutions_of_a_frame_s_bands(tmp_path: Path) -> None:
    """`model.bands`: images, whose rows of pixels are read at once; features whose deltas are in the file."""
    conv, *_ = build(tmp_path, "[{conv: {filters: 3, patch: 4}}]", 64, 7, "model.bands=8")
    assert isinstance(conv, Convolution) and (conv.bands, conv.input_dim, conv.gemm.rows) == (8, 64, 5)
    conv, *_ = build(tmp_path, "[{conv: {filters: 3, patch: 4}}]", 120, 7, "model.bands=40", "data.splice=1")
    assert isinstance(conv, Convolution) and (conv.bands, conv.input_dim, conv.gemm.rows) == (40, 360, 37)


@pytest.mark.parametrize("activation", ["relu", "prelu", "tanh", "linear"])
def test_initial_filters_of_other_activations(tmp_path: Path, activation: str) -> None:
    first, *_, second = (
        layer
        for layer in build(
            tmp_path,
            f"[{{conv: {{filters: 9, patch: 4}}, activation: {activation}, repeat: 2}}]",
            80,
            7,
            "model.bands=8",
        )
        if isinstance(layer, Convolution)
    )
    assert (first.bias_mean, first.bias_range, second.bias_mean, second.bias_range) == (0, 0, 0, 0)
    rectified = (math.sqrt(2 / 40), math.sqrt(2 / 36))  # 10 pieces of 4 bands; 4 bands of 9 filters
    expected = rectified if "relu" in activation else (0.02, 0.1)
    assert (first.weight_stddev, second.weight_stddev) == pytest.approx(expected)


def test_an_affine_layer_that_reads_the_input_is_first_whatever_is_below(tmp_path: Path) -> None:
    """make_nnet_proto.py's smaller input weights; a convolution is the first itself."""
    for text, smaller in (
        ("[{dropout: 0.1}, scale-and-shift, {affine: 300}]", True),
        ("[{conv: {filters: 9, patch: 92}}, {affine: 300}]", False),
    ):
        network = Network(build(tmp_path, text, 100))
        initialize(network, 3)
        n = next(i for i, layer in enumerate(network.layers) if isinstance(layer, Affine))
        deviation = 3.5 * math.sqrt(2 / (network.layers[n].input_dim + 300)) * (math.sqrt(1 / 12) if smaller else 1)
        assert network.views[n]["weight"].std().item() == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize(
    ("layers", "settings", "said"),
    [
        ("[{conv: {filters: 3, patch: 9}}]", (), "layer 0 (conv): patch 9 does not fit into 8 bands; 1 to 8 do"),
        ("[{affine: 3}]", ("model.bands=3",), "3 found, which does not divide the 8 dims of the features; 2 and 4 do"),
        ("[{conv: {filters: 500000, patch: 2}}]", (), "layer 0 (conv): outputs 3500000, expected 1 to 1000000"),
        ("[{stored: {kind: toy}}]", (), "layer 0 (stored): kind of layer 'toy' found, expected one of affine, conv, "),
        ("[{stored: {width: 8}}]", (), "layer 0 (stored): no key 'kind'"),
        (
            "[{affine: 5}, {stored: {kind: length-norm, width: 6}}]",
            (),
            "layer 1 (stored): length-norm, which reads 6 dims, found above a layer that gives 5",
        ),
        ("[{stored: {kind: length-norm, width: 8, x: 1}}]", (), "unexpected keyword argument 'x'"),
        (
            "[{stored: {kind: affine, in_features: 8, out_features: 3, activation: softmax}}]",
            (),
            "layer 0 (stored): softmax found below other layers",
        ),
        ("[{stored: {kind: length-norm, width: 8}}, {pool: 2}]", (), "layer 1 (pool): pooling takes the patches of a"),
        (
            "[{stored: {kind: affine, in_features: 8, out_features: 3}}, {conv: {filters: 1, patch: 1}}]",
            (),
            "layer 1 (conv): there are no bands above an affine layer",
        ),
    ],
)
def test_layers_that_do_not_fit_the_features(tmp_path: Path, layers: str, settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(tmp_path, layers, 8, 7, *settings)
    assert said in caught.value.message
    assert caught.value.location == ("model.bands" if settings else f"{tmp_path / 'r.yaml'}, line 2")


@pytest.mark.parametrize(
    ("bands", "items", "said"),
    [
        (
            10,
            ["conv: {filters: 4, patch: 3}", "affine: 3", "conv: {filters: 4, patch: 3}"],
            "layer 2 (conv): there are no bands above an affine layer; convolutions come first  [line 7]",
        ),
        (
            9,
            ["conv: {filters: 4, patch: 2}", "dropout: 0.1", "conv: {filters: 4, patch: 9}"],
            "layer 2 (conv): patch 9 does not fit into 8 bands; 1 to 8 do  [line 7]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8, step: 3}"],
            "layer 0 (conv): patch 8 with step 3 leaves 2 of 40 bands over; patch 7 and 10, or step 2 and 4 fit  [line 5]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8, pool: 4}"],
            "layer 0 (conv): pool 4 does not divide 33 patches; 3 and 11 do  [line 5]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8, pool: 34}"],
            "layer 0 (conv): pool 34 does not fit into 33 patches; 1 to 33 do  [line 5]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8, pool: 4, pool_step: 2}"],
            "pool 4 with pool_step 2 leaves 1 of 33 patches over; pool 3 and 5, or pool_step 1 and 29 fit  [line 5]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8, pool: 3, pool_step: 4}"],
            "layer 0 (conv): pool_step 4 would skip patches between pools of 3; 1 to 3 do not  [line 5]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8}", "pool: {size: 3, step: 4}"],
            "layer 1 (pool): pool_step 4 would skip patches between pools of 3; 1 to 3 do not  [line 6]",
        ),
        (
            40,
            ["conv: {filters: 4, patch: 8}", "pool: {size: 4, step: 3}"],
            "pool 4 with pool_step 3 leaves 2 of 33 patches over; pool 3 and 6, or pool_step 1 and 29 fit  [line 6]",
        ),
        (
            40,
            ["pool: 2"],
            "layer 0 (pool): pooling takes the patches of a convolution, and there is none below  [line 5]",
        ),
        (
            12,
            ["{conv: {filters: 4, patch: 3}, repeat: 3}", "affine: 2", "{conv: {filters: 1, patch: 1}}"],
            "layer 4 (conv): there are no bands",  # repeated layers are counted
        ),
        (
            8,
            ["{conv: {filters: 4, patch: 4}, repeat: 3}"],
            "layer 2 (conv): patch 4 does not fit into 2 bands; 1 to 2 do",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_line(
    tmp_path: Path, bands: int, items: list[str], said: str
) -> None:
    path = tmp_path / "r.yaml"
    text = f"data: {{train: ., alignments: .}}\nmodel:\n  bands: {bands}\n  layers:\n"
    path.write_text(text + "".join(f"  - {item}\n" for item in items))
    with pytest.raises(RecipeError) as caught:
        network_layers(load_recipe(path), 11 * bands, 7)
    said, _, line = said.partition("  [")
    assert said in caught.value.message
    assert str(caught.value.location).startswith(f"{path}, {line.rstrip(']') or 'line '}")


def test_divisors_next_to_a_number() -> None:
    assert [nearest_divisors(*pair) for pair in ((33, 4), (40, 50), (40, 7), (1, 3), (999_983, 10))] == [
        *("3 and 11", "40", "5 and 8", "1", "1 and 999983"),
    ]


def test_layers_above_stored_ones_know_their_bands(tmp_path: Path) -> None:
    stored = "{stored: {kind: conv, in_features: 8, patch_dim: 3, patch_step: 1, patch_stride: 8, filters: 2}}"
    *_, pool, _ = build(tmp_path, f"[{stored}, {{stored: {{kind: length-norm, width: 12}}}}, {{pool: 3}}]", 8)
    assert pool == MaxPooling.of_patches(12, 3, 3, 2)


def test_frozen_layers_are_those_of_the_list(tmp_path: Path) -> None:
    """A convolution with what follows it is one layer; repeated ones are several."""
    path = tmp_path / "r.yaml"
    text = "[{conv: {filters: 2, patch: 3, pool: 2}}, {affine: 4, repeat: 2, dropout: 0.1}, scale-and-shift]"
    path.write_text(
        f"data: {{train: ., alignments: ., splice: 0}}\nmodel: {{layers: {text}}}\noptimizer: {{name: ng-sgd}}\n"
    )
    expected = {0: {0, 1, 2, 3, 4}, 1: {5, 6}, 2: {7, 8}, 3: {9, 10}, 4: {11}}
    for number, layers in expected.items():
        recipe = load_recipe(path, [f"model.freeze=[{number}]"])
        made = network_layers(recipe, 6, 7)
        assert frozen_layers(recipe, made) == layers
        frozen = any(made[i].gemm for i in layers)
        whole = estimate_memory(load_recipe(path), 6, 7, 1).cpu["optimizer"]
        assert (estimate_memory(recipe, 6, 7, 1).cpu["optimizer"] < whole) == frozen


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Its recipe has a convolution over the 4 dims of its features, pooling, affine layers and dropout."""
    job = make_job(tmp_path)
    layers = "layers: [{conv: {filters: 3, patch: 2, pool: 3}}, {affine: 8, repeat: 2, dropout: 0.2}]"
    text = job.recipe.read_text().replace("hidden_layers: 1, hidden_units: 8", layers)
    job.recipe.write_text(text)
    return job


def train(run_cli: RunCli, job: Job, *settings: str, dry: bool = False) -> Any:
    options = [word for setting in settings for word in ("--set", setting)]
    where = ["--dry-run"] if dry else ["--run-dir", job.run, "--device", "cpu"]
    return run_cli("train", job.recipe, *where, *options)


def test_a_training_of_layers(job: Job, run_cli: RunCli) -> None:
    dry = train(run_cli, job, dry=True)
    assert dry.stdout.startswith("# conv 3 of 2 bands pool 3, 2 x 8 sigmoid dropout 0.2, init random, ")
    assert "network: 12-9-3-8-8-3, 158 parameters" in dry.stdout
    result = train(run_cli, job, "model.freeze=[0, 3]")
    assert result.exit_code == 0, result.stderr
    network = load_model(job.run / "final.safetensors").network
    assert [layer.kind for layer in network.layers] == [
        *("conv", "max-pool", "scale", "shift", "activation", "affine", "dropout", "affine", "dropout", "affine"),
    ]
    begun = Network(network.layers)
    initialize(begun, load_recipe(job.recipe).seed)
    kept = [
        i
        for i, (a, b) in enumerate(zip(network.views, begun.views, strict=True))
        if a and all(torch.equal(a[k], b[k]) for k in a)
    ]
    assert kept == [0, 2, 3, 9]  # of those with parameters


def test_layers_that_do_not_fit_are_refused_before_anything_is_trained(job: Job, run_cli: RunCli) -> None:
    setting = "model.layers=[{conv: {filters: 3, patch: 2, pool: 2}}]"
    said = "layer 0 (conv): pool 2 does not divide 3 patches; 1 and 3 do"
    assert_refused(train(run_cli, job, setting, dry=True), said)
    assert_refused(train(run_cli, job, setting), said)
    assert "metrics.jsonl" not in files_in(job.run)


def test_convolutions_over_time_and_bands(tmp_path: Path) -> None:
    """Of an image its rows, of speech the frames of the splice; what is along bands alone above it reads all times."""
    text = "[{conv: {filters: 3, patch: {time: 3, bands: 2}, step: {bands: 2}, pool: 2, scale_and_shift: false}}, "
    text += "{conv: {filters: 2, patch: {time: 1, bands: 2}, scale_and_shift: false, activation: linear}}, {affine: 4}]"
    assert build(tmp_path, text, 48, 7, "model.bands=8") == (
        Convolution(6, 1, 8, 3, 2, 3, 1, 2, 1, False, max_norm=30, weight_stddev=0.02, bias_mean=-1, bias_range=2),
        MaxPooling(4, 4, 3, 2, 2, 2, 2),
        Activation(12),
        Convolution(2, 3, 2, 1, 2, 2, 1, 1, 1, True, max_norm=50, weight_stddev=0.1, bias_mean=0, bias_range=0),
        Affine(4, 4),
        Affine(4, 7, "softmax", bias_learn_rate_coef=0.1),
    )
    text = "[{conv: {filters: 3, patch: {time: 2, bands: 5}, dilation: 3, pool: {time: 4}, activation: relu}}, "
    text += "{conv: {filters: 2, patch: 3}}, {pool: 4}]"
    tdnn, pool, *_, above, _, _, _, last, _ = build(tmp_path, text, 30, 7, "data.splice=5", "data.deltas=2")
    he = math.sqrt(2 / (2 * 5 * 3))
    assert tdnn == Convolution(11, 3, 10, 2, 5, 3, 1, 1, 3, False, 1, 1, 30, he, 0, 0)
    assert pool == MaxPooling(8, 6, 3, 4, 1, 4, 1)
    assert above == Convolution.of_pieces(36, 9, 3, 18, 2, max_norm=50, weight_stddev=0.1, bias_mean=-2, bias_range=4)
    assert last == MaxPooling.of_patches(8, 4, 4, 2)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("{conv: {filters: 3, patch: {time: 4, bands: 2}}}", "patch.time 4 does not fit into 3 frames; 1 to 3 do"),
        ("{conv: {filters: 3, patch: {bands: 9}}}", "patch.bands 9 does not fit into 8 bands; 1 to 8 do"),
        ("{conv: {filters: 3, patch: {time: 2}, dilation: 3}}", "patch.time 2 with dilation 3 spans 4 of 3 frames"),
        (
            "{conv: {filters: 3, patch: {bands: 3}, step: {bands: 2}}}",
            "patch.bands 3 with step.bands 2 leaves 1 of 8 bands over; patch.bands 2 and 4, or step.bands 1 and 5 fit",
        ),
        ("{conv: {filters: 3, patch: {bands: 2}, pool: 2}}", "pool.time 2 does not divide 3 patches; 1 and 3 do"),
        (
            "{conv: {filters: 3, patch: {bands: 2}, pool: {bands: 2}, pool_step: {bands: 3}}}",
            "pool_step.bands 3 would skip patches between pools of 2; 1 to 2 do not",
        ),
        (
            "{conv: {filters: 3, patch: 2, pool: {bands: 2}}}",
            "pool of time and bands found beside patch 2, which is along bands alone",
        ),
        (
            "{conv: {filters: 3, patch: 2, dilation: 2}}",
            "dilation is of frames, over which only a patch of {time: .., ",
        ),
        (
            "{conv: {filters: 3, patch: 2, layout: kaldi}}, {conv: {filters: 3, patch: {time: 2}}}",
            "layer 1 (conv): patch.time 2 takes several frames, and there is 1 here: data.splice gives more, "
            "model.bands the rows of an image",
        ),
    ],
)
def test_patches_over_time_and_bands_that_do_not_fit(tmp_path: Path, layers: str, said: str) -> None:
    """Already when the recipe is read, which knows the frames of the splice."""
    with pytest.raises(RecipeError) as caught:
        build(tmp_path, f"[{layers}]", 8, 7, "data.splice=1", "model.bands=8")
    assert said in caught.value.message and "r.yaml" in str(caught.value)
