"""Kaldi nnet1 networks (`.nnet`, `.dbn`), component by component, text and binary.

Follows kaldi `nnet/nnet-nnet.cc`, `nnet/nnet-component.cc` and the components' headers. What Kaldi wrote is read and
written again byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddnn.files import written_whole
from ddnn.kaldi.basic_io import Reader, read_whole
from ddnn.kaldi.basic_write import (
    write_float32,
    write_float_matrix,
    write_float_vector,
    write_header,
    write_int32,
    write_int32_vector,
    write_line_end,
    write_token,
)
from ddnn.kaldi.nnet1_components import (
    MAX_DIM,
    Activation,
    AddShift,
    Affine,
    Component,
    Kind,
    Matrix,
    Rbm,
    Rescale,
    Splice,
    Units,
    Vector,
    check_components,
)

__all__ = [
    "Activation",
    "AddShift",
    "Affine",
    "Component",
    "Rbm",
    "Rescale",
    "Splice",
    "read_nnet1",
    "write_nnet1",
]

KIND = "a Kaldi nnet1 network"
_LARGEST = float(np.finfo(np.float32).max)


def read_nnet1(path: str | PathLike[str]) -> tuple[Component, ...]:
    """Reads a network from `<Nnet>` to `</Nnet>`.

    Raises:
        DataError: the file cannot be read or is damaged, has a component that is not supported here, a value that is
            not finite, or dims that do not chain.
    """
    reader = read_whole(path, KIND)
    reader.expect("<Nnet>")
    components: list[Component] = []
    while reader.peek_token() != "</Nnet>":
        components.append(_read_component(reader, len(components) + 1))
    reader.expect("</Nnet>")
    if reader.data[reader.position :].strip():
        raise reader.error("the end of the file behind </Nnet>")
    check_components(components, path)
    return tuple(components)


def write_nnet1(path: str | PathLike[str], components: Sequence[Component], *, binary: bool = True) -> None:
    """Writes a network that Kaldi's nnet1 tools read; the file appears whole.

    Raises:
        DataError: the dims do not chain, or a value is not finite.
        UserError: the file cannot be written.
    """
    check_components(components, path)
    with written_whole(Path(path)) as handle:
        write_header(handle, binary=binary)
        write_token(handle, "<Nnet>")
        write_line_end(handle, binary=binary)
        for component in components:
            _write_component(handle, component, binary)
        write_token(handle, "</Nnet>")
        write_line_end(handle, binary=binary)


def _read_component(reader: Reader, number: int) -> Component:
    start = reader.position
    token = reader.token("a component or </Nnet>")
    # Kaldi takes any case: files of 2012 have <affinetransform>.
    read = _READERS.get(token.lower())
    if read is None:
        reader.position = start
        supported = ", ".join(_MARKERS)
        raise reader.error(f"component {number} to be one that is supported ({supported})", repr(token))
    output_dim = reader.int32(f"the output dim of {token}")
    input_dim = reader.int32(f"the input dim of {token}")
    if not (1 <= output_dim <= MAX_DIM and 1 <= input_dim <= MAX_DIM):
        raise reader.error(f"dims of {token} in 1 to {MAX_DIM}", f"{output_dim} x {input_dim}")
    component = read(reader, token, output_dim, input_dim)
    if (component.output_dim, component.input_dim) != (output_dim, input_dim):
        found = f"{component.output_dim} x {component.input_dim}"
        raise reader.error(f"{token} (component {number}) of {output_dim} x {input_dim} (output x input)", found)
    if reader.peek() == b"<" and reader.peek_token() == "<!EndOfComponent>":
        reader.expect("<!EndOfComponent>")
    return component


def _read_coefs(reader: Reader, defaults: dict[str, float]) -> tuple[float, ...]:
    """Optional numbers, each behind its token, in any order; in the order of `defaults`."""
    values = dict(defaults)
    while reader.peek() == b"<":
        token = reader.expect(*defaults)
        values[token] = reader.float32(f"the value of {token}")
        if not abs(values[token]) <= _LARGEST:
            raise reader.error(f"a finite value of {token}", str(values[token]))
    return tuple(values.values())


def _finite(reader: Reader, values: NDArray[Any], what: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
    if single.shape != shape:
        raise reader.error(f"{what} of dims {' x '.join(map(str, shape))}", " x ".join(map(str, single.shape)))
    if not np.isfinite(single).all():
        position = np.unravel_index(int(np.flatnonzero(~np.isfinite(single))[0]), shape)
        at = ", ".join(str(index) for index in position)
        raise reader.error(f"finite values in {what}", f"{values[position]} at [{at}]")
    return single


def _read_vector(reader: Reader, what: str, dim: int) -> Vector:
    return _finite(reader, reader.float_vector(what), what, (dim,))


def _read_matrix(reader: Reader, what: str, rows: int, columns: int) -> Matrix:
    return _finite(reader, reader.float_matrix(what), what, (rows, columns))


def _read_affine(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    defaults = {"<LearnRateCoef>": 1.0, "<BiasLearnRateCoef>": 1.0, "<MaxNorm>": 0.0}
    coefs = _read_coefs(reader, defaults)
    weight = _read_matrix(reader, f"the weights of {token}", output_dim, input_dim)
    return Affine(weight, _read_vector(reader, f"the bias of {token}", output_dim), *coefs)


def _read_activation(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    return Activation(_ACTIVATIONS[token.lower()], output_dim)


def _read_relu(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    coefs = _read_coefs(reader, {"<AlphaLearnRateCoef>": 0.0, "<BetaLearnRateCoef>": 0.0})
    alpha = _read_vector(reader, f"the slopes above 0 of {token}", output_dim)
    beta = _read_vector(reader, f"the slopes below 0 of {token}", output_dim)
    if any(coefs) or (alpha != 1).any() or beta.any():
        found = f"{alpha.min():g} to {alpha.max():g} and {beta.min():g} to {beta.max():g}, rates {coefs}"
        raise reader.error(f"a plain ReLU: slopes 1 and 0 in {token}, not trained", found)
    return Activation("relu", output_dim)


def _read_splice(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    offsets = reader.int32_vector(f"the frame offsets of {token}").tolist()
    if any(abs(offset) > MAX_DIM for offset in offsets):
        raise reader.error(f"frame offsets within {MAX_DIM}", f"{min(offsets)} to {max(offsets)}")
    return Splice(tuple(offsets), input_dim)


def _read_shift(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    (coef,) = _read_coefs(reader, {"<LearnRateCoef>": 1.0})
    return AddShift(_read_vector(reader, f"the values of {token}", output_dim), coef)


def _read_rescale(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    (coef,) = _read_coefs(reader, {"<LearnRateCoef>": 1.0})
    return Rescale(_read_vector(reader, f"the values of {token}", output_dim), coef)


def _read_rbm(reader: Reader, token: str, output_dim: int, input_dim: int) -> Component:
    visible, hidden = (reader.expect("bern", "gauss") for _ in range(2))
    weight = _read_matrix(reader, f"the weights of {token}", output_dim, input_dim)
    visible_bias = _read_vector(reader, f"the visible bias of {token}", input_dim)
    hidden_bias = _read_vector(reader, f"the hidden bias of {token}", output_dim)
    units: dict[str, Units] = {"bern": "bern", "gauss": "gauss"}
    return Rbm(units[visible], units[hidden], weight, visible_bias, hidden_bias)


_MARKERS: dict[str, Callable[[Reader, str, int, int], Component]] = {
    "<AffineTransform>": _read_affine,
    "<Sigmoid>": _read_activation,
    "<Tanh>": _read_activation,
    "<Softmax>": _read_activation,
    "<ParametricRelu>": _read_relu,
    "<Splice>": _read_splice,
    "<AddShift>": _read_shift,
    "<Rescale>": _read_rescale,
    "<Rbm>": _read_rbm,
}
_READERS = {marker.lower(): read for marker, read in _MARKERS.items()}
_ACTIVATIONS: dict[str, Kind] = {"<sigmoid>": "sigmoid", "<tanh>": "tanh", "<softmax>": "softmax"}
_ACTIVATION_MARKERS = {"sigmoid": "<Sigmoid>", "tanh": "<Tanh>", "softmax": "<Softmax>", "relu": "<ParametricRelu>"}


def _write_component(handle: BinaryIO, component: Component, binary: bool) -> None:
    if isinstance(component, Affine):
        _write_start(handle, "<AffineTransform>", component, binary)
        coefs = (component.learn_rate_coef, component.bias_learn_rate_coef, component.max_norm)
        for token, value in zip(("<LearnRateCoef>", "<BiasLearnRateCoef>", "<MaxNorm>"), coefs, strict=True):
            write_token(handle, token)
            write_float32(handle, value, binary=binary)
        write_line_end(handle, binary=binary)
        write_float_matrix(handle, component.weight, binary=binary)
        write_float_vector(handle, component.bias, binary=binary)
    elif isinstance(component, Activation):
        _write_start(handle, _ACTIVATION_MARKERS[component.kind], component, binary)
        if component.kind == "relu":
            for token in ("<AlphaLearnRateCoef>", "<BetaLearnRateCoef>"):
                write_token(handle, token)
                write_float32(handle, 0.0, binary=binary)
            write_line_end(handle, binary=binary)
            for slope in (1.0, 0.0):
                write_float_vector(handle, np.full(component.dim, slope, np.float32), binary=binary)
    elif isinstance(component, Splice):
        _write_start(handle, "<Splice>", component, binary)
        write_int32_vector(handle, np.array(component.offsets, np.int32), binary=binary)
    elif isinstance(component, Rbm):
        _write_start(handle, "<Rbm>", component, binary)
        write_token(handle, component.visible)
        write_token(handle, component.hidden)
        write_float_matrix(handle, component.weight, binary=binary)
        write_float_vector(handle, component.visible_bias, binary=binary)
        write_float_vector(handle, component.hidden_bias, binary=binary)
    else:
        shift = isinstance(component, AddShift)
        _write_start(handle, "<AddShift>" if shift else "<Rescale>", component, binary)
        write_token(handle, "<LearnRateCoef>")
        write_float32(handle, component.learn_rate_coef, binary=binary)
        values = component.shift if isinstance(component, AddShift) else component.scale
        write_float_vector(handle, values, binary=binary)
    write_token(handle, "<!EndOfComponent>")
    write_line_end(handle, binary=binary)


def _write_start(handle: BinaryIO, marker: str, component: Component, binary: bool) -> None:
    write_token(handle, marker)
    write_int32(handle, component.output_dim, binary=binary)
    write_int32(handle, component.input_dim, binary=binary)
    write_line_end(handle, binary=binary)
