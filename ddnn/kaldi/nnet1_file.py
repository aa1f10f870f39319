"""Files of Kaldi's nnet1 networks (`.nnet`, `.dbn`), component by component, in text and binary.

Follows kaldi `nnet/nnet-nnet.cc` and `nnet/nnet-component.cc`. What Kaldi wrote is written again byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ddnn.kaldi.basic_types import BasicTypeReader, BasicTypeWriter, MalformedRecordError, TextWriter, open_kaldi_file
from ddnn.kaldi.nnet1 import (
    MAX_DEPTH,
    MAX_DIM,
    Activation,
    AffineTransform,
    Component,
    ConvolutionalComponent,
    Copy,
    Dropout,
    ParallelComponent,
    ParametricRelu,
    RbmComponent,
)
from ddnn.util.errors import DataError
from ddnn.util.files import atomic_write

# A component is called as its class, but for these.
_TOKENS = {component_type: f"<{component_type.__name__}>" for component_type in get_args(Component)}
_TOKENS[RbmComponent] = "<Rbm>"
_ACTIVATIONS = dict.fromkeys(("<Sigmoid>", "<Tanh>", "<Softmax>"), Activation)
_TYPES: dict[str, type[Any]] = {_TOKENS[t]: t for t in _TOKENS if t is not Activation} | _ACTIVATIONS
# Kaldi takes any case: files of 2012 have <affinetransform>.
_BY_TOKEN = {token.lower(): component_type for token, component_type in _TYPES.items()}
TOKENS = tuple(_BY_TOKEN)  # with one of which, in any case, a network may begin, if not with <Nnet>
_METHODS = {
    "Units": "token",
    "tuple[int, ...]": "int32_vector",
    "int": "int32",
    "float": "float32",
    "Matrix": "float_matrix",
    "Vector": "float_vector",
}
"""By the type of a field, in the order of files: the method of BasicTypeReader and BasicTypeWriter for it."""
_WITH_LINE_ENDS = (AffineTransform, ParametricRelu, ConvolutionalComponent)  # in text, behind integers and floats


def _names(component_type: type[Any], field_type: str) -> list[str]:
    """The fields of this type, but for those that are one of the two dims."""
    return [f.name for f in fields(component_type) if f.type == field_type and f.name not in ("dim", "input_dim")]


def _token_of(name: str) -> str:
    return "<DropoutRate>" if name == "rate" else f"<{name.title().replace('_', '')}>"


def _from_file(component: Component) -> Component:
    if not isinstance(component, ParametricRelu) or component.alpha_learn_rate_coef or component.beta_learn_rate_coef:
        return component
    is_plain = (component.alpha == 1).all() and not component.beta.any()
    return Activation("relu", component.dim) if is_plain else component


def _to_file(component: Component) -> Component:
    """The component that a file has for this one."""
    if not isinstance(component, Activation) or component.kind != "relu":
        return component
    return ParametricRelu(np.ones(component.dim, np.float32), np.zeros(component.dim, np.float32))


def _check_network(components: Sequence[Component], location: Path, within: str = "", depth: int = 0) -> None:
    """Raises DataError unless there are components, each valid in itself, whose dims chain. `within` names the component
    and network that contain this one, `depth` of them."""
    if not components or depth > MAX_DEPTH:
        problem = f"networks nested more than {MAX_DEPTH} deep" if components else "it has no component"
        raise DataError(f"not a Kaldi nnet1 network: {problem}", location=location)
    below, output_dim = "", None
    for number, component in enumerate(components, 1):
        at = f"{within}component {number}"
        name = f"{at} ({type(component).__name__})"
        if isinstance(component, ParallelComponent):
            for nested, network in enumerate(component.networks, 1):
                _check_network(network, location, f"{at}, network {nested}, ", depth + 1)
        if problem := _problem(component):
            raise DataError(f"{name}: {problem}", location=location)
        if output_dim not in (None, component.input_dim):
            message = f"{below} has the output dim {output_dim}, but {name} the input dim {component.input_dim}"
            raise DataError(message, location=location, hint="check that the parts of the network belong together")
        below, output_dim = name, component.output_dim


def _problem(component: Component) -> str:
    dims = (component.output_dim, component.input_dim)
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        return f"dims {dims[0]} x {dims[1]}, expected 1 to {MAX_DIM}"
    for name, value in vars(component).items():
        if isinstance(value, np.ndarray | float):
            with np.errstate(over="ignore", invalid="ignore"):
                values = np.asarray(value, np.float32)
            invalid = np.argwhere(~np.isfinite(values))[:1].tolist()
            if invalid:
                return f"{name}{invalid[0] or ''} is {values[tuple(invalid[0])]}, expected a finite value"
    return ""


def read_nnet1(path: Path) -> tuple[Component, ...]:
    """Reads a network to its `</Nnet>`. DataError: the file cannot be read or is damaged, has a component that is not
    supported here (it is named), a value that is not finite, or dims that do not fit or do not chain."""
    with open_kaldi_file(path, "a Kaldi nnet1 network") as reader:
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
    component_type = _BY_TOKEN.get(token.lower())
    if component_type is None:
        supported = f"{name} to be one that is supported ({', '.join(_TYPES)})"
        raise reader.error(supported if token else "a component or </Nnet>", repr(token) if token else None)
    reader.token()
    output_dim, input_dim = reader.int32(f"the output dim of {token}"), reader.int32(f"the input dim of {token}")
    if component_type is ParallelComponent:
        values: dict[str, Any] = {"networks": _read_networks(reader, f"{name}, ", depth + 1)}
    else:
        header = {"kind": token[1:-1].lower(), "dim": output_dim, "input_dim": input_dim}
        values = {field.name: header[field.name] for field in fields(component_type) if field.name in header}
        values |= _read_values(reader, component_type, token)
    try:
        component = component_type(**values)
    except ValueError as error:
        raise MalformedRecordError(f"{token} ({name}): {error}") from error
    dims = f"{component.output_dim} x {component.input_dim}"
    if dims != f"{output_dim} x {input_dim}":
        raise reader.error(f"{token} ({name}) of {output_dim} x {input_dim} (output x input)", dims)
    if reader.peek() == b"<" and reader.peek_token() == "<!EndOfComponent>":
        reader.token()
    return _from_file(component)


def _read_networks(reader: BasicTypeReader, within: str, depth: int) -> tuple[tuple[Component, ...], ...]:
    reader.expect("<NestedNnetCount>")
    networks = []
    for number in range(1, reader.int32("the number of networks") + 1):
        reader.expect("<NestedNnet>")
        reader.int32("the number of a network")
        networks.append(_read_network(reader, f"{within}network {number}, ", depth))
    reader.expect("</ParallelComponent>")
    return tuple(networks)


def _read_values(reader: BasicTypeReader, component_type: type[Any], token: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field_type, method in _METHODS.items():
        names = _names(component_type, field_type)
        if field_type == "float":
            values |= _read_floats(reader, component_type, {_token_of(name): name for name in names})
            continue
        for name in names:
            if field_type == "int" or component_type is ConvolutionalComponent:
                reader.expect(_token_of(name))
            if field_type == "Units":
                values[name] = reader.expect("bern", "gauss")
                continue
            value = getattr(reader, method)(f"{name} of {token}")
            if field_type == "tuple[int, ...]":
                value = tuple((value - (component_type is Copy)).tolist())  # columns are counted from 1
            elif isinstance(value, np.ndarray):
                with np.errstate(over="ignore", invalid="ignore"):  # `_problem` refuses Inf and NaN
                    value = value.astype(np.float32)
            values[name] = value
    return values


def _read_floats(reader: BasicTypeReader, component_type: type[Any], names: dict[str, str]) -> dict[str, float]:
    """The values of those tokens of `names` (token -> field) that there are; they may come in any order."""
    values: dict[str, float] = {}
    if component_type is Dropout:
        names["<DropoutRetention>"] = "retention"  # 1 - rate, in files of older Kaldis
    while names and reader.peek() == b"<":
        token = reader.peek_token()
        if token not in names and (component_type is Dropout or token == "<Filters>"):
            break
        reader.expect(*names)
        values[names[token]] = reader.float32(f"the value of {token}")
    if "retention" in values:
        values["rate"] = float(np.float32(1 - np.float32(values.pop("retention"))))
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
    for component in components:
        _write_component(writer, _to_file(component))
    writer.token("</Nnet>")
    writer.end_line()


def _write_component(writer: BasicTypeWriter, component: Component) -> None:
    component_type = type(component)
    writer.token(f"<{component.kind.title()}>" if isinstance(component, Activation) else _TOKENS[component_type])
    writer.int32(component.output_dim)
    writer.int32(component.input_dim)
    writer.end_line()
    if isinstance(component, ParallelComponent):
        _write_networks(writer, component.networks)
    for field_type, method in _METHODS.items():
        names, is_number = _names(component_type, field_type), field_type in ("int", "float")
        for name in names:
            value = getattr(component, name)
            if field_type == "tuple[int, ...]":
                value = np.array(value, np.int32) + (component_type is Copy)
            if is_number:
                writer.token(_token_of(name))
            elif component_type is ConvolutionalComponent:
                writer.token(_token_of(name))
                writer.end_line()
            getattr(writer, method)(value)
        if names and is_number and component_type in _WITH_LINE_ENDS:
            writer.end_line()
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
