"""Acoustic models: features, input transform, network. Stored in one safetensors file, which holds no code; to and from
Kaldi's nnet1 components."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ddnn.data.dataset import InputTransform
from ddnn.data.feature_reader import FeatureConfig
from ddnn.kaldi.alignments import transition_digest
from ddnn.kaldi.nnet1 import AddShift, Component, Rescale, Splice
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.kaldi.transforms import TransformConfig, read_nnet_options
from ddnn.nn.layer import Layer, as_array
from ddnn.nn.layers import check_layers, layer_from_config, layers_from_nnet1, num_parameters
from ddnn.nn.network import Network
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_write, read_bytes_limited

NNET1_FRONTS = ("feature_transform.nnet", "final.feature_transform")
"""A directory's feature transform as nnet1: the first name is ddnn's, the second is where Kaldi's scripts look for it."""
NNET1_FEATURES = "ddnn_features.json"
"""What the network of a directory reads, beside what Kaldi's files say of it: the digest of the transforms; Kaldi ignores it."""
NORMALIZATION: dict[Any, str] = {AddShift: "shift", Rescale: "scale"}
"""Components of a feature transform and parts of an `InputTransform` whose vector is of the same name, in order."""
FORMAT = 2  # Of a stored model. Format 1, whose layers were all affine, is read too.


@dataclass(frozen=True)
class AcousticModel:
    """Everything between a Kaldi feature archive and pre-softmax activations."""

    features: FeatureConfig
    transform: InputTransform
    network: Network
    transition_digest: str | None = None  # of the model that its pdf-ids are from; None where that is not known

    def to(self, device: torch.device) -> AcousticModel:
        return replace(self, transform=self.transform.to(device), network=self.network.to(device))

    def check_features(self, dim: int, location: Path) -> None:
        """Raises DataError where features of `dim` dims (after deltas) are not what the model was trained on."""
        if dim != self.transform.dim:
            raise DataError(
                f"the features have {dim} dims, the model was trained on {self.transform.dim}",
                location=location,
                hint="use features of the kind that the model was trained on; an imported network may lack its deltas "
                "(delta_opts in its directory) or its splice: ddnn import-nnet1 --feature-transform",
            )


class TorchModel(torch.nn.Module):
    """A copy of a model for autograd and for PyTorch's exporters: from the features of an utterance, (frames, dim) float32
    after CMVN, deltas and transforms, to logits (frames, pdfs). UserError: it has a layer that PyTorch has no module
    for."""

    shift: Tensor
    scale: Tensor

    def __init__(self, model: AcousticModel) -> None:
        super().__init__()
        transform, network = model.transform, model.network
        zeros = network.parameters.new_zeros(transform.output_dim)
        self.offsets = transform.offsets
        self.register_buffer("shift", zeros if transform.shift is None else transform.shift.clone())
        self.register_buffer("scale", zeros + 1 if transform.scale is None else transform.scale.clone())
        try:
            modules = [layer.to_torch(views) for layer, views in zip(network.layers, network.views, strict=True)]
        except ValueError as error:
            raise UserError(str(error), hint="affine layers, activations and dropout can") from error
        self.layers = torch.nn.Sequential(*modules)

    def forward(self, features: Tensor) -> Tensor:
        frames = torch.arange(len(features), device=features.device)
        spliced = [features[(frames + offset).clamp(0, len(features) - 1)] for offset in self.offsets]
        logits: Tensor = self.layers((torch.cat(spliced, dim=1) + self.shift) * self.scale)
        return logits


def save_model(path: Path, model: AcousticModel) -> None:
    """Writes the model whole. UserError: it cannot be written, or has values that are not finite."""
    data = encode_model(model, path)
    with atomic_write(path) as handle:
        handle.write(data)


def encode_model(model: AcousticModel, path: Path) -> bytes:
    """The file of a model: float32 tensors by name, and their meaning as JSON in the header; the same bytes for the same
    model. UserError: it has values that are not finite; `path` is for the message."""
    if not bool(model.network.parameters.isfinite().all()):
        message = "the network has values that are not finite"
        raise UserError(message, location=path, hint="lower the learning rate: training diverged")
    header, tensors = model_config(model), transform_tensors(model)
    for i, views in enumerate(model.network.views):
        tensors |= {f"layer{i}.{name}": value.cpu().contiguous() for name, value in views.items()}
    return save(tensors, metadata={"ddnn": json.dumps(header)})


def model_config(model: AcousticModel) -> dict[str, Any]:
    """All of a model but its numbers, as JSON: what `model_from_config` reads."""
    return {
        "format": FORMAT,
        "features": features_config(model.features),
        "splice": list(model.transform.offsets),
        "dim": model.transform.dim,
        "transition_digest": model.transition_digest,
        "layers": [layer.config() for layer in model.network.partition.layers(model.network.layers)],
    }


def features_config(features: FeatureConfig) -> dict[str, Any]:
    """As JSON, as the header of a model has it."""
    config: dict[str, Any] = {"cmvn": features.cmvn, "deltas": features.deltas}
    return config if features.transforms is None else {**config, "transforms": asdict(features.transforms)}


def _features(config: dict[str, Any]) -> FeatureConfig:
    """ValueError, TypeError or KeyError where it is no `features_config`."""
    found = config.get("transforms")
    transforms = None if found is None else TransformConfig.from_header(found)
    features = FeatureConfig(config["cmvn"], config["deltas"], transforms=transforms)
    known = features.cmvn in ("none", "mean", "mean-variance")
    if not (known and type(features.deltas) is int and 0 <= features.deltas <= 4):
        raise ValueError(f"feature pipeline {features!r}")
    return features


def transform_tensors(model: AcousticModel) -> dict[str, Tensor]:
    """transform.shift and transform.scale, (input_dim,) float32 on the host, where the model normalizes."""
    named = {name: getattr(model.transform, name) for name in NORMALIZATION.values()}
    return {f"transform.{name}": value.cpu() for name, value in named.items() if value is not None}


def load_model(path: Path) -> AcousticModel:
    """Reads a model written by `save_model`. DataError: not a ddnn model, or a damaged one: shapes and values are
    checked."""
    if path.exists() and not path.is_file():  # safe_open would wait at a pipe
        raise DataError("not a ddnn model: not a regular file", location=path, hint="name the run dir of a training")
    try:
        with safe_open(path, framework="pt") as stored:
            header = json.loads((stored.metadata() or {})["ddnn"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(
            f"there is no model {path.name}", location=path, hint="name the run dir of a finished training"
        ) from error
    except (OSError, MemoryError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise DataError(f"not a ddnn model: {error}", location=path) from error
    return model_from_config(header, tensors, path)


def model_from_config(header: Any, tensors: dict[str, Tensor], location: Path) -> AcousticModel:
    """The model of a `model_config`. `tensors`: `transform_tensors`, and the parameters by layer and name, or all of
    them as `parameters`. DataError: they do not fit; the numbers are not finite."""
    try:
        return _from_config(_upgraded(header), tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"a damaged ddnn model: {error}", location=location) from error


def _upgraded(header: dict[str, Any]) -> dict[str, Any]:
    """A header of the present format; ValueError where it is of none."""
    if header["format"] == FORMAT:
        return header
    if header["format"] != 1:
        raise ValueError(f"format {header['format']!r} found, {FORMAT} expected")
    names = {"inputs": "in_features", "outputs": "out_features"}
    names |= {"weight_rate": "learn_rate_coef", "bias_rate": "bias_learn_rate_coef"}
    layers = [{"kind": "affine", **{names.get(k, k): v for k, v in layer.items()}} for layer in header["layers"]]
    return {**header, "features": header["pipeline"], "layers": layers}


def _layers(header: dict[str, Any]) -> tuple[Layer, ...]:
    layers = []
    for i, config in enumerate(header["layers"]):
        try:
            layers.append(layer_from_config(config))
        except ValueError as error:
            raise ValueError(f"layer {i}: {error}") from error
    check_layers(layers)
    return tuple(layers)


def _from_config(header: dict[str, Any], tensors: dict[str, Tensor]) -> AcousticModel:
    layers = _layers(header)
    offsets, dim, input_dim = tuple(header["splice"]), header["dim"], layers[0].input_dim
    if not offsets or not all(type(offset) is int and abs(offset) < 1000 for offset in offsets):
        raise ValueError(f"splice {offsets!r}")
    if type(dim) is not int or dim < 1:
        raise ValueError(f"splice {offsets!r} of {dim!r} dims")
    if len(offsets) * dim != input_dim:
        raise ValueError(f"{len(offsets)} frames of {dim} dims do not make an input of {input_dim}")
    features = _features(header["features"])
    tree = header.get("transition_digest")
    if tree is not None and not (isinstance(tree, str) and re.fullmatch("[0-9a-f]{64}", tree)):
        raise ValueError(f"transition_digest {str(tree)[:80]!r}")

    if "parameters" in tensors:
        parts = [_take(tensors, "parameters", (num_parameters(layers),))]
    else:
        shapes = {f"layer{i}.{name}": p.shape for i, layer in enumerate(layers) for name, p in layer.parameters.items()}
        parts = [_take(tensors, name, shape).flatten() for name, shape in shapes.items()]
    names = [f"transform.{name}" for name in NORMALIZATION.values()]
    vectors = [_take(tensors, name, (input_dim,)) if name in tensors else None for name in names]
    return AcousticModel(features, InputTransform(offsets, dim, *vectors), Network(layers, torch.cat(parts)), tree)


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, {shape} float32 expected")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite")
    return tensor


def to_nnet1(model: AcousticModel) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The model as nnet1 components: the network and its feature transform. UserError: nnet1 has no component for a
    layer."""
    try:
        layers = zip(model.network.layers, model.network.views, strict=True)
        components = [component for layer, views in layers for component in layer.to_nnet1(views)]
    except ValueError as error:
        raise UserError(f"the model cannot be a Kaldi nnet1 network: {error}") from error
    transform = model.transform
    front: list[Component] = [Splice(transform.offsets, transform.dim)]
    for kind, name in NORMALIZATION.items():
        if (vector := getattr(transform, name)) is not None:
            front.append(kind(as_array(vector), 0.0))
    return tuple(components), tuple(front)


def from_nnet1(
    network: tuple[Component, ...], front: tuple[Component, ...], location: Path, features: FeatureConfig | None = None
) -> AcousticModel:
    """A model from nnet1 components. DataError: a component that is no layer, or dimensions that do not fit. `network`:
    any but Splice and RBMs; softmax only last, behind an affine one. `front`: at most one splice, shift and rescale, in
    this order; may be empty."""
    try:
        layers, parameters = layers_from_nnet1(network)
    except ValueError as error:
        hint = "a Splice before the network is given with --feature-transform" if "Splice" in str(error) else None
        raise DataError(f"the components are no network of ddnn: {error}", location=location, hint=hint) from error
    transform = _nnet1_transform(front, layers[0].input_dim, location)
    if transform.output_dim != layers[0].input_dim:
        message = f"the feature transform gives {transform.output_dim} dims, the network reads {layers[0].input_dim}"
        raise DataError(message, location=location)
    return AcousticModel(features or FeatureConfig(), transform, Network(layers, parameters))


def nnet1_features(path: Path) -> FeatureConfig | None:
    """What the network of a directory reads: as its `NNET1_FEATURES` says or, where there is none, its `cmvn_opts` and
    `delta_opts`; None where nothing does. DataError: damaged files, or they contradict each other."""
    file, by_options = path / NNET1_FEATURES, None
    if any((path / name).is_file() for name in ("cmvn_opts", "delta_opts")):
        by_options = FeatureConfig(*read_nnet_options(path))
    if not file.exists():
        return by_options
    try:
        found = _features(json.loads(read_bytes_limited(file, 100_000)))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"cannot read what features the network was trained on: {error}", location=file) from error
    if by_options is not None and by_options != replace(found, transforms=None):
        message, hint = f"{by_options} in cmvn_opts and delta_opts, {found} in {file.name}", "remove what is wrong"
        raise DataError(message, location=path, hint=hint)
    return found


def find_nnet1(path: Path) -> tuple[Path, Path | None]:
    """The network of a directory that `ddnn export` or Kaldi wrote: `final.nnet`, or the only file of this kind if it
    has another name; and `feature_transform.nnet` or `final.feature_transform`, where there is one. DataError: there is
    no network, or more than one to choose from."""
    if path.is_file():
        raise DataError("a file found, a directory expected", location=path, hint=f"name its directory: {path.parent}")
    fronts = [path / name for name in NNET1_FRONTS if (path / name).exists()]
    networks = sorted(set(path.glob("*.nnet")) - set(fronts))
    final = path / "final.nnet" if (path / "final.nnet").exists() else networks[0] if len(networks) == 1 else None
    if final is None:
        names = ", ".join(one.name for one in networks)
        found = (
            f"there are {names}, and no final.nnet" if networks else "there is no final.nnet and no final.safetensors"
        )
        hint = "name a run dir of ddnn, or a directory of Kaldi's final.nnet with its feature transform"
        raise DataError(found, location=path, hint=hint)
    if len(fronts) == 2 and fronts[0].read_bytes() != fronts[1].read_bytes():
        names = " and ".join(front.name for front in fronts)
        raise DataError(f"{names} differ", location=path, hint="remove the one that the network was not trained with")
    return final, fronts[0] if fronts else None


def read_nnet1_dir(path: Path, features: FeatureConfig | None = None) -> AcousticModel:
    """The network that `find_nnet1` finds. The tree is that of `final.mdl`, where there is one. `features`: CMVN, deltas
    and transforms; as `nnet1_features` says where None. DataError: as of these and `from_nnet1`."""
    final, front = find_nnet1(path)
    features = features or nnet1_features(path)
    model = from_nnet1(read_nnet1(final), () if front is None else read_nnet1(front), final, features)
    return replace(model, transition_digest=transition_digest(path) if (path / "final.mdl").exists() else None)


def _nnet1_transform(front: tuple[Component, ...], input_dim: int, location: Path) -> InputTransform:
    parts: dict[type, Any] = {type(component): component for component in front}
    if [type(component) for component in front] != [kind for kind in (Splice, AddShift, Rescale) if kind in parts]:
        names = ", ".join(type(component).__name__ for component in front)
        message = f"the feature transform is {names}; ddnn has one splice, shift and rescale, in this order"
        raise DataError(message, location=location)
    splice = parts.get(Splice, Splice((0,), input_dim))
    vectors = [
        torch.tensor(getattr(parts[kind], name)) if kind in parts else None for kind, name in NORMALIZATION.items()
    ]
    return InputTransform(splice.offsets, splice.input_dim, *vectors)
