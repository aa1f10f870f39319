"""`model.layers`: the kinds of layers and their keys, and the axes of a frame from layer to layer, which say whether the
sizes fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ddnn.recipe.section import Fraction, NotNegative, Section, Size

MOST_REPEATS = 100


class LayerConfig(Section):
    """One of `model.layers`. A mapping of its kind to its keys, or to the value of the key that `VALUE_OF` names."""

    repeat: Annotated[int, Field(ge=1, le=MOST_REPEATS)] = 1
    """So many such layers, one above the other, each counted as a layer."""


class TrainedLayerConfig(LayerConfig):
    """The keys that layers of units or filters have."""

    activation: Literal["sigmoid", "tanh", "relu", "prelu", "linear"] = "sigmoid"
    """Activation. `prelu`: a ReLU whose slope for negative inputs is trained, unit by unit, from 0.25 on. `linear`: none."""
    dropout: Fraction = 0.0
    """Fraction of the outputs that are set to 0 in training, drawn for each frame."""
    learn_rate_coef: NotNegative = 1.0
    """Multiple of the learning rate for weights and biases."""


class AffineLayerConfig(TrainedLayerConfig):
    """A hidden layer of units that read all outputs of the layer below."""

    units: Size
    """Number of units."""
    max_norm: NotNegative = 0.0
    """Largest L2 norm of a unit's weights, to which longer ones are scaled down after each update. 0: none."""


class ConvLayerConfig(TrainedLayerConfig):
    """Filters that move along the bands of the features, or of the convolution below; then pooling, scale and shift, and
    the activation, as in Kaldi's make_cnn_proto.py."""

    filters: Size
    """Number of filters."""
    patch: Size
    """Bands that a filter reads at once, of all frames and deltas, or of all filters below."""
    step: Size = 1
    """Bands from one patch to the next."""
    pool: Size = 1
    """Patches in a pool. 1: no pooling."""
    pool_step: Size | None = None
    """Patches from one pool to the next, at most `pool`. Default: `pool`, so that pools do not overlap."""
    pool_kind: Literal["max", "average"] = "max"
    """What a pool gives of a filter's outputs."""
    layout: Literal["frequency", "kaldi"] = "frequency"
    """Above another convolution: `frequency` moves along frequency. `kaldi` reads the same values as make_cnn_proto.py
    does, as if they were ordered filter by filter, of which a patch takes mostly different filters."""
    scale_and_shift: bool = True
    """Whether each output is multiplied and shifted by a trained number before the activation (Rescale, AddShift)."""
    max_norm: NotNegative | None = None
    """Largest L2 norm of a filter, to which longer ones are scaled down after each update. 0: none. Default: 30 for the
    first convolution, 50 for others."""
    weight_stddev: NotNegative | None = None
    """Standard deviation of the initial filters. Default: 0.02 for the first convolution, 0.1 for others; with `relu` and
    `prelu` the square root of 2 / (values that a filter reads)."""
    bias_mean: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Mean of the initial biases. Default: -1 for the first convolution, -2 for others; 0 unless the activation is
    sigmoid."""
    bias_range: NotNegative | None = None
    """Initial biases lie within `bias_mean` +- `bias_range` / 2. Default: 2 for the first convolution, 4 for others; 0
    unless the activation is sigmoid."""


class PoolLayerConfig(LayerConfig):
    """Pooling of the patches of the convolution below."""

    size: Size
    """Patches in a pool."""
    step: Size | None = None
    """Patches from one pool to the next, at most `size`. Default: `size`."""
    kind: Literal["max", "average"] = "max"
    """What a pool gives of a filter's outputs."""


class ScaleAndShiftLayerConfig(LayerConfig):
    """Each column is multiplied, then shifted by a trained number (Rescale, AddShift)."""

    learn_rate_coef: NotNegative = 1.0
    """Multiple of the learning rate."""


class DropoutLayerConfig(LayerConfig):
    """Sets inputs to 0 in training, drawn for each frame."""

    rate: Fraction
    """Fraction of the inputs that are set to 0."""


class ActivationLayerConfig(LayerConfig):
    """An activation on its own."""

    activation: Literal["sigmoid", "tanh", "relu", "prelu"]
    """As that of other layers."""


def _plain(value: Any) -> Any:
    """Without what `ddnn.recipe.source.Entry` knows besides."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


class StoredLayerConfig(LayerConfig):
    """A layer as model files have it, with its sizes, such as `{kind: length-norm, width: 512}`. Layers of the network of
    `init.model` that have no other form are written so into the run dir's recipe."""

    config: Annotated[dict[str, Any], AfterValidator(lambda config: _plain(config))]
    """`kind` and the fields of its class: docs/extending.md."""


LAYERS: dict[str, type[LayerConfig]] = {
    "affine": AffineLayerConfig,
    "conv": ConvLayerConfig,
    "pool": PoolLayerConfig,
    "scale-and-shift": ScaleAndShiftLayerConfig,
    "dropout": DropoutLayerConfig,
    "activation": ActivationLayerConfig,
    "stored": StoredLayerConfig,
}
"""The kinds of `model.layers`."""
VALUE_OF = {"affine": "units", "pool": "size", "dropout": "rate", "activation": "activation", "stored": "config"}
"""By kind of layer, the key whose value may take the place of all its keys: `affine: 512`."""

AnyLayerConfig = (
    AffineLayerConfig
    | ConvLayerConfig
    | PoolLayerConfig
    | ScaleAndShiftLayerConfig
    | DropoutLayerConfig
    | ActivationLayerConfig
    | StoredLayerConfig
)


def describe_layer(layer: LayerConfig) -> str:
    """A layer in a few words: "2 x 512 relu", "conv 128 of 8 bands pool 3"."""
    kind = kind_of_layer(layer)
    text = kind
    if isinstance(layer, AffineLayerConfig):
        text = f"{layer.units} {layer.activation}"
    elif isinstance(layer, ConvLayerConfig):
        text = f"conv {layer.filters} of {layer.patch} bands" + f" pool {layer.pool}" * (layer.pool > 1)
        text += f" {layer.activation}" * (layer.activation != "sigmoid")
    elif isinstance(layer, StoredLayerConfig):
        text = str(layer.config.get("kind"))
    elif kind in VALUE_OF:
        text = f"{kind} {getattr(layer, VALUE_OF[kind])}".replace("activation ", "")
    many = f"{layer.repeat} x " if layer.repeat > 1 or isinstance(layer, AffineLayerConfig) else ""
    return (
        many + text + (f" dropout {layer.dropout:g}" if isinstance(layer, TrainedLayerConfig) and layer.dropout else "")
    )


def kind_of_layer(layer: LayerConfig) -> str:
    """Its name in `LAYERS`."""
    return next(kind for kind, its in LAYERS.items() if its is type(layer))


def is_convolution(layer: LayerConfig) -> bool:
    """Whether it moves along a frequency axis."""
    kind = layer.config.get("kind") if isinstance(layer, StoredLayerConfig) else kind_of_layer(layer)
    return str(kind).startswith("conv")


def written(layer: LayerConfig) -> dict[str, Any]:
    """A layer as a recipe has it, defaults written out."""
    kind = kind_of_layer(layer)
    if isinstance(layer, StoredLayerConfig):
        return {kind: layer.config, **({"repeat": layer.repeat} if layer.repeat > 1 else {})}
    values = layer.model_dump(exclude_none=True)
    return {kind: {key: values[key] for key in sorted(values, key=lambda key: key in TrainedLayerConfig.model_fields)}}


@dataclass(frozen=True)
class Axes:
    """A frame between two layers, as far as it is known.

    Attributes:
        dim: its values.
        bands: along frequency; 0 where there is no such axis.
        filters: of the convolution below, side by side in each band; 0 in the network's input, the bands of whose
            streams (frames, deltas) are side by side; None where it is not known.
    """

    dim: int | None = None
    bands: int | None = None
    filters: int | None = 0


def numbered(layers: Sequence[LayerConfig]) -> Iterator[tuple[int, LayerConfig]]:
    """`model.layers` from the lowest on, repeated ones as often as they are, each with its index in the list. Their
    numbers, from 0 on, are those of `model.freeze` and of messages."""
    return ((n, layer) for n, layer in enumerate(layers) for _ in range(layer.repeat))


def layer_name(number: int, layer: LayerConfig) -> str:
    """How messages name a layer: "layer 2 (conv)"."""
    return f"layer {number} ({kind_of_layer(layer)})"


def shape_problem(layers: Sequence[LayerConfig], bands: int | None) -> tuple[int, str] | None:
    """What does not fit in `model.layers` as far as the recipe says, and in which item of the list."""
    axes = Axes(bands=bands)
    for number, (index, layer) in enumerate(numbered(layers)):
        try:
            axes = next_axes(layer, axes)
        except ValueError as error:
            return index, f"{layer_name(number, layer)}: {error}"
    return None


def next_axes(layer: LayerConfig, axes: Axes) -> Axes:
    """What is above this layer. ValueError, with the nearest sizes that fit: it does not fit on what is below."""
    if isinstance(layer, AffineLayerConfig):
        return Axes(layer.units, 0)
    if isinstance(layer, StoredLayerConfig):
        return Axes(filters=None)
    if isinstance(layer, ConvLayerConfig):
        if axes.bands == 0:
            raise ValueError("there are no bands above an affine layer; convolutions come first")
        bands = None if axes.bands is None else windows("patch", layer.patch, layer.step, axes.bands, "bands")
        axes = Axes(None if bands is None else bands * layer.filters, bands, layer.filters)
        return axes if layer.pool == 1 == (layer.pool_step or 1) else pooled(axes, layer.pool, layer.pool_step, "pool")
    if isinstance(layer, PoolLayerConfig):
        if axes.bands == 0 or axes.filters == 0:
            raise ValueError("pooling takes the patches of a convolution, and there is none below")
        return pooled(axes, layer.size, layer.step, "size")
    return axes


def pooled(axes: Axes, size: int, step: int | None, key: str) -> Axes:
    """Above pooling of `size` patches; `key`: of the recipe, that says it. ValueError: as of `next_axes`."""
    if step is not None and step > size:
        between = f"{key}_step".removeprefix("size_")
        raise ValueError(f"{between} {step} would skip patches between pools of {size}; 1 to {size} do not")
    if axes.bands is None:
        return axes
    bands = windows(key, size, size if step is None else step, axes.bands, "patches", own_step=step is not None)
    return Axes(bands * (axes.filters or 0), bands, axes.filters)


def windows(key: str, size: int, step: int, length: int, what: str, *, own_step: bool = True) -> int:
    """How many windows of `size`, `step` apart, cover `length` without a rest. ValueError, with the nearest sizes that
    do: there is a rest, or they do not fit at all. `own_step`: whether the step was given, and is not the size."""
    if size > length:
        raise ValueError(f"{key} {size} does not fit into {length} {what}; 1 to {length} do")
    rest = (length - size) % step
    if rest and not own_step:
        raise ValueError(f"{key} {size} does not divide {length} {what}; {near(length, size)} do")
    if rest:
        sizes = " and ".join(str(fit) for fit in (size + rest - step, size + rest) if fit > 0)
        steps = near(length - size, step)
        name = "pool_step" if key == "pool" else "step"
        raise ValueError(
            f"{key} {size} with {name} {step} leaves {rest} of {length} {what} over; {key} {sizes}, or {name} {steps} fit"
        )
    return 1 + (length - size) // step


def near(number: int, to: int) -> str:
    """The divisors of `number` next to `to`, below and above."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    return " and ".join(map(str, [d for d in divisors if d <= to][-1:] + [d for d in divisors if d > to][:1]))
