"""An acoustic model as it is stored: features, input transform, network. One safetensors file, which holds no code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ddnn.data.corpus import FeaturePipeline
from ddnn.data.transform import InputTransform
from ddnn.errors import DataError, UserError
from ddnn.files import written_whole
from ddnn.model.network import ACTIVATIONS, Layer, Network

FORMAT = 1


@dataclass(frozen=True)
class AcousticModel:
    """Everything between a Kaldi feature archive and pre-softmax activations."""

    pipeline: FeaturePipeline
    transform: InputTransform
    network: Network

    def to(self, device: torch.device) -> AcousticModel:
        """The model on `device`."""
        return replace(self, transform=self.transform.to(device), network=self.network.to(device))

    def check_features(self, dim: int, where: Path) -> None:
        """Raises DataError where features of `dim` dims (after deltas) are not what the model was trained on."""
        if dim != self.transform.dim:
            raise DataError(
                f"the features have {dim} dims, the model was trained on {self.transform.dim}",
                where=where,
                mend="use features of the kind that the model was trained on; an imported network may lack its splice: "
                "ddnn import-nnet1 --feature-transform",
            )


def save_model(path: Path, model: AcousticModel) -> None:
    """Writes the model whole: float32 tensors by name, and their meaning as JSON in the header.

    Raises:
        UserError: it cannot be written, or has values that are not finite.
    """
    if not bool(model.network.parameters.isfinite().all()):
        raise UserError(
            "the network has values that are not finite", where=path, mend="lower the learning rate: training diverged"
        )
    header, tensors = describe_model(model), transform_tensors(model)
    for i, (weight, bias) in enumerate(zip(model.network.weights, model.network.biases, strict=True)):
        tensors[f"layer{i}.weight"] = weight.cpu().contiguous()
        tensors[f"layer{i}.bias"] = bias.cpu().contiguous()
    with written_whole(path) as handle:
        handle.write(save(tensors, metadata={"ddnn": json.dumps(header)}))


def describe_model(model: AcousticModel) -> dict[str, Any]:
    """All of a model but its numbers, as JSON: what `assemble_model` checks and reads."""
    return {
        "format": FORMAT,
        "pipeline": asdict(model.pipeline),
        "splice": list(model.transform.offsets),
        "dim": model.transform.dim,
        "layers": [asdict(layer) for layer in model.network.layers],
    }


def transform_tensors(model: AcousticModel) -> dict[str, Tensor]:
    """transform.shift and transform.scale, (input_dim,) float32 on the host, where the model normalises."""
    named = {"transform.shift": model.transform.shift, "transform.scale": model.transform.scale}
    return {name: value.cpu() for name, value in named.items() if value is not None}


def load_model(path: Path) -> AcousticModel:
    """Reads a model written by `save_model`.

    Raises:
        DataError: not a ddnn model, or a damaged one: shapes and values are checked.
    """
    if path.exists() and not path.is_file():  # safe_open would wait at a pipe
        raise DataError("not a ddnn model: not a regular file", where=path, mend="name the run dir of a training")
    try:
        with safe_open(path, framework="pt") as stored:
            header = json.loads((stored.metadata() or {})["ddnn"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(
            f"there is no model {path.name}", where=path, mend="name the run dir of a finished training"
        ) from error
    except (OSError, MemoryError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise DataError(f"not a ddnn model: {error}", where=path) from error
    return assemble_model(header, tensors, path)


def assemble_model(header: Any, tensors: dict[str, Tensor], where: Path) -> AcousticModel:
    """The model that `describe_model` described.

    Args:
        tensors: `transform_tensors`, and the weights and biases by layer, or all of them as `parameters`.

    Raises:
        DataError: they do not fit; the numbers are not finite.
    """
    try:
        return _assemble(header, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"a damaged ddnn model: {error}", where=where) from error


def _assemble(header: dict[str, Any], tensors: dict[str, Tensor]) -> AcousticModel:
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']!r} found, {FORMAT} expected")
    layers = tuple(Layer(**layer) for layer in header["layers"])
    _check_layers(layers)
    offsets, dim = tuple(header["splice"]), header["dim"]
    if not offsets or not all(type(offset) is int and abs(offset) < 1000 for offset in offsets):
        raise ValueError(f"splice {offsets!r}")
    if type(dim) is not int or dim < 1:
        raise ValueError(f"splice {offsets!r} of {dim!r} dims")
    if len(offsets) * dim != layers[0].inputs:
        raise ValueError(f"{len(offsets)} frames of {dim} dims do not make an input of {layers[0].inputs}")
    pipeline = FeaturePipeline(**header["pipeline"])
    if (
        pipeline.cmvn not in ("none", "mean", "mean-variance")
        or type(pipeline.deltas) is not int
        or not 0 <= pipeline.deltas <= 4
    ):
        raise ValueError(f"feature pipeline {pipeline!r}")

    def vector(name: str) -> Tensor | None:
        return _take(tensors, name, (layers[0].inputs,)) if name in tensors else None

    if "parameters" in tensors:
        parts = [_take(tensors, "parameters", (sum(layer.num_parameters for layer in layers),))]
        layers_by_name: tuple[Layer, ...] = ()
    else:
        parts, layers_by_name = [], layers
    for i, layer in enumerate(layers_by_name):
        parts += [_take(tensors, f"layer{i}.weight", (layer.outputs, layer.inputs)).flatten()]
        parts += [_take(tensors, f"layer{i}.bias", (layer.outputs,))]
    transform = InputTransform(offsets, dim, vector("transform.shift"), vector("transform.scale"))
    return AcousticModel(pipeline, transform, Network(layers, torch.cat(parts)))


def _check_layers(layers: tuple[Layer, ...]) -> None:
    if not layers:
        raise ValueError("no layers")
    for i, layer in enumerate(layers):
        if layer.activation not in ACTIVATIONS:
            raise ValueError(f"layer {i}: activation {layer.activation!r}")
        if not all(type(n) is int and n > 0 for n in (layer.inputs, layer.outputs)):
            raise ValueError(f"layer {i}: {layer.inputs!r} inputs, {layer.outputs!r} outputs")
        if not all(
            isinstance(v, int | float) and np.isfinite(v) for v in (layer.weight_rate, layer.bias_rate, layer.max_norm)
        ):
            raise ValueError(f"layer {i}: rates {layer.weight_rate!r}, {layer.bias_rate!r}, {layer.max_norm!r}")
        if layer.activation == "softmax" and i != len(layers) - 1:
            raise ValueError(f"layer {i}: softmax, which only the last layer can be")
        if i and layer.inputs != layers[i - 1].outputs:
            raise ValueError(f"layer {i} reads {layer.inputs} dims, the one before gives {layers[i - 1].outputs}")


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, {shape} float32 expected")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite")
    return tensor
