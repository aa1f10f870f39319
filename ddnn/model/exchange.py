"""Models to and from Kaldi's nnet1 files."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ddnn.data.corpus import FeaturePipeline
from ddnn.data.transform import InputTransform
from ddnn.errors import DataError
from ddnn.kaldi.nnet1 import Activation, AddShift, Affine, Component, Rescale, Splice
from ddnn.kaldi.nnet1_components import Kind
from ddnn.model.acoustic import AcousticModel
from ddnn.model.network import Layer, Network


def to_nnet1(model: AcousticModel) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The model as nnet1 components: the network and its feature transform."""
    components: list[Component] = []
    network = model.network
    for layer, weight, bias in zip(network.layers, network.weights, network.biases, strict=True):
        components.append(Affine(_array(weight), _array(bias), layer.weight_rate, layer.bias_rate, layer.max_norm))
        if layer.activation != "linear":
            components.append(Activation(cast(Kind, layer.activation), layer.outputs))
    front: list[Component] = [Splice(model.transform.offsets, model.transform.dim)]
    if model.transform.shift is not None:
        front.append(AddShift(_array(model.transform.shift), 0.0))
    if model.transform.scale is not None:
        front.append(Rescale(_array(model.transform.scale), 0.0))
    return tuple(components), tuple(front)


def from_nnet1(
    network: tuple[Component, ...], front: tuple[Component, ...], where: Path, pipeline: FeaturePipeline | None = None
) -> AcousticModel:
    """A model from nnet1 components.

    Args:
        network: affine components, each followed by at most one activation; softmax only last.
        front: at most one splice, shift and rescale, in this order; may be empty.

    Raises:
        DataError: components that ddnn's networks do not have in this order, or dimensions that do not fit.
    """
    layers, flat = _layers(network, where)
    transform = _transform(front, layers[0].inputs, where)
    if transform.output_dim != layers[0].inputs:
        raise DataError(
            f"the feature transform gives {transform.output_dim} dims, the network reads {layers[0].inputs}",
            where=where,
        )
    return AcousticModel(pipeline or FeaturePipeline(), transform, Network(layers, torch.cat(flat)))


def _layers(components: tuple[Component, ...], where: Path) -> tuple[tuple[Layer, ...], list[Tensor]]:
    layers: list[Layer] = []
    flat: list[Tensor] = []
    for i, component in enumerate(components):
        if isinstance(component, Affine):
            outputs, inputs = component.weight.shape
            stored = (component.learn_rate_coef, component.bias_learn_rate_coef, component.max_norm)
            rates = [float(str(np.float32(value))) for value in stored]  # float32 in the file: 0.1 is to stay 0.1
            layers.append(Layer(inputs, outputs, "linear", *rates))
            flat += [torch.from_numpy(component.weight.copy()).flatten(), torch.from_numpy(component.bias.copy())]
        elif isinstance(component, Activation) and layers and layers[-1].activation == "linear":
            if component.kind == "softmax" and i != len(components) - 1:
                raise DataError(f"component {i + 1} is a softmax that is not the last component", where=where)
            last = layers[-1]
            layers[-1] = Layer(
                last.inputs, last.outputs, component.kind, last.weight_rate, last.bias_rate, last.max_norm
            )
        else:
            raise DataError(
                f"component {i + 1} is {type(component).__name__}: a network is affine components, "
                "each followed by at most one activation",
                where=where,
                mend="give what precedes the network with --feature-transform",
            )
    if not layers:
        raise DataError("the network has no affine component", where=where)
    return tuple(layers), flat


def _transform(front: tuple[Component, ...], input_dim: int, where: Path) -> InputTransform:
    offsets: tuple[int, ...] = (0,)
    dim = input_dim
    shift: Tensor | None = None
    scale: Tensor | None = None
    order = [type(component) for component in front]
    if order != [kind for kind in (Splice, AddShift, Rescale) if kind in order]:
        names = ", ".join(kind.__name__ for kind in order)
        raise DataError(
            f"the feature transform is {names}; ddnn has one splice, shift and rescale, in this order", where=where
        )
    for component in front:
        if isinstance(component, Splice):
            offsets, dim = component.offsets, component.input_dim
        elif isinstance(component, AddShift):
            shift = torch.from_numpy(component.shift.copy())
        elif isinstance(component, Rescale):
            scale = torch.from_numpy(component.scale.copy())
    return InputTransform(offsets, dim, shift, scale)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().numpy()
