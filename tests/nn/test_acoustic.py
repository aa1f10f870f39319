"""Stored models: what is written comes back, and what is not a sound model is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ddnn.data.dataset import InputTransform
from ddnn.data.feature_reader import FeatureConfig
from ddnn.nn.acoustic_model import AcousticModel, load_model, save_model
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, initialize
from ddnn.util.errors import DataError


def model() -> AcousticModel:
    network = Network((Affine(6, 4, "sigmoid"), Affine(4, 3, "softmax", bias_learn_rate_coef=0.1)))
    initialize(network, 1)
    transform = InputTransform((-1, 0, 1), 2, torch.arange(6.0), None)
    return AcousticModel(FeatureConfig("mean", 1), transform, network)


def parts(path: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Header and tensors of a stored model."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        header = json.loads(stored.metadata()["ddnn"])
        return header, {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def test_a_model_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    save_model(path, model())
    found, expected = load_model(path), model()
    assert torch.equal(found.network.parameters, expected.network.parameters)
    assert found.network.layers == expected.network.layers
    assert found.features == expected.features
    assert found.transform.offsets == (-1, 0, 1)
    assert torch.equal(found.transform.shift, torch.arange(6.0))  # type: ignore[arg-type]
    assert found.transform.scale is None
    first = path.read_bytes()
    save_model(path, found)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 3}, "format 3 found, 2 expected"),
        ({"layers": []}, "no layers"),
        ({"splice": [-1, 0]}, "2 frames of 2 dims do not make an input of 6"),
        ({"splice": [0, 1, 10**9]}, "splice"),
        ({"dim": "x"}, "splice"),
        ({"features": {"cmvn": "x", "deltas": 0}}, "feature pipeline"),
        ({"features": {"cmvn": "none", "deltas": 99}}, "feature pipeline"),
        ({"features": {"other": 1}}, "damaged"),
        (
            {"layers": [{"kind": "affine", "in_features": 6, "out_features": 3, "activation": "exec"}]},
            "activation 'exec'",
        ),
        (
            {"layers": [{"kind": "affine", "in_features": 6, "out_features": -3, "activation": "relu"}]},
            "out_features -3",
        ),
        ({"layers": [{"kind": "affine", "in_features": 6, "out_features": 2**40, "activation": "relu"}]}, "expected"),
        (
            {
                "layers": [
                    {
                        "kind": "affine",
                        "in_features": 6,
                        "out_features": 4,
                        "activation": "relu",
                        "max_norm": float("nan"),
                    }
                ]
            },
            "coefficients",
        ),
        ({"layers": [{"kind": "affine", "in_features": 6, "out_features": 4, "other": 1}]}, "damaged"),
        ({"layers": [{"kind": "exec"}]}, "kind of layer 'exec' found, expected one of affine"),
        ({"layers": [{}]}, "damaged"),
        ({"layers": 5}, "damaged"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "final.safetensors"
    save_model(path, model())
    header, tensors = parts(path)
    path.write_bytes(save(tensors, metadata={"ddnn": json.dumps({**header, **change})}))
    with pytest.raises(DataError, match="model") as caught:
        load_model(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_model_of_format_1_is_read(tmp_path: Path) -> None:
    """As versions before 0.2 wrote it."""
    path = tmp_path / "final.safetensors"
    save_model(path, model())
    header, tensors = parts(path)
    layers = [
        {"inputs": 6, "outputs": 4, "activation": "sigmoid", "weight_rate": 1.0, "bias_rate": 1.0, "max_norm": 0.0},
        {"inputs": 4, "outputs": 3, "activation": "softmax", "weight_rate": 1.0, "bias_rate": 0.1, "max_norm": 0.0},
    ]
    old = {**header, "format": 1, "pipeline": header.pop("features"), "layers": layers}
    path.write_bytes(save(tensors, metadata={"ddnn": json.dumps(old)}))
    found, expected = load_model(path), model()
    assert found.network.layers == expected.network.layers
    assert found.features == expected.features
    assert torch.equal(found.network.parameters, expected.network.parameters)


@pytest.mark.parametrize("name", ["layer0.weight", "layer1.bias", "transform.shift"])
def test_tensors_are_checked(tmp_path: Path, name: str) -> None:
    path = tmp_path / "final.safetensors"
    save_model(path, model())
    header, tensors = parts(path)
    metadata = {"ddnn": json.dumps(header)}
    for wrong, said in (
        (tensors[name].double(), "float64"),
        (tensors[name].flatten()[:1].clone(), "expected"),
        (torch.full_like(tensors[name], float("nan")), "not finite"),
    ):
        path.write_bytes(save({**tensors, name: wrong}, metadata=metadata))
        with pytest.raises(DataError, match=name) as caught:
            load_model(path)
        assert said in str(caught.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_refused_or_changes_only_numbers(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "final.safetensors"
    save_model(path, model())
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[at:]
    path.write_bytes(whole)
    try:
        found = load_model(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert bool(found.network.parameters.isfinite().all())


def test_a_header_that_claims_much_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**31, 2**20], "data_offsets": [0, 2**53]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(DataError, match="not a ddnn model"):
        load_model(path)
    path.write_bytes(struct.pack("<Q", 2**62))
    with pytest.raises(DataError, match="not a ddnn model"):
        load_model(path)


def test_other_files_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no model"):
        load_model(tmp_path / "final.safetensors")
    (tmp_path / "x.safetensors").write_bytes(save({"a": torch.zeros(2)}))
    with pytest.raises(DataError, match="not a ddnn model"):
        load_model(tmp_path / "x.safetensors")
    (tmp_path / "dir").mkdir()
    with pytest.raises(DataError, match="not a ddnn model"):
        load_model(tmp_path / "dir")
