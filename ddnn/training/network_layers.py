"""From `model.layers` of a recipe to the layers of a network, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from ddnn.nn.convolution import (
    AveragePooling,
    AveragePooling2d,
    Convolution,
    Convolution2d,
    Filters,
    MaxPooling,
    MaxPooling2d,
    Pooling,
    Pooling2d,
    Pools,
)
from ddnn.nn.elementwise import Activation, Dropout, Elementwise, ParametricRelu, Scale, Shift
from ddnn.nn.layer import Layer
from ddnn.nn.layers import (
    Affine,
    check_layers,
    layer_from_config,
    mlp_layers,
    num_parameters,
)
from ddnn.recipe.layers import (
    MOST_REPEATS,
    ActivationLayerConfig,
    AffineLayerConfig,
    Axes,
    ConvLayerConfig,
    DropoutLayerConfig,
    LayerConfig,
    PoolLayerConfig,
    ScaleAndShiftLayerConfig,
    StoredLayerConfig,
    TimeAndBands,
    both,
    describe_layer,
    layer_name,
    near,
    next_axes,
    numbered,
)
from ddnn.recipe.schema import Recipe
from ddnn.util.errors import RecipeError


def network_layers(recipe: Recipe, input_dim: int, num_pdfs: int, *, on_dbn: bool = False) -> tuple[Layer, ...]:
    """The recipe's network on `input_dim` values a frame, which are ordered, from slow to fast, by frame offset, order of
    the deltas, and band: first to last, the output layer included. RecipeError: as of `hidden_layers`."""
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
    made = [*hidden_layers(recipe, layers[0].input_dim), layers[-1:]]
    counted = [number for number, parts in enumerate(made) for _ in parts]
    return frozenset(i for i, number in enumerate(counted) if number in numbers)


def describe_parameters(recipe: Recipe, layers: Sequence[Layer]) -> str:
    """How many parameters the network has, and how many of them are trained where `model.freeze` names layers."""
    frozen = frozen_layers(recipe, layers)
    trained = num_parameters([layer for i, layer in enumerate(layers) if i not in frozen])
    names = ", ".join(map(str, sorted(recipe.model.freeze or ())))
    return f"{num_parameters(layers):,} parameters" + f", {trained:,} of them trained (frozen: layer {names})" * bool(
        frozen
    )


def hidden_layers(recipe: Recipe, input_dim: int) -> Iterator[tuple[Layer, ...]]:
    """Of each layer of `model.layers`, as `model.freeze` counts them, the layers of the network that it is, on `input_dim`
    values a frame. RecipeError: sizes do not fit, with the nearest that do."""
    axes, first = input_axes(recipe, input_dim), True
    for number, (_, layer) in enumerate(numbered(recipe.model.layers or ())):
        try:
            made, above = _made(layer, axes, first_convolution=first)
            check_layers(made)
        except (KeyError, TypeError, ValueError) as error:
            text = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise RecipeError(f"{layer_name(number, layer)}: {text}"[:500], location="model.layers") from error
        axes, first = above, first and not any(isinstance(part, Filters) for part in made)
        yield made


def static_dims(recipe: Recipe, input_dim: int) -> int:
    """The dims of the features, neither with their deltas nor spliced."""
    return input_dim // ((2 * recipe.data.splice + 1) * (recipe.data.deltas + 1))


def input_axes(recipe: Recipe, input_dim: int, bands: int | None = None) -> Axes:
    """Of the network's input; `bands`: where not those of the recipe. RecipeError: `model.bands` do not divide the dims
    of the features."""
    static = static_dims(recipe, input_dim)
    bands = bands or recipe.model.bands or static
    if static % bands:
        message = f"{bands} found, which does not divide the {static} dims of the features; {near(static, bands)} do"
        raise RecipeError(message, location="model.bands")
    frames = 2 * recipe.data.splice + 1
    return Axes(input_dim, bands, 0, frames if frames > 1 else static // bands)


def _made(layer: LayerConfig, below: Axes, *, first_convolution: bool) -> tuple[tuple[Layer, ...], Axes]:
    """What one layer of `model.layers` is above these axes, and the axes above it."""
    axes, dim = next_axes(layer, below), below.dim or 0
    if isinstance(layer, AffineLayerConfig):
        coef, function = layer.learn_rate_coef, "linear" if layer.activation == "prelu" else layer.activation
        affine = Affine(dim, layer.units, function, coef, coef, layer.max_norm)
        slopes = _activation("prelu", layer.units, coef) if layer.activation == "prelu" else ()
        return (affine, *slopes, *_dropout(layer.units, layer.dropout)), axes
    if isinstance(layer, ConvLayerConfig):
        return _convolution(layer, below, axes, first=first_convolution), axes
    if isinstance(layer, PoolLayerConfig):
        return (_pooling(layer.kind, below, layer.size, layer.step),), axes
    if isinstance(layer, ScaleAndShiftLayerConfig):
        return (Scale(dim, layer.learn_rate_coef), Shift(dim, layer.learn_rate_coef)), axes
    if isinstance(layer, DropoutLayerConfig):
        return (Dropout(dim, layer.rate),), axes
    if isinstance(layer, ActivationLayerConfig):
        return _activation(layer.activation, dim), axes
    assert isinstance(layer, StoredLayerConfig)
    stored = layer_from_config(layer.config)
    if stored.must_be_last:
        raise ValueError(f"{stored.label} found below other layers, expected only of the last, which is added")
    if stored.input_dim != dim:
        raise ValueError(f"{stored.label}, which reads {stored.input_dim} dims, found above a layer that gives {dim}")
    if isinstance(stored, Elementwise):
        return (stored,), below
    if not isinstance(stored, Filters | Pools):
        return (stored,), Axes(stored.output_dim, 0)
    *times, bands, filters = stored.out_shape
    return (stored,), Axes(stored.output_dim, bands, filters, *times)


POOLING: dict[str, tuple[type[Pooling], type[Pooling2d]]] = {
    "max": (MaxPooling, MaxPooling2d),
    "average": (AveragePooling, AveragePooling2d),
}


def _pooling(kind: str, below: Axes, size: int | TimeAndBands, step: int | TimeAndBands | None) -> Layer:
    """Pooling above a convolution."""
    assert below.dim and below.bands and below.filters and below.times
    along_bands, along_both = POOLING[kind]
    sizes, steps = both(size), both(size if step is None else step)
    if below.times == 1 and not isinstance(size, TimeAndBands):
        return along_bands(below.dim, sizes.bands, steps.bands, below.filters)
    row = below.times, below.bands, below.filters
    return along_both(*row, sizes.time, sizes.bands, steps.time, steps.bands)


def _convolution(layer: ConvLayerConfig, below: Axes, above: Axes, *, first: bool) -> tuple[Layer, ...]:
    """A convolution as Kaldi's make_cnn_proto.py makes one, with what follows it; `first`: of the network."""
    assert below.dim and below.bands and below.times and above.dim
    step, wide = both(layer.step), below.filters or 1  # a band is as many values wide as there are filters below
    made: Filters
    if isinstance(layer.patch, TimeAndBands):
        channels = below.dim // (below.times * below.bands)
        row, size = (below.times, channels, below.bands), (layer.patch.time, layer.patch.bands)
        steps = (step.time, step.bands, layer.dilation)
        made = Convolution2d(*row, *size, layer.filters, *steps, channels_last=below.filters != 0)
    elif layer.layout == "kaldi":
        made = Convolution(below.dim, layer.patch, step.bands, below.bands, layer.filters)
    else:
        made = Convolution(below.dim, layer.patch * wide, step.bands * wide, below.bands * wide, layer.filters)
    rectified, coef = layer.activation in ("relu", "prelu"), layer.learn_rate_coef
    mean, width = (0.0, 0.0) if layer.activation != "sigmoid" else (-1.0, 2.0) if first else (-2.0, 4.0)
    deviation = math.sqrt(2.0 / made.fan_in) if rectified else 0.02 if first else 0.1
    made = replace(
        made,
        learn_rate_coef=coef,
        bias_learn_rate_coef=coef,
        max_norm=_given(layer.max_norm, 30.0 if first else 50.0),
        weight_stddev=_given(layer.weight_stddev, deviation),
        bias_mean=_given(layer.bias_mean, mean),
        bias_range=_given(layer.bias_range, width),
    )
    *times, bands, filters = made.out_shape
    patches = Axes(made.output_dim, bands, filters, *times)
    pool = (_pooling(layer.pool_kind, patches, layer.pool, layer.pool_step),) if both(layer.pool) != both(1) else ()
    scaled = (Scale(above.dim, coef), Shift(above.dim, coef)) if layer.scale_and_shift else ()
    return (made, *pool, *scaled, *_activation(layer.activation, above.dim, coef), *_dropout(above.dim, layer.dropout))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _activation(function: str, width: int, coef: float = 1.0) -> tuple[Layer, ...]:
    if function == "prelu":  # He et al. 2015: the slope for negative inputs is trained, from 0.25 on
        return (ParametricRelu(width, beta_learn_rate_coef=coef, beta=0.25),)
    return () if function == "linear" else (Activation(width, function),)


def _dropout(width: int, rate: float) -> tuple[Layer, ...]:
    return (Dropout(width, rate),) if rate else ()


def described_layers(layers: Sequence[Layer], below: Axes) -> list[LayerConfig]:
    """Layers of a network above these axes as a `model.layers` of which `hidden_layers` makes the same; those that have no
    other form are `stored`."""
    found, first, i = list[LayerConfig](), True, 0
    while i < len(layers):
        stored = partial(StoredLayerConfig, config=layers[i].config())
        guesses: list[Callable[[], LayerConfig]] = [*_guesses(layers[i:], below), stored]
        for guess in guesses:
            with suppress(ValueError):  # a recipe does not take these sizes or numbers
                config = guess()
                made, above = _made(config, below, first_convolution=first)
                if made == tuple(layers[i : i + len(made)]):
                    break
        if found and found[-1].model_copy(update={"repeat": 1}) == config and found[-1].repeat < MOST_REPEATS:
            config = config.model_copy(update={"repeat": found.pop().repeat + 1})
        found.append(config)
        first = first and not any(isinstance(part, Filters) for part in made)
        below, i = above, i + len(made)
    return found


def describe_hidden(layers: Sequence[Layer], times: int, static: int) -> str:
    """A network's layers below the output layer in a few words; `times`: frames that are spliced, of `static` dims and
    their deltas."""
    input_dim, bands = layers[0].input_dim, bands_of(layers)
    bands = static if bands is None or static % bands else bands
    below = Axes(input_dim, bands, 0, times if times > 1 else static // bands)
    return ", ".join(map(describe_layer, described_layers(layers[:-1], below)))


def bands_of(layers: Sequence[Layer]) -> int | None:
    """Along how many bands of the network's input its first convolution moves; None where none does."""
    for layer in layers:
        if isinstance(layer, Convolution | Convolution2d):
            return layer.patch_stride if isinstance(layer, Convolution) else layer.bands
        if not isinstance(layer, Elementwise):
            return None
    return None


def _guesses(layers: Sequence[Layer], below: Axes) -> Iterator[Callable[[], LayerConfig]]:
    """How a recipe may have described the first of these layers, with those that follow and may belong to it."""
    layer, *following = layers

    def take(*kinds: Any) -> Any:
        return following.pop(0) if following and isinstance(following[0], kinds) else None

    if isinstance(layer, Affine):
        coef = {"learn_rate_coef": layer.learn_rate_coef, "max_norm": layer.max_norm}
        function = "prelu" if layer.label == "linear" and take(ParametricRelu) else layer.label
        drop, units = take(Dropout), layer.out_features
        yield partial(AffineLayerConfig, units=units, activation=function, dropout=drop.rate if drop else 0.0, **coef)
        yield partial(AffineLayerConfig, units=units, activation=layer.label, **coef)
    elif isinstance(layer, Filters):
        pool, scaled = take(Pools), take(Scale) is not None and take(Shift) is not None
        function, drop = take(Activation, ParametricRelu), take(Dropout)
        pools = {"pool": _sizes(pool), "pool_step": _steps(pool), "pool_kind": _kind(pool)} if pool else {}
        names = ("filters", "learn_rate_coef", "max_norm", "weight_stddev", "bias_mean", "bias_range")
        keys = {"scale_and_shift": scaled, **{name: getattr(layer, name) for name in names}}
        keys |= {"activation": function.label if function else "linear", "dropout": drop.rate if drop else 0.0, **pools}
        for sizes in _patches(layer, below.filters or 1):
            yield partial(ConvLayerConfig, **sizes, **keys)
    elif isinstance(layer, Pools):
        yield partial(PoolLayerConfig, size=_sizes(layer), step=_steps(layer), kind=_kind(layer))
    elif isinstance(layer, Scale):
        yield partial(ScaleAndShiftLayerConfig, learn_rate_coef=layer.learn_rate_coef)
    elif isinstance(layer, Dropout):
        yield partial(DropoutLayerConfig, rate=layer.rate)
    elif isinstance(layer, Activation | ParametricRelu):
        yield partial(ActivationLayerConfig, activation=layer.label)


def _patches(layer: Filters, wide: int) -> Iterator[dict[str, Any]]:
    """The keys that may say a convolution's patches; `wide`: values of a band."""
    if isinstance(layer, Convolution2d):
        patch = TimeAndBands(time=layer.time_size, bands=layer.band_size)
        step = TimeAndBands(time=layer.time_step, bands=layer.band_step)
        yield {"patch": patch, "step": step, "dilation": layer.time_dilation}
    elif isinstance(layer, Convolution):
        yield {"patch": layer.patch_dim // wide, "step": layer.patch_step // wide}
        yield {"patch": layer.patch_dim, "step": layer.patch_step, "layout": "kaldi"}


def _sizes(pool: Pools) -> int | TimeAndBands:
    if isinstance(pool, Pooling2d):
        return TimeAndBands(time=pool.time_size, bands=pool.band_size)
    return pool.grid.band.size


def _steps(pool: Pools) -> int | TimeAndBands | None:
    time, band, *_ = pool.grid
    if (time.step, band.step) == (time.size, band.size):
        return None
    return TimeAndBands(time=time.step, bands=band.step) if isinstance(pool, Pooling2d) else band.step


def _kind(pool: Pools) -> str:
    return "max" if isinstance(pool, MaxPooling | MaxPooling2d) else "average"


TRAINING_FIELDS = {
    *("learn_rate_coef", "bias_learn_rate_coef", "max_norm", "weight_stddev", "bias_mean", "bias_range"),
    *("alpha_learn_rate_coef", "beta_learn_rate_coef", "alpha", "beta"),
}
"""Fields of layers that say how they are initialized and trained, and not what they compute."""


def computes_the_same(one: Sequence[Layer], other: Sequence[Layer]) -> bool:
    """Whether they are the same layers of the same parameters, however they are trained: with which rates, limits,
    dropout."""
    described = ([layer.config() for layer in layers if not isinstance(layer, Dropout)] for layers in (one, other))
    stripped = (
        [{k: v for k, v in config.items() if k not in TRAINING_FIELDS} for config in configs] for configs in described
    )
    return next(stripped) == next(stripped)
