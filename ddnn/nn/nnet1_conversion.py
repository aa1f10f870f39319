"""Models to and from Kaldi's nnet1 files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.transform import InputTransform
from ddnn.kaldi.nnet1 import AddShift, Component, Rescale, Splice
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.layers import LAYERS, Layer, check_layers
from ddnn.nn.network import Network
from ddnn.util.errors import DataError, UserError


def to_nnet1(model: AcousticModel) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The model as nnet1 components: the network and its feature transform.

    Raises:
        UserError: nnet1 has no component for a layer.
    """
    try:
        layers = zip(model.network.layers, model.network.views, strict=True)
        components = [component for layer, views in layers for component in layer.to_nnet1(views)]
    except ValueError as error:
        raise UserError(f"the model cannot be a Kaldi nnet1 network: {error}") from error
    transform = model.transform
    front: list[Component] = [Splice(transform.offsets, transform.dim)]
    for make, vector in ((AddShift, transform.shift), (Rescale, transform.scale)):
        if vector is not None:
            front.append(make(vector.cpu().contiguous().numpy(), 0.0))
    return tuple(components), tuple(front)


def from_nnet1(
    network: tuple[Component, ...],
    front: tuple[Component, ...],
    location: Path,
    features: FeatureConfig | None = None,
) -> AcousticModel:
    """A model from nnet1 components.

    Args:
        network: affine components, each followed by at most one activation; softmax only last.
        front: at most one splice, shift and rescale, in this order; may be empty.

    Raises:
        DataError: components that ddnn's networks do not have in this order, or dimensions that do not fit.
    """
    layers, flat = _layers(network, location)
    transform = _transform(front, layers[0].input_dim, location)
    if transform.output_dim != layers[0].input_dim:
        raise DataError(
            f"the feature transform gives {transform.output_dim} dims, the network reads {layers[0].input_dim}",
            location=location,
        )
    return AcousticModel(features or FeatureConfig(), transform, Network(layers, torch.cat(flat)))


def _layers(components: tuple[Component, ...], location: Path) -> tuple[tuple[Layer, ...], list[Tensor]]:
    layers: list[Layer] = []
    parameters: list[Tensor] = []
    at = 0
    while at < len(components):
        found = next(filter(None, (kind.from_nnet1(components[at:]) for kind in LAYERS.values())), None)
        if found is None:
            raise DataError(
                f"component {at + 1} is {type(components[at]).__name__}: a network is affine components, "
                "each followed by at most one activation",
                location=location,
                hint="give what precedes the network with --feature-transform",
            )
        layer, values, count = found
        at += count
        if layer.must_be_last and at < len(components):
            raise DataError(f"component {at} is a {layer.label} that is not the last component", location=location)
        layers.append(layer)
        parameters.append(values)
    try:
        check_layers(layers)
    except ValueError as error:
        raise DataError(f"the components are no network: {error}", location=location) from error
    return tuple(layers), parameters


def _transform(front: tuple[Component, ...], input_dim: int, location: Path) -> InputTransform:
    order = [type(component) for component in front]
    if order != [kind for kind in (Splice, AddShift, Rescale) if kind in order]:
        names = ", ".join(kind.__name__ for kind in order)
        raise DataError(
            f"the feature transform is {names}; ddnn has one splice, shift and rescale, in this order",
            location=location,
        )
    transform = InputTransform((0,), input_dim)
    for component in front:
        if isinstance(component, Splice):
            transform = replace(transform, offsets=component.offsets, dim=component.input_dim)
        elif isinstance(component, AddShift):
            transform = replace(transform, shift=torch.from_numpy(component.shift.copy()))
        elif isinstance(component, Rescale):
            transform = replace(transform, scale=torch.from_numpy(component.scale.copy()))
    return transform
