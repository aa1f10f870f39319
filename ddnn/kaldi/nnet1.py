"""Kaldi nnet1 networks (`.nnet`, `.dbn`), component by component, text and binary.

Follows kaldi `nnet/nnet-nnet.cc`, `nnet/nnet-component.cc` and the headers `nnet-affine-transform.h`,
`nnet-activation.h`, `nnet-parametric-relu.h`, `nnet-various.h` and `nnet-rbm.h`. What Kaldi wrote is read and written
again byte for byte. A component takes rows (frames x input_dim) and gives rows (frames x output_dim).

A new component is a dataclass here and a row of `_FORMS`: its token and its fields, for reader and writer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, open_model
from ddnn.kaldi.stream import MalformedRecordError
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
    """`<AffineTransform>`: y = x W^T + b.

    Args:
        weight: float32 (output_dim, input_dim).
        bias: float32 (output_dim,).
        learn_rate_coef, bias_learn_rate_coef: factors on the learning rate.
        max_norm: limit of the L2 norm of a row of `weight`; 0: none.
    """

    weight: Matrix
    bias: Vector
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0


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
    """`<Rbm>`: forward as an affine layer and a sigmoid (hidden units "bern"; "gauss": no sigmoid).

    Args:
        visible, hidden: kind of the units, "bern" or "gauss".
        weight: float32 (hidden, visible).
        visible_bias: float32 (visible,).
        hidden_bias: float32 (hidden,).
    """

    visible: Units
    hidden: Units
    weight: Matrix
    visible_bias: Vector
    hidden_bias: Vector


Component = AffineTransform | Activation | Splice | AddShift | Rescale | RbmComponent


def check_components(components: Sequence[Component], location: str | PathLike[str]) -> None:
    """Raises DataError unless there are components, each valid in itself, whose dims chain.

    Args:
        components: a network, from input to output.
        location: the file concerned, for messages.
    """
    if not components:
        raise DataError("not a Kaldi nnet1 network: it has no component", location=location)
    for number, component in enumerate(components, start=1):
        _check_component(component, number, location)
    for number, (lower, upper) in enumerate(pairwise(components), start=1):
        if lower.output_dim != upper.input_dim:
            raise DataError(
                f"component {number} ({type(lower).__name__}) has the output dim {lower.output_dim}, "
                f"but component {number + 1} ({type(upper).__name__}) the input dim {upper.input_dim}",
                location=location,
                hint="check that the parts of the network belong together",
            )


def _check_component(component: Component, number: int, location: str | PathLike[str]) -> None:
    name = f"component {number} ({type(component).__name__})"
    dims = (component.output_dim, component.input_dim)
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        raise DataError(f"{name} has the dims {dims[0]} x {dims[1]}, expected 1 to {MAX_DIM}", location=location)
    expected = {field.name: field.shape(*dims) for field in _form_of(component).fields if isinstance(field, _Array)}
    for field, value in vars(component).items():
        if isinstance(value, np.ndarray) and value.shape != expected[field]:
            message = f"{name}: {field} has the dims {value.shape}, expected {expected[field]}"
            raise DataError(message, location=location)
        if isinstance(value, np.ndarray | float):
            with np.errstate(over="ignore", invalid="ignore"):
                finite = np.isfinite(np.asarray(value, np.float32)).all()
            if not finite:
                raise DataError(f"{name}: {field} has a value that is not finite", location=location)


class _Field(Protocol):
    """A part of a component's data in a file."""

    def read(self, reader: BasicTypeReader, token: str, output_dim: int, input_dim: int) -> dict[str, Any]:
        """The attributes that this part holds."""

    def write(self, writer: BasicTypeWriter, values: dict[str, Any]) -> None:
        """Writes these attributes of a component."""


@dataclass(frozen=True)
class _Array:
    """A matrix of float32 (axes "OI", output_dim x input_dim), or a vector (axes "O" or "I")."""

    name: str
    description: str
    axes: Literal["OI", "O", "I"]

    def shape(self, output_dim: int, input_dim: int) -> tuple[int, ...]:
        return tuple({"O": output_dim, "I": input_dim}[axis] for axis in self.axes)

    def read(self, reader: BasicTypeReader, token: str, output_dim: int, input_dim: int) -> dict[str, Any]:
        what = f"{self.description} of {token}"
        values = reader.float_matrix(what) if len(self.axes) == 2 else reader.float_vector(what)
        return {self.name: _to_finite(values, what, self.shape(output_dim, input_dim))}

    def write(self, writer: BasicTypeWriter, values: dict[str, Any]) -> None:
        (writer.float_matrix if len(self.axes) == 2 else writer.float_vector)(values[self.name])


@dataclass(frozen=True)
class _Coefs:
    """Optional numbers: token -> attribute and default. They may come in any order; all are written, in this order."""

    defaults: dict[str, tuple[str, float]]
    ends_line: bool = False

    def read(self, reader: BasicTypeReader, token: str, output_dim: int, input_dim: int) -> dict[str, Any]:
        values = dict(self.defaults.values())
        while reader.peek() == b"<":
            coef = reader.expect(*self.defaults)
            value = reader.float32(f"the value of {coef}")
            if not abs(value) <= _MAX_FLOAT:
                raise reader.error(f"a finite value of {coef}", str(value))
            values[self.defaults[coef][0]] = value
        return values

    def write(self, writer: BasicTypeWriter, values: dict[str, Any]) -> None:
        for token, (name, _) in self.defaults.items():
            writer.token(token)
            writer.float32(values[name])
        if self.ends_line:
            writer.line_end()


class _Offsets:
    """The frame offsets of a splice."""

    def read(self, reader: BasicTypeReader, token: str, output_dim: int, input_dim: int) -> dict[str, Any]:
        offsets = reader.int32_vector(f"the frame offsets of {token}").tolist()
        if any(abs(offset) > MAX_DIM for offset in offsets):
            raise reader.error(f"frame offsets within {MAX_DIM}", f"{min(offsets)} to {max(offsets)}")
        return {"offsets": tuple(offsets), "input_dim": input_dim}

    def write(self, writer: BasicTypeWriter, values: dict[str, Any]) -> None:
        writer.int32_vector(np.array(values["offsets"], np.int32))


class _UnitKinds:
    """The kinds of an RBM's visible and hidden units."""

    def read(self, reader: BasicTypeReader, token: str, output_dim: int, input_dim: int) -> dict[str, Any]:
        return {name: reader.expect("bern", "gauss") for name in ("visible", "hidden")}

    def write(self, writer: BasicTypeWriter, values: dict[str, Any]) -> None:
        writer.token(values["visible"], values["hidden"])


class _PlainSlopes:
    """The slopes of a `<ParametricRelu>`, which must be those of a ReLU: 1 above 0, 0 below, not trained."""

    coefs: ClassVar = _Coefs(
        {"<AlphaLearnRateCoef>": ("alpha_coef", 0.0), "<BetaLearnRateCoef>": ("beta_coef", 0.0)}, True
    )
    slopes: ClassVar = (_Array("alpha", "the slopes above 0", "O"), _Array("beta", "the slopes below 0", "O"))

    def read(self, reader: BasicTypeReader, token: str, output_dim: int, input_dim: int) -> dict[str, Any]:
        coefs = tuple(self.coefs.read(reader, token, output_dim, input_dim).values())
        alpha, beta = (slope.read(reader, token, output_dim, input_dim)[slope.name] for slope in self.slopes)
        if any(coefs) or (alpha != 1).any() or beta.any():
            found = f"{alpha.min():g} to {alpha.max():g} and {beta.min():g} to {beta.max():g}, rates {coefs}"
            raise reader.error(f"a plain ReLU: slopes 1 and 0 in {token}, not trained", found)
        return {}

    def write(self, writer: BasicTypeWriter, values: dict[str, Any]) -> None:
        self.coefs.write(writer, {"alpha_coef": 0.0, "beta_coef": 0.0})
        for slope in (1.0, 0.0):
            writer.float_vector(np.full(values["dim"], slope, np.float32))


def _to_finite(values: NDArray[Any], what: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
    if single.shape != shape:
        expected, found = (" x ".join(map(str, dims)) for dims in (shape, single.shape))
        raise MalformedRecordError(f"expected {what} of dims {expected}, found {found}")
    if not np.isfinite(single).all():
        position = np.unravel_index(int(np.flatnonzero(~np.isfinite(single))[0]), shape)
        at = ", ".join(str(index) for index in position)
        raise MalformedRecordError(f"expected finite values in {what}, found {values[position]} at [{at}]")
    return single


@dataclass(frozen=True)
class _Form:
    """How a component is written in a file.

    Attributes:
        token: its name there.
        make: the component of the attributes that the fields hold, and of `dim` (the output dim) for an activation.
        fields: in their order.
    """

    token: str
    make: Callable[..., Component]
    fields: tuple[_Field, ...] = ()
    kind: Kind | None = None


_LEARN_RATE = {"<LearnRateCoef>": ("learn_rate_coef", 1.0)}
_AFFINE = {**_LEARN_RATE, "<BiasLearnRateCoef>": ("bias_learn_rate_coef", 1.0), "<MaxNorm>": ("max_norm", 0.0)}
_WEIGHT = _Array("weight", "the weights", "OI")
_RBM_BIASES = (_Array("visible_bias", "the visible bias", "I"), _Array("hidden_bias", "the hidden bias", "O"))
_FORMS = (
    _Form("<AffineTransform>", AffineTransform, (_Coefs(_AFFINE, True), _WEIGHT, _Array("bias", "the bias", "O"))),
    _Form("<Sigmoid>", Activation, kind="sigmoid"),
    _Form("<Tanh>", Activation, kind="tanh"),
    _Form("<Softmax>", Activation, kind="softmax"),
    _Form("<ParametricRelu>", Activation, (_PlainSlopes(),), kind="relu"),
    _Form("<Splice>", Splice, (_Offsets(),)),
    _Form("<AddShift>", AddShift, (_Coefs(_LEARN_RATE), _Array("shift", "the values", "O"))),
    _Form("<Rescale>", Rescale, (_Coefs(_LEARN_RATE), _Array("scale", "the values", "O"))),
    _Form("<Rbm>", RbmComponent, (_UnitKinds(), _WEIGHT, *_RBM_BIASES)),
)
# Kaldi takes any case: files of 2012 have <affinetransform>.
_BY_TOKEN = {form.token.lower(): form for form in _FORMS}
_BY_TYPE = {(form.make, form.kind): form for form in _FORMS}


def _form_of(component: Component) -> _Form:
    return _BY_TYPE[type(component), component.kind if isinstance(component, Activation) else None]


def read_nnet1(path: str | PathLike[str]) -> tuple[Component, ...]:
    """Reads a network from `<Nnet>` to `</Nnet>`.

    Raises:
        DataError: the file cannot be read or is damaged, has a component that is not supported here (it is named), a
            value that is not finite, or dims that do not chain.
    """
    components: list[Component] = []
    with open_model(path, "a Kaldi nnet1 network") as reader:
        reader.expect("<Nnet>")
        while reader.peek_token() != "</Nnet>":
            components.append(_read_component(reader, len(components) + 1))
        reader.expect("</Nnet>")
        reader.skip_space()
        if reader.peek():
            raise reader.error("the end of the file behind </Nnet>")
    check_components(components, path)
    return tuple(components)


def _read_component(reader: BasicTypeReader, number: int) -> Component:
    token = reader.peek_token()
    form = _BY_TOKEN.get(token.lower())
    if form is None:
        supported = ", ".join(form.token for form in _FORMS)
        expected = (
            f"component {number} to be one that is supported ({supported})" if token else "a component or </Nnet>"
        )
        raise reader.error(expected, repr(token) if token else None)
    reader.token()
    output_dim = reader.int32(f"the output dim of {token}")
    input_dim = reader.int32(f"the input dim of {token}")
    if not (1 <= output_dim <= MAX_DIM and 1 <= input_dim <= MAX_DIM):
        raise reader.error(f"dims of {token} in 1 to {MAX_DIM}", f"{output_dim} x {input_dim}")
    values: dict[str, Any] = {} if form.kind is None else {"kind": form.kind, "dim": output_dim}
    for field in form.fields:
        values |= field.read(reader, token, output_dim, input_dim)
    component = form.make(**values)
    if (component.output_dim, component.input_dim) != (output_dim, input_dim):
        found = f"{component.output_dim} x {component.input_dim}"
        raise reader.error(f"{token} (component {number}) of {output_dim} x {input_dim} (output x input)", found)
    if reader.peek() == b"<" and reader.peek_token() == "<!EndOfComponent>":
        reader.expect("<!EndOfComponent>")
    return component


def write_nnet1(path: str | PathLike[str], components: Sequence[Component], *, binary: bool = True) -> None:
    """Writes a network that Kaldi's nnet1 tools read; the file appears complete or not at all.

    Raises:
        DataError: the dims do not chain, or a value is not finite.
        UserError: the file cannot be written.
    """
    check_components(components, path)
    with atomic_write(Path(path)) as handle:
        writer = BasicTypeWriter(handle, binary=binary)
        writer.marker()
        writer.token_line("<Nnet>")
        for component in components:
            form = _form_of(component)
            writer.token(form.token)
            writer.int32(component.output_dim)
            writer.int32(component.input_dim)
            writer.line_end()
            for field in form.fields:
                field.write(writer, vars(component))
            writer.token_line("<!EndOfComponent>")
        writer.token_line("</Nnet>")
