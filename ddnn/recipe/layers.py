"""`model.layers`: the kinds of layers and their keys. Which layers of a network they are, and whether their sizes fit, the layers
themselves say (`ddnn.training.network_layers`): nothing here imports torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import yaml
from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import to_jsonable_python

from ddnn.recipe.section import MAPPING, VALUE, VALUE_OR_MAPPING, Fraction, NotNegative, Section, Size
from ddnn.recipe.source import format_value

MAX_REPEATS = 100
MAX_LAYERS = 1000  # repeated ones as often as they are


class LayerConfig(Section):
    """One of `model.layers`: a mapping of its kind to its keys, or to the value of its `primary_key`. `place`: the file and
    line that it comes from.

    Attributes:
        name: the kind, in recipes.
        primary_key: the key whose value may take the place of all keys: `affine: 512`.
        trained: whether training changes anything of it; not known of a stored layer, and true.
        rbm_units: the hidden units of the RBM that it may be; None where it cannot be one.
    """

    name: ClassVar[str]
    primary_key: ClassVar[str] = ""
    trained: ClassVar[bool] = False
    rbm_units: ClassVar[int | None] = None
    _place: str = PrivateAttr("")

    repeat: Annotated[int, Field(ge=1, le=MAX_REPEATS)] = 1
    """Number of such layers, one on top of the other. Each of them counts as a layer."""

    @property
    def place(self) -> str:
        return self._place

    def set_place(self, place: str) -> None:
        self._place = place

    @model_validator(mode="before")
    @classmethod
    def _join_keys(cls, item: Any) -> Any:
        """The keys of an item of a recipe's list, some of which may be beside the kind: `{affine: 512, repeat: 3}`. Those that
        are null are not given."""
        if isinstance(item, str) and item == cls.name:  # - scale-and-shift
            return {}
        if not isinstance(item, dict) or cls.name not in item:
            return item
        value, beside = item[cls.name], {key: value for key, value in item.items() if key != cls.name}
        if cls.primary_key and (cls is StoredLayerConfig or not isinstance(value, dict | None)):
            value = {cls.primary_key: value}
        if not isinstance(value, dict | None):
            return value
        keys = value or {}
        for key in filter(keys.__contains__, beside):
            raise ValueError(f"{key} given twice, in the mapping of {cls.name} and beside it")
        return {key: value for key, value in {**keys, **beside}.items() if value is not None}

    def __eq__(self, other: object) -> bool:
        """Wherever they come from."""
        return isinstance(other, LayerConfig) and self.as_yaml() == other.as_yaml()

    def as_yaml(self) -> dict[str, Any]:
        """As a recipe has it, defaults written out."""
        return {self.name: self.model_dump(exclude_none=True)}

    def __repr__(self) -> str:
        """As a recipe may have it, without defaults: "{affine: {units: 512, repeat: 3}}"."""
        keys = {self.name: self.model_dump(exclude_defaults=True)}
        return yaml.safe_dump(keys, default_flow_style=True, sort_keys=False, width=10_000).strip()

    __str__ = __repr__

    def describe(self) -> str:
        """In a few words: "2 x 512 relu", "conv 128 of 8 bands pool 3"."""
        return f"{self.repeat} x {self._words()}" if self.repeat > 1 else self._words()

    def _words(self) -> str:
        return f"{self.name} {getattr(self, self.primary_key)}" if self.primary_key else self.name


class TrainedLayerConfig(LayerConfig):
    """The keys that layers of units or filters have."""

    trained: ClassVar[bool] = True

    activation: Literal["sigmoid", "tanh", "relu", "prelu", "linear"] = "sigmoid"
    """Activation. `prelu`: a ReLU whose slope for negative inputs is trained for each unit, starting at 0.25. `linear`: none."""
    dropout: Fraction = 0.0
    """Fraction of the outputs that are set to 0 in training, drawn for each frame."""
    learn_rate_coef: NotNegative = 1.0
    """Factor of the learning rate for weights and biases."""

    def describe(self) -> str:
        return super().describe() + (f" dropout {self.dropout:g}" if self.dropout else "")


class AffineLayerConfig(TrainedLayerConfig):
    """A hidden layer of units that read all outputs of the layer below."""

    name: ClassVar[str] = "affine"
    primary_key: ClassVar[str] = "units"

    units: Size
    """Number of units."""
    max_norm: NotNegative = 0.0
    """Largest L2 norm of a unit's weights; larger ones are scaled down to it after each update. 0: no limit."""

    @property
    def rbm_units(self) -> int:  # type: ignore[override]
        return self.units

    def _words(self) -> str:
        return f"{'' if self.repeat > 1 else '1 x '}{self.units} {self.activation}"


class TimeAndBands(Section):
    """A size along both axes."""

    time: Size = 1
    """Frames of the splice; rows of an image."""
    bands: Size = 1
    """Bands; columns of an image."""

    def __str__(self) -> str:
        return f"{self.time} x {self.bands}"


SizeOrBoth = Annotated[Annotated[Size, VALUE] | Annotated[TimeAndBands, MAPPING], VALUE_OR_MAPPING]


class ConvLayerConfig(TrainedLayerConfig):
    """Filters that move along the bands of the features, or of the convolution below; then pooling, scale and shift, and
    the activation, as in Kaldi's make_cnn_proto.py."""

    name: ClassVar[str] = "conv"

    filters: Size
    """Number of filters."""
    patch: SizeOrBoth = Field(examples=["{time: 3, bands: 8}"])
    """Number of neighboring bands that a filter reads, in all frames and deltas, or in all filters of the convolution below.
    With a mapping, the filter moves along time (frames, or the rows of an image), too, and reads this many of each."""
    step: SizeOrBoth = 1
    """Bands from one patch to the next. For a patch over both axes: a mapping, or one number for both."""
    dilation: Size = 1
    """For a patch over both axes: distance in frames between the frames that it reads, as in a TDNN."""
    pool: SizeOrBoth = 1
    """Patches in a pool. For a patch over both axes: a mapping, or one number for both. 1: no pooling."""
    pool_step: SizeOrBoth | None = None
    """Patches from one pool to the next, at most `pool`. Default: `pool`, without overlap."""
    pool_kind: Literal["max", "average"] = "max"
    """What a pool computes from the outputs of a filter."""
    layout: Literal["frequency", "kaldi"] = "frequency"
    """How a convolution reads the one below. `frequency`: along frequency. `kaldi`: the same values as make_cnn_proto.py, as if
    they were ordered filter by filter, so that a patch mostly covers different filters."""
    scale_and_shift: bool = True
    """Whether each output is scaled and shifted by trained numbers before the activation (Kaldi's Rescale and AddShift)."""
    max_norm: NotNegative | None = None
    """Largest L2 norm of a filter; a larger one is scaled down to it after each update. 0: no limit. Default: 30 for the
    first convolution, 50 for others."""
    weight_stddev: NotNegative | None = None
    """Standard deviation of the initial filters. Default: 0.02 for the first convolution, 0.1 for others; with `relu` and
    `prelu` the square root of 2 / (values that a filter reads)."""
    bias_mean: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Mean of the initial biases. Default: -1 for the first convolution, -2 for others; 0 unless the activation is
    sigmoid."""
    bias_range: NotNegative | None = None
    """Initial biases are within `bias_mean` +- `bias_range` / 2. Default: 2 for the first convolution, 4 for others; 0
    unless the activation is sigmoid."""

    def _words(self) -> str:
        words = [f"conv {self.filters} of {self.patch}"]
        if isinstance(self.patch, int):
            words.append("bands")
        if as_time_and_bands(self.pool) != as_time_and_bands(1):
            words.append(f"pool {self.pool}")
        if self.activation != "sigmoid":
            words.append(self.activation)
        if self.layout == "kaldi":
            words.append("layout kaldi")
        return " ".join(words)


class PoolLayerConfig(LayerConfig):
    """Pooling of the patches of the convolution below."""

    name: ClassVar[str] = "pool"
    primary_key: ClassVar[str] = "size"

    size: SizeOrBoth
    """Patches in a pool. For patches over both axes: a mapping, or one number for both."""
    step: SizeOrBoth | None = None
    """Patches from one pool to the next, at most `size`. Default: `size`."""
    kind: Literal["max", "average"] = "max"
    """What a pool computes from the outputs of a filter."""


class ScaleAndShiftLayerConfig(LayerConfig):
    """Each column is multiplied by a trained number, and another is added to it (Kaldi's Rescale and AddShift)."""

    name: ClassVar[str] = "scale-and-shift"
    trained: ClassVar[bool] = True

    learn_rate_coef: NotNegative = 1.0
    """Factor of the learning rate."""


class DropoutLayerConfig(LayerConfig):
    """In training, sets a random choice of the inputs to 0, another one for each frame."""

    name: ClassVar[str] = "dropout"
    primary_key: ClassVar[str] = "rate"

    rate: Fraction
    """Fraction of the inputs that are set to 0."""


class ActivationLayerConfig(LayerConfig):
    """An activation on its own."""

    name: ClassVar[str] = "activation"
    primary_key: ClassVar[str] = "activation"

    activation: Literal["sigmoid", "tanh", "relu", "prelu"]
    """Activation, as in `affine` and `conv`."""

    @property
    def trained(self) -> bool:  # type: ignore[override]
        return self.activation == "prelu"

    def _words(self) -> str:
        return self.activation


class StoredLayerConfig(LayerConfig):
    """A layer as model files describe it, one of ddnn's or your own: `{kind: length-norm}`. Its `width` or `in_features` may be
    omitted: it is that of the layer below. If the network of `init.model` has layers that no other kind describes, the run
    dir's recipe has them in this form."""

    name: ClassVar[str] = "stored"
    primary_key: ClassVar[str] = "config"
    trained: ClassVar[bool] = True

    config: Annotated[dict[str, Any], AfterValidator(to_jsonable_python)]
    """`kind` and the fields of its class: docs/development/extending.md."""

    def as_yaml(self) -> dict[str, Any]:
        return {self.name: self.config, **({"repeat": self.repeat} if self.repeat > 1 else {})}

    def _words(self) -> str:
        return re.sub(r"[^\w-]", "?", str(self.config.get("kind")))[:40]  # anybody's word, for a job script too


KINDS = (
    AffineLayerConfig,
    ConvLayerConfig,
    PoolLayerConfig,
    ScaleAndShiftLayerConfig,
    DropoutLayerConfig,
    ActivationLayerConfig,
    StoredLayerConfig,
)
LAYERS: dict[str, type[LayerConfig]] = {kind.name: kind for kind in KINDS}
"""The kinds of `model.layers`."""


def kind_of(item: Any) -> str | None:
    """The kind of an item of `model.layers`; None where it names none, or several."""
    if isinstance(item, LayerConfig):
        return item.name
    if isinstance(item, str):
        return item if item in LAYERS else None
    kinds = kinds_in(item)
    return kinds[0] if len(kinds) == 1 else None


def kinds_in(item: Any) -> list[str]:
    """The kinds that an item names: `activation` and `dropout` are keys beside another kind."""
    kinds = [kind for kind in LAYERS if isinstance(item, dict) and kind in item]
    return [kind for kind in kinds if kind not in ("activation", "dropout")] or kinds[:1]


def why_no_layer(item: Any) -> str:
    """Why an item of `model.layers` has no kind."""
    if not isinstance(item, dict):
        return f"{format_value(item)} found, expected a mapping such as affine: 512"
    words = [key.replace("_", "-") for key in item if key not in TrainedLayerConfig.model_fields]
    near = [match for word in words for match in difflib.get_close_matches(word, LAYERS, n=1)]
    meant = f"; did you mean {near[0]}?" if near and not kinds_in(item) else ""
    return f"{' and '.join(kinds_in(item)) or 'no kind of layer'} found, expected one of {', '.join(LAYERS)}{meant}"


if TYPE_CHECKING:
    AnyLayer = LayerConfig
else:
    _TAGGED = tuple(Annotated[section, Tag(name)] for name, section in LAYERS.items())
    AnyLayer = Annotated[Union[_TAGGED], Discriminator(kind_of)]  # noqa: UP007 (of a tuple)


def check_number(layers: list[LayerConfig]) -> list[LayerConfig]:
    if sum(layer.repeat for layer in layers) > MAX_LAYERS:
        raise ValueError(f"more than {MAX_LAYERS} layers")
    return layers


def as_time_and_bands(size: int | TimeAndBands) -> TimeAndBands:
    return size if isinstance(size, TimeAndBands) else TimeAndBands(time=size, bands=size)


def expand_repeats(layers: Sequence[LayerConfig]) -> Iterator[tuple[int, LayerConfig]]:
    """`model.layers` from the lowest on, repeated ones as often as they are, each with its number: that of `model.freeze`
    and of messages."""
    return enumerate(layer for layer in layers for _ in range(layer.repeat))


def layer_name(number: int, layer: LayerConfig) -> str:
    """How messages name a layer: "layer 2 (conv)"."""
    return f"layer {number} ({layer.name})"
