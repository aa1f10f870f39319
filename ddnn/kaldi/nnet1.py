"""Kaldi nnet1 networks (`.nnet`, `.dbn`), component by component; text and binary are read, binary is written.

Follows kaldi `nnet/nnet-nnet.cc`, `nnet/nnet-component.cc` and the headers `nnet-affine-transform.h`,
`nnet-activation.h`, `nnet-parametric-relu.h`, `nnet-various.h` and `nnet-rbm.h`. What Kaldi wrote is written again byte
for byte. A component takes rows (frames x input_dim) and gives rows (frames x output_dim).

A new component is a dataclass here and a row of `_FORMS`, for reader and writer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, MalformedRecordError, open_model
from ddnn.util.errors import DataError
from ddnn.util.files import atomic_write

# The dim of a component without weights is in the file alone: it must not claim what no layer has.
MAX_DIM = 1_000_000
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


@dataclass(frozen=True)
class Splice:
    """`<Splice>`: frame t becomes frames t + o side by side for o in `offsets`; outside, the first or last frame."""

    offsets: tuple[int, ...]
    input_dim: int

    @property
    def output_dim(self) -> int:
        return len(self.offsets) * self.input_dim


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


Component = AffineTransform | Activation | Splice | AddShift | Rescale | RbmComponent
Dims = tuple[int, int]  # (output_dim, input_dim), as in a file


@dataclass(frozen=True)
class _Array:
    """A matrix of float32 (axes "OI", output_dim x input_dim), or a vector (axes "O" or "I")."""

    name: str
    description: str
    axes: str

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(dims["OI".index(axis)] for axis in self.axes)

    def read(self, reader: BasicTypeReader, token: str, dims: Dims) -> NDArray[np.float32]:
        what, shape = f"{self.description} of {token}", self.shape(dims)
        values = reader.float_matrix(what) if len(shape) == 2 else reader.float_vector(what)
        with np.errstate(over="ignore", invalid="ignore"):
            single = values.astype(np.float32)
        if single.shape != shape:
            expected, found = (" x ".join(map(str, sizes)) for sizes in (shape, single.shape))
            raise MalformedRecordError(f"expected {what} of dims {expected}, found {found}")
        if not np.isfinite(single).all():
            position = tuple(np.argwhere(~np.isfinite(single))[0].tolist())
            at = ", ".join(map(str, position))
            raise MalformedRecordError(f"expected finite values in {what}, found {values[position]} at [{at}]")
        return single


_Coefs = dict[str, tuple[str, float]]
"""Optional numbers: token -> attribute and default. They may come in any order; all are written, in this order."""


@dataclass(frozen=True)
class _Form:
    """How a component is written: `token`, then what the further fields name, in their order."""

    token: str
    make: Callable[..., Component]
    coefs: _Coefs = field(default_factory=dict)
    arrays: tuple[_Array, ...] = ()
    kind: Kind | None = None  # of an activation


_LEARN_RATE = {"<LearnRateCoef>": ("learn_rate_coef", 1.0)}
_AFFINE = {**_LEARN_RATE, "<BiasLearnRateCoef>": ("bias_learn_rate_coef", 1.0), "<MaxNorm>": ("max_norm", 0.0)}
_SLOPE_RATES = {"<AlphaLearnRateCoef>": ("alpha_coef", 0.0), "<BetaLearnRateCoef>": ("beta_coef", 0.0)}
_SLOPES = (_Array("alpha", "the slopes above 0", "O"), _Array("beta", "the slopes below 0", "O"))
_WEIGHT = _Array("weight", "the weights", "OI")
_RBM_BIASES = (_Array("visible_bias", "the visible bias", "I"), _Array("hidden_bias", "the hidden bias", "O"))
_FORMS = (
    _Form("<AffineTransform>", AffineTransform, _AFFINE, (_WEIGHT, _Array("bias", "the bias", "O"))),
    _Form("<Sigmoid>", Activation, kind="sigmoid"),
    _Form("<Tanh>", Activation, kind="tanh"),
    _Form("<Softmax>", Activation, kind="softmax"),
    _Form("<ParametricRelu>", Activation, _SLOPE_RATES, _SLOPES, kind="relu"),
    _Form("<Splice>", Splice),
    _Form("<AddShift>", AddShift, _LEARN_RATE, (_Array("shift", "the values", "O"),)),
    _Form("<Rescale>", Rescale, _LEARN_RATE, (_Array("scale", "the values", "O"),)),
    _Form("<Rbm>", RbmComponent, {}, (_WEIGHT, *_RBM_BIASES)),
)
# Kaldi takes any case: files of 2012 have <affinetransform>.
_BY_TOKEN = {form.token.lower(): form for form in _FORMS}
_BY_TYPE = {(form.make, form.kind): form for form in _FORMS}


def _form_of(component: Component) -> _Form:
    return _BY_TYPE[type(component), component.kind if isinstance(component, Activation) else None]


def _check_network(components: Sequence[Component], location: Path) -> None:
    """Raises DataError unless there are components, each valid in itself, whose dims chain."""
    if not components:
        raise DataError("not a Kaldi nnet1 network: it has no component", location=location)
    names = [f"component {number} ({type(component).__name__})" for number, component in enumerate(components, start=1)]
    for name, component in zip(names, components, strict=True):
        if problem := _problem(component):
            raise DataError(name + problem, location=location)
    for (below, lower), (above, upper) in pairwise(zip(names, components, strict=True)):
        if lower.output_dim != upper.input_dim:
            message = f"{below} has the output dim {lower.output_dim}, but {above} the input dim {upper.input_dim}"
            raise DataError(message, location=location, hint="check that the parts of the network belong together")


def _problem(component: Component) -> str | None:
    dims = (component.output_dim, component.input_dim)
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        return f" has the dims {dims[0]} x {dims[1]}, expected 1 to {MAX_DIM}"
    expected = {array.name: array.shape(dims) for array in _form_of(component).arrays}
    for attribute, value in vars(component).items():
        if isinstance(value, np.ndarray) and value.shape != expected[attribute]:
            return f": {attribute} has the dims {value.shape}, expected {expected[attribute]}"
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(value, np.ndarray | float) and not np.isfinite(np.asarray(value, np.float32)).all():
                return f": {attribute} has a value that is not finite"
    return None


def read_nnet1(path: Path) -> tuple[Component, ...]:
    """Reads a network from `<Nnet>` to `</Nnet>`. DataError: the file cannot be read or is damaged, has a component
    that is not supported here (it is named), a value that is not finite, or dims that do not chain."""
    components: list[Component] = []
    with open_model(path, "a Kaldi nnet1 network") as reader:
        reader.expect("<Nnet>")
        while reader.peek_token() != "</Nnet>":
            components.append(_read_component(reader, len(components) + 1))
        reader.expect("</Nnet>")
        reader.skip_space()
        if reader.peek():
            raise reader.error("the end of the file behind </Nnet>")
    _check_network(components, path)
    return tuple(components)


def _read_component(reader: BasicTypeReader, number: int) -> Component:
    token = reader.peek_token()
    form = _BY_TOKEN.get(token.lower())
    if form is None:
        supported = f"component {number} to be one that is supported ({', '.join(form.token for form in _FORMS)})"
        raise reader.error(supported if token else "a component or </Nnet>", repr(token) if token else None)
    reader.token()
    output_dim, input_dim = dims = reader.int32(f"the output dim of {token}"), reader.int32(f"the input dim of {token}")
    if not (1 <= output_dim <= MAX_DIM and 1 <= input_dim <= MAX_DIM):
        raise reader.error(f"dims of {token} in 1 to {MAX_DIM}", f"{output_dim} x {input_dim}")
    values = _read_values(reader, form, token, dims)
    component = form.make(**values) if form.kind is None else Activation(form.kind, output_dim)
    if (component.output_dim, component.input_dim) != dims:
        found = f"{component.output_dim} x {component.input_dim}"
        raise reader.error(f"{token} (component {number}) of {output_dim} x {input_dim} (output x input)", found)
    if reader.peek() == b"<" and reader.peek_token() == "<!EndOfComponent>":
        reader.expect("<!EndOfComponent>")
    return component


def _read_values(reader: BasicTypeReader, form: _Form, token: str, dims: Dims) -> dict[str, Any]:
    values: dict[str, Any] = dict(form.coefs.values())
    if form.make is RbmComponent:
        values = {name: reader.expect("bern", "gauss") for name in ("visible", "hidden")}
    if form.make is Splice:
        offsets = reader.int32_vector(f"the frame offsets of {token}").tolist()
        if any(abs(offset) > MAX_DIM for offset in offsets):
            raise reader.error(f"frame offsets within {MAX_DIM}", f"{min(offsets)} to {max(offsets)}")
        values = {"offsets": tuple(offsets), "input_dim": dims[1]}
    while form.coefs and reader.peek() == b"<":
        coef = reader.expect(*form.coefs)
        value = reader.float32(f"the value of {coef}")
        if not abs(value) <= _MAX_FLOAT:
            raise reader.error(f"a finite value of {coef}", str(value))
        values[form.coefs[coef][0]] = value
    for array in form.arrays:
        values[array.name] = array.read(reader, token, dims)
    if form.kind == "relu":
        alpha, beta, rates = values["alpha"], values["beta"], (values["alpha_coef"], values["beta_coef"])
        if any(rates) or (alpha != 1).any() or beta.any():
            found = f"{alpha.min():g} to {alpha.max():g} and {beta.min():g} to {beta.max():g}, rates {rates}"
            raise reader.error(f"a plain ReLU: slopes 1 and 0 in {token}, not trained", found)
    return values


def write_nnet1(path: Path, components: Sequence[Component]) -> None:
    """Writes a network that Kaldi's nnet1 tools read; the file appears complete or not at all. DataError: the dims do
    not chain, or a value is not finite. UserError: the file cannot be written."""
    _check_network(components, path)
    with atomic_write(path) as handle:
        writer = BasicTypeWriter(handle)
        writer.marker()
        writer.token("<Nnet>")
        for component in components:
            form, values = _form_of(component), vars(component)
            if form.kind == "relu":
                slopes = {"alpha": np.ones(component.output_dim), "beta": np.zeros(component.output_dim)}
                values = {"alpha_coef": 0.0, "beta_coef": 0.0, **slopes}
            writer.token(form.token)
            writer.int32(component.output_dim)
            writer.int32(component.input_dim)
            if isinstance(component, RbmComponent):
                writer.token(component.visible, component.hidden)
            if isinstance(component, Splice):
                writer.int32_vector(np.array(component.offsets, np.int32))
            for token, (name, _) in form.coefs.items():
                writer.token(token)
                writer.float32(values[name])
            for array in form.arrays:
                (writer.float_matrix if len(array.axes) == 2 else writer.float_vector)(values[array.name])
            writer.token("<!EndOfComponent>")
        writer.token("</Nnet>")
