"""Kaldi nnet1 networks (`.nnet`, `.dbn`), component by component, in text and binary.

Follows kaldi `nnet/nnet-nnet.cc`, `nnet/nnet-component.cc` and the headers `nnet-affine-transform.h`,
`nnet-activation.h`, `nnet-parametric-relu.h`, `nnet-various.h`, `nnet-rbm.h`, `nnet-convolutional-component.h`,
`nnet-max-pooling-component.h`, `nnet-average-pooling-component.h` and `nnet-parallel-component.h`. What Kaldi wrote is
written again byte for byte. A component takes rows (frames x input_dim) and gives rows (frames x output_dim).

A new component is a dataclass here and a row of `_FORMS`, for reader and writer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, MalformedRecordError, TextWriter, open_model
from ddnn.util.errors import DataError
from ddnn.util.files import atomic_write

# The dim of a component without weights is in the file alone: it must not claim what no layer has.
MAX_DIM = 1_000_000
MAX_DEPTH = 8  # of networks within networks
_MAX_FLOAT = float(np.finfo(np.float32).max)

Kind = Literal["sigmoid", "tanh", "relu", "softmax"]
Units = Literal["bern", "gauss"]
Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]


class _Weighted:
    """A component whose dims are those of its weight matrix."""

    weight: Matrix

    @property
    def input_dim(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dim(self) -> int:
        return int(self.weight.shape[0])


class _Elementwise:
    """A component that keeps the dim of its input."""

    dim: int

    @property
    def input_dim(self) -> int:
        return self.dim

    @property
    def output_dim(self) -> int:
        return self.dim


@dataclass(frozen=True, eq=False)
class AffineTransform(_Weighted):
    """`<AffineTransform>`: y = x W^T + b."""

    weight: Matrix  # (output_dim, input_dim)
    bias: Vector  # (output_dim,)
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0  # limit of the L2 norm of a row of `weight`; 0: none


@dataclass(frozen=True)
class Activation(_Elementwise):
    """`<Sigmoid>`, `<Tanh>`, `<Softmax>`; relu is a `<ParametricRelu>` with slopes 1 and 0 that are not trained."""

    kind: Kind
    dim: int


@dataclass(frozen=True, eq=False)
class ParametricRelu(_Elementwise):
    """`<ParametricRelu>`: y = x * (alpha if x >= 0 else beta), column by column; a coefficient of 0: not trained."""

    alpha: Vector
    beta: Vector
    alpha_learn_rate_coef: float = 0.0
    beta_learn_rate_coef: float = 0.0

    @property
    def dim(self) -> int:  # type: ignore[override]
        return len(self.alpha)


@dataclass(frozen=True)
class LengthNormComponent(_Elementwise):
    """`<LengthNormComponent>`: y = x / |x|, frame by frame."""

    dim: int


@dataclass(frozen=True)
class Dropout(_Elementwise):
    """`<Dropout>`: in training each value is 0 with probability `rate`, else divided by 1 - rate. ValueError: no rate."""

    dim: int
    rate: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= np.float32(self.rate) < 1:
            raise ValueError(f"the dropout rate {self.rate:g}, expected at least 0 and less than 1")


def _count_windows(what: str, length: int, size: int, step: int) -> int:
    """How many windows of `size`, `step` apart, reach exactly from 0 to `length`. ValueError: none do."""
    if min(size, step) < 1 or size > length or (length - size) % step:
        raise ValueError(f"{what} of {size} at steps of {step} do not fit into {length} exactly")
    return 1 + (length - size) // step


@dataclass(frozen=True, eq=False)
class ConvolutionalComponent:
    """`<ConvolutionalComponent>`: the input is `input_dim / patch_stride` streams side by side; patch p is the columns
    p * patch_step to p * patch_step + patch_dim of every stream, and output column p * len(filters) + f is the product of
    patch and filter f, plus its bias. ValueError: sizes that do not fit."""

    input_dim: int
    patch_dim: int
    patch_step: int
    patch_stride: int
    filters: Matrix  # (filters, streams * patch_dim), stream by stream
    bias: Vector  # (filters,)
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0  # limit of the L2 norm of a filter; 0: none

    def __post_init__(self) -> None:
        if self.patch_stride < 1 or self.input_dim % self.patch_stride:
            raise ValueError(f"PatchStride {self.patch_stride} does not divide the input dim {self.input_dim}")
        streams, _ = self.input_dim // self.patch_stride, self.output_dim
        length, (count, found) = streams * self.patch_dim, self.filters.shape
        if found != length:
            patch = f"{streams} streams of PatchDim {self.patch_dim}"
            raise ValueError(f"the filters have {found} weights each, expected {length} ({patch})")
        if len(self.bias) != count:
            raise ValueError(f"the bias has the dim {len(self.bias)}, expected {count}, the number of filters")

    @property
    def output_dim(self) -> int:
        patches = _count_windows("patches", self.patch_stride, self.patch_dim, self.patch_step)
        return patches * len(self.filters)


@dataclass(frozen=True)
class _Pooling:
    """The input is `input_dim / pool_stride` patches of `pool_stride` filters; pool q takes of each filter patches
    q * pool_step to q * pool_step + pool_size. ValueError: sizes that do not fit."""

    input_dim: int
    pool_size: int
    pool_step: int
    pool_stride: int

    def __post_init__(self) -> None:
        if self.pool_stride < 1 or self.input_dim % self.pool_stride:
            raise ValueError(f"PoolStride {self.pool_stride} does not divide the input dim {self.input_dim}")
        if self.output_dim and self.pool_step > self.pool_size:
            raise ValueError(f"PoolStep {self.pool_step} skips patches, expected at most PoolSize {self.pool_size}")

    @property
    def output_dim(self) -> int:
        patches = self.input_dim // self.pool_stride
        return self.pool_stride * _count_windows("pools", patches, self.pool_size, self.pool_step)


class MaxPoolingComponent(_Pooling):
    """`<MaxPoolingComponent>`: the largest value of each pool."""


class AveragePoolingComponent(_Pooling):
    """`<AveragePoolingComponent>`: the mean of each pool."""


@dataclass(frozen=True)
class Splice:
    """`<Splice>`: frame t becomes frames t + o side by side for o in `offsets`; outside, the first or last frame."""

    offsets: tuple[int, ...]
    input_dim: int

    @property
    def output_dim(self) -> int:
        return len(self.offsets) * self.input_dim


@dataclass(frozen=True)
class Copy:
    """`<Copy>`: output column j is input column `columns[j]`, counted from 0 (in files from 1)."""

    columns: tuple[int, ...]
    input_dim: int

    def __post_init__(self) -> None:
        if wrong := [column for column in self.columns if not 0 <= column < self.input_dim]:
            raise ValueError(f"column {wrong[0] + 1} found, expected 1 to {self.input_dim}")

    @property
    def output_dim(self) -> int:
        return len(self.columns)


@dataclass(frozen=True, eq=False)
class AddShift(_Elementwise):
    """`<AddShift>`: y = x + shift; `shift` float32 (dim,)."""

    shift: Vector
    learn_rate_coef: float = 1.0

    @property
    def dim(self) -> int:  # type: ignore[override]
        return len(self.shift)


@dataclass(frozen=True, eq=False)
class Rescale(_Elementwise):
    """`<Rescale>`: y = x * scale, element by element; `scale` float32 (dim,)."""

    scale: Vector
    learn_rate_coef: float = 1.0

    @property
    def dim(self) -> int:  # type: ignore[override]
        return len(self.scale)


@dataclass(frozen=True, eq=False)
class RbmComponent(_Weighted):
    """`<Rbm>`: forward as an affine layer and a sigmoid (hidden units "bern"; "gauss": no sigmoid)."""

    visible: Units
    hidden: Units
    weight: Matrix  # (hidden, visible)
    visible_bias: Vector
    hidden_bias: Vector


@dataclass(frozen=True)
class ParallelComponent:
    """`<ParallelComponent>`: networks that read the input's columns one after another, and whose outputs are side by
    side. ValueError: there are none, or one without components."""

    networks: tuple[tuple[Component, ...], ...]

    def __post_init__(self) -> None:
        if not self.networks or not all(self.networks):
            raise ValueError("no nested network, or one without components")

    @property
    def input_dim(self) -> int:
        return sum(network[0].input_dim for network in self.networks)

    @property
    def output_dim(self) -> int:
        return sum(network[-1].output_dim for network in self.networks)


Component = (
    AffineTransform
    | Activation
    | ParametricRelu
    | LengthNormComponent
    | Dropout
    | ConvolutionalComponent
    | MaxPoolingComponent
    | AveragePoolingComponent
    | Splice
    | AddShift
    | Rescale
    | Copy
    | RbmComponent
    | ParallelComponent
)
Dims = tuple[int, int]  # (output_dim, input_dim), as in a file


@dataclass(frozen=True)
class _Array:
    """A matrix of float32 (axes "OI", output_dim x input_dim) or a vector (axes "O" or "I"), behind a token of its own or
    none. Axes "MK" and "M", those of filters, are checked where the component is made."""

    name: str
    description: str
    axes: str
    token: str = ""

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(dims["OI".index(axis)] for axis in self.axes)

    def read(self, reader: BasicTypeReader, token: str, dims: Dims) -> NDArray[np.float32]:
        if self.token:
            reader.expect(self.token)
        what = f"{self.description} of {token}"
        values = reader.float_matrix(what) if len(self.axes) == 2 else reader.float_vector(what)
        with np.errstate(over="ignore", invalid="ignore"):
            single = values.astype(np.float32)
        if "M" not in self.axes and single.shape != self.shape(dims):
            expected, found = (" x ".join(map(str, sizes)) for sizes in (self.shape(dims), single.shape))
            raise MalformedRecordError(f"expected {what} of dims {expected}, found {found}")
        if not np.isfinite(single).all():
            position = tuple(np.argwhere(~np.isfinite(single))[0].tolist())
            at = ", ".join(map(str, position))
            raise MalformedRecordError(f"expected finite values in {what}, found {values[position]} at [{at}]")
        return single


_Coefs = dict[str, tuple[str, float | None]]
"""Optional numbers: token -> attribute and default. They may come in any order; all are written, in this order, but
those without a default, which only older Kaldis wrote."""


@dataclass(frozen=True)
class _Form:
    """How a component is written: `token` and dims, then what the further fields name, in their order."""

    token: str
    make: Callable[..., Component]
    coefs: _Coefs = field(default_factory=dict)
    arrays: tuple[_Array, ...] = ()
    kind: Kind | None = None  # of an activation
    indices: str = ""  # attribute of a vector of integers
    first: int = 0  # what the file has for its 0
    integers: tuple[str, ...] = ()  # attributes, the tokens of which are their names
    end_lines: bool = False  # in text, behind integers and coefs


_LEARN_RATE: _Coefs = {"<LearnRateCoef>": ("learn_rate_coef", 1.0)}
_AFFINE: _Coefs = {
    **_LEARN_RATE,
    "<BiasLearnRateCoef>": ("bias_learn_rate_coef", 1.0),
    "<MaxNorm>": ("max_norm", 0.0),
}
_SLOPE_RATES: _Coefs = {
    "<AlphaLearnRateCoef>": ("alpha_learn_rate_coef", 0.0),
    "<BetaLearnRateCoef>": ("beta_learn_rate_coef", 0.0),
}
_DROPOUT: _Coefs = {"<DropoutRate>": ("rate", 0.5), "<DropoutRetention>": ("retention", None)}
_SLOPES = (_Array("alpha", "the slopes above 0", "O"), _Array("beta", "the slopes below 0", "O"))
_WEIGHT = _Array("weight", "the weights", "OI")
_FILTERS = (_Array("filters", "the filters", "MK", "<Filters>"), _Array("bias", "the bias", "M", "<Bias>"))
_RBM_BIASES = (_Array("visible_bias", "the visible bias", "I"), _Array("hidden_bias", "the hidden bias", "O"))
_PATCH, _POOL = ("patch_dim", "patch_step", "patch_stride"), ("pool_size", "pool_step", "pool_stride")
_FORMS = (
    _Form("<AffineTransform>", AffineTransform, _AFFINE, (_WEIGHT, _Array("bias", "the bias", "O")), end_lines=True),
    _Form("<Sigmoid>", Activation, kind="sigmoid"),
    _Form("<Tanh>", Activation, kind="tanh"),
    _Form("<Softmax>", Activation, kind="softmax"),
    _Form("<ParametricRelu>", ParametricRelu, _SLOPE_RATES, _SLOPES, end_lines=True),
    _Form("<LengthNormComponent>", LengthNormComponent),
    _Form("<Dropout>", Dropout, _DROPOUT),
    _Form("<ConvolutionalComponent>", ConvolutionalComponent, _AFFINE, _FILTERS, integers=_PATCH, end_lines=True),
    _Form("<MaxPoolingComponent>", MaxPoolingComponent, integers=_POOL),
    _Form("<AveragePoolingComponent>", AveragePoolingComponent, integers=_POOL),
    _Form("<Splice>", Splice, indices="offsets"),
    _Form("<Copy>", Copy, indices="columns", first=1),
    _Form("<AddShift>", AddShift, _LEARN_RATE, (_Array("shift", "the values", "O"),)),
    _Form("<Rescale>", Rescale, _LEARN_RATE, (_Array("scale", "the values", "O"),)),
    _Form("<Rbm>", RbmComponent, {}, (_WEIGHT, *_RBM_BIASES)),
    _Form("<ParallelComponent>", ParallelComponent),
)
# Kaldi takes any case: files of 2012 have <affinetransform>.
_BY_TOKEN = {form.token.lower(): form for form in _FORMS}
TOKENS = tuple(_BY_TOKEN)  # with one of which, in any case, a network may begin, if not with <Nnet>
_BY_TYPE = {(form.make, form.kind): form for form in _FORMS}


def _form_of(component: Component) -> _Form:
    return _BY_TYPE[type(component), component.kind if isinstance(component, Activation) else None]


def _token_of(attribute: str) -> str:
    return f"<{attribute.title().replace('_', '')}>"


def _written(component: Component) -> Component:
    """The component that a file has for this one."""
    if not isinstance(component, Activation) or component.kind != "relu":
        return component
    return ParametricRelu(np.ones(component.dim, np.float32), np.zeros(component.dim, np.float32))


def _read(component: Component) -> Component:
    """The component for one of a file: `_written` the other way round."""
    if not isinstance(component, ParametricRelu) or component.alpha_learn_rate_coef or component.beta_learn_rate_coef:
        return component
    plain = (component.alpha == 1).all() and not component.beta.any()
    return Activation("relu", component.dim) if plain else component


def _check_network(components: Sequence[Component], location: Path, within: str = "", depth: int = 0) -> None:
    """Raises DataError unless there are components, each valid in itself, whose dims chain; `within`: what contains
    the network, `depth` times."""
    if not components or depth > MAX_DEPTH:
        wrong = f"networks nested more than {MAX_DEPTH} deep" if components else "it has no component"
        raise DataError(f"not a Kaldi nnet1 network: {wrong}", location=location)
    numbers = [f"{within}component {number}" for number in range(1, len(components) + 1)]
    names = [f"{at} ({type(component).__name__})" for at, component in zip(numbers, components, strict=True)]
    for at, name, component in zip(numbers, names, components, strict=True):
        for number, network in enumerate(component.networks if isinstance(component, ParallelComponent) else (), 1):
            _check_network(network, location, f"{at}, network {number}, ", depth + 1)
        if problem := _problem(_written(component)):
            raise DataError(name + problem, location=location)
    for (below, lower), (above, upper) in pairwise(zip(names, components, strict=True)):
        if lower.output_dim != upper.input_dim:
            message = f"{below} has the output dim {lower.output_dim}, but {above} the input dim {upper.input_dim}"
            raise DataError(message, location=location, hint="check that the parts of the network belong together")


def _problem(component: Component) -> str | None:
    dims = (component.output_dim, component.input_dim)
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        return f" has the dims {dims[0]} x {dims[1]}, expected 1 to {MAX_DIM}"
    expected = {array.name: array.shape(dims) for array in _form_of(component).arrays if "M" not in array.axes}
    for attribute, value in vars(component).items():
        if isinstance(value, np.ndarray) and value.shape != expected.get(attribute, value.shape):
            return f": {attribute} has the dims {value.shape}, expected {expected[attribute]}"
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(value, np.ndarray | float) and not np.isfinite(np.asarray(value, np.float32)).all():
                return f": {attribute} has a value that is not finite"
    return None


def read_nnet1(path: Path) -> tuple[Component, ...]:
    """Reads a network to its `</Nnet>`. DataError: the file cannot be read or is damaged, has a component that is not
    supported here (it is named), a value that is not finite, or dims that do not fit or do not chain."""
    with open_model(path, "a Kaldi nnet1 network") as reader:
        if reader.peek_token().lower() not in _BY_TOKEN and reader.peek_token() != "<Nnet>":
            reader.expect("<Nnet>")
        components = _read_network(reader)
        reader.skip_space()
        if reader.peek():
            raise reader.error("the end of the file behind </Nnet>")
    _check_network(components, path)
    return components


def _read_network(reader: BasicTypeReader, within: str = "", depth: int = 0) -> tuple[Component, ...]:
    if depth > MAX_DEPTH:
        raise reader.error(f"networks nested at most {MAX_DEPTH} deep")
    components: list[Component] = []
    if reader.peek_token() == "<Nnet>":
        reader.token()
    while reader.peek_token() != "</Nnet>":
        components.append(_read_component(reader, f"{within}component {len(components) + 1}", depth))
    reader.token()
    return tuple(components)


def _read_component(reader: BasicTypeReader, name: str, depth: int) -> Component:
    token = reader.peek_token()
    form = _BY_TOKEN.get(token.lower())
    if form is None:
        supported = f"{name} to be one that is supported ({', '.join(form.token for form in _FORMS)})"
        raise reader.error(supported if token else "a component or </Nnet>", repr(token) if token else None)
    reader.token()
    output_dim, input_dim = dims = reader.int32(f"the output dim of {token}"), reader.int32(f"the input dim of {token}")
    if not (1 <= output_dim <= MAX_DIM and 1 <= input_dim <= MAX_DIM):
        raise reader.error(f"dims of {token} in 1 to {MAX_DIM}", f"{output_dim} x {input_dim}")
    if form.make is ParallelComponent:
        values: dict[str, Any] = {"networks": _read_networks(reader, f"{name}, ", depth + 1)}
    else:
        values = _read_values(reader, form, token, dims)
    try:
        component = form.make(**values)
    except ValueError as error:
        raise MalformedRecordError(f"{token} ({name}): {error}") from error
    if (component.output_dim, component.input_dim) != dims:
        found = f"{component.output_dim} x {component.input_dim}"
        raise reader.error(f"{token} ({name}) of {output_dim} x {input_dim} (output x input)", found)
    if reader.peek() == b"<" and reader.peek_token() == "<!EndOfComponent>":
        reader.expect("<!EndOfComponent>")
    return _read(component)


def _read_networks(reader: BasicTypeReader, within: str, depth: int) -> tuple[tuple[Component, ...], ...]:
    reader.expect("<NestedNnetCount>")
    networks = []
    for number in range(1, reader.int32("the number of networks") + 1):
        reader.expect("<NestedNnet>")
        reader.int32("the number of a network")
        networks.append(_read_network(reader, f"{within}network {number}, ", depth))
    reader.expect("</ParallelComponent>")
    return tuple(networks)


def _read_values(reader: BasicTypeReader, form: _Form, token: str, dims: Dims) -> dict[str, Any]:
    given = {"kind": form.kind, "dim": dims[0], "input_dim": dims[1]}
    values: dict[str, Any] = {one.name: given[one.name] for one in fields(cast(Any, form.make)) if one.name in given}
    values |= {name: default for name, default in form.coefs.values() if default is not None}
    if form.make is RbmComponent:
        values |= {name: reader.expect("bern", "gauss") for name in ("visible", "hidden")}
    if form.indices:
        indices = reader.int32_vector(f"the {form.indices} of {token}").tolist()
        if form.make is Splice and any(abs(offset) > MAX_DIM for offset in indices):
            raise reader.error(f"frame offsets within {MAX_DIM}", f"{min(indices)} to {max(indices)}")
        values[form.indices] = tuple(index - form.first for index in indices)
    for name in form.integers:
        reader.expect(_token_of(name))
        values[name] = reader.int32(f"the value of {_token_of(name)}")
    while form.coefs and reader.peek() == b"<":
        if reader.peek_token() not in form.coefs and (not form.arrays or reader.peek_token() == form.arrays[0].token):
            break
        coef = reader.expect(*form.coefs)
        value = reader.float32(f"the value of {coef}")
        if not abs(value) <= _MAX_FLOAT:
            raise reader.error(f"a finite value of {coef}", str(value))
        values[form.coefs[coef][0]] = value
    if "retention" in values:
        values["rate"] = float(np.float32(1 - np.float32(values.pop("retention"))))
    for array in form.arrays:
        values[array.name] = array.read(reader, token, dims)
    return values


def write_nnet1(path: Path, components: Sequence[Component], *, text: bool = False) -> None:
    """Writes a network that Kaldi's nnet1 tools read; the file appears complete or not at all. DataError: the dims do
    not chain, or a value is not finite. UserError: the file cannot be written."""
    _check_network(components, path)
    with atomic_write(path) as handle:
        writer = (TextWriter if text else BasicTypeWriter)(handle)
        writer.marker()
        _write_network(writer, components)


def _write_network(writer: BasicTypeWriter, components: Sequence[Component]) -> None:
    writer.token("<Nnet>")
    writer.end_line()
    for component in map(_written, components):
        _write_component(writer, component)
    writer.token("</Nnet>")
    writer.end_line()


def _write_component(writer: BasicTypeWriter, component: Component) -> None:
    form, values = _form_of(component), vars(component)
    writer.token(form.token)
    writer.int32(component.output_dim)
    writer.int32(component.input_dim)
    writer.end_line()
    if isinstance(component, RbmComponent):
        writer.token(component.visible, component.hidden)
    if isinstance(component, ParallelComponent):
        _write_networks(writer, component.networks)
    if form.indices:
        writer.int32_vector(np.array(values[form.indices], np.int32) + np.int32(form.first))
    for name in form.integers:
        writer.token(_token_of(name))
        writer.int32(values[name])
    if form.integers and form.end_lines:
        writer.end_line()
    for coef, (name, default) in form.coefs.items():
        if default is not None:
            writer.token(coef)
            writer.float32(values[name])
    if form.end_lines:
        writer.end_line()
    for array in form.arrays:
        if array.token:
            writer.token(array.token)
            writer.end_line()
        (writer.float_matrix if len(array.axes) == 2 else writer.float_vector)(values[array.name])
    writer.token("<!EndOfComponent>")
    writer.end_line()


def _write_networks(writer: BasicTypeWriter, networks: Sequence[Sequence[Component]]) -> None:
    writer.token("<NestedNnetCount>")
    writer.int32(len(networks))
    writer.end_line()
    for number, network in enumerate(networks, start=1):
        writer.token("<NestedNnet>")
        writer.int32(number)
        writer.end_line()
        _write_network(writer, network)
    writer.token("</ParallelComponent>")
