"""`model.layers`: the kinds of layers and their keys, and the axes of a frame from layer to layer, which say whether the
sizes fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ddnn.recipe.section import EITHER, MAPPING, VALUE, Fraction, NotNegative, Section, Size

MOST_REPEATS = 100


class LayerConfig(Section):
    """One of `model.layers`. A mapping of its kind to its keys, or to the value of the key that `VALUE_OF` names."""

    repeat: Annotated[int, Field(ge=1, le=MOST_REPEATS)] = 1
    """So many such layers, one above the other, each counted as a layer."""

    def __repr__(self) -> str:
        """As a recipe may have it, without defaults: "{affine: {units: 512, repeat: 3}}"."""
        kind, keys = kind_of_layer(self), self.model_dump(exclude_defaults=True)
        return f"{{{kind}: {_flow(keys['config'] if kind == 'stored' else keys)}}}"

    __str__ = __repr__


def _flow(value: Any) -> str:
    """A value as YAML in a line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else str(value)


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


class TimeAndBands(Section):
    """A size along both axes."""

    time: Size = 1
    """Frames of the splice; rows of an image."""
    bands: Size = 1
    """Bands; columns of an image."""

    def __str__(self) -> str:
        return f"{self.time} x {self.bands}"


SizeOrBoth = Annotated[Annotated[Size, VALUE] | Annotated[TimeAndBands, MAPPING], EITHER]


class ConvLayerConfig(TrainedLayerConfig):
    """Filters that move along the bands of the features, or of the convolution below; then pooling, scale and shift, and
    the activation, as in Kaldi's make_cnn_proto.py."""

    filters: Size
    """Number of filters."""
    patch: SizeOrBoth
    """Bands that a filter reads at once, of all frames and deltas, or of all filters below. A mapping of `time` and `bands`
    makes it move along both: over frames, or over the rows of an image, so many at once."""
    step: SizeOrBoth = 1
    """Bands from one patch to the next; of a patch over both a mapping, or the same for both."""
    dilation: Size = 1
    """Of a patch over both: frames from one that it reads to the next, as in a TDNN."""
    pool: SizeOrBoth = 1
    """Patches in a pool; of a patch over both a mapping, or the same for both. 1: no pooling."""
    pool_step: SizeOrBoth | None = None
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

    size: SizeOrBoth
    """Patches in a pool; of patches over time and bands a mapping, or the same for both."""
    step: SizeOrBoth | None = None
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
        bands = "" if isinstance(layer.patch, TimeAndBands) else " bands"
        text = f"conv {layer.filters} of {layer.patch}{bands}" + f" pool {layer.pool}" * (both(layer.pool) != both(1))
        text += f" {layer.activation}" * (layer.activation != "sigmoid") + " layout kaldi" * (layer.layout == "kaldi")
    elif isinstance(layer, StoredLayerConfig):
        text = re.sub(r"[^\w-]", "?", str(layer.config.get("kind")))[:40]  # anybody's word, for a job script too
    elif kind in VALUE_OF:
        text = f"{kind} {getattr(layer, VALUE_OF[kind])}".replace("activation ", "")
    many = f"{layer.repeat} x " if layer.repeat > 1 or isinstance(layer, AffineLayerConfig) else ""
    return (
        many + text + (f" dropout {layer.dropout:g}" if isinstance(layer, TrainedLayerConfig) and layer.dropout else "")
    )


def kind_of_layer(layer: LayerConfig) -> str:
    """Its name in `LAYERS`."""
    return next(kind for kind, its in LAYERS.items() if its is type(layer))


def has_parameters(layer: LayerConfig) -> bool:
    """Whether training changes anything of it; of a stored layer that is not known, and true."""
    if isinstance(layer, ActivationLayerConfig):
        return layer.activation == "prelu"
    return not isinstance(layer, PoolLayerConfig | DropoutLayerConfig)


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
        times: along time, each with all bands: frames of the splice, or rows of an image; 1 above a convolution along
            bands alone.
    """

    dim: int | None = None
    bands: int | None = None
    filters: int | None = 0
    times: int | None = 1


def numbered(layers: Sequence[LayerConfig]) -> Iterator[tuple[int, LayerConfig]]:
    """`model.layers` from the lowest on, repeated ones as often as they are, each with its index in the list. Their
    numbers, from 0 on, are those of `model.freeze` and of messages."""
    return ((n, layer) for n, layer in enumerate(layers) for _ in range(layer.repeat))


def layer_name(number: int, layer: LayerConfig) -> str:
    """How messages name a layer: "layer 2 (conv)"."""
    return f"layer {number} ({kind_of_layer(layer)})"


def shape_problem(layers: Sequence[LayerConfig], bands: int | None, times: int | None) -> tuple[int, str] | None:
    """What does not fit in `model.layers` as far as the recipe says, and in which item of the list."""
    axes = Axes(bands=bands, times=times)
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
        return Axes(filters=None, times=None)
    if isinstance(layer, ConvLayerConfig):
        if axes.bands == 0:
            raise ValueError("there are no bands above an affine layer; convolutions come first")
        if isinstance(layer.patch, TimeAndBands):
            patch, step = layer.patch, both(layer.step)
            span = (patch.time - 1) * layer.dilation + 1
            if patch.time > 1 and axes.times == 1:
                more = "data.splice gives more, model.bands the rows of an image"
                raise ValueError(f"patch.time {patch.time} takes several frames, and there is 1 here: {more}")
            if layer.dilation > 1 and axes.times is not None and span > axes.times:
                raise ValueError(
                    f"patch.time {patch.time} with dilation {layer.dilation} spans {span} of {axes.times} frames"
                )
            times = windows("time", ("patch", "step"), span, step.time, axes.times, "frames")
            bands = windows("bands", ("patch", "step"), patch.bands, step.bands, axes.bands, "bands")
        else:
            keys = {"step": layer.step, "pool": layer.pool, "pool_step": layer.pool_step}
            for key in [key for key, value in keys.items() if isinstance(value, TimeAndBands)]:
                raise ValueError(
                    f"{key} of time and bands found beside patch {layer.patch}, which is along bands alone"
                )
            times, bands = 1, windows("", ("patch", "step"), layer.patch, both(layer.step).bands, axes.bands, "bands")
        if layer.dilation > 1 and not isinstance(layer.patch, TimeAndBands):
            raise ValueError("dilation is of frames, over which only a patch of {time: .., bands: ..} moves")
        return pooled(_known(bands, layer.filters, times), layer.pool, layer.pool_step, ("pool", "pool_step"))
    if isinstance(layer, PoolLayerConfig):
        if axes.bands == 0 or axes.filters == 0:
            raise ValueError("pooling takes the patches of a convolution, and there is none below")
        return pooled(axes, layer.size, layer.step, ("size", "step"))
    return axes


def _known(bands: int | None, filters: int | None, times: int | None) -> Axes:
    dim = None if bands is None or filters is None or times is None else bands * filters * times
    return Axes(dim, bands, filters, times)


def both(size: int | TimeAndBands) -> TimeAndBands:
    return size if isinstance(size, TimeAndBands) else TimeAndBands(time=size, bands=size)


def pooled(axes: Axes, size: int | TimeAndBands, step: int | TimeAndBands | None, names: tuple[str, str]) -> Axes:
    """Above pooling of `size` patches; `names`: of the recipe's keys that say it. ValueError: as of `next_axes`."""
    over_time = axes.times != 1 or isinstance(size, TimeAndBands)
    sizes, steps = both(size), both(size if step is None else step)
    times = axes.times
    for axis in ("time", "bands") if over_time else ("bands",):
        one, by = getattr(sizes, axis), getattr(steps, axis)
        if by > one:
            where = f"{names[1]}.{axis}" if over_time else names[1]
            raise ValueError(f"{where} {by} would skip patches between pools of {one}; 1 to {one} do not")
    if over_time:
        times = windows("time", names, sizes.time, steps.time, axes.times, "patches")
    axis = "bands" if over_time else ""
    return _known(windows(axis, names, sizes.bands, steps.bands, axes.bands, "patches"), axes.filters, times)


def windows(axis: str, names: tuple[str, str], size: int, step: int, length: int | None, what: str) -> int | None:
    """How many windows of `size`, `step` apart, cover `length` without a rest; None where that is not known. ValueError,
    with the nearest sizes that do: there is a rest, or they do not fit at all. `axis`, `names`: where the recipe says size
    and step."""
    if length is None:
        return None
    key, step_key = (f"{name}.{axis}" if axis else name for name in names)
    if size > length:
        one = {"bands": "band", "frames": "frame", "patches": "patch"}[what]
        there = f"{length} {what}; 1 to {length} do" if length > 1 else f"1 {one}; 1 does"
        raise ValueError(f"{key} {size} does not fit into {there}")
    rest = (length - size) % step
    if rest and size == step and names[0] != "patch":
        raise ValueError(f"{key} {size} does not divide {length} {what}; {near(length, size)} do")
    if rest:
        fitting = " and ".join(str(fit) for fit in (size + rest - step, size + rest) if fit > 0)
        message = f"{key} {size} with {step_key} {step} leaves {rest} of {length} {what} over; "
        raise ValueError(f"{message}{key} {fitting}, or {step_key} {near(length - size, step)} fit")
    return 1 + (length - size) // step


def near(number: int, to: int) -> str:
    """The divisors of `number` next to `to`, below and above."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    return " and ".join(map(str, [d for d in divisors if d <= to][-1:] + [d for d in divisors if d > to][:1]))
