"""From `model.layers` of a recipe to the layers of a network. Whether sizes fit is what a layer says when it is made: its
ValueError becomes the user's message, with the file and line of the recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling, nearest_divisors
from ddnn.nn.elementwise import Activation, Dropout, Elementwise, ParametricRelu, Scale, Shift
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine, layer_from_config, mlp_layers, num_parameters
from ddnn.recipe.layers import TimeAndBands, as_time_and_bands, expand_repeats, layer_name
from ddnn.recipe.schema import Recipe
from ddnn.util.errors import RecipeError


def network_layers(recipe: Recipe, input_dim: int, num_pdfs: int, *, on_dbn: bool = False) -> tuple[Layer, ...]:
    """The recipe's network on `input_dim` values a frame, which are ordered, from slow to fast, by frame offset, order of
    the deltas, and band: first to last, the output layer included. RecipeError: see `hidden_layers`."""
    if recipe.model.layers is None:
        model = recipe.model
        return mlp_layers(input_dim, model.hidden_layers, model.hidden_units, num_pdfs, model.activation, on_dbn=on_dbn)
    hidden = tuple(chain.from_iterable(hidden_layers(recipe, input_dim)))
    return (*hidden, *mlp_layers(hidden[-1].output_dim if hidden else input_dim, 0, 0, num_pdfs, on_dbn=on_dbn))


def frozen_layers(recipe: Recipe, layers: Sequence[Layer]) -> frozenset[int]:
    """Which of the network's layers, by number, `model.freeze` names."""
    numbers = frozenset(recipe.model.freeze or ())
    if recipe.model.layers is None or not numbers:
        return numbers
    blocks = [*hidden_layers(recipe, layers[0].input_dim), layers[-1:]]
    counted = [number for number, parts in enumerate(blocks) for _ in parts]
    return frozenset(i for i, number in enumerate(counted) if number in numbers)


def describe_parameters(recipe: Recipe, layers: Sequence[Layer]) -> str:
    """How many parameters the network has, and how many of them are trained where `model.freeze` names layers."""
    frozen = frozen_layers(recipe, layers)
    text = f"{num_parameters(layers):,} parameters"
    if not frozen:
        return text
    trained = num_parameters([layer for i, layer in enumerate(layers) if i not in frozen])
    names = ", ".join(map(str, sorted(recipe.model.freeze or ())))
    return f"{text}, {trained:,} of them trained (frozen: layer {names})"


def hidden_layers(recipe: Recipe, input_dim: int) -> Iterator[tuple[Layer, ...]]:
    """For each layer of `model.layers`, as `model.freeze` counts them, the layers of the network that it is, on `input_dim`
    values a frame. RecipeError: sizes do not fit, with the nearest that do."""
    network = _Network(input_row(recipe, input_dim))
    for number, layer in expand_repeats(recipe.model.layers or ()):
        first = len(network.layers)
        try:
            BUILDERS[layer.name](network, layer)
        except (KeyError, TypeError, ValueError) as error:
            text = f"no key {error}" if isinstance(error, KeyError) else str(error)
            location = layer.place or "model.layers"
            raise RecipeError(f"{layer_name(number, layer)}: {text}"[:500], location=location) from error
        yield tuple(network.layers[first:])


def static_dims(recipe: Recipe, input_dim: int) -> int:
    """The dims of the features, neither with their deltas nor spliced."""
    return input_dim // ((2 * recipe.data.splice + 1) * (recipe.data.deltas + 1))


class Row(NamedTuple):
    """The values of a frame between two layers: (times, channels, bands), or with `channels_last` (times, bands, channels).
    Times are frames of the splice, or rows of an image. Where there is no frequency axis, `bands` is 0, and the channels are
    the values. Channels are deltas in the network's input, and the filters of the convolution below elsewhere."""

    times: int
    bands: int
    channels: int
    channels_last: bool = True

    @property
    def dim(self) -> int:
        return self.times * max(self.bands, 1) * self.channels


def input_row(recipe: Recipe, input_dim: int) -> Row:
    """Of the network's input. RecipeError: `model.bands` do not divide the dims of the features."""
    static = static_dims(recipe, input_dim)
    bands = recipe.model.bands or static
    if static % bands:
        fit = nearest_divisors(static, bands)
        message = f"{bands} found, which does not divide the {static} dims of the features; {fit} do"
        raise RecipeError(message, location="model.bands")
    frames = 2 * recipe.data.splice + 1
    times = frames if frames > 1 else static // bands
    return Row(times, bands, input_dim // (times * bands), channels_last=False)


class _Network:
    """The layers so far, the row above them, and whether there is a convolution among them."""

    def __init__(self, row: Row) -> None:
        self.layers, self.row, self.has_convolution = list[Layer](), row, False

    @property
    def dim(self) -> int:
        return self.row.dim

    def add(self, layer: Layer) -> None:
        self.layers.append(layer)
        self.has_convolution |= isinstance(layer, Convolution)
        if not isinstance(layer, Elementwise):
            grid = layer.out_shape if len(layer.out_shape) == 3 else (1, 0, layer.output_dim)
            self.row = Row(*grid)

    def add_activation(self, function: str, learn_rate_coef: float = 1.0) -> None:
        if function == "prelu":  # He et al. 2015: the slope for negative inputs is trained, from 0.25 on
            self.add(ParametricRelu(self.dim, beta_learn_rate_coef=learn_rate_coef, beta=0.25))
        elif function != "linear":
            self.add(Activation(self.dim, function))

    def add_scale_and_shift(self, learn_rate_coef: float) -> None:
        self.add(Scale(self.dim, learn_rate_coef))
        self.add(Shift(self.dim, learn_rate_coef))

    def add_dropout(self, rate: float) -> None:
        if rate:
            self.add(Dropout(self.dim, rate))

    def add_pooling(self, kind: str, size: int | TimeAndBands, step: int | TimeAndBands | None) -> None:
        """`size` and `step` of patches; one number is for both axes, of which there is one above filters of all times."""
        row, sizes, steps = self.row, as_time_and_bands(size), as_time_and_bands(size if step is None else step)
        if not row.bands or not row.channels_last:
            raise ValueError("pooling takes the patches of a convolution, and there is none below")
        pooling = MaxPooling if kind == "max" else AveragePooling
        if row.times == 1 and isinstance(size, int):
            sizes, steps = (axes.model_copy(update={"time": 1}) for axes in (sizes, steps))
        self.add(pooling(*row[:3], sizes.time, sizes.bands, steps.time, steps.bands))


def _add_affine(network: _Network, layer: Any) -> None:
    coef, slopes = layer.learn_rate_coef, layer.activation == "prelu"
    function = "linear" if slopes else layer.activation
    network.add(Affine(network.dim, layer.units, function, coef, coef, layer.max_norm))
    if slopes:
        network.add_activation("prelu", coef)
    network.add_dropout(layer.dropout)


def _add_convolution(network: _Network, layer: Any) -> None:
    """As Kaldi's make_cnn_proto.py makes one, with what follows it."""
    first = not network.has_convolution
    rectified = layer.activation in ("relu", "prelu")
    mean, width = (0.0, 0.0) if layer.activation != "sigmoid" else (-1.0, 2.0) if first else (-2.0, 4.0)
    defaults = {"max_norm": 30.0 if first else 50.0, "weight_stddev": 0.02 if first else 0.1}
    defaults |= {"bias_mean": mean, "bias_range": width}
    from_recipe = {name: value for name, value in layer if name in defaults and value is not None}
    numbers = defaults | from_recipe | dict.fromkeys(("learn_rate_coef", "bias_learn_rate_coef"), layer.learn_rate_coef)
    convolution = _convolution(network.row, layer, numbers)
    if rectified and layer.weight_stddev is None:
        convolution = replace(convolution, weight_stddev=math.sqrt(2.0 / convolution.fan_in))
    network.add(convolution)
    if as_time_and_bands(layer.pool) != as_time_and_bands(1):
        network.add_pooling(layer.pool_kind, layer.pool, layer.pool_step)
    if layer.scale_and_shift:
        network.add_scale_and_shift(layer.learn_rate_coef)
    network.add_activation(layer.activation, layer.learn_rate_coef)
    network.add_dropout(layer.dropout)


def _convolution(row: Row, layer: Any, numbers: dict[str, Any]) -> Convolution:
    if not row.bands:
        raise ValueError("there are no bands above an affine layer; convolutions come first")
    patch, step = layer.patch, as_time_and_bands(layer.step)
    if isinstance(patch, TimeAndBands):
        if patch.time > 1 and row.times == 1:
            more = "data.splice gives more, model.bands the rows of an image"
            raise ValueError(f"patch.time {patch.time} takes several frames, and there is 1 here: {more}")
        sizes = (patch.time, patch.bands, layer.filters, step.time, step.bands, layer.dilation)
        return Convolution(row.times, row.channels, row.bands, *sizes, row.channels_last, **numbers)
    for key in ("step", "pool", "pool_step"):
        if isinstance(getattr(layer, key), TimeAndBands):
            raise ValueError(f"{key} of time and bands found beside patch {patch}, which is along bands alone")
    if layer.dilation > 1:
        raise ValueError("dilation is of frames, over which only a patch of {time: .., bands: ..} moves")
    channels_last = row.channels_last and layer.layout == "frequency"
    sizes = (row.times, patch, layer.filters, 1, step.bands, 1)
    return Convolution(row.times, row.channels, row.bands, *sizes, channels_last, **numbers)


def _add_stored(network: _Network, layer: Any) -> None:
    stored = layer_from_config(layer.config, network.dim)
    if stored.must_be_last:
        raise ValueError(f"{stored.label} found below other layers, expected only of the last, which is added")
    if stored.input_dim != network.dim:
        text = f"{stored.label}, which reads {stored.input_dim} dims, found above a layer that gives {network.dim}"
        raise ValueError(text)
    network.add(stored)


BUILDERS: dict[str, Callable[[_Network, Any], None]] = {
    "affine": _add_affine,
    "conv": _add_convolution,
    "pool": lambda network, layer: network.add_pooling(layer.kind, layer.size, layer.step),
    "scale-and-shift": lambda network, layer: network.add_scale_and_shift(layer.learn_rate_coef),
    "dropout": lambda network, layer: network.add(Dropout(network.dim, layer.rate)),
    "activation": lambda network, layer: network.add_activation(layer.activation),
    "stored": _add_stored,
}
"""By the kind of a layer of `model.layers`, which adds its layers to the network."""


TRAINING_FIELDS = {
    *("learn_rate_coef", "bias_learn_rate_coef", "max_norm", "weight_stddev", "bias_mean", "bias_range"),
    *("alpha_learn_rate_coef", "beta_learn_rate_coef", "alpha", "beta"),
}
"""Fields of layers that say how they are initialized and trained, and not what they compute."""


def is_equivalent(first: Sequence[Layer], second: Sequence[Layer]) -> bool:
    """Whether they are the same layers of the same parameters, however they are trained: with which rates, limits,
    dropout."""
    return _computations(first) == _computations(second)


def _computations(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    configs = (layer.config() for layer in layers if not isinstance(layer, Dropout))
    return [{name: value for name, value in config.items() if name not in TRAINING_FIELDS} for config in configs]
